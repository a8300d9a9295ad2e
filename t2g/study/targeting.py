"""What training changed, and where: log-probability of the base's own responses, by what the feedback said of a token.

The reference is one response of the base to each of some held-out prompts, with its feedback, made before any training.
Training that acts where the criticism points lowers the log-probability of criticised tokens and leaves those that were
never mentioned alone.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from t2g.feedback import token_offsets
from t2g.feedback.rewards import token_rewards
from t2g.interfaces import FeedbackSource, RolloutSource, Sampling
from t2g.loop.sampling import JudgedResponse
from t2g.types import Prompt, Rollout, SpanFeedback

NUM_ALIKE = 10  # unmentioned tokens that a criticised one is held against
MENTIONS = {-1: "criticised", 1: "praised", 0: "unmentioned"}


async def sample_and_judge(
    prompts: Sequence[Prompt], rollouts: RolloutSource, feedback: FeedbackSource, sampling: Sampling
) -> list[JudgedResponse]:
    """One response to each prompt, with its feedback."""

    async def one(prompt: Prompt) -> JudgedResponse:
        (rollout,) = await rollouts.sample(prompt, sampling)
        return prompt, rollout, await feedback.judge(prompt, rollout.response_text)

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


async def measure(
    reference: Sequence[JudgedResponse],
    logprobs: Sequence[np.ndarray],
    rollouts: RolloutSource,
    feedback: FeedbackSource,
    sampling: Sampling,
    tokenizer: Any,
) -> dict[str, Any]:
    """`changes_by_mention` and `returns` of a trained policy.

    Criticism that returns is told by one source: an ablation's reward model quotes in its own way, so `feedback` judges
    the reference again.

    logprobs: [R] float32 each, the trained policy's, of the reference's tokens; the base's are those of the engine that
        sampled them. rollouts: engines of that policy. sampling: as the reference was sampled, seed included, so that a
        response changes only where the policy did.
    """
    before = await asyncio.gather(*(feedback.judge(p, r.response_text) for p, r, _ in reference))
    after = await sample_and_judge([p for p, _, _ in reference], rollouts, feedback, sampling)
    again = returns(
        [criticisms(r.response_text, f) for (_, r, _), f in zip(reference, before, strict=True)],
        [criticisms(r.response_text, f) for _, r, f in after],
    )
    judged = [(r, f, new - r.rollout_logprobs) for (_, r, f), new in zip(reference, logprobs, strict=True) if f.usable]
    labels = [mentions(tokenizer, r, f) for r, f, _ in judged]
    base = [r.rollout_logprobs for r, _, _ in judged]
    return changes_by_mention(labels, [change for _, _, change in judged], base) | again


def mentions(tokenizer: Any, rollout: Rollout, feedback: SpanFeedback) -> np.ndarray:
    """-> [R] int8: -1 criticised (also where it is praised as well), 1 praised, 0 never mentioned (EOS always)."""
    offsets = token_offsets(tokenizer, rollout.response_ids)
    # The job's own rule may pay nothing for some spans; they are criticism all the same.
    deltas = token_rewards(offsets, feedback.spans, text=rollout.response_text)
    return np.sign(deltas).astype(np.int8)


def changes_by_mention(
    labels: Sequence[np.ndarray], changes: Sequence[np.ndarray], base: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Mean change of log-probability over the tokens of each kind, nats, with their number; None for a kind without.

    labels, changes, base (log-probabilities before): [R] each, of the same responses. `difference` is criticised less
    unmentioned: below 0 where training turned against what was criticised, and not against everything. `matched` is
    that among tokens that the base thought about as likely: faults are unlikelier than other tokens, which moves them
    whatever is paid.

        labels [-1, 0, 0], changes [-2, .5, -.5] -> criticised -2, praised None, unmentioned 0, difference -2
    """
    label, change = np.concatenate(labels), np.concatenate(changes)
    of = {name: change[label == value] for value, name in MENTIONS.items()}
    means = {name: float(part.mean()) if part.size else None for name, part in of.items()}
    criticised, unmentioned = means["criticised"], means["unmentioned"]
    difference = None if criticised is None or unmentioned is None else criticised - unmentioned
    matched = matched_difference(label, change, np.concatenate(base))
    return {
        **means,
        "difference": difference,
        "matched": matched,
        "tokens": {name: int(part.size) for name, part in of.items()},
    }


def matched_difference(label: np.ndarray, change: np.ndarray, base: np.ndarray) -> float | None:
    """Mean over the criticised tokens of their change less the mean change of the NUM_ALIKE unmentioned tokens of the
    nearest `base`; None without both kinds. label, change, base: [N].
    """
    criticised, unmentioned = label == -1, label == 0
    if not (criticised.any() and unmentioned.any()):
        return None
    order = np.argsort(base[unmentioned], kind="stable")
    sums, count = np.append(0, np.cumsum(change[unmentioned][order])), min(NUM_ALIKE, len(order))
    place = np.searchsorted(base[unmentioned][order], base[criticised])
    first = np.clip(place - count // 2, 0, len(order) - count)
    return float((change[criticised] - (sums[first + count] - sums[first]) / count).mean())


def criticisms(response_text: str, feedback: SpanFeedback) -> frozenset[str] | None:
    """The quotes that are called poor, each once; None where the feedback is of no use."""
    if not feedback.usable:
        return None
    return frozenset(response_text[span.start : span.end] for span in feedback.spans if span.label < 0)


def returns(before: Sequence[frozenset[str] | None], after: Sequence[frozenset[str] | None]) -> dict[str, Any]:
    """Of the criticisms of the base's responses, the share that is made of the new ones to the same prompts as well.

    before, after: by prompt; a prompt without usable feedback on both sides does not count.

        before [{Lima, laptop}, {Ann}], after [{Lima}, {}] -> 1 of 3
    """
    both = [(old, new) for old, new in zip(before, after, strict=True) if old is not None and new is not None]
    count = sum(len(old) for old, _ in both)
    again = sum(len(old & new) for old, new in both)
    return {"returns": again / count if count else None, "criticisms": count, "prompts": len(both)}
