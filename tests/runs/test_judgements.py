"""The journal of paid judgements: a resumed run takes what was recorded, and requests the rest once."""

import asyncio
import json
import os
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import letter_tokenizer
from trainer_bench import NUM_STEPS, Bench, job

from t2g.errors import UserError
from t2g.feedback.parse import make_failed_feedback, make_feedback
from t2g.feedback.records import make_annotated_record
from t2g.feedback.sources.combined import CombinedFeedback
from t2g.interfaces import FeedbackSource
from t2g.runs.identity import Identity
from t2g.runs.judgements import SYNC_S, JournaledFeedback
from t2g.types import Prompt, SpanFeedback

PROMPT = Prompt(prompt_id="p", prompt_text="Why?", task="prompts", payload={"facts": ["a"]})
IDENTITY = Identity(config={}, contents={"feedback.source": "f1", "task": "t1", "data.path": "d1"})


class NumberedFeedback(FeedbackSource):
    """Each critique has the number of its call; the response "fail" fails, "fault" is unparsable."""

    name = "llm"
    judgement_cache_key = "model#1"

    def __init__(self) -> None:
        self.judged: list[str] = []

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        self.judged.append(response_text)
        names = {"source": self.name, "version": self.judgement_cache_key}
        if response_text in ("fail", "fault"):
            status: Any = "failed" if response_text == "fail" else "unparsable"
            return make_failed_feedback(status, reason="no \ud800 answer", **names)
        return make_feedback(f"critique {len(self.judged)}", ["a"], [], response_text, **names)


def judge(
    folder: Path, *responses: str, prompt: Prompt = PROMPT, identity: Identity = IDENTITY, version: str = "model#1"
) -> tuple[list[SpanFeedback], list[str]]:
    """Return what a new process gets for the responses, and those that it requests."""
    source = NumberedFeedback()
    source.judgement_cache_key = version

    async def judge_all(journaled: JournaledFeedback) -> list[SpanFeedback]:
        return [await journaled.judge(prompt, response) for response in responses]

    with closing(JournaledFeedback(source, folder, identity, keep=2)) as journaled:
        return asyncio.run(judge_all(journaled)), source.judged


def test_a_second_process_requests_only_what_the_first_has_no_answer_for(tmp_path: Path) -> None:
    first, requested = judge(tmp_path, "a b", "fail", "fault")
    assert requested == ["a b", "fail", "fault"]
    second, requested = judge(tmp_path, "fault", "a c", "a b", "fail")
    assert requested == ["a c", "fail"]
    assert second[2] == first[0]
    assert second[0] == first[2]
    assert first[2].reason == "no \ufffd answer"
    assert judge(tmp_path, "a c", "a b", "fault")[1] == []


def test_equal_turns_after_other_turns_get_their_own_answers(tmp_path: Path) -> None:
    class Turns(NumberedFeedback):
        judges_turns = True

    first, second = (replace(PROMPT, messages=({"role": "assistant", "content": text},)) for text in "ab")

    def critiques(*prompts: Prompt) -> list[str]:
        with closing(JournaledFeedback(Turns(), tmp_path, IDENTITY, keep=2)) as journaled:
            return [asyncio.run(journaled.judge(prompt, "a")).critique for prompt in prompts]

    assert critiques(first, second) == ["critique 1", "critique 2"]
    assert critiques(second, first) == ["critique 2", "critique 1"]


def test_equal_responses_get_the_answers_that_they_had_in_order(tmp_path: Path) -> None:
    critiques = [feedback.critique for feedback in judge(tmp_path, "a", "a", "b", "a")[0]]
    assert critiques == ["critique 1", "critique 2", "critique 3", "critique 4"], "nothing is shared in a process"
    again, requested = judge(tmp_path, "a", "a", "a", "a")
    assert [feedback.critique for feedback in again] == ["critique 1", "critique 2", "critique 4", "critique 1"]
    assert requested == ["a"]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": replace(PROMPT, prompt_id="q")},
        {"prompt": replace(PROMPT, prompt_text="Who?")},
        {"prompt": replace(PROMPT, payload={"facts": ["b"]})},
        {"version": "model#2"},
        {"identity": IDENTITY.model_copy(update={"contents": {**IDENTITY.contents, "feedback.source": "f2"}})},
        {"identity": IDENTITY.model_copy(update={"contents": {**IDENTITY.contents, "task": "t2"}})},
    ],
)
def test_another_prompt_or_version_is_judged_again(tmp_path: Path, change: dict[str, Any]) -> None:
    judge(tmp_path, "a")
    assert judge(tmp_path, "a", **change)[1] == ["a"]
    assert judge(tmp_path, "a")[1] == []
    data = IDENTITY.model_copy(update={"contents": {**IDENTITY.contents, "data.path": "d2"}})
    assert judge(tmp_path, "a", identity=data)[1] == []


def test_a_line_that_was_cut_off_is_judged_again_and_the_others_are_kept(tmp_path: Path) -> None:
    judge(tmp_path, "a", "b")
    whole = (tmp_path / "judgements" / "step-00000000.jsonl").read_bytes()
    first = whole.index(b"\n") + 1
    for end in (0, 1, first - 1, first, first + 1, len(whole) - 1):
        folder = tmp_path / str(end)
        (folder / "judgements").mkdir(parents=True)
        (folder / "judgements" / "step-00000000.jsonl").write_bytes(whole[:end])
        assert judge(folder, "a", "b")[1] == (["b"] if end >= first else ["a", "b"])
        assert judge(folder, "a", "b")[1] == []


def test_only_files_that_a_resume_can_need_are_kept(tmp_path: Path) -> None:
    """With two checkpoints kept, a damaged last one leaves the one before: what was judged since is still there."""
    source = NumberedFeedback()

    async def run(journaled: JournaledFeedback) -> None:
        for step in range(1, 10):
            await journaled.judge(PROMPT, f"step {step}")
            journaled.start_file(step)
        await journaled.judge(PROMPT, "step 10")

    with closing(JournaledFeedback(source, tmp_path, IDENTITY, keep=2)) as journaled:
        asyncio.run(run(journaled))
    assert [path.name[-7:-6] for path in sorted((tmp_path / "judgements").iterdir())] == ["7", "8", "9"]
    assert judge(tmp_path, *(f"step {step}" for step in range(7, 11)))[1] == ["step 7"]


def judge_criteria(
    folder: Path, response: str, *, identity: Identity = IDENTITY, failing: str = "", **versions: str
) -> tuple[SpanFeedback, list[str]]:
    """Return what a new process gets from the criteria of these versions, and the criteria that it requests."""
    sources = {name: NumberedFeedback() for name in versions}
    for name, source in sources.items():
        source.judgement_cache_key = versions[name]

    class Failing(NumberedFeedback):
        async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
            await super().judge(prompt, response_text)
            return make_failed_feedback("failed", source=self.name, version="", reason="lone \udfff")

    if failing:
        sources[failing] = Failing()
    both = CombinedFeedback(sources, list(sources))
    with closing(JournaledFeedback(both, folder, identity, keep=2)) as journaled:
        feedback = asyncio.run(journaled.judge(PROMPT, response))
    return feedback, [name for name, source in sources.items() if source.judged]


def test_each_paid_criterion_has_judgements_of_its_own(tmp_path: Path) -> None:
    first, requested = judge_criteria(tmp_path, "a b", facts="v1", style="v1", free="")
    assert requested == ["facts", "style", "free"]
    again, requested = judge_criteria(tmp_path, "a b", facts="v1", style="v1", free="")
    assert again == first and requested == ["free"]
    assert [span.criterion for span in again.spans] == ["facts", "style", "free"]
    assert judge_criteria(tmp_path, "a b", facts="v2", style="v1")[1] == ["facts"]
    assert judge_criteria(tmp_path, "a b", facts="v1", tone="v1")[1] == ["tone"], "the name belongs to the key"
    contents = IDENTITY.contents | {"feedback.sources.style.source": "s2"}
    changed = IDENTITY.model_copy(update={"contents": contents})
    assert judge_criteria(tmp_path, "a b", facts="v1", style="v1", identity=changed)[1] == ["style"]


def test_a_criterion_that_fails_does_not_lose_the_judgement_of_another(tmp_path: Path) -> None:
    failed, requested = judge_criteria(tmp_path, "a b", failing="style", facts="v1", style="v1")
    assert failed.status == "failed" and requested == ["facts", "style"]
    record = make_annotated_record(PROMPT, "a b", failed)
    assert "lone \ufffd" in json.loads(record.model_dump_json())["criteria"]["style"]["reason"]
    again, requested = judge_criteria(tmp_path, "a b", facts="v1", style="v1")
    assert again.usable and requested == ["style"]


@pytest.mark.parametrize("resumed", [5, 10])
def test_a_resume_from_an_older_checkpoint_keeps_the_files_of_all_kept_checkpoints(
    tmp_path: Path, resumed: int
) -> None:
    """The checkpoints of the steps 15 and 20, or also 10, are damaged; one checkpoint is kept."""

    async def run(journaled: JournaledFeedback, *steps: int) -> None:
        for step in steps:
            journaled.start_file(step)
            await journaled.judge(PROMPT, f"after {step}, resumed from {steps[0]}")

    def names() -> list[int]:
        return [int(path.stem[-2:]) for path in sorted((tmp_path / "judgements").iterdir())]

    def start(*steps: int, keep: int) -> None:
        with closing(JournaledFeedback(NumberedFeedback(), tmp_path, IDENTITY, keep=keep)) as journaled:
            asyncio.run(run(journaled, *steps))

    start(0, 5, 10, 15, 20, keep=5)
    start(resumed, keep=1)
    text = (tmp_path / "judgements" / f"step-{resumed:08d}.jsonl").read_text()
    assert text.count("\n") == 2, "the file of the resumed checkpoint continues"
    assert names() == [0, 5, 10, 15, 20]
    start(resumed, resumed, 12, keep=2)
    assert names() == [0, 5, 10, 12, 15, 20], "the checkpoint before the resumed one is still kept"
    start(resumed, 12, keep=1)
    assert names() == [*(step for step in (5, 10) if step >= resumed), 12, 15, 20], "12 is not written completely yet"


class SlowDisk:
    """A disk whose syncs end when another task of the event loop has had 50 turns meanwhile."""

    def __init__(self) -> None:
        self.num_syncs = 0
        self._num_turns = 0
        self._is_loop_running = False

    def sync(self, file: int) -> None:
        self.num_syncs += 1
        last_turn = self._num_turns + 50
        deadline = time.monotonic() + 20
        while self._is_loop_running and self._num_turns < last_turn:
            if time.monotonic() > deadline:
                self._is_loop_running = False  # the further syncs need no wait
                raise OSError(5, "the sync blocks the loop")
            time.sleep(0.001)

    async def judge_at_once(self, journaled: JournaledFeedback, number: int) -> None:
        """Judge responses in four rounds."""
        self._is_loop_running = True
        turns = asyncio.create_task(self._count_turns())
        try:
            for part in range(4):
                await asyncio.gather(*(journaled.judge(PROMPT, f"a {part} {i}") for i in range(number // 4)))
                await asyncio.sleep(SYNC_S)
        finally:
            turns.cancel()
            self._is_loop_running = False

    async def _count_turns(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self._num_turns += 1


def test_a_slow_disk_syncs_many_judgements_at_once_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk()
    monkeypatch.setattr(os, "fsync", disk.sync)
    started = time.monotonic()
    with closing(JournaledFeedback(NumberedFeedback(), tmp_path, IDENTITY, keep=1)) as journaled:
        asyncio.run(disk.judge_at_once(journaled, 64))
    num_intervals = int((time.monotonic() - started) / SYNC_S)
    assert 2 <= disk.num_syncs <= num_intervals + 2  # of 64 judgements; two at the end


def test_a_failed_sync_ends_the_run_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports an error once: the sync at the close succeeds."""
    requested: list[str] = []

    def fail_once(file: int) -> None:
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    async def run(journaled: JournaledFeedback, *responses: str) -> None:
        with closing(journaled):
            for response in responses:
                await journaled.judge(PROMPT, response)
                requested.append(response)
                async with asyncio.timeout(20):
                    while not journaled._syncs[0].done():
                        await asyncio.sleep(0.01)

    for responses in (("a", "b", "c"), ("a",)):  # the next judgement raises it, or the close
        monkeypatch.setattr(os, "fsync", fail_once)
        folder = tmp_path / str(len(responses))
        folder.mkdir()
        journaled = JournaledFeedback(NumberedFeedback(), folder, IDENTITY, keep=1)
        with pytest.raises(UserError, match=r"step-0{8}\.jsonl cannot be synced to the disk: .*Input/output error"):
            asyncio.run(run(journaled, *responses))
    assert requested == ["a", "a"]


def test_payloads_and_texts_that_are_no_json_have_keys_too(tmp_path: Path) -> None:
    prompt = replace(PROMPT, prompt_text="lone \ud800", payload={"facts": {"a", 1.5}, "rows": np.arange(3)})
    assert judge(tmp_path, "a \udfff", prompt=prompt)[1] == ["a \udfff"]
    assert judge(tmp_path, "a \udfff", "a", prompt=prompt)[1] == ["a"]


def test_a_free_source_has_no_journal(tmp_path: Path) -> None:
    assert judge(tmp_path, "a", version="")[1] == judge(tmp_path, "a", version="")[1] == ["a"]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(("killed_at", "max_staleness"), [(5, 0), (120, 0), (120, 1)])
def test_a_killed_run_that_resumes_requests_no_judgement_twice(
    tokenizer: Any, tmp_path: Path, killed_at: int, max_staleness: int
) -> None:
    """The run is killed in the evaluation before step 1, or in step 4 after a checkpoint."""
    requested: Counter[str] = Counter()

    def start(folder: str, kill_at: int = -1) -> Bench:
        bench = Bench(tmp_path / folder, tokenizer, job(max_staleness=max_staleness), judgement_cache_key="judge#1")

        def count(prompt: Prompt) -> None:
            if requested.total() == kill_at:
                raise RuntimeError("killed")
            requested[folder] += 1

        bench.feedback.before_judge = count
        return bench

    whole = start("whole")
    whole.run()
    num_judgements = requested.pop("whole")
    with pytest.raises(RuntimeError, match="killed"):
        start("killed", killed_at).run()
    resumed = start("killed")
    resumed.run()
    assert num_judgements == 8 * (NUM_STEPS // 3 + 1) + 32 * NUM_STEPS
    if max_staleness == 0:  # a recorded answer may also serve an equal response to the prompt in a later step
        assert num_judgements - 8 <= requested["killed"] <= num_judgements
        assert resumed.metrics() == whole.metrics()
        np.testing.assert_array_equal(resumed.learner.logits.detach(), whole.learner.logits.detach())
    assert requested["killed"] <= num_judgements + 32 * 2  # other weights sample other responses of one step ahead
