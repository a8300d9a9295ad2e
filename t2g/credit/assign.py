"""Token rewards and advantages of one batch of judged responses, for a trainer that has sampled them itself."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from t2g.algo.advantages import group_advantages, whiten
from t2g.config import RewardRuleConfig
from t2g.errors import UserError
from t2g.feedback import decode, token_offsets, token_rewards
from t2g.feedback.parse import read_judgement
from t2g.feedback.rewards import apply_placement, compute_sentence_ids
from t2g.loop.steps import pad_rows
from t2g.tasks.base import Task
from t2g.types import Span, SpanFeedback

SPAN_ONCE = RewardRuleConfig()


@dataclass(frozen=True, kw_only=True)
class Credit:
    """The numbers of a batch, right-padded with 0; entry [i, t] belongs to token t of response i."""

    token_rewards: torch.Tensor  # [B, R] float32
    advantages: torch.Tensor  # [B, R] float32; 0 for a response without a judgement


def assign_credit(
    tokenizer: Any,
    texts: Sequence[str],
    token_ids: Sequence[Sequence[int] | np.ndarray],
    judgements: Sequence[Any],
    groups: Sequence[Hashable],
    *,
    rule: RewardRuleConfig = SPAN_ONCE,
    gamma: float = 1.0,
    normalize: bool = False,
    whitening: Literal["full", "scale_only", "none"] = "full",
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
        rule: What a span pays and where.
        gamma: Discount of later token rewards.
        normalize: Whether advantages are divided by the group's deviation; see `t2g.algo.advantages.group_advantages`.
        whitening: Mode of `t2g.algo.advantages.whiten`; "none" is usual with `normalize`.

    Raises:
        UserError: The lengths differ or are 0, a judgement has another form, a text is not in the decoded tokens, or
            `rule` is the control "shuffled".

        assign_credit(tokenizer, ["so bad", "fine"], [[12, 31], [7]], [("", [], ["bad"]), ("", ["fine"], [])], [0, 0],
                      whitening="none").advantages -> [[-2, -2], [2, 0]]
    """
    _check_lengths([len(texts), len(token_ids), len(judgements), len(groups)])
    if rule.placement == "shuffled":
        raise UserError("rule.placement is 'shuffled', a control of `t2g train`; needs span, step or scalar")
    group_of = {group: number for number, group in enumerate(groups)}
    rows: list[np.ndarray] = []
    keep: list[np.ndarray] = []
    group_numbers: list[int] = []
    responses = zip(texts, token_ids, judgements, groups, strict=True)
    for number, (text, ids, judgement, group) in enumerate(responses):
        try:
            feedback = _read_usable(judgement, text)
            spans = () if feedback is None else feedback.spans
            rows.append(_reward_tokens(tokenizer, text, ids, spans, rule))
        except ValueError as error:
            raise UserError(f"response {number}: {error}") from None
        is_judged = feedback is not None
        keep.append(np.full(len(ids), is_judged))
        # A response without a judgement is a group of its own.
        group_numbers.append(group_of[group] if is_judged else -1 - number)
    rewards = pad_rows(rows)
    mask = pad_rows(keep)
    advantages, _ = group_advantages(rewards, mask, torch.tensor(group_numbers), gamma, normalize=normalize)
    advantages = whiten(advantages, mask, whitening)
    return Credit(token_rewards=rewards, advantages=advantages)


def _check_lengths(lengths: Sequence[int]) -> None:
    if len(set(lengths)) > 1 or not lengths[0]:
        raise UserError(f"got {lengths} texts, token ids, judgements and groups; needs one or more, as many of each")


def _read_usable(judgement: Any, text: str) -> SpanFeedback | None:
    """Return the feedback of a judgement; None without one, or if none of its quotes occurs in the text."""
    if judgement is None:
        return None
    feedback = read_judgement(judgement, text, source="program", version="")
    return feedback if feedback.usable else None


def _reward_tokens(tokenizer: Any, text: str, ids: Any, spans: Sequence[Span], rule: RewardRuleConfig) -> np.ndarray:
    """Return the rewards of the spans of `text`, placed on the tokens `ids`, [R] float32."""
    response = decode(tokenizer, ids)
    offsets = token_offsets(tokenizer, ids)
    start = response.rfind(text)  # the thinking, which comes before, may hold the same text
    if start < 0:
        raise ValueError(f"its text {text!r:.80} is not in its decoded tokens; t2g.feedback.decode gives their text")
    moved = [replace(span, start=span.start + start, end=span.end + start) for span in spans]
    rewards = token_rewards(offsets, moved, text=response, rule=rule)
    steps = compute_sentence_ids(offsets, response, Task.step_pattern)
    return apply_placement(rewards, rule.placement, sentence_ids=steps)
