"""Stage 1 on fakes: what is asked for, what is asked for again, and the order in the end."""

import asyncio
from pathlib import Path

from fakes import FakeFeedback, FakeRollouts, letter_prompts, letter_tokenizer

from t2g.annotate import annotate, in_prompt_order, is_heldout
from t2g.data.records import AnnotatedRecord
from t2g.interfaces import Sampling
from t2g.types import Prompt, Rollout, SpanFeedback

SAMPLING = Sampling(num_samples=2, temperature=1.0, max_new_tokens=4, seed=3)


class Counting(FakeRollouts):
    """Remembers whom it sampled, and lets the last prompt overtake the first."""

    def __init__(self, folder: Path) -> None:
        super().__init__(letter_tokenizer(folder))
        self.sampled: list[str] = []

    async def sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        self.sampled.append(prompt.prompt_id)
        await asyncio.sleep({"p0": 0.02, "p1": 0.01}.get(prompt.prompt_id, 0))
        return await super().sample(prompt, sampling)


class CountingFeedback(FakeFeedback):
    def __init__(self) -> None:
        super().__init__()
        self.judged: list[str] = []

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        self.judged.append(prompt.prompt_id)
        return await super().judge(prompt, response_text)


def key(record: AnnotatedRecord) -> tuple[str, int]:
    return record.prompt_id, record.sample_index


def test_each_sample_is_heard_of_once_and_put_into_the_order_of_the_prompts(tmp_path: Path) -> None:
    prompts, heard = letter_prompts(3), []
    asyncio.run(annotate(prompts, SAMPLING, Counting(tmp_path), FakeFeedback(), heard.append))
    assert [key(record) for record in heard] == [(p, i) for p in ("p2", "p1", "p0") for i in (0, 1)]
    assert [key(r) for r in in_prompt_order(heard, prompts)] == [(p, i) for p in ("p0", "p1", "p2") for i in (0, 1)]


def test_what_is_there_is_neither_sampled_nor_judged_again(tmp_path: Path) -> None:
    rollouts, feedback, heard = Counting(tmp_path), CountingFeedback(), []
    done = {("p0", 0), ("p0", 1), ("p1", 1)}
    asyncio.run(annotate(letter_prompts(3), SAMPLING, rollouts, feedback, heard.append, done=done))
    assert rollouts.sampled == ["p1", "p2"]
    assert sorted(feedback.judged) == ["p1", "p2", "p2"]
    assert {key(record) for record in heard} == {("p1", 0), ("p2", 0), ("p2", 1)}


def test_records_of_other_prompts_are_left_out() -> None:
    def record(prompt_id: str, text: str) -> AnnotatedRecord:
        return AnnotatedRecord(prompt_id=prompt_id, prompt=text, response="a", critique="c")

    records = [record("p1", "write"), record("p0", "another text"), record("q", "write")]
    assert in_prompt_order(records, letter_prompts(2)) == records[:1]


def test_the_share_that_is_held_out() -> None:
    held = [is_heldout(str(i), 0.25) for i in range(4000)]
    assert abs(sum(held) / 4000 - 0.25) < 0.03  # four standard deviations
    assert not is_heldout("7", 0.0)
