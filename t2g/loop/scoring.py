"""The rewards of a judged response by the rules of a run, before they are placed and combined. A pure function."""

from functools import partial
from typing import Any

from t2g.config import PolicyJob
from t2g.feedback import token_rewards
from t2g.feedback.rewards import compute_sentence_ids, reward_criteria, span_value_rule, sum_criteria
from t2g.tasks.base import Task
from t2g.text.transcript import compute_answer_mask, rollout_offsets
from t2g.types import CriterionRewards, Rollout, ScoredRollout, SpanFeedback


def score_response(
    rollout: Rollout, feedback: SpanFeedback, *, config: PolicyJob, task: Task, tokenizer: Any
) -> ScoredRollout:
    """Return the response with the rewards of its tokens, criteria and outcome.

    Args:
        task: Its `step_pattern` ends sentences.
        tokenizer: Tokenizer of the policy.
    """
    objective = config.objective
    rule = objective.rewards
    text = rollout.response_text
    offsets = rollout_offsets(tokenizer, rollout)
    weights = config.feedback.weights
    reward_unweighted = partial(token_rewards, offsets, text=text)
    reward_weighted = partial(reward_unweighted, weights=weights)
    rewards = reward_weighted(feedback.spans, rule=rule)
    span_values = reward_weighted(feedback.spans, rule=span_value_rule(rule))
    criterion_rewards = sum_criteria(feedback, reward_weighted, rule=rule)
    criteria: dict[str, CriterionRewards] = {}
    if objective.normalize_criteria:
        criteria = reward_criteria(feedback, reward_unweighted, rule=rule, weights=weights)

    turn_starts = [turn.characters[0] for turn in rollout.turns]
    sentence_ids = compute_sentence_ids(offsets, text, task.step_pattern, starts=turn_starts)
    outcome_reward = 0.0
    for entry in objective.outcome_rewards:
        outcome_reward += entry.weight * feedback.outcomes.get(entry.source, 0.0)

    return ScoredRollout(
        rollout=rollout,
        feedback=feedback,
        token_rewards=rewards,
        span_values=span_values,
        sentence_ids=sentence_ids,
        outcome_reward=outcome_reward,
        truncation_penalty=objective.truncation_penalty if rollout.is_unfinished else 0.0,
        answer_mask=compute_answer_mask(offsets, rollout),
        criterion_rewards=criterion_rewards,
        criteria=criteria,
    )
