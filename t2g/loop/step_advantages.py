"""The advantages of a step: rewards are placed and combined, compared with other samples or a critic, and scaled.

Pure functions of the scored responses; `t2g.loop.steps` makes training samples of the result.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from t2g.algo.advantages import add_local_credit, combine_rewards, compare_samples, gae, punish_unlikely, whiten
from t2g.algo.criteria import normalize_criterion, normalize_outcome
from t2g.algo.group_values import find_zero_variance_groups
from t2g.config import ObjectiveConfig
from t2g.feedback.rewards import apply_placement, count_paid_spans
from t2g.types import CriterionRewards, Rollout, ScoredRollout, TokenStats


class StepAdvantages(NamedTuple):
    """The learner's targets for the sampled tokens of a step, right-padded: [B, R] each."""

    advantages: torch.Tensor  # scaled over the step's trained tokens, 0 at the others
    returns: torch.Tensor  # from advantages before scaling


class StepRewards(NamedTuple):
    """The rewards of the sampled tokens of a step, right-padded: [B, R] each."""

    mask: torch.Tensor
    rewards: torch.Tensor  # combined by `combine_rewards`
    gamma: torch.Tensor | float  # discount from each token to the next


class _FeedbackRewards(NamedTuple):
    """What the feedback and the outcome sources pay, without penalties and KL."""

    spans: torch.Tensor  # [B, R], at the tokens where they are paid
    span_values: torch.Tensor  # [B, R], on the spans' own tokens
    outcomes: torch.Tensor  # [B] float64


def compute_advantages(
    scored: Sequence[ScoredRollout],
    stats: Sequence[TokenStats],
    objective: ObjectiveConfig,
    *,
    kl_coef: float,
    seed: int,
) -> StepAdvantages:
    """Return the advantages and returns of a step's sampled tokens; `t2g/README.md` has the formulas.

    Without a critic a group whose samples all earn the same gets 0, apart from `objective.local_coef`.
    """
    if objective.advantages == "unlikely":
        return _punish_unlikely(scored, objective)
    feedback_rewards = _collect_rewards(scored, objective, seed)
    step = _combine_step_rewards(scored, feedback_rewards, stats, objective, kl_coef=kl_coef)
    is_trained = _pad_trained(scored, objective)
    if objective.uses_critic:
        values = pad_sampled(scored, [token_stats.values for token_stats in stats])
        advantages, returns = gae(step.rewards, values, step.mask, step.gamma, objective.lam)
        advantages = whiten(advantages, is_trained, objective.whiten)
    else:
        state_ids = _state_ids(scored, objective, seed)
        advantages, returns = compare_with_group(step, number_prompts(scored), state_ids, is_trained, objective)
    advantages = add_span_credit(advantages, feedback_rewards.span_values, is_trained, objective)
    return StepAdvantages(advantages=advantages, returns=returns)


def find_trained_tokens(scored: ScoredRollout, objective: ObjectiveConfig) -> np.ndarray:
    """Return whether the loss counts each token, [R] bool: sampled, and of the answer unless thinking is trained."""
    return scored.rollout.policy_mask if objective.train_thinking else scored.answer_mask


def _pad_trained(scored: Sequence[ScoredRollout], objective: ObjectiveConfig) -> torch.Tensor:
    """Return whether the loss counts each sampled token, [B, R]: tokens that it does not count set no scale."""
    return pad_sampled(scored, [find_trained_tokens(response, objective) for response in scored])


def _punish_unlikely(scored: Sequence[ScoredRollout], objective: ObjectiveConfig) -> StepAdvantages:
    """Return the advantages of the control without feedback, and returns of 0."""
    logprobs = pad_sampled(scored, [response.rollout.rollout_logprobs for response in scored])
    is_trained = _pad_trained(scored, objective)
    advantages = whiten(punish_unlikely(logprobs, is_trained), is_trained, objective.whiten)
    return StepAdvantages(advantages=advantages, returns=torch.zeros_like(advantages))


def compare_with_group(
    step: StepRewards,
    groups: torch.Tensor,
    state_ids: torch.Tensor | None,
    is_trained: torch.Tensor,
    objective: ObjectiveConfig,
) -> StepAdvantages:
    """Return scaled advantages against the prompt's other samples; see `t2g.algo.advantages.compare_samples`."""
    compared = compare_samples(
        step.rewards,
        step.mask,
        groups,
        step.gamma,
        state_ids=state_ids,
        lam=objective.lam,
        normalize=objective.advantages == "group_normalised",
        whitening=objective.whiten,
        is_trained=is_trained,
    )
    return StepAdvantages(*compared)


def add_span_credit(
    advantages: torch.Tensor, span_values: torch.Tensor, is_trained: torch.Tensor, objective: ObjectiveConfig
) -> torch.Tensor:
    """Return the advantages plus `objective.local_coef` times the spans' values on their own tokens, [B, R] each."""
    if objective.local_coef == 0:
        return advantages
    return add_local_credit(
        advantages,
        span_values,
        is_trained,
        coef=objective.local_coef,
        cap=objective.local_cap,
        keep_sign=objective.local_keeps_sign,
    )


def zero_variance_share(scored: Sequence[ScoredRollout], objective: ObjectiveConfig, *, seed: int) -> float | None:
    """Return the share of prompts whose samples all earn the same at every token; None without two samples a prompt.

    Where `objective.values` compares states, they earn the same at every state. Rewards are those before the KL. Such
    prompts carry nothing for advantages by groups.
    """
    groups = number_prompts(scored)
    _, sizes = groups.unique(return_counts=True)
    num_groups = int((sizes > 1).sum())
    if num_groups == 0:
        return None
    feedback_rewards = _collect_rewards(scored, objective, seed)
    step = _combine_step_rewards(scored, feedback_rewards, None, objective, kl_coef=0.0)
    returns, _ = gae(step.rewards, torch.zeros_like(step.rewards), step.mask, step.gamma, 1.0)
    state_ids = _state_ids(scored, objective, seed)
    is_constant = find_zero_variance_groups(returns, step.mask, groups, state_ids)
    num_single = int((sizes == 1).sum())
    num_constant = len(groups[is_constant].unique()) - num_single
    return num_constant / num_groups


def _state_ids(scored: Sequence[ScoredRollout], objective: ObjectiveConfig, seed: int) -> torch.Tensor | None:
    """Return the state before each sampled token, [B, R] int64; None with `objective.values=position`."""
    match objective.values:
        case "position":
            return None
        case "sentence":
            counts = [_count_sentences(response) for response in scored]
        case "span":
            unit = objective.rewards.unit
            placed = [_apply_placement(response, response.token_rewards, objective, seed) for response in scored]
            counts = [count_paid_spans(rewards, unit) for rewards in placed]
    return pad_sampled(scored, _within_turns(scored, counts)).long()


def _within_turns(scored: Sequence[ScoredRollout], counts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return a state for each turn and each count within the turn, [R] each; a response without turns is one."""
    turns = []
    counts_of_turns = []
    for response, count in zip(scored, counts, strict=True):
        turn_ids = _turn_ids(response.rollout)
        first_tokens = np.searchsorted(turn_ids, turn_ids)  # first token of each token's turn
        turns.append(turn_ids)
        counts_of_turns.append(count - count[first_tokens])

    states_of_turn = 1 + max((int(count.max(initial=0)) for count in counts_of_turns), default=0)
    return [turn_ids * states_of_turn + count for turn_ids, count in zip(turns, counts_of_turns, strict=True)]


def _count_sentences(scored: ScoredRollout) -> np.ndarray:
    """Return the sentences of the answers that began up to each token, [R]; a turn's thinking is one with its start.

    The last token of a turn, which ends it, counts as a sentence of its own, unless the response was truncated.
    """
    is_first = np.diff(scored.sentence_ids, prepend=-1) > 0
    is_answer = scored.answer_mask
    begins_answer = is_answer & ~np.append(False, is_answer[:-1])
    begins = (is_first & is_answer) | begins_answer
    ends_turn = _ends_turn(scored.rollout)
    return np.cumsum(begins | ends_turn)


def _ends_turn(rollout: Rollout) -> np.ndarray:
    """Return whether a token ends a turn, or a response that was not truncated, [R] bool."""
    ends = np.zeros(len(rollout.response_ids), bool)
    for turn in rollout.environment_turns:
        ends[turn.tokens[1] - 1] = True
    ends[-1:] = rollout.finish_reason == "stop"
    return ends


def sentence_states(sentence_ids: np.ndarray, *, has_end: bool) -> np.ndarray:
    """Return the state of each token of a response without turns or thinking, [R]: its sentence, or its end (EOS)."""
    begins = np.diff(sentence_ids, prepend=-1) > 0
    begins[-1:] |= has_end
    return np.cumsum(begins) - 1


def _turn_ids(rollout: Rollout) -> np.ndarray:
    """Return the number of the policy's turns that ended before each token, [R]; 0 without an environment."""
    ends = np.zeros(len(rollout.response_ids) + 1, np.int64)
    for turn in rollout.environment_turns:
        ends[turn.tokens[1]] += 1
    return ends.cumsum()[:-1]


def _collect_rewards(scored: Sequence[ScoredRollout], objective: ObjectiveConfig, seed: int) -> _FeedbackRewards:
    if objective.normalize_criteria:
        return _normalize_rewards(scored, objective, seed)
    placed_rewards = [_apply_placement(response, response.token_rewards, objective, seed) for response in scored]
    values = [_apply_placement_to_values(response, response.span_values, objective, seed) for response in scored]
    outcome_rewards = [response.outcome_reward for response in scored]
    return _FeedbackRewards(
        spans=pad_sampled(scored, placed_rewards),
        span_values=pad_sampled(scored, values),
        outcomes=torch.tensor(outcome_rewards, dtype=torch.float64),
    )


def _normalize_rewards(scored: Sequence[ScoredRollout], objective: ObjectiveConfig, seed: int) -> _FeedbackRewards:
    """Return the rewards with `objective.normalize_criteria`: each criterion on its own scale, times its weight."""
    mask = pad_sampled(scored, [np.ones(len(response.token_rewards)) for response in scored])
    gamma = pad_sampled(scored, [_discounts(response.rollout, objective) for response in scored])
    groups = number_prompts(scored)
    spans = torch.zeros_like(mask)
    span_values = torch.zeros_like(mask)
    names = dict.fromkeys(chain.from_iterable(response.criteria for response in scored))
    for name in names:
        rows = [_apply_placement_to_criterion(response, name, objective, seed) for response in scored]
        rewards = pad_sampled(scored, [row.token_rewards for row in rows])
        values = pad_sampled(scored, [row.span_values for row in rows])
        is_judged = torch.tensor([name in response.criteria for response in scored])
        weights = torch.tensor([row.weight for row in rows])
        weight = weights[is_judged][0]
        normalized = normalize_criterion(rewards, mask, groups, gamma, is_judged)
        spans += weight * normalized.rewards.float()
        span_values += weight * normalized.scales[:, None].float() * values

    outcomes = torch.zeros(len(scored), dtype=torch.float64)
    for entry in objective.outcome_rewards:
        numbers = [response.feedback.outcomes.get(entry.source, math.nan) for response in scored]
        outcomes += entry.weight * normalize_outcome(torch.tensor(numbers, dtype=torch.float64), groups)
    return _FeedbackRewards(spans=spans, span_values=span_values, outcomes=outcomes)


def _apply_placement_to_criterion(
    scored: ScoredRollout, name: str, objective: ObjectiveConfig, seed: int
) -> CriterionRewards:
    """Return the rewards of one criterion after `rewards.placement`; 0 for a response that lacks it."""
    criterion = scored.criteria.get(name)
    if criterion is None:
        zeros = np.zeros_like(scored.token_rewards)
        return CriterionRewards(token_rewards=zeros, span_values=zeros, weight=0.0)
    return CriterionRewards(
        token_rewards=_apply_placement(scored, criterion.token_rewards, objective, seed),
        span_values=_apply_placement_to_values(scored, criterion.span_values, objective, seed),
        weight=criterion.weight,
    )


def _apply_placement_to_values(
    scored: ScoredRollout, values: np.ndarray, objective: ObjectiveConfig, seed: int
) -> np.ndarray:
    """Return the values of the spans on their own tokens, [R]; the control "shuffled" moves them as well."""
    if objective.rewards.placement == "shuffled":
        return _apply_placement(scored, values, objective, seed)
    return values


def _combine_step_rewards(
    scored: Sequence[ScoredRollout],
    feedback_rewards: _FeedbackRewards,
    stats: Sequence[TokenStats] | None,
    objective: ObjectiveConfig,
    *,
    kl_coef: float,
) -> StepRewards:
    """Return the step's rewards: the spans' rewards, the final ones (outcomes and truncation penalty) and the KL term.

    Without `stats` there is no KL term.
    """
    masks = []
    penalties = []
    discounts = []
    for response in scored:
        masks.append(np.ones(len(response.rollout.response_ids)))
        penalties.append(response.truncation_penalty)
        discounts.append(_discounts(response.rollout, objective))

    pad = partial(pad_sampled, scored)
    mask = pad(masks)
    logprobs = torch.zeros_like(mask)
    ref_logprobs = torch.zeros_like(mask)
    if stats is not None:
        logprobs = pad([token_stats.old_logprobs for token_stats in stats])
        ref_logprobs = pad([token_stats.ref_logprobs for token_stats in stats])
    final_rewards = feedback_rewards.outcomes + torch.tensor(penalties, dtype=torch.float64)
    rewards = combine_rewards(
        feedback_rewards.spans,
        final_rewards.float(),
        logprobs,
        ref_logprobs,
        mask,
        span_coef=objective.span_coef,
        kl_coef=0.0 if objective.kl_in_loss else kl_coef,
    )
    return StepRewards(mask=mask, rewards=rewards, gamma=pad(discounts))


def number_prompts(scored: Sequence[ScoredRollout]) -> torch.Tensor:
    """Return a number for each response, [B]; it is equal for the responses to one prompt."""
    prompt_ids = [response.rollout.prompt_id for response in scored]
    last_index = {prompt_id: index for index, prompt_id in enumerate(prompt_ids)}
    return torch.tensor([last_index[prompt_id] for prompt_id in prompt_ids])


def _apply_placement(scored: ScoredRollout, rewards: np.ndarray, objective: ObjectiveConfig, seed: int) -> np.ndarray:
    """Return token rewards after `rewards.placement`, which moves them among the tokens of the answers, [R]."""
    rollout = scored.rollout
    is_answer = scored.answer_mask
    placed = rewards.copy()
    placed[is_answer] = apply_placement(
        placed[is_answer],
        objective.rewards.placement,
        sentence_ids=scored.sentence_ids[is_answer],
        seed=seed,
        prompt_id=rollout.prompt_id,
        sample_index=rollout.sample_index,
    )
    return placed


def _discounts(rollout: Rollout, objective: ObjectiveConfig) -> np.ndarray:
    """Return the discount from each token to the next, [R]: gamma, times turn_gamma from one turn to the next."""
    discounts = np.full(len(rollout.response_ids), objective.gamma)
    for turn in rollout.environment_turns:
        discounts[turn.tokens[1] - 1] *= objective.turn_gamma
    return discounts


def pad_rows(rows: Sequence[np.ndarray]) -> torch.Tensor:
    """Return ragged [R] float arrays as one [B, max R] float32 tensor, right-padded with zeros."""
    tensors = [torch.from_numpy(np.array(row, np.float32)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def pad_sampled(scored: Sequence[ScoredRollout], rows: Sequence[np.ndarray]) -> torch.Tensor:
    """Return `pad_rows` of the numbers of sampled tokens: those that an environment inserted are left out."""
    sampled = []
    for response, row in zip(scored, rows, strict=True):
        sampled.append(row[response.rollout.policy_mask])
    return pad_rows(sampled)
