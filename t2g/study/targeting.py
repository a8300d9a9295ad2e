"""Measure where training changed log-probabilities: on criticised, praised or unmentioned tokens.

The reference is one response of the base policy to each of some held-out prompts, with its feedback, sampled before any
training. Training that acts where the critique points lowers the log-probability of criticised tokens, and does not
change that of unmentioned tokens.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from t2g.feedback.rewards import token_rewards
from t2g.interfaces import FeedbackSource, RolloutSource, Sampling
from t2g.loop.sampling import judge_answer
from t2g.text.transcript import compute_answer_mask, rollout_offsets
from t2g.types import JudgedResponse, Prompt, Rollout, SpanFeedback

NUM_MATCHES = 10  # unmentioned tokens that a criticised token is compared with
THINKING = 2  # label of tokens that are left out
MENTIONS = {-1: "criticised", 1: "praised", 0: "unmentioned"}


async def sample_and_judge(
    prompts: Sequence[Prompt], rollouts: RolloutSource, feedback: FeedbackSource, sampling: Sampling
) -> list[JudgedResponse]:
    """Return one response to each prompt, with its feedback."""

    async def respond(prompt: Prompt) -> JudgedResponse:
        (rollout,) = await rollouts.sample(prompt, sampling)
        answer = await judge_answer(feedback, prompt, rollout)
        return JudgedResponse(prompt, rollout, answer)

    return list(await asyncio.gather(*(respond(prompt) for prompt in prompts)))


async def measure(
    reference: Sequence[JudgedResponse],
    logprobs: Sequence[np.ndarray],
    rollouts: RolloutSource,
    feedback: FeedbackSource,
    sampling: Sampling,
    tokenizer: Any,
) -> dict[str, Any]:
    """Return `changes_by_mention` and `measure_recurrence` of a trained policy.

    `feedback` judges the reference again, since recurring criticism must come from one source: the reward model of an
    ablation quotes differently.

    Args:
        logprobs: The trained policy's log-probabilities of the reference's tokens, [R] float32 each. The base policy's
            are those of the engine that sampled the reference.
        rollouts: Engines with the trained policy.
        sampling: Sampling parameters of the reference, including the seed, so that only the policy changes a response.
    """
    requests = [judge_answer(feedback, response.prompt, response.rollout) for response in reference]
    judged_again = await asyncio.gather(*requests)
    prompts = [response.prompt for response in reference]
    responses_after = await sample_and_judge(prompts, rollouts, feedback, sampling)

    before = []
    for response, answer in zip(reference, judged_again, strict=True):
        before.append(find_criticised_quotes(response.rollout.response_text, answer))
    after = [find_criticised_quotes(judged.rollout.response_text, judged.feedback) for judged in responses_after]

    labels: list[np.ndarray] = []
    changes: list[np.ndarray] = []
    base: list[np.ndarray] = []
    for response, new_logprobs in zip(reference, logprobs, strict=True):
        if not response.feedback.usable:
            continue
        old_logprobs = response.rollout.rollout_logprobs
        labels.append(label_tokens(tokenizer, response.rollout, response.feedback))
        changes.append(new_logprobs - old_logprobs)
        base.append(old_logprobs)
    return changes_by_mention(labels, changes, base) | measure_recurrence(before, after)


def label_tokens(tokenizer: Any, rollout: Rollout, feedback: SpanFeedback) -> np.ndarray:
    """Return the label of each token, [R] int8.

    -1 criticised (even if praised as well), 1 praised, 0 unmentioned (always for EOS), THINKING for thinking and for
    inserted tokens, which no feedback can mention.
    """
    offsets = rollout_offsets(tokenizer, rollout)
    # Without the job's reward rule, under which some criticised spans may have no reward.
    rewards = token_rewards(offsets, feedback.spans, text=rollout.response_text)
    labels = np.sign(rewards).astype(np.int8)
    labels[~compute_answer_mask(offsets, rollout)] = THINKING
    return labels


def changes_by_mention(
    labels: Sequence[np.ndarray], changes: Sequence[np.ndarray], base: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Return the mean change of log-probability, in nats, and the number of tokens by label.

    `difference` is the mean of criticised less that of unmentioned tokens: below 0 if training acted against criticised
    tokens, and not against all tokens. `matched` compares tokens of about equal log-probability under the base policy:
    faults are less likely than other tokens, and unlikely tokens change more under any reward.

        labels [-1, 0, 0], changes [-2, .5, -.5] -> criticised -2, praised None, unmentioned 0, difference -2

    Args:
        labels: See `label_tokens`, [R] each.
        changes: Changes of the log-probabilities, [R] each.
        base: Log-probabilities under the base policy, [R] each.

    Returns:
        The means, difference and matched are None where there is no such token.
    """
    label = np.concatenate(labels)
    change = np.concatenate(changes)
    means: dict[str, float | None] = {}
    num_tokens: dict[str, int] = {}
    for value, name in MENTIONS.items():
        mentioned = change[label == value]
        means[name] = float(mentioned.mean()) if mentioned.size else None
        num_tokens[name] = int(mentioned.size)

    criticised = means["criticised"]
    unmentioned = means["unmentioned"]
    difference = None if criticised is None or unmentioned is None else criticised - unmentioned
    matched = matched_difference(label, change, np.concatenate(base))
    return {**means, "difference": difference, "matched": matched, "tokens": num_tokens}


def matched_difference(label: np.ndarray, change: np.ndarray, base: np.ndarray) -> float | None:
    """Return the mean difference of criticised tokens from unmentioned tokens of similar log-probability.

    Each criticised token's change is compared with the mean change of the NUM_MATCHES unmentioned tokens of the nearest
    `base`. None if there are no criticised or no unmentioned tokens. label, change, base: [N].
    """
    criticised = label == -1
    unmentioned = label == 0
    if not (criticised.any() and unmentioned.any()):
        return None
    order = np.argsort(base[unmentioned], kind="stable")
    sorted_base = base[unmentioned][order]
    sums = np.append(0, np.cumsum(change[unmentioned][order]))
    count = min(NUM_MATCHES, len(order))
    nearest = np.searchsorted(sorted_base, base[criticised])
    first = np.clip(nearest - count // 2, 0, len(order) - count)
    matched_mean = (sums[first + count] - sums[first]) / count
    return float((change[criticised] - matched_mean).mean())


def find_criticised_quotes(response_text: str, feedback: SpanFeedback) -> frozenset[str] | None:
    """Return the quotes that are labelled poor, each once, or None if the feedback is unusable."""
    if not feedback.usable:
        return None
    poor = [span for span in feedback.spans if span.label < 0]
    return frozenset(response_text[span.start : span.end] for span in poor)


def measure_recurrence(
    before: Sequence[frozenset[str] | None], after: Sequence[frozenset[str] | None]
) -> dict[str, Any]:
    """Return the share of the base policy's criticisms that recur on the new responses to the same prompts.

        before [{Lima, laptop}, {Ann}], after [{Lima}, {}] -> 1 of 3

    Args:
        before: Criticised quotes by prompt, None for unusable feedback. Such a prompt does not count.
        after: As before, of the new responses.
    """
    num_prompts = 0
    num_criticisms = 0
    num_recurring = 0
    for old, new in zip(before, after, strict=True):
        if old is None or new is None:
            continue
        num_prompts += 1
        num_criticisms += len(old)
        num_recurring += len(old & new)
    share = num_recurring / num_criticisms if num_criticisms else None
    return {"returns": share, "criticisms": num_criticisms, "prompts": num_prompts}
