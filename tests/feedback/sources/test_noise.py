"""Noise by draws that are known, by rates, and by what it must leave alone."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from t2g.config import AnnotateConfig, NoiseConfig, ScoreJob
from t2g.feedback.sources.noise import NoisyFeedback, add_noise
from t2g.interfaces import FeedbackSource
from t2g.types import Prompt, Span, SpanFeedback

TEXT = "abcdefghij"
GOOD = Span(start=0, end=2, label=1, critique_range=(0, 3))
POOR = Span(start=4, end=7, label=-1, severity=3)


def feedback(*spans: Span, status: str = "ok") -> SpanFeedback:
    return SpanFeedback(
        critique="c", spans=spans, status=status, source="program", version="v", num_quotes=3, num_located=2
    )  # type: ignore[arg-type]


def noisy(clean: SpanFeedback, *, seed: int = 0, text: str = TEXT, **noise: Any) -> SpanFeedback:
    return add_noise(clean, NoiseConfig(**noise), response_text=text, rng=np.random.default_rng(seed))


def test_without_noise_nothing_changes() -> None:
    assert noisy(feedback(GOOD, POOR)) == feedback(GOOD, POOR)


def test_flip_changes_the_label_and_nothing_else() -> None:
    flipped = noisy(feedback(GOOD, POOR), flip=1.0)
    assert flipped == feedback(
        Span(start=0, end=2, label=-1, critique_range=(0, 3)), Span(start=4, end=7, label=1, severity=3)
    )


def test_drop_leaves_empty_feedback_with_its_critique() -> None:
    assert noisy(feedback(GOOD, POOR), drop=1.0) == feedback(status="empty")
    assert noisy(feedback(GOOD, POOR), drop_poor=1.0) == feedback(GOOD)
    assert noisy(feedback(GOOD, POOR), drop_poor=1.0, flip=1.0).spans[0].label == -1  # by the label it came with
    assert noisy(feedback(status="failed"), drop=1.0) == feedback(status="failed")


def test_move_keeps_the_length_and_takes_every_other_place_alike() -> None:
    starts = [noisy(feedback(POOR), seed=seed, move=1.0).spans[0] for seed in range(1400)]
    assert all(span.end - span.start == 3 and span.label == -1 and span.severity == 3 for span in starts)
    counts = np.bincount([span.start for span in starts], minlength=8)
    assert len(counts) == 8  # 0 .. 7 and its own, 4, never
    assert counts[4] == 0
    assert (abs(np.delete(counts, 4) - 200) < 70).all()  # five standard deviations
    whole = Span(start=0, end=10, label=1)
    assert noisy(feedback(whole), move=1.0).spans == (whole,)


def test_rates_are_those_of_the_config() -> None:
    many = feedback(*[GOOD, POOR] * 2000)
    spans = noisy(many, drop=0.1, drop_poor=0.6).spans
    good = sum(span.label == 1 for span in spans)
    assert good / 2000 == pytest.approx(0.9, abs=0.035)  # five standard deviations
    assert (len(spans) - good) / 2000 == pytest.approx(0.4, abs=0.055)
    assert sum(s != t for s, t in zip(noisy(many, flip=0.3).spans, many.spans, strict=True)) / 4000 == pytest.approx(
        0.3, abs=0.037
    )


@given(
    seed=st.integers(0, 999),
    low=st.floats(0, 1),
    high=st.floats(0, 1),
    kind=st.sampled_from(["flip", "drop", "drop_poor", "move"]),
)
def test_more_noise_changes_what_less_noise_changed(seed: int, low: float, high: float, kind: str) -> None:
    low, high = sorted((low, high))
    clean = feedback(*(Span(start=i, end=i + 1, label=1 if i % 2 else -1, severity=2) for i in range(8)))
    untouched = [set(noisy(clean, seed=seed, **{kind: rate}).spans) & set(clean.spans) for rate in (low, high)]
    if kind != "move":  # a moved span may land where another one was
        assert untouched[1] <= untouched[0]
    for span in noisy(clean, seed=seed, **{kind: high}).spans:
        assert 0 <= span.start < span.end <= len(TEXT)


def test_a_confidence_is_the_probability_that_the_span_is_intact() -> None:
    many = feedback(*[GOOD, POOR] * 6000)
    noise = {"flip": 0.2, "move": 0.1}
    changed_share = 1 - 0.8 * 0.9
    plain = noisy(many, **noise).spans
    weighed = noisy(many, confidence=True, **noise).spans
    assert tuple(replace(span, confidence=1.0) for span in weighed) == plain  # the same noise
    confidences = np.array([span.confidence for span in weighed])
    is_intact = np.array([span.label == was.label for span, was in zip(plain, many.spans, strict=True)])
    is_intact &= np.array([span.start == was.start for span, was in zip(plain, many.spans, strict=True)])
    assert confidences.mean() == pytest.approx(1 - changed_share, abs=0.02)
    for low in np.arange(0.0, 1.0, 0.1):
        is_near = (low <= confidences) & (confidences < low + 0.1)
        deviation = 0.5 / np.sqrt(is_near.sum())
        assert is_intact[is_near].mean() == pytest.approx(confidences[is_near].mean(), abs=5 * deviation)
    above = confidences[is_intact][:, None] > confidences[~is_intact][None, :1000]
    assert above.mean() == pytest.approx(5 / 6, abs=0.03)


def test_a_confidence_multiplies_that_of_the_source() -> None:
    unsure = Span(start=0, end=2, label=1, confidence=0.5)
    assert noisy(feedback(GOOD, unsure), confidence=True) == feedback(GOOD, unsure)  # nothing is changed
    assert {span.confidence for span in noisy(feedback(GOOD, POOR), flip=1.0, confidence=True).spans} == {0}
    factor = noisy(feedback(GOOD), flip=0.3, confidence=True).spans[0].confidence
    assert noisy(feedback(unsure), flip=0.3, confidence=True).spans[0].confidence == 0.5 * factor


class Source(FeedbackSource):
    name = "program"

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        return feedback(*(Span(start=i, end=i + 1, label=1) for i in range(10)))


def judged(prompt_id: str, response: str, seed: int) -> tuple[int, ...]:
    prompt = Prompt(prompt_id=prompt_id, prompt_ids=np.zeros(1, np.int32), prompt_text="q", task="t")
    source = NoisyFeedback(Source(), NoiseConfig(drop=0.5), seed=seed)
    assert source.name == "program"
    return tuple(span.start for span in asyncio.run(source.judge(prompt, response)).spans)


def test_seed_prompt_and_response_decide_and_nothing_else() -> None:
    keys = [("p", TEXT, 1), ("q", TEXT, 1), ("p", TEXT[::-1], 1), ("p", TEXT, 2), ("p", "\ud800" + TEXT, 1)]
    results = [judged(*key) for key in keys]
    assert results == [judged(*key) for key in keys]
    assert len(set(results)) == len(keys)


@pytest.mark.parametrize(
    "make",
    [
        lambda noise: AnnotateConfig(noise=noise),
        lambda noise: ScoreJob(feedback={"reward_model": "rm", "noise": noise}),  # type: ignore[arg-type]
    ],
)
def test_noise_is_refused_where_nothing_is_trained(make: Any) -> None:
    with pytest.raises(ValidationError, match="noise is for policy training"):
        make({"flip": 0.1})
