"""Metrics and alarms of failures that leave every other number plausible.

The engines sample another distribution than the one that is trained; the tokenizer cannot name what they sample; the
feedback is the same for every response; no token has an advantage.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from t2g import metrics as m
from t2g.config import ObjectiveConfig
from t2g.text.offsets import has_token
from t2g.types import ScoredRollout, SpanFeedback, TokenStats, TrainSample

MIN_RESPONSES = 8  # different texts in a step; fewer may well deserve the same feedback
WHOLE = None  # in place of the quote of a span that covers the whole answer

MAX_UNNAMED_SHARE = 1e-3  # rows that only pad an embedding are almost never sampled
MAX_SAME_SHARE = 0.95
SAME_STEPS = 3  # steps in a row: a single step of easy prompts may deserve the same feedback
BOUNDED = (m.GAP_CURRENT, m.UNNAMED_SHARE, m.SAME_FEEDBACK, m.ZERO_ADVANTAGE)


def consistency_metrics(
    scored: Sequence[ScoredRollout],
    samples: Sequence[TrainSample],
    stats: Sequence[TokenStats],
    staleness: np.ndarray,
    objective: ObjectiveConfig,
    *,
    tokenizer: Any,
) -> dict[str, float]:
    """Return the metrics of this module.

    Args:
        staleness: `steps.compute_token_staleness` of the responses, [N] for their sampled tokens.
    """
    metrics = {m.UNNAMED_SHARE: _unnamed_share(scored, tokenizer)}
    metrics |= _current_gap(scored, stats, staleness)
    metrics |= _same_feedback(scored)
    if objective.trains_rewards:
        metrics |= _zero_advantage(samples)
    return metrics


def format_consistency_alarm(name: str, value: float, *, probe_tolerance: float) -> str:
    """Return the alarm of a metric of this module, "" for a value within its bounds.

    Args:
        value: For feedback/same_share the smallest of the last SAME_STEPS steps.
        probe_tolerance: `LearnerConfig.resolve_probe_tolerance` of the run.
    """
    match name:
        case m.GAP_CURRENT if value > probe_tolerance:
            return (
                f"the log-probabilities of engines and learner differ by {value:.3g} nats per token, on tokens that "
                f"were sampled with the weights that are trained; rounding explains learner.probe_tolerance="
                f"{probe_tolerance:g}: the engines sample with other weights, another temperature, or a truncated "
                "distribution; compare this number with that of step 1, and restart the engines"
            )
        case m.UNNAMED_SHARE if value > MAX_UNNAMED_SHARE:
            return (
                f"the tokenizer has no token for {value:.1%} of the sampled ids, so that the feedback does not see "
                "them: the tokenizer is not that of the model; use the one that the model was trained with"
            )
        case m.SAME_FEEDBACK if value >= MAX_SAME_SHARE:
            return (
                f"the feedback on {value:.0%} of the different responses was the same for {SAME_STEPS} steps, critique "
                "and spans: either the prompts are solved, or the source does not read the responses; read the "
                "critiques in samples.jsonl"
            )
        case m.ZERO_ADVANTAGE if value >= 1:
            return (
                "every advantage of the step is 0, so that the update follows the KL alone: the responses earn the "
                "same, or no prompt has two responses with usable feedback; read the rewards in samples.jsonl"
            )
    return ""


def smallest_recent(values: Sequence[float]) -> list[float]:
    """Return for each value the smallest of the last SAME_STEPS values; 0 where there are fewer.

    >>> smallest_recent([1.0, 0.5, 1.0, 1.0, 1.0])
    [0.0, 0.0, 0.5, 0.5, 1.0]
    """
    smallest = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - SAME_STEPS) : end]
        smallest.append(min(recent) if len(recent) == SAME_STEPS else 0.0)
    return smallest


def _unnamed_share(scored: Sequence[ScoredRollout], tokenizer: Any) -> float:
    """Return the share of sampled ids for which the tokenizer has no token."""
    sampled = [response.rollout.response_ids[response.rollout.policy_mask] for response in scored]
    ids, counts = np.unique(np.concatenate(sampled), return_counts=True)
    is_named = has_token(tokenizer, ids)
    return float(counts[~is_named].sum() / counts.sum())


def _current_gap(
    scored: Sequence[ScoredRollout], stats: Sequence[TokenStats], staleness: np.ndarray
) -> dict[str, float]:
    """Return the gap of the tokens that were sampled with the weights of the update; {} without any."""
    gaps = []
    for response, token_stats in zip(scored, stats, strict=True):
        mask = response.rollout.policy_mask
        gap = token_stats.old_logprobs - response.rollout.rollout_logprobs
        gaps.append(gap[mask])
    current = np.abs(np.concatenate(gaps))[staleness == 0]
    if current.size == 0:
        return {}
    return {m.GAP_CURRENT: float(current.mean())}


def _same_feedback(scored: Sequence[ScoredRollout]) -> dict[str, float]:
    """Return the share of different responses whose feedback is the most frequent one; {} with few responses."""
    judged: set[tuple[str, Any]] = set()
    for response in scored:
        rollout = response.rollout
        if rollout.answer_start is None:
            continue  # it was not judged
        start = rollout.answer_start
        judged.add((rollout.response_text, _describe(response.feedback, rollout.response_text, start)))
    num_texts = len({text for text, _ in judged})
    if num_texts < MIN_RESPONSES:
        return {}
    frequencies = Counter(description for _, description in judged)
    return {m.SAME_FEEDBACK: max(frequencies.values()) / len(judged)}


def _describe(feedback: SpanFeedback, text: str, answer_start: int) -> Any:
    """Return what the feedback says without its positions, hashable.

    A quote of the whole answer says as little about it as no quote.
    """
    spans = []
    for span in feedback.spans:
        quote: str | None = text[span.start : span.end]
        is_whole = span.start <= answer_start and span.end >= len(text.rstrip())
        spans.append((span.label, span.severity, span.confidence, WHOLE if is_whole else quote))
    numbers = sorted((feedback.metrics | feedback.outcomes).items())
    return feedback.critique, tuple(spans), tuple(numbers)


def _zero_advantage(samples: Sequence[TrainSample]) -> dict[str, float]:
    """Return the share of trained tokens whose advantage is 0; {} without a trained token."""
    advantages = [sample.advantages[sample.weights > 0] for sample in samples]
    trained = np.concatenate(advantages)
    if trained.size == 0:
        return {}
    return {m.ZERO_ADVANTAGE: float(np.mean(trained == 0))}
