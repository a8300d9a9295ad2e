"""A real reward fleet with random weights: whatever the model would like to say, guided decoding makes it an answer.

It is served and reported on as jobs.evaluate does.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from models import random_model

import jobs.train_reward.reward_models
from actors.engines.reward import RewardFleet
from jobs.common.run_folder import begin_folder
from jobs.train_reward.reward_models import evaluate_reward, serve_reward_model, usable_records, with_trained_style
from t2g.config import AnnotateConfig, EvaluateJob, FeedbackConfig, RewardEngineConfig, StyleConfig
from t2g.errors import UserError
from t2g.feedback.card import make_card, write_card
from t2g.feedback.sources.make import make_local_source
from t2g.report.reward_page import EVALUATION_FILE, HTML_FILE
from t2g.tasks.base import get_task
from t2g.text.tokenizer import load_tokenizer
from t2g.types import Prompt, SpanFeedback

ENGINE = RewardEngineConfig(
    max_model_len=2048,
    max_new_tokens=640,
    max_critique_chars=40,
    max_spans=2,
    max_quote_chars=8,
    kv_cache_gib=0.1,
    cpus=0.1,
)


RECORDS = [
    {"prompt": "What hums?", "response": "The phone hums.", "critique": "It is the phone.", "good": ["phone"]},
    {"prompt": "What hums?", "response": "It sings.", "critique": "It hums.", "poor": ["sings"]},
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> EvaluateJob:
    folder = tmp_path_factory.mktemp("reward")
    model = random_model(folder / "model", "qwen2")
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 2048}))
    write_card(model, make_card(get_task("prompts"), StyleConfig()))
    (folder / "heldout.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return with_trained_style(
        EvaluateJob.model_validate(
            {
                "run": {"root": folder / "runs"},
                "cluster": {"object_store_gib": 0.1, "placement_timeout_s": 30},
                "data": {"path": str(folder / "heldout.jsonl")},
                "feedback": {"reward_model": str(model), "engine": ENGINE},
            }
        )
    )


@pytest.fixture(scope="module")
def fleet(job: EvaluateJob, cluster: None) -> Iterator[RewardFleet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs.train_reward.reward_models, "on_cluster", lambda *requests: nullcontext())  # it is connected
        with serve_reward_model(job) as fleet:
            yield fleet


PROMPT = Prompt(prompt_id="p", prompt_ids=np.zeros(1, np.int32), prompt_text="What hums?", task="prompts")


def judge(fleet: RewardFleet, responses: list[str]) -> list[SpanFeedback]:
    async def run() -> list[SpanFeedback]:
        return await asyncio.gather(*(fleet.judge(PROMPT, r) for r in responses))

    return asyncio.run(run())


def align(fleet: RewardFleet, response: str, critiques: list[str]) -> list[SpanFeedback]:
    async def run() -> list[SpanFeedback]:
        return await asyncio.gather(*(fleet.align(PROMPT, response, c) for c in critiques))

    return asyncio.run(run())


def is_parsed(answer: SpanFeedback) -> bool:
    """Return whether an answer was read; the quotes of this random model need not occur in the response."""
    return answer.usable or 0 == answer.num_located < answer.num_quotes


def test_every_answer_parses_and_is_reproducible(fleet: RewardFleet) -> None:
    responses = [f"The phone hums {i} times." for i in range(8)] + [""]
    answers = judge(fleet, responses)
    assert all(is_parsed(answer) for answer in answers)
    assert all(a.source == "reward_model" and a.version == fleet.version for a in answers)
    assert all(len(a.critique) <= 2 * 40 + 39 for a in answers)  # the bound of `make_answer_grammar`
    again = judge(fleet, responses)
    assert all(a is b for a, b in zip(answers, again, strict=True))


def test_a_response_too_long_for_the_window_fails_alone(fleet: RewardFleet) -> None:
    short, long = judge(fleet, ["The phone hums.", "The phone hums. " * 500])
    assert is_parsed(short) and long.status == "failed"


def test_a_given_critique_comes_back_with_spans_and_is_kept_beside_the_models_own(fleet: RewardFleet) -> None:
    response = "The phone hums."
    (unguided,) = judge(fleet, [response])
    critiques = ['It "hums"\n\\ and 😀 is wrong.', "", "Long. " * 60]  # longer than what the model itself may write
    answers = align(fleet, response, critiques)
    assert [answer.critique for answer in answers] == critiques
    assert all(is_parsed(answer) for answer in answers)
    assert align(fleet, response, critiques)[0] is answers[0]
    assert judge(fleet, [response])[0] is unguided
    (failed,) = align(fleet, response, ["Long. " * 500])
    assert failed.status == "failed" and "leaves no room" in failed.reason


def test_a_model_with_another_card_is_refused(tmp_path: Path) -> None:
    """Refused before any engine is started."""
    task = get_task("prompts")
    write_card(tmp_path, make_card(task, StyleConfig(critique=False)))
    config = FeedbackConfig(reward_model=str(tmp_path), engine=ENGINE)
    with pytest.raises(UserError, match="was trained for task prompts, without a critique"):
        RewardFleet(config, task, seed=1, placement_timeout_s=30)


def test_a_persons_critique_is_aligned_by_the_served_model(
    fleet: RewardFleet, job: EvaluateJob, tmp_path: Path
) -> None:
    file = tmp_path / "human.jsonl"
    file.write_text(json.dumps({"prompt_id": "p", "response": "The phone hums.", "critique": "It is the phone."}))
    config = AnnotateConfig.model_validate(
        {"source": "human", "align": "reward_model", "human_file": str(file)}
        | job.feedback.model_dump(include={"reward_model", "engine"})
    )
    source = make_local_source(config, get_task("prompts"), aligner=fleet)
    feedback = asyncio.run(source.judge(PROMPT, "The phone hums."))
    assert (feedback.source, feedback.critique) == ("human", "It is the phone.")
    assert is_parsed(feedback) and feedback.version.endswith(fleet.version)


def test_the_report_of_a_served_model(fleet: RewardFleet, job: EvaluateJob) -> None:
    assert job.task == "prompts"  # says the model's card
    folder = begin_folder(job)
    tokenizer = load_tokenizer(str(job.feedback.reward_model))
    metrics = evaluate_reward(job, usable_records("data.path", job.data, job.task), fleet, tokenizer, folder)
    assert metrics["num_records"] == 2 and 0 <= metrics["usable_rate"] <= 1
    assert metrics["parse_rate"] == 0.0  # nobody made it an answer
    assert json.loads((folder / EVALUATION_FILE).read_text())["metrics"] == metrics
    assert "The phone hums." in (folder / HTML_FILE).read_text()
