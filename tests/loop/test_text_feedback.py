"""Training on the critiques of a function that returns a text alone; an LLM behind an endpoint finds the spans."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_endpoint import Reply, fake_endpoint, says, span
from fakes import letter_tokenizer
from trainer_bench import Bench, job

from t2g.config import PolicyJob, with_overrides
from t2g.errors import UserError
from t2g.feedback.sources.make import make_local_source
from t2g.runs.identity import Identity
from t2g.runs.judgements import JournaledFeedback
from t2g.tasks.prompts_only import PromptsTask

CRITIQUE = "The letter a is right and the letter b is wrong."


CALLS: list[str] = []  # responses that the function judged


def judge(prompt: str, response: str) -> str:
    CALLS.append(response)
    return CRITIQUE


def find_letters(number: int, body: dict[str, Any]) -> Reply:
    """Answer as an aligner: every a is good and every b poor."""
    content = body["messages"][0]["content"]
    assert CRITIQUE in content and '"critique": then' not in content
    response = content.split("Response:\n")[1].split("\n")[0]
    spans = [
        span(letter, label, occurrence=index + 1, phrase=f"letter {letter}")
        for letter, label in (("a", "good"), ("b", "poor"))
        for index in range(response.count(letter))
    ]
    return says(json.dumps({"reasoning": "r", "spans": spans}))


def text_job(url: str, **feedback: Any) -> PolicyJob:
    llm = {"model": "judge", "url": url, "key_env": "PATH"}
    return with_overrides(job(), {"num_steps": 3, "feedback": {"source": f"{__name__}:judge", "llm": llm, **feedback}})


def test_three_steps_train_on_texts_that_an_endpoint_aligns(tmp_path: Path) -> None:
    with fake_endpoint() as server:
        server.reply = find_letters
        config = text_job(server.url, align="llm")
        bench = Bench(tmp_path, letter_tokenizer(tmp_path), config)
        bench.trainer.feedback = bench.trainer.train_feedback = make_local_source(config.feedback, PromptsTask())
        assert bench.run().step == 3
    probabilities = bench.learner.logits.softmax(-1).mean(0)
    assert probabilities[0] > 0.37 and probabilities[1] < 0.3  # from a third each
    assert [m["feedback/failed_share"] for m in bench.metrics()[1:]] == [0, 0, 0]
    samples = [json.loads(line)["feedback"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {sample["critique"] for sample in samples} == {CRITIQUE}
    assert any(sample["spans"] for sample in samples)


def test_without_align_the_run_stops_with_a_sentence_that_names_the_key(tmp_path: Path) -> None:
    config = text_job("http://127.0.0.1:9/v1")
    bench = Bench(tmp_path, letter_tokenizer(tmp_path), config)
    bench.trainer.feedback = bench.trainer.train_feedback = make_local_source(config.feedback, PromptsTask())
    CALLS.clear()
    with pytest.raises(UserError, match=r"returned a critique alone, on prompt \S+: feedback\.align=llm"):
        bench.run()
    assert len(CALLS) <= config.feedback.concurrency, "the first such answer stops the run"


def test_a_killed_run_requests_no_judgement_twice_from_function_and_endpoint(tmp_path: Path) -> None:
    """The run is killed in step 3, after the checkpoint of step 2: only the evaluation of step 3 is judged anew."""
    requests: list[str] = []

    def record(number: int, body: dict[str, Any]) -> Reply:
        requests.append(body["messages"][0]["content"])
        return find_letters(number, body)

    def start(config: PolicyJob) -> Bench:
        bench = Bench(tmp_path, letter_tokenizer(tmp_path), config)
        source = make_local_source(config.feedback, PromptsTask())
        journaled = JournaledFeedback(source, tmp_path, Identity.from_config(config), keep=2)
        bench.trainer.feedback = bench.trainer.train_feedback = journaled
        bench.trainer.on_checkpoint = journaled.start_file
        return bench

    def kill(call: str) -> None:
        if call == "update" and killed.trainer.state.step == 2:
            raise RuntimeError("killed")

    with fake_endpoint() as server:
        server.reply = record
        config = text_job(server.url, align="llm")
        killed = start(config)
        killed.learner.before_call = kill
        CALLS.clear()
        with pytest.raises(RuntimeError, match="killed"):
            killed.run()
        assert len(CALLS) == len(requests) == 8 + 3 * 32
        assert start(config).run().step == 3
    assert len(CALLS) == len(requests) == 8 + 3 * 32 + 8
