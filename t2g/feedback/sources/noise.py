"""Artificial noise in feedback, to measure how a method depends on correct spans."""

import math
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
        self.judges_turns = source.judges_turns
        self._source = source
        self._noise = noise
        self._seed = seed

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        feedback = await self._source.judge(prompt, response_text)
        identity = stable_id(f"{self._seed}\x1f{prompt.prompt_id}\x1f{response_text}")
        rng = np.random.default_rng(int(identity, 16))
        return add_noise(feedback, self._noise, response_text=response_text, rng=rng)


def add_noise(
    feedback: SpanFeedback, noise: NoiseConfig, *, response_text: str, rng: np.random.Generator
) -> SpanFeedback:
    """Return the feedback with spans dropped, flipped and moved with the probabilities of `noise`.

    A moved span keeps its length; its new position is uniform over all others. Every span takes the same draws at every
    noise level, so that a higher level changes all that a lower level changes. Critique and counts stay the same; no
    span keeps its fix. With `noise.confidence` the confidence of a span is multiplied by `compute_confidence`.
    """
    changed_share = 1 - (1 - noise.flip) * (1 - noise.move)
    signals = rng.spawn(1)[0]  # the noise is the same with and without confidences
    remaining: list[Span] = []
    for span in feedback.spans:
        draws = rng.random(4).tolist()
        noisy = _apply_noise(span, noise, len(response_text), draws)
        signal = 1 - signals.random()
        if noisy is None:
            continue
        if noise.confidence:
            is_changed = (noisy.label, noisy.start) != (span.label, span.start)
            factor = compute_confidence(signal, changed_share, is_changed=is_changed)
            noisy = replace(noisy, confidence=span.confidence * factor)
        remaining.append(noisy)
    status = "empty" if feedback.status == "ok" and not remaining else feedback.status
    return replace(feedback, spans=tuple(remaining), status=status)


def compute_confidence(signal: float, changed_share: float, *, is_changed: bool) -> float:
    """Return the probability that a span is intact, from noisy evidence x: a confidence that is calibrated.

        x = sqrt(u) of an intact span, 1 - sqrt(u) of a changed one       densities 2 x and 2 (1 - x)
        confidence = x (1 - p) / (x (1 - p) + (1 - x) p)

    x of an intact span exceeds x of a changed one with probability 5/6.

    Args:
        signal: u, uniform in (0, 1].
        changed_share: p, the probability that a span is changed.
    """
    root = math.sqrt(signal)
    evidence = 1 - root if is_changed else root
    intact = evidence * (1 - changed_share)
    changed = (1 - evidence) * changed_share
    return intact / (intact + changed)


def _apply_noise(span: Span, noise: NoiseConfig, num_chars: int, draws: list[float]) -> Span | None:
    """Return the noisy span, or None if it is dropped. draws: four numbers in [0, 1)."""
    drop, flip, move, position = draws
    drop_share = noise.drop
    if span.label == -1:
        drop_share = max(noise.drop, noise.drop_poor)
    if drop < drop_share:
        return None
    span = replace(span, fix=None)
    if flip < noise.flip:
        span = replace(span, label=-span.label)
    num_positions = num_chars - (span.end - span.start)  # without its own
    if move < noise.move and num_positions > 0:
        start = int(position * num_positions)
        start += start >= span.start
        span = replace(span, start=start, end=start + span.end - span.start)
    return span
