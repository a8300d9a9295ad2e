"""Feedback made worse on purpose: what a method loses when spans are wrong, missing or elsewhere."""

from dataclasses import replace

import numpy as np

from t2g.config import NoiseConfig
from t2g.interfaces import FeedbackSource
from t2g.tasks.base import stable_id
from t2g.types import Prompt, Span, SpanFeedback


class NoisyFeedback(FeedbackSource):
    """Another source's feedback with `add_noise`, drawn from (seed, prompt_id, response): the same in every run."""

    def __init__(self, source: FeedbackSource, noise: NoiseConfig, *, seed: int) -> None:
        self.name = source.name
        self._source, self._noise, self._seed = source, noise, seed

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        feedback = await self._source.judge(prompt, response_text)
        rng = np.random.default_rng(int(stable_id(f"{self._seed}\x1f{prompt.prompt_id}\x1f{response_text}"), 16))
        return add_noise(feedback, self._noise, response_text=response_text, rng=rng)


def add_noise(
    feedback: SpanFeedback, noise: NoiseConfig, *, response_text: str, rng: np.random.Generator
) -> SpanFeedback:
    """Each span dropped, flipped and moved with the probabilities of `noise`; critique and counts stay as they were.

    A moved span keeps its length and goes to any other place of the response, each equally likely. Every span takes
    the same draws at every level of noise: what a little noise changes, more of it changes as well.
    """
    spans = (_changed(span, noise, len(response_text), rng.random(4).tolist()) for span in feedback.spans)
    kept = tuple(span for span in spans if span is not None)
    status = "empty" if feedback.status == "ok" and not kept else feedback.status
    return replace(feedback, spans=kept, status=status)


def _changed(span: Span, noise: NoiseConfig, num_chars: int, draws: list[float]) -> Span | None:
    """The span after its noise, None when it is dropped. draws: four numbers in [0, 1)."""
    drop, flip, move, where = draws
    if drop < (noise.drop if span.label == 1 else max(noise.drop, noise.drop_poor)):
        return None
    if flip < noise.flip:
        span = replace(span, label=-span.label)
    num_places = num_chars - (span.end - span.start)  # beside its own
    if move < noise.move and num_places > 0:
        start = int(where * num_places)
        start += start >= span.start
        span = replace(span, start=start, end=start + span.end - span.start)
    return span
