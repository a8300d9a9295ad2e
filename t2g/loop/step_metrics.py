"""The metrics of one step that the driver computes, see `t2g.metrics`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from t2g import metrics as m
from t2g.config import ObjectiveConfig, RolloutConfig
from t2g.feedback.rewards import compute_label_shares
from t2g.loop.sampling import JudgedStep
from t2g.loop.step_advantages import zero_variance_share
from t2g.loop.tool_metrics import tool_metrics
from t2g.sandbox import MODES
from t2g.tasks.base import Task
from t2g.types import (
    JudgedResponse,
    PolicyTurn,
    Rollout,
    ScoredRollout,
    Span,
    TokenStats,
    WeightSyncResult,
)


class _TokenNumbers(NamedTuple):
    """Numbers of the step's sampled tokens, [N] each."""

    span_values: np.ndarray  # span values of answer tokens alone
    rewards: np.ndarray
    gaps: np.ndarray  # |learner - engine|, nats
    entropies: np.ndarray


def step_metrics(
    judged: Sequence[JudgedResponse],
    scored: Sequence[ScoredRollout],
    stats: Sequence[TokenStats],
    objective: ObjectiveConfig,
    *,
    kl: float,
    kl_coef: float,
) -> dict[str, float]:
    """Return the driver's metrics of a step, see `t2g.metrics`. Shares are of answer tokens or of samples.

    Args:
        kl: `steps.compute_step_kl` of the step.
    """
    tokens = _collect_tokens(scored, stats)
    label_shares = compute_label_shares(tokens.span_values)
    metrics = {m.LABEL_SHARES[label]: share for label, share in label_shares.items()}
    metrics |= _source_metrics(judged)
    metrics |= _criterion_metrics(judged, scored)
    metrics |= _unanswered_metrics(judged)
    metrics |= _conversation_metrics(judged)
    metrics |= _outcome_metrics(scored, objective)
    metrics |= _reward_metrics(scored, tokens.rewards, objective)
    metrics[m.KL] = kl
    metrics[m.KL_PER_TOKEN] = kl * len(scored) / len(tokens.rewards)
    metrics[m.KL_COEF] = kl_coef
    metrics[m.ENTROPY] = float(tokens.entropies.mean())
    metrics |= _length_metrics(judged)
    metrics[m.GAP_MEAN] = float(tokens.gaps.mean())
    metrics[m.GAP_P95] = float(np.quantile(tokens.gaps, 0.95))
    metrics |= _quote_metrics(judged)
    return metrics


def group_metrics(scored: Sequence[ScoredRollout], objective: ObjectiveConfig, *, seed: int) -> dict[str, float]:
    """Return the share of prompts whose samples all earn the same, see `zero_variance_share`.

    {} where samples are not compared: with a critic, a teacher alone, advantages=unlikely, or one sample a prompt.

    Args:
        seed: The run's seed, for rewards.placement=shuffled.
    """
    if objective.uses_critic or not objective.trains_rewards:
        return {}
    share = zero_variance_share(scored, objective, seed=seed)
    return {} if share is None else {m.ZERO_VARIANCE: share}


def _collect_tokens(scored: Sequence[ScoredRollout], stats: Sequence[TokenStats]) -> _TokenNumbers:
    span_values = []
    rewards = []
    gaps = []
    entropies = []
    for response, token_stats in zip(scored, stats, strict=True):
        mask = response.rollout.policy_mask
        gap = token_stats.old_logprobs - response.rollout.rollout_logprobs
        span_values.append(response.span_values[response.answer_mask])
        rewards.append(response.rewards[mask])
        gaps.append(gap[mask])
        entropies.append(token_stats.entropy[mask])
    return _TokenNumbers(
        span_values=np.concatenate(span_values),
        rewards=np.concatenate(rewards),
        gaps=np.abs(np.concatenate(gaps)),
        entropies=np.concatenate(entropies),
    )


def _source_metrics(responses: Sequence[JudgedResponse]) -> dict[str, float]:
    """Return the shares of feedback sources and sandbox modes, and the means of a feedback function's own numbers."""
    sources: Counter[str] = Counter()
    modes: Counter[str] = Counter()
    own_metrics = []
    for response in responses:
        feedback = response.feedback
        sources[feedback.source] += 1
        mode = feedback.execution.get("mode")
        if mode in MODES:  # a feedback function may have a mode of its own
            modes[mode] += 1
        own_metrics.append(feedback.metrics)

    metrics: dict[str, float] = {}
    for source, count in sorted(sources.items()):
        metrics[m.SOURCE_SHARE + source] = count / sources.total()
    for mode, count in sorted(modes.items()):
        metrics[m.fill(m.SANDBOX_SHARE, mode)] = count / modes.total()
    return metrics | _means(m.FEEDBACK_METRICS, own_metrics)


def _criterion_metrics(responses: Sequence[JudgedResponse], scored: Sequence[ScoredRollout]) -> dict[str, float]:
    """Return for each criterion the share of failures and the mean reward.

    A response without an answer is not judged: it has no criteria, and counts as a reward of 0. A conversation that has
    fewer turns than others does not count for the turns that it lacks.
    """
    failed: dict[str, list[bool]] = {}
    for response in responses:
        for name, result in response.feedback.criteria.items():
            failed.setdefault(name, []).append(not result.usable)

    metrics: dict[str, float] = {}
    for name, failures in failed.items():
        metrics[f"{m.CRITERION_FAILED}{name}"] = float(np.mean(failures))
        rewards = []
        for response in scored:
            criteria = response.feedback.criteria
            if name in criteria or not criteria:
                rewards.append(response.criterion_rewards.get(name, 0.0))
        if rewards:
            metrics[f"{m.CRITERION_REWARD}{name}"] = float(np.mean(rewards))
    return metrics


def _unanswered_metrics(responses: Sequence[JudgedResponse]) -> dict[str, float]:
    """Return the share of responses without an answer; {} unless the model thinks."""
    if not any(_has_thinking(response.rollout) for response in responses):
        return {}
    unanswered = [response.rollout.answer_start is None for response in responses]
    return {m.UNANSWERED_SHARE: float(np.mean(unanswered))}


def _has_thinking(rollout: Rollout) -> bool:
    return any(turn.answer_start != turn.characters[0] for turn in rollout.turns)


def _conversation_metrics(responses: Sequence[JudgedResponse]) -> dict[str, float]:
    """Return the metrics of conversations with an environment; {} without one."""
    num_turns = []
    is_window_full = []
    is_unpaid = []
    for response in responses:
        rollout = response.rollout
        if not rollout.environment_turns:
            continue
        num_turns.append(len(rollout.turns))
        is_window_full.append(rollout.is_window_full)
        for span in response.feedback.spans:
            is_paid = any(_overlaps(span, turn) for turn in rollout.turns)
            is_unpaid.append(not is_paid)

    if not num_turns:
        return {}
    metrics = {
        m.TURNS: float(np.mean(num_turns)),
        m.WINDOW_SHARE: float(np.mean(is_window_full)),
        m.UNPAID_SHARE: float(np.mean(is_unpaid)) if is_unpaid else 0.0,
    }
    return metrics | tool_metrics([response.rollout for response in responses])


def _overlaps(span: Span, turn: PolicyTurn) -> bool:
    start, end = turn.characters
    return span.start < end and start < span.end


def _outcome_metrics(scored: Sequence[ScoredRollout], objective: ObjectiveConfig) -> dict[str, float]:
    """Return the means of the outcome rewards, in sum and by source; {} without `objective.outcome_rewards`."""
    if not objective.outcome_rewards:
        return {}
    outcome_rewards = [response.outcome_reward for response in scored]
    outcomes = [response.feedback.outcomes for response in scored]
    return {m.OUTCOME_MEAN: float(np.mean(outcome_rewards))} | _means(m.OUTCOME_REWARD, outcomes)


def _reward_metrics(
    scored: Sequence[ScoredRollout], token_rewards: np.ndarray, objective: ObjectiveConfig
) -> dict[str, float]:
    totals = []
    response_rewards = []
    for response in scored:
        span_reward = objective.span_coef * response.token_rewards.sum()
        totals.append(span_reward + response.truncation_penalty + response.outcome_reward)
        response_rewards.append(response.rewards.sum())
    return {
        m.TOTAL_REWARD: float(np.mean(totals)),
        m.TOKEN_REWARD: float(token_rewards.mean()),
        m.RESPONSE_REWARD: float(np.mean(response_rewards)),
    }


def _length_metrics(responses: Sequence[JudgedResponse]) -> dict[str, float]:
    lengths = []
    is_truncated = []
    for response in responses:
        lengths.append(response.rollout.policy_mask.sum())
        is_truncated.append(response.rollout.is_truncated)
    return {
        m.LENGTH: float(np.mean(lengths)),
        m.TRUNCATED_SHARE: float(np.mean(is_truncated)),
    }


def _quote_metrics(responses: Sequence[JudgedResponse]) -> dict[str, float]:
    """Return the share of feedback without spans, and the share of quotes that occur in their response."""
    num_empty = 0
    num_quotes = 0
    num_located = 0
    for response in responses:
        feedback = response.feedback
        num_quotes += feedback.num_quotes
        num_located += feedback.num_located
        if feedback.status == "empty" and response.rollout.has_answer:
            num_empty += 1
    return {
        m.EMPTY_SHARE: num_empty / len(responses),
        m.LOCATED_RATE: num_located / num_quotes if num_quotes else 1.0,
    }


def _means(prefix: str, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return for each name the mean over the rows that have it."""
    values_by_name: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values_by_name.setdefault(name, []).append(value)
    means: dict[str, float] = {}
    for name, values in sorted(values_by_name.items()):
        means[prefix + name] = float(np.mean(values))
    return means


def compute_fault_recall(task: Task, judged: Sequence[JudgedResponse]) -> dict[str, float]:
    """Return how well the feedback finds the faults that the task knows.

    Returns:
        For each fault class the share that overlaps a poor span; `feedback/faults_praised` is the share of all faults
        that overlaps a good span, which is rewarded instead of penalized.
    """
    recalled: dict[str, list[bool]] = {}
    praised = []
    for prompt, rollout, feedback in judged:
        answer_start = rollout.answer_start
        if answer_start is None or not feedback.usable:
            continue
        for kind, fault_start, fault_end in task.faults(prompt, rollout.answer):
            start = answer_start + fault_start
            end = answer_start + fault_end
            overlapping = [span for span in feedback.spans if span.start < end and start < span.end]
            labels = {span.label for span in overlapping}
            recalled.setdefault(f"{m.RECALL}{kind}", []).append(-1 in labels)
            praised.append(1 in labels)

    shares: dict[str, float] = {}
    for name, hits in sorted(recalled.items()):
        shares[name] = float(np.mean(hits))
    if praised:
        shares[m.FAULTS_PRAISED] = float(np.mean(praised))
    return shares


def sample_metrics(judged: JudgedStep, staleness: np.ndarray, rollout: RolloutConfig) -> dict[str, float]:
    """Return staleness, counts and times of a step's samples: dropped ones, and further prompts if they may be drawn.

    Args:
        staleness: `steps.compute_token_staleness` of the step, [N].
    """
    num_unusable = sum(not response.feedback.usable for response in judged.all_responses)
    failed_share = num_unusable / len(judged.all_responses)
    num_dropped = num_unusable + judged.num_unsampled
    metrics = {
        m.STALENESS_MEAN: float(staleness.mean()),
        m.STALENESS_MAX: float(staleness.max()),
        m.FAILED_SHARE: failed_share,
        m.DROPPED_SAMPLES: float(num_dropped),
        m.DROPPED_PROMPTS: float(len(judged.unsampled)),
    }
    metrics |= {m.GENERATE_S: judged.generate_s, m.FEEDBACK_S: judged.feedback_s}
    if rollout.resample_zero_groups:
        metrics[m.FURTHER_PROMPTS] = float(judged.filtered.num_further)
        metrics[m.REPLACED_PROMPTS] = float(judged.filtered.num_replaced)
    return metrics


def sync_metrics(result: WeightSyncResult) -> dict[str, float]:
    """Return the metrics of a weight sync."""
    metrics = {f"{m.SYNC}{name}_s": seconds for name, seconds in result.timings.items()}
    metrics |= {
        m.SYNC_S: result.seconds,
        m.SYNC_BYTES: float(result.bytes),
        m.PROBE_GAP: result.probe_gap,
        m.SYNC_CALLS: float(result.num_calls),
        m.SYNC_MISSED: float(len(result.missed)),
    }
    return metrics
