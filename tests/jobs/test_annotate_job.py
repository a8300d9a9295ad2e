"""jobs.annotate in this process, with fakes in the place of engines: begun again, refused, tried out, stopped.

What a kill of the real process leaves is in test_annotate_kill.py.
"""

import asyncio
import fcntl
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeFeedback, FakeRollouts
from killed_jobs import run_until_killed
from pydantic import ValidationError

from jobs.annotate.annotation_job import describe
from jobs.annotate.annotation_runs import (
    ANNOTATED_FILE,
    DONE_FILE,
    HELDOUT_FILE,
    JOURNAL_FILE,
    TRAIN_FILE,
    annotate_data,
    annotate_samples,
    read_samples,
)
from jobs.common.cli import StopFlag
from jobs.common.run_folder import LOCK
from t2g.config import AnnotateJob, with_overrides
from t2g.config.loading import load
from t2g.errors import RunStopped, Stopped, UserError
from t2g.feedback.sources.annotator import MAX_FAULTS, MAX_NOTES_CHARS, MAX_REPEATED_CHARS, make_follow_up, make_request
from t2g.feedback.sources.chat_client import BYTES_PER_TOKEN, estimate_tokens
from t2g.loop.annotation import select_heldout_prompts
from t2g.tasks.base import get_task
from t2g.tasks.tiny import world
from t2g.tasks.tiny.assets import build_tokenizer
from t2g.text.tokenizer import load_tokenizer
from t2g.types import Prompt, SpanFeedback

NUM_PROMPTS = 20
NUM_SAMPLES = 2 * NUM_PROMPTS


class FakeFleets:
    """One policy and one feedback source, which may do `before_judging` each time."""

    def __init__(self, config: AnnotateJob, before_judging: Callable[[Prompt], None] = lambda prompt: None) -> None:
        self.config = config
        self.source = FakeFeedback()
        self.before_judging = before_judging
        self.num_judged = 0

    def rollouts(self, *_: Any) -> FakeRollouts:
        return FakeRollouts(load_tokenizer(self.config.model.policy))

    def feedback(self, *_: Any) -> "FakeFleets":
        return self

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        self.before_judging(prompt)
        self.num_judged += 1
        return await self.source.judge(prompt, response_text)


def job(folder: Path, **annotate: Any) -> AnnotateJob:
    return AnnotateJob.model_validate(
        {
            "run": {"root": folder, "name": "annotated"},
            "model": {"policy": str(folder / "model")},
            "data": {"path": str(folder / "data.jsonl")},
            "rollout": {"samples_per_prompt": 2, "max_new_tokens": 8, "max_model_len": 128},
            "annotate": {"source": "my.feedback:judge", "max_failed_share": 0.25, "heldout_share": 0.3} | annotate,
        }
    )


def write_data(config: AnnotateJob, *rows: dict[str, Any]) -> None:
    Path(config.data.path).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def sampled(tmp_path: Path) -> AnnotateJob:
    """Two responses to each of twenty prompts."""
    build_tokenizer(tmp_path / "model", ["abc"], vocab_size=261)
    config = job(tmp_path, responses="policy")
    write_data(config, *({"id": f"p{i}", "prompt": f"write {i}"} for i in range(NUM_PROMPTS)))
    return config


@pytest.fixture
def data_job(tmp_path: Path) -> AnnotateJob:
    """Twenty records with a response."""
    config = job(tmp_path)
    write_data(config, *given_rows())
    return config


def given_rows() -> list[dict[str, Any]]:
    return [{"id": f"p{i}", "prompt": f"judge {i}", "response": "ab" * (i % 3 + 1)} for i in range(NUM_PROMPTS)]


def with_run(config: AnnotateJob, **changes: Any) -> AnnotateJob:
    return with_overrides(config, {f"run.{key}": value for key, value in changes.items()})


def with_options(config: AnnotateJob, **changes: Any) -> AnnotateJob:
    return with_overrides(config, {f"annotate.{key}": value for key, value in changes.items()})


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompt_ids(path: Path) -> list[str]:
    return [row["prompt_id"] for row in read(path)]


def killer(after: int) -> Callable[[Prompt], None]:
    """The process ends while it asks for judgement number `after` + 1."""
    count = 0

    def before_judging(prompt: Prompt) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise KeyboardInterrupt

    return before_judging


def test_planted_responses_are_judged_beside_the_sampled_ones(sampled: AnnotateJob) -> None:
    posts = (world.sample_facts(np.random.default_rng(i), heldout=False) for i in range(NUM_PROMPTS))
    write_data(sampled, *({"id": f"p{i}", "post": f"Post {i}.", "facts": facts} for i, facts in enumerate(posts)))
    config = with_overrides(sampled, {"task": "tiny", "annotate.planted": 0.5})
    run_until_killed(annotate_data, config, FakeFleets(config, killer(after=15)))
    fleets = FakeFleets(config)
    annotate_data(config, fleets)
    assert fleets.num_judged == NUM_SAMPLES + NUM_PROMPTS // 2 - 15  # those in the journal are not judged again
    records = read(config.run.folder / ANNOTATED_FILE)
    planted = [record for record in records if record["sample_index"] == 2]
    assert [record["prompt_id"] for record in planted] == [f"p{i}" for i in range(1, NUM_PROMPTS, 2)]
    assert len(records) == NUM_SAMPLES + len(planted)
    assert all(world.measure(record["payload"]["facts"], record["response"])["fact_recall"] > 0 for record in planted)


def test_planted_responses_have_no_human_judgement(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"planted=0.5 adds responses that source=human lacks"):
        job(tmp_path, source="human", human_file="judged.jsonl", planted=0.5)


def test_a_killed_annotation_pays_for_no_record_twice(sampled: AnnotateJob) -> None:
    folder = sampled.run.folder
    run_until_killed(annotate_data, sampled, FakeFleets(sampled, killer(after=27)))
    assert len(read(folder / JOURNAL_FILE)) == 27
    assert not (folder / ANNOTATED_FILE).exists()
    with (folder / JOURNAL_FILE).open("a") as file:
        file.write('{"prompt_id": "p19", "promp')  # the record that was being written

    fleets = FakeFleets(sampled)
    metrics = annotate_data(sampled, fleets)
    assert fleets.num_judged == NUM_SAMPLES - 27
    ids = [f"p{i}" for i in range(NUM_PROMPTS) for _ in range(2)]
    assert prompt_ids(folder / ANNOTATED_FILE) == ids
    assert [row["sample_index"] for row in read(folder / ANNOTATED_FILE)] == [0, 1] * NUM_PROMPTS
    assert sorted(prompt_ids(folder / JOURNAL_FILE)) == sorted(ids)
    held = select_heldout_prompts((f"write {i}" for i in range(NUM_PROMPTS)), 0.3)
    for name, inside in ((TRAIN_FILE, False), (HELDOUT_FILE, True)):
        part = [i for i in ids if (f"write {i[1:]}" in held) is inside]
        assert part and prompt_ids(folder / name) == part
    assert metrics["train_records"] + metrics["heldout_records"] == NUM_SAMPLES
    assert metrics["failed_share"] == 0
    assert json.loads((folder / DONE_FILE).read_text()) == metrics
    assert metrics["style"] == {"critique": True, "labels": "sparse", "spans": True}

    untouched = FakeFleets(sampled)
    assert annotate_data(sampled, untouched) == metrics
    assert untouched.num_judged == 0


def test_half_a_file_is_not_taken_for_a_whole_one(data_job: AnnotateJob) -> None:
    folder = data_job.run.folder
    metrics = annotate_data(data_job, FakeFleets(data_job))
    whole = {name: (folder / name).read_text() for name in (ANNOTATED_FILE, TRAIN_FILE, HELDOUT_FILE)}
    for name, text in whole.items():
        (folder / name).write_text(text[: len(text) // 2])
    (folder / DONE_FILE).unlink()
    untouched = FakeFleets(data_job)
    assert annotate_data(data_job, untouched) == metrics
    assert untouched.num_judged == 0
    assert {name: (folder / name).read_text() for name in whole} == whole


def test_failed_feedback_is_in_the_file_and_requested_again(data_job: AnnotateJob) -> None:
    folder = data_job.run.folder
    fleets = FakeFleets(data_job)
    fleets.source.failing = lambda prompt: int(prompt.prompt_id[1:]) < 8  # 40 %
    with pytest.raises(RunStopped, match=r"40% of 20 responses .* allows 25%(?s:.*)20 records: 12 ok, 8 failed"):
        annotate_data(data_job, fleets)
    assert [row["status"] for row in read(folder / ANNOTATED_FILE)] == ["failed"] * 8 + ["ok"] * 12
    assert len(read(folder / JOURNAL_FILE)) == 12
    assert not (folder / DONE_FILE).exists()

    again = FakeFleets(data_job)
    again.source.failing = lambda prompt: prompt.prompt_id == "p0"
    metrics = annotate_data(data_job, again)
    assert again.num_judged == 8
    assert (metrics["failed"], metrics["ok"], metrics["failed_share"]) == (1, 19, pytest.approx(1 / 20))
    assert "p0" not in prompt_ids(folder / TRAIN_FILE) + prompt_ids(folder / HELDOUT_FILE)

    last = FakeFleets(data_job)
    assert annotate_data(data_job, last)["ok"] == 20
    assert last.num_judged == 1
    assert len(read(folder / JOURNAL_FILE)) == 20


def test_a_record_without_a_response_is_counted_and_named(data_job: AnnotateJob, tmp_path: Path) -> None:
    rows = given_rows()
    write_data(data_job, *rows[:3], {"id": "none", "prompt": "judge me"}, {"id": "twice"} | rows[3], rows[3], rows[3])
    fleets = FakeFleets(data_job)
    metrics = annotate_data(data_job, fleets)
    rows_written = read(data_job.run.folder / ANNOTATED_FILE)
    assert [(row["prompt_id"], row["sample_index"]) for row in rows_written] == [
        ("p0", 0), ("p1", 0), ("p2", 0), ("none", 0), ("p3", 0), ("p3", 1), ("p3", 2),
    ]  # fmt: skip
    assert fleets.num_judged == 4  # equal ones are judged once
    reason = "data record 4 (data.jsonl:4) has no response; it has id, prompt"
    assert (rows_written[3]["status"], rows_written[3]["reason"]) == ("failed", reason)
    assert metrics["reasons"] == [(1, reason)]

    write_data(data_job, {"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(UserError, match=r"data\.jsonl: no record can be judged; data record 1 .* has no response"):
        read_samples(data_job)


def test_changed_data_is_judged_anew_and_the_rest_is_not(data_job: AnnotateJob) -> None:
    annotate_data(data_job, FakeFleets(data_job))
    rows = given_rows()
    rows[7]["response"] = "changed b"
    rows[8]["note"] = "the payload counts"
    write_data(data_job, {"id": "new", "prompt": "first now", "response": "a"}, *reversed(rows))
    fleets = FakeFleets(data_job)
    metrics = annotate_data(data_job, fleets)
    assert fleets.num_judged == 3 and metrics["records"] == 21
    rows_by_id = {row["prompt_id"]: row for row in read(data_job.run.folder / ANNOTATED_FILE)}
    assert list(rows_by_id)[:2] == ["new", "p19"]
    assert rows_by_id["p7"]["response"] == "changed b"
    assert len(read(data_job.run.folder / JOURNAL_FILE)) == 23  # nothing that was paid for is thrown away


def test_one_prompt_is_all_for_training(data_job: AnnotateJob, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(data_job, given_rows()[0])
    metrics = annotate_data(data_job, FakeFleets(data_job))
    assert (metrics["train_records"], metrics["heldout_records"]) == (1, 0)
    assert (data_job.run.folder / HELDOUT_FILE).read_text() == ""
    assert "of one prompt or conversation: nothing is held out" in capsys.readouterr().out


@pytest.mark.parametrize("after", [5, NUM_SAMPLES])
def test_another_config_is_refused_by_the_names_of_its_keys(sampled: AnnotateJob, after: int) -> None:
    fleets = FakeFleets(sampled, killer(after))
    if after < NUM_SAMPLES:
        run_until_killed(annotate_data, sampled, fleets)
    else:
        annotate_data(sampled, fleets)
    hotter = with_overrides(sampled, {"rollout.temperature": 0.5})
    with pytest.raises(UserError, match=r"rollout\.temperature \(1\.0 -> 0\.5\)"):
        annotate_data(hotter, FakeFleets(sampled))
    with pytest.raises(UserError, match=r"run\.resume=never, and .*journal\.jsonl exists"):
        annotate_data(with_run(sampled, resume="never"), FakeFleets(sampled))
    freer = with_options(sampled, max_failed_share=1.0, heldout_share=0.5, timeout_s=1.0)
    assert annotate_data(freer, FakeFleets(sampled))["records"] == NUM_SAMPLES


def test_a_config_without_answers_can_change(data_job: AnnotateJob) -> None:
    fleets = FakeFleets(data_job)
    fleets.source.failing = lambda prompt: True
    with pytest.raises(RunStopped, match="100% of 20 responses"):
        annotate_data(data_job, fleets)
    other = with_options(data_job, source="my.feedback:better")
    assert annotate_data(other, FakeFleets(data_job))["ok"] == 20


def test_a_smoke_run_does_eight_prompts_and_touches_nothing_else(
    sampled: AnnotateJob, capsys: pytest.CaptureFixture[str]
) -> None:
    smoke = with_run(sampled, smoke=True)
    for _ in range(2):  # the second starts from nothing
        fleets = FakeFleets(sampled)
        annotate_data(smoke, fleets)
        assert fleets.num_judged == 16
        assert re.search(r"samples/s; 40 samples will take about \d+ s", capsys.readouterr().out)
    assert [path.name for path in sampled.run.folder.iterdir()] == ["smoke"]
    assert len(read(sampled.run.folder / "smoke" / JOURNAL_FILE)) == 16


class Signalled(FakeFleets):
    """SIGTERM comes while p5 and p6 are judged: p5 is answered once the job has noticed, p6 never."""

    def __init__(self, config: AnnotateJob, *, again: bool = False) -> None:
        super().__init__(config)
        self.stop = StopFlag()
        self.again = again

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        feedback = await super().judge(prompt, response_text)
        if prompt.prompt_id == "p5":
            self.stop.signal_name = "SIGTERM"
            while self.stop:  # the job takes the flag down to see a second signal
                await asyncio.sleep(0.01)
        elif prompt.prompt_id == "p6":
            while not self.again or self.num_journaled() < 6:
                await asyncio.sleep(0.01)
            self.stop.signal_name = "SIGINT"
            await asyncio.sleep(3600)
        return feedback

    def num_journaled(self) -> int:
        return len(read(self.config.run.folder / JOURNAL_FILE))


@pytest.mark.parametrize("again", [False, True])
def test_a_signal_lets_in_what_is_under_way_and_begins_nothing(
    data_job: AnnotateJob, again: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    timeout_s = 3600 if again else 0.5  # it ends by a second signal, or by itself
    llm = {"model": "judge", "concurrency": 2, "request_timeout_s": timeout_s}
    config = job(data_job.run.root, source="llm", llm=llm)
    fleets = Signalled(config, again=again)
    with pytest.raises(Stopped):
        annotate_samples(config, read_samples(config), fleets, fleets.stop)
    assert fleets.stop.signal_name == "SIGTERM"
    assert f"SIGTERM: waiting up to {timeout_s:g} s for 2 answers under way" in capsys.readouterr().err
    assert prompt_ids(config.run.folder / JOURNAL_FILE) == [f"p{i}" for i in range(6)]
    assert fleets.num_judged == 7
    rest = FakeFleets(config)
    assert annotate_data(config, rest)["ok"] == 20
    assert rest.num_judged == 14


def test_two_processes_do_not_write_one_folder(data_job: AnnotateJob) -> None:
    data_job.run.folder.mkdir()
    with (data_job.run.folder / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process works in .*annotated: wait"):
            annotate_data(data_job, FakeFleets(data_job))


@pytest.mark.parametrize(
    ("options", "cluster"),
    [
        ({"source": "program"}, False),
        ({"source": "pkg.mod:f", "responses": "policy"}, True),
        ({"source": "reward_model", "reward_model": "m"}, True),
        ({"source": "llm", "llm": {"model": "m"}}, True),
        ({"source": "llm", "llm": {"model": "m", "url": "http://h/v1"}}, False),
        ({"source": "human"}, False),
        ({"source": "human", "align": "llm", "llm": {"model": "m", "url": "http://h/v1"}}, False),
        ({"source": "human", "align": "llm", "llm": {"model": "m"}}, True),
        ({"source": "human", "align": "reward_model", "reward_model": "m"}, True),
        ({"source": "pkg.mod:f", "align": "reward_model", "reward_model": "m"}, True),
        ({"source": "pkg.mod:f", "align": "llm", "llm": {"model": "m", "url": "http://h/v1"}}, False),
    ],
)
def test_what_needs_ray(tmp_path: Path, options: dict[str, Any], cluster: bool) -> None:
    assert bool(job(tmp_path, **options).roles()) is cluster


def test_a_dry_run_describes_endpoint_requests(data_job: AnnotateJob, capsys: pytest.CaptureFixture[str]) -> None:
    llm = {"model": "judge", "url": "http://127.0.0.1:1/v1", "key_env": "T2G_TEST_NOT_SET", "max_output_tokens": 100}
    config = job(data_job.run.root, source="llm", llm=llm)
    assert "feedback: llm" in describe(config)
    assert "judge: 20 requests, up to about " in (output := capsys.readouterr().out) and "2,000 of answers" in output
    assert "without second tries" in output
    human = Path(data_job.data.path).with_name("human.jsonl")
    marked = {"good": ["ab"]}
    rows = [row | {"critique": "ab"} | (marked if i else {}) for i, row in enumerate(given_rows())]
    human.write_text("".join(json.dumps(row) + "\n" for row in rows))
    describe(job(data_job.run.root, source="human", human_file=str(human), align="llm", llm=llm))
    assert "judge: 1 requests" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"more than llm\.max_total_tokens=2000"):
        describe(job(data_job.run.root, source="llm", llm=llm | {"max_total_tokens": 2000}))


def test_a_server_that_moved_does_not_make_another_run(data_job: AnnotateJob) -> None:
    llm = {"model": "judge", "url": "http://old/v1"}
    annotate_data(job(data_job.run.root, source="llm", llm=llm), FakeFleets(data_job))
    moved = llm | {"url": "http://new/v1"}
    untouched = FakeFleets(data_job)
    assert annotate_data(job(data_job.run.root, source="llm", llm=moved), untouched)["ok"] == 20
    assert untouched.num_judged == 0
    with pytest.raises(UserError, match=r'annotate\.llm\.model \("judge" -> "other"\)'):
        annotate_data(job(data_job.run.root, source="llm", llm=moved | {"model": "other"}), untouched)


@pytest.mark.parametrize(
    ("name", "file"), [("slf5k", "slf5k.json"), ("ultrafeedback", "ultrafeedback.json"), ("kodcode", "kodcode.jsonl")]
)
def test_own_engines_have_room_for_a_second_try(name: str, file: str) -> None:
    root = Path(__file__).parents[2]
    overrides = [f"data.path={root / 'tests' / 'data' / file}", "annotate.llm.url=null"]
    config = load(AnnotateJob, root / "configs" / name / "annotate.yaml", overrides)
    room = config.annotate.engine.max_model_len - config.annotate.llm.max_output_tokens
    task = get_task(config.task)
    for sample in read_samples(config):
        assert sample.response is not None
        request = make_request(task, sample.prompt, sample.response, config.annotate.style)
        requests = make_follow_up(request, "x" * MAX_REPEATED_CHARS, ["x" * 300] * MAX_FAULTS)
        notes = task.notes(sample.prompt, sample.response) or ""
        longest = (
            sum(estimate_tokens(m["content"]) for m in requests) + (MAX_NOTES_CHARS - len(notes)) // BYTES_PER_TOKEN
        )
        assert longest <= room


def test_the_summary_has_the_share_of_records_whose_solution_shares_its_tests_process(tmp_path: Path) -> None:
    config = AnnotateJob.model_validate(
        {
            "run": {"root": tmp_path, "name": "annotated"}, "task": "code", "annotate": {"source": "program"},
            "data": {"path": str(tmp_path / "data.jsonl")},
        }
    )  # fmt: skip
    printed = "def f():\n    print('x')\n"
    patched = "from unittest.mock import patch\nfrom solution import f\n"
    patched += "@patch('builtins.print')\ndef test(p):\n    f()\n    assert p.called\n"
    plain = "from solution import f\ndef test():\n    assert f() is None\n"
    rows = [{"question": "Write f.", "test": t, "solution": printed, "response": printed} for t in (patched, plain)]
    write_data(config, *rows, {"question": "And g.", "test": patched, "solution": printed})  # no other response
    summary = annotate_samples(config, read_samples(config), None, StopFlag())
    assert (summary["sandbox_together_share"], summary["sandbox_separate_share"]) == (1 / 3, 2 / 3)
    lines = (config.run.folder / JOURNAL_FILE).read_text().splitlines()
    executions = [json.loads(line)["execution"] for line in lines]
    assert sorted((o["mode"], o["passed"]) for o in executions) == [
        ("separate", False), ("separate", True), ("together", True),
    ]  # fmt: skip
