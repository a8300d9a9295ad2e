"""How held-out responses are scored where the task has no measure of its own."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from fakes import LetterTask, letter_prompts

from t2g.config import PolicyJob
from t2g.feedback.parse import make_failed_feedback, make_feedback
from t2g.loop.sampling import compute_held_out_metrics
from t2g.types import PolicyTurn, Prompt, Rollout, SpanFeedback

CONFIG = PolicyJob(
    model={"policy": "m"},  # type: ignore[arg-type]
    data={"path": "d"},  # type: ignore[arg-type]
    feedback={"source": "program"},  # type: ignore[arg-type]
    objective={"rewards": {"poor": (0, -0.5, -2)}},  # type: ignore[arg-type]
)


def rollout(prompt_id: str, text: str) -> Rollout:
    ids = np.zeros(len(text), np.int32)
    return Rollout(
        prompt_id=prompt_id, sample_index=0, prompt_ids=ids[:1], response_ids=ids, rollout_logprobs=ids * 0.0,
        response_text=text, finish_reason="stop", policy_versions=((0, len(text), 0),),
    )  # fmt: skip


def score(*feedback: SpanFeedback) -> float:
    task = LetterTask()
    answers = iter(feedback)
    task.unmeasured = {f"p{i}" for i in range(len(feedback))}

    async def judge(prompt: Any, response_text: str) -> SpanFeedback:
        return next(answers)

    pairs = [(p, rollout(p.prompt_id, "ggpp")) for p in letter_prompts(len(feedback))]
    log: Any = SimpleNamespace(write_samples=lambda *_: None)
    metrics = compute_held_out_metrics(CONFIG, task, pairs, SimpleNamespace(judge=judge), log, step=0)  # type: ignore[arg-type]
    return asyncio.run(metrics)["eval/score"]


def test_the_standard_error_is_of_prompts_and_not_of_responses() -> None:
    """Shares of `a`: p0 has 1 and 0, p1 has 1 and 0.5. The means 0.5 and 0.75 deviate by 0.125 sqrt(2)."""
    log: Any = SimpleNamespace(write_samples=lambda *_: None)
    source: Any = SimpleNamespace(
        judge=lambda *_: asyncio.sleep(0, make_feedback("c", [], [], "", source="s", version="v"))
    )
    texts = zip((p for p in letter_prompts(2) for _ in range(2)), ("aaaa", "bbbb", "aaaa", "aabb"), strict=True)
    pairs = [(p, rollout(p.prompt_id, text)) for p, text in texts]
    for measured_pairs, error in ((pairs, 0.125), (pairs[:2], np.inf)):
        metrics = asyncio.run(compute_held_out_metrics(CONFIG, LetterTask(), measured_pairs, source, log, step=0))
        assert metrics["eval/score_se"] == pytest.approx(error)


def test_a_held_out_conversation_without_a_reply_has_no_score_and_each_answer_is_measured_once() -> None:
    """Shares of `a` after one turn and after two: .5 and 1; a conversation of one turn counts as it is, 0."""
    config = CONFIG.model_copy(update={"environment": "a:B"})

    def conversation(prompt_id: str, *turns: str, failure: str = "") -> Rollout:
        starts = [sum(map(len, turns[:i])) for i in range(len(turns))]
        ranges = [(start, start + len(turn)) for start, turn in zip(starts, turns, strict=True)]
        parts = tuple(PolicyTurn(tokens=r, characters=r, answer_start=r[0]) for r in ranges)
        whole = rollout(prompt_id, "".join(turns))
        return replace(whole, environment_turns=parts, answer_start=starts[-1], failure=failure)

    class Counting(LetterTask):
        measured: ClassVar[list[str]] = []

        def measure(self, prompt: Prompt, response_text: str, **options: Any) -> dict[str, float] | None:
            self.measured.append(response_text)
            return super().measure(prompt, response_text, **options)

    rollouts = [("aabb", "aaaa"), ("bbbb",), ("aaaa", "aaaa")]
    prompts = letter_prompts(3)
    pairs = [(p, conversation(p.prompt_id, *turns)) for p, turns in zip(prompts, rollouts, strict=True)]
    pairs[2] = (prompts[2], replace(pairs[2][1], failure="no reply"))
    judged = make_feedback("c", [], [], "", source="s", version="v")
    source: Any = SimpleNamespace(name="s", judges_turns=False, judge=lambda *_: asyncio.sleep(0, judged))
    log: Any = SimpleNamespace(write_samples=lambda *_: None)
    metrics = asyncio.run(compute_held_out_metrics(config, Counting(), pairs, source, log, step=0))
    name = LetterTask().score_name
    assert (metrics[f"eval/{name}_turn_1"], metrics["eval/score"]) == (0.25, 0.5)
    assert metrics["eval/failed_share"] == pytest.approx(1 / 3)
    assert sorted(Counting.measured) == ["aaaa", "aabb", "bbbb"]


def spans_feedback(good: int, *severities: int) -> SpanFeedback:
    text = "g" * good + "p" * len(severities)
    poor = [{"quote": "p", "occurrence": i + 1, "severity": severity} for i, severity in enumerate(severities)]
    pieces = [("g", i + 1) for i in range(good)]
    return make_feedback("c", pieces, poor, text, source="s", version="v")


def test_the_score_is_a_rate_that_more_of_the_same_does_not_raise() -> None:
    assert score(spans_feedback(1)) == score(spans_feedback(9)) == 1.0
    assert score(spans_feedback(2, 3)) == pytest.approx((2 - 2) / (2 + 2))
    assert score(spans_feedback(1, 2), spans_feedback(3, 3)) == pytest.approx(((1 - 0.5) / 1.5 + (3 - 2) / 5) / 2)


def test_nothing_marked_and_nothing_that_costs_is_neither_good_nor_poor() -> None:
    assert score(spans_feedback(0)) == score(spans_feedback(0, 1)) == 0.0
    assert score(spans_feedback(2), make_failed_feedback("failed", source="s", version="v")) == 1.0
    assert score(make_failed_feedback("failed", source="s", version="v")) == float("-inf")
