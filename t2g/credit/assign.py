"""Token rewards and advantages of one batch of judged responses, for a trainer that has sampled them itself."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from t2g.algo.criteria import normalize_criterion
from t2g.config import ObjectiveConfig, RewardRuleConfig
from t2g.errors import UserError
from t2g.feedback import decode, token_offsets, token_rewards
from t2g.feedback.parse import read_judgement
from t2g.feedback.rewards import apply_placement, compute_sentence_ids, count_paid_spans, span_value_rule
from t2g.loop.step_advantages import StepRewards, add_span_credit, compare_with_group, pad_rows, sentence_states
from t2g.tasks.base import Task
from t2g.types import SpanFeedback

REPLACED = {
    "rule": "objective.rewards",
    "gamma": "objective.gamma",
    "normalize": "objective.advantages",
    "whitening": "objective.whiten",
}


@dataclass(frozen=True, kw_only=True)
class Credit:
    """The numbers of a batch, right-padded with 0; entry [i, t] belongs to token t of response i."""

    token_rewards: torch.Tensor  # [B, R] float32
    advantages: torch.Tensor  # [B, R] float32; 0 for a response without a judgement


class _ResponseRewards(NamedTuple):
    """The rewards of a response's tokens, [R] each."""

    token_rewards: np.ndarray  # at the tokens where objective.rewards pays them
    span_values: np.ndarray  # the value of the spans that cover a token
    sentence_states: np.ndarray
    is_judged: bool


def assign_credit(
    tokenizer: Any,
    texts: Sequence[str],
    token_ids: Sequence[Sequence[int] | np.ndarray],
    judgements: Sequence[Any],
    groups: Sequence[Hashable],
    *,
    objective: ObjectiveConfig | None = None,
    sentence_end: str = Task.step_pattern,
    **replaced: Any,
) -> Credit:
    """Return token rewards and advantages as `t2g train` computes them, for one *global* batch of B responses.

    Args:
        tokenizer: Fast tokenizer of the policy; see `t2g.text.offsets` for the supported families.
        texts: The texts that were judged: a response, or its end after the thinking. See `t2g.feedback.decode`.
        token_ids: The sampled tokens of each response, without padding.
        judgements: For each text (critique, good pieces, poor pieces), see `t2g.feedback.parse.read_judgement`. None:
            not judged; such a response has no advantages, and the others are not compared with it. The same holds for
            a judgement whose quotes do not occur in the text.
        groups: For each response its prompt, or any other value that is equal for responses to compare.
        objective: How spans become advantages, by default as in `t2g train`: rewards, span_coef, normalize_criteria
            (the spans are a criterion), gamma, advantages (group or group_normalised), values, lam, local_coef,
            local_cap, local_keeps_sign and whiten are read.
        sentence_end: Pattern whose matches end a sentence, for rewards.placement=step and values=sentence; a newline
            for code.
        replaced: Arguments of earlier versions, which are refused with their successor.

    Raises:
        UserError: The lengths differ or are 0, a judgement has another form, a text is not in the decoded tokens, or
            `objective` needs a critic or a teacher, or is a control.

        assign_credit(tokenizer, ["so bad", "fine"], [[12, 31], [7]], [("", [], ["bad"]), ("", ["fine"], [])], [0, 0],
                      objective=ObjectiveConfig(whiten="none", local_coef=0)).advantages -> [[-2, -2], [2, 0]]
    """
    _check_arguments(replaced)
    _check_lengths([len(texts), len(token_ids), len(judgements), len(groups)])
    objective = ObjectiveConfig() if objective is None else objective
    _check_objective(objective)
    rows: list[_ResponseRewards] = []
    for number, (text, ids, judgement) in enumerate(zip(texts, token_ids, judgements, strict=True)):
        try:
            rows.append(_reward_tokens(tokenizer, text, ids, judgement, objective.rewards, sentence_end))
        except ValueError as error:
            raise UserError(f"response {number}: {error}") from None

    token_rewards = pad_rows([row.token_rewards for row in rows])
    mask = pad_rows([np.full(len(row.token_rewards), row.is_judged) for row in rows])
    numbers = _number_groups(groups, rows)
    span_values = pad_rows([row.span_values for row in rows])
    if objective.normalize_criteria:
        normalized = normalize_criterion(token_rewards, mask, numbers, objective.gamma, mask.any(1))
        token_rewards = normalized.rewards.float()
        span_values = normalized.scales[:, None].float() * span_values
    step = StepRewards(mask=mask, rewards=objective.span_coef * token_rewards, gamma=objective.gamma)
    compared = compare_with_group(step, numbers, _pad_states(rows, objective), mask, objective)
    advantages = add_span_credit(compared.advantages, span_values, mask, objective)
    return Credit(token_rewards=token_rewards, advantages=advantages)


def _number_groups(groups: Sequence[Hashable], rows: Sequence[_ResponseRewards]) -> torch.Tensor:
    """Return the number of each response's group, [B]; a response without a judgement is a group of its own."""
    group_of = {group: number for number, group in enumerate(groups)}
    numbers = []
    for number, (group, row) in enumerate(zip(groups, rows, strict=True)):
        numbers.append(group_of[group] if row.is_judged else -1 - number)
    return torch.tensor(numbers)


def _check_arguments(replaced: Mapping[str, Any]) -> None:
    for name in replaced:
        successor = REPLACED.get(name, "objective")
        raise UserError(
            f"assign_credit has no argument {name}: needs {successor}, of objective=t2g.ObjectiveConfig(...)"
        )


def _check_objective(objective: ObjectiveConfig) -> None:
    if objective.rewards.placement == "shuffled":
        raise UserError(
            "objective.rewards.placement is 'shuffled', a control of `t2g train`; needs span, step or scalar"
        )
    if objective.uses_critic:
        raise UserError("objective.advantages is 'gae', which needs a critic; needs group or group_normalised")
    if objective.advantages == "unlikely":
        raise UserError(
            "objective.advantages is 'unlikely', a control of `t2g train` without judgements; needs group or "
            "group_normalised"
        )
    if objective.teacher is not None:
        raise UserError(
            "objective.teacher is set, and assign_credit has no teacher: `t2g train` scores the responses with their "
            "critiques in the prompt; needs teacher=None"
        )


def _pad_states(rows: Sequence[_ResponseRewards], objective: ObjectiveConfig) -> torch.Tensor | None:
    """Return the states of `objective.values`, [B, R]; None for positions."""
    match objective.values:
        case "position":
            return None
        case "sentence":
            states = [row.sentence_states for row in rows]
        case "span":
            states = [count_paid_spans(row.token_rewards, objective.rewards.unit) for row in rows]
    return pad_rows(states).long()


def _check_lengths(lengths: Sequence[int]) -> None:
    if len(set(lengths)) > 1 or not lengths[0]:
        raise UserError(f"got {lengths} texts, token ids, judgements and groups; needs one or more, as many of each")


def _read_usable(judgement: Any, text: str) -> SpanFeedback | None:
    """Return the feedback of a judgement; None without one, or if none of its quotes occurs in the text."""
    if judgement is None:
        return None
    feedback = read_judgement(judgement, text, source="program", version="")
    return feedback if feedback.usable else None


def _reward_tokens(
    tokenizer: Any, text: str, ids: Any, judgement: Any, rule: RewardRuleConfig, sentence_end: str
) -> _ResponseRewards:
    """Return the rewards that a judgement of `text` puts on the tokens `ids`."""
    feedback = _read_usable(judgement, text)
    response = decode(tokenizer, ids)
    offsets = token_offsets(tokenizer, ids)
    start = response.rfind(text)  # the thinking, which comes before, may hold the same text
    if start < 0:
        raise ValueError(f"its text {text!r:.80} is not in its decoded tokens; t2g.feedback.decode gives their text")

    spans = () if feedback is None else feedback.spans
    moved = [replace(span, start=span.start + start, end=span.end + start) for span in spans]
    rewards = token_rewards(offsets, moved, text=response, rule=rule)
    sentence_ids = compute_sentence_ids(offsets, response, sentence_end)
    ends_without_text = len(ids) > 0 and bool(offsets[-1][0] == offsets[-1][1])  # EOS
    return _ResponseRewards(
        token_rewards=apply_placement(rewards, rule.placement, sentence_ids=sentence_ids),
        span_values=token_rewards(offsets, moved, text=response, rule=span_value_rule(rule)),
        sentence_states=sentence_states(sentence_ids, has_end=ends_without_text),
        is_judged=feedback is not None,
    )
