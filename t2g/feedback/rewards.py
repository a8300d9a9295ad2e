"""Spans to token rewards: the paper's delta (arXiv 2505.22338, eq. 6) or one reward per span, and their placement."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Literal

import numpy as np

from t2g.config import Placement, RewardRuleConfig
from t2g.tasks.base import stable_id
from t2g.types import LABELS, CriterionRewards, Span, SpanFeedback

SPAN_VALUE_RULE = RewardRuleConfig(unit="token")


def span_value_rule(rule: RewardRuleConfig) -> RewardRuleConfig:
    """Return the rule that pays every covered token. A validated copy would lose the values that a task derives."""
    return rule.model_copy(update={"unit": "token"})


def token_rewards(
    offsets: np.ndarray,
    spans: Sequence[Span],
    *,
    text: str,
    rule: RewardRuleConfig = SPAN_VALUE_RULE,
    weights: Mapping[str | None, float] = MappingProxyType({}),
) -> np.ndarray:
    """Return the reward of every token: `rule.good` for a good span, `rule.poor[severity - 1]` for a poor span.

    Each is multiplied by the span's confidence; a span of confidence 0 counts as absent.

    Spans of different criteria do not affect each other: the rewards of each criterion, times its weight, add up.

    A span covers a token if they share a non-blank character, so that a token of blanks or without characters (EOS) is
    never covered.

    - unit token, the paper's delta_t: each covered token is paid. Several spans of one label count once, by the
      strongest. `rule.overlap` selects the label of a token that both labels cover, or adds their rewards.
    - unit span: each span is paid once, at the last token that it covers. Spans of one label that share non-blank
      characters are merged, and paid as the strongest. `rule.overlap` selects the label that is paid if spans of both
      labels overlap.

    The strongest span has the largest reward, of equal ones the highest severity.

    Args:
        offsets: [R, 2], half-open character ranges of `text`.
        weights: Criterion -> factor of its rewards, by default 1.

    Returns:
        [R] float32, before placement.

        text "so good, so bad", spans good (0, 7), poor (12, 15), tokens "so" " good" "," " so" " bad"
        -> [1, 1, 0, 0, -1] by token, [0, 1, 0, 0, -1] by span
    """
    by_criterion: defaultdict[str | None, list[Span]] = defaultdict(list)
    for span in spans:
        stripped = _strip_blanks(span, text)
        if span.confidence > 0 and stripped.start < stripped.end:
            by_criterion[span.criterion].append(stripped)
    pay = _pay_spans if rule.unit == "span" else _pay_tokens

    total = np.zeros(len(offsets), np.float32)
    for criterion, criterion_spans in by_criterion.items():
        weight = np.float32(weights.get(criterion, 1.0))
        total += weight * pay(offsets, criterion_spans, text, rule)
    return total


def reward_criteria(
    feedback: SpanFeedback,
    reward_spans: Callable[..., np.ndarray],
    *,
    rule: RewardRuleConfig,
    weights: Mapping[str | None, float],
) -> dict[str, CriterionRewards]:
    """Return the rewards of each criterion that judged a response; "" is a single source.

    Args:
        reward_spans: `token_rewards` of the response, which takes spans and a rule.
        weights: Criterion -> factor of its rewards; {}: a single source.
    """
    by_criterion: dict[str, CriterionRewards] = {}
    for name, weight in (weights or {"": 1.0}).items():
        result = feedback.criteria.get(str(name))
        is_missing = not result.usable if result else bool(weights and feedback.criteria)
        if is_missing:
            continue
        spans = [span for span in feedback.spans if not weights or span.criterion == name]
        by_criterion[str(name)] = CriterionRewards(
            token_rewards=reward_spans(spans, rule=rule),
            span_values=reward_spans(spans, rule=span_value_rule(rule)),
            weight=weight,
        )
    return by_criterion


def sum_criteria(
    feedback: SpanFeedback, reward_spans: Callable[..., np.ndarray], *, rule: RewardRuleConfig
) -> dict[str, float]:
    """Return the sum of the token rewards of each criterion; {} for a single source. See `reward_criteria`."""
    sums: dict[str, float] = {}
    for name in feedback.criteria:
        spans = [span for span in feedback.spans if span.criterion == name]
        sums[name] = float(reward_spans(spans, rule=rule).sum())
    return sums


def score_spans(
    spans: Sequence[Span], rule: RewardRuleConfig, weights: Mapping[str | None, float] = MappingProxyType({})
) -> float:
    """Return the sum of the spans' rewards over the sum of their absolute values, -1 to 1; 0 without a reward.

    It is a rate, because a sum would grow with the length of the response. Two good spans and a poor one: 1/3. Each
    span counts, also one that overlaps another: `token_rewards` would merge them.

    Args:
        weights: Criterion -> factor of its rewards, by default 1.
    """
    values: list[float] = []
    for span in spans:
        weight = weights.get(span.criterion, 1.0)
        values.append(weight * _span_reward(span, rule))
    if not any(values):
        return 0.0
    return sum(values) / sum(map(abs, values))


def _span_reward(span: Span, rule: RewardRuleConfig) -> float:
    value = rule.good if span.label == 1 else rule.poor[span.severity - 1]
    return span.confidence * value


def _strength(span: Span, rule: RewardRuleConfig) -> tuple[float, int]:
    """Return the order of spans of one label; see `token_rewards`."""
    return abs(_span_reward(span, rule)), span.severity


def _select_label(spans: Sequence[Span], label: Literal[-1, 1]) -> list[Span]:
    return [span for span in spans if span.label == label]


def _pay_tokens(offsets: np.ndarray, spans: Sequence[Span], text: str, rule: RewardRuleConfig) -> np.ndarray:
    good = np.zeros(len(offsets))
    poor = np.zeros(len(offsets))
    is_good = np.zeros(len(offsets), bool)
    is_poor = np.zeros(len(offsets), bool)
    for span in sorted(spans, key=partial(_strength, rule=rule)):  # the strongest comes last
        is_covered = find_covered_tokens(offsets, [span], text=text)
        rewards, has_label = (good, is_good) if span.label == 1 else (poor, is_poor)
        rewards[is_covered] = _span_reward(span, rule)
        has_label |= is_covered

    if rule.overlap == "poor":
        good[is_poor] = 0
    elif rule.overlap == "good":
        poor[is_good] = 0
    return (good + poor).astype(np.float32)


def _pay_spans(offsets: np.ndarray, spans: Sequence[Span], text: str, rule: RewardRuleConfig) -> np.ndarray:
    good = _merge_spans(_select_label(spans, 1), rule)
    poor = _merge_spans(_select_label(spans, -1), rule)
    paid = np.zeros(len(offsets), np.float32)
    for span in (*good, *poor):
        is_covered = find_covered_tokens(offsets, [span], text=text)
        covered = np.flatnonzero(is_covered)
        if not covered.size:
            continue

        others = poor if span.label == 1 else good
        is_preferred = rule.overlap == "sum" or LABELS[rule.overlap] == span.label
        if not is_preferred and any(_overlap(span, other) for other in others):
            continue
        paid[covered[-1]] += _span_reward(span, rule)
    return paid


def _merge_spans(spans: Sequence[Span], rule: RewardRuleConfig) -> list[Span]:
    """Return the spans of one label, with overlapping ones merged into the strongest."""
    units: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if units and _overlap(units[-1], span):
            last = units.pop()
            end = max(last.end, span.end)
            strongest = max(last, span, key=partial(_strength, rule=rule))
            span = replace(strongest, start=last.start, end=end)
        units.append(span)
    return units


def _strip_blanks(span: Span, text: str) -> Span:
    """Return the span without blanks at its ends: two such spans overlap if they share a non-blank character."""
    quote = text[span.start : span.end]
    num_leading = len(quote) - len(quote.lstrip())
    start = span.start + num_leading
    end = start + len(quote.strip())
    if (start, end) == (span.start, span.end):
        return span
    return replace(span, start=start, end=end)


def _overlap(span: Span, other: Span) -> bool:
    return span.start < other.end and other.start < span.end


def find_covered_tokens(offsets: np.ndarray, spans: Sequence[Span], *, text: str) -> np.ndarray:
    """Return whether at least one of `spans` covers a token, [R] bool."""
    num_nonblank = _count_nonblank(text)
    starts = offsets[:, 0]
    ends = offsets[:, 1]
    result = np.zeros(len(offsets), bool)
    for span in spans:
        is_touched = (starts < span.end) & (ends > span.start)
        touched = np.flatnonzero(is_touched)
        shared_start = np.maximum(starts[touched], span.start)
        shared_end = np.minimum(ends[touched], span.end)
        num_shared = num_nonblank[shared_end] - num_nonblank[shared_start]
        result[touched] |= num_shared > 0
    return result


@lru_cache(maxsize=4)  # called for each span of a text
def _count_nonblank(text: str) -> np.ndarray:
    """Return the number of non-blank characters in text[:i], [characters + 1] int64."""
    is_nonblank = [not character.isspace() for character in text]
    return np.append(0, np.cumsum(is_nonblank, dtype=np.int64))


def compute_sentence_ids(offsets: np.ndarray, text: str, pattern: str, *, starts: Sequence[int] = ()) -> np.ndarray:
    """Return the index of the sentence, or line of code, of each token: 0, 1, ..., rising, [R] int32.

    A token belongs to the sentence of its first character. A token without characters belongs to the sentence of the
    next character; at the end of the text (EOS) to the last sentence.

    Args:
        offsets: [R, 2], half-open character ranges of `text`.
        pattern: Each match ends a sentence (`Task.step_pattern`).
        starts: First characters of the turns of a conversation, where sentences start as well.

        text "One. Two", tokens "One" "." " Two" EOS, sentences -> [0, 0, 1, 1]
    """
    matches = re.finditer(pattern, text)
    borders = {*starts, *(match.end() for match in matches)}
    inner_borders = sorted(borders - {0, len(text)})
    token_starts = offsets[:, 0]
    return np.searchsorted(inner_borders, token_starts, side="right").astype(np.int32)


def apply_placement(
    rewards: np.ndarray,
    placement: Placement,
    *,
    sentence_ids: np.ndarray,
    seed: int = 0,
    prompt_id: str = "",
    sample_index: int = 0,
) -> np.ndarray:
    """Return the token rewards of one response at the tokens where they are paid, [R] float32, with the same sum.

    - span: unchanged.
    - step: the sum of each sentence at its last token.
    - scalar: the sum of all at the last token.
    - shuffled: the same rewards at random tokens of the response, EOS included since it is an action. The draw depends
      on (seed, prompt_id, sample_index) only.

    Args:
        rewards: [R].
        sentence_ids: [R], rising.
    """
    if placement == "span" or len(rewards) == 0:
        return rewards.astype(np.float32)
    if placement == "shuffled":
        key = int(stable_id(f"{seed}\x1f{sample_index}\x1f{prompt_id}"), 16)
        generator = np.random.default_rng(key)
        return generator.permutation(rewards).astype(np.float32)

    groups = sentence_ids if placement == "step" else np.zeros(len(rewards))
    group_changes = np.diff(groups, prepend=groups[0] - 1)
    first = np.flatnonzero(group_changes)
    last = np.append(first[1:], len(rewards)) - 1
    paid = np.zeros(len(rewards), np.float32)
    paid[last] = np.add.reduceat(rewards.astype(np.float64), first)
    return paid


def count_paid_spans(rewards: np.ndarray, unit: Literal["span", "token"]) -> np.ndarray:
    """Return the number of spans that were paid before each token, [R] int64.

    With unit=span each reward is that of a span's last token. With unit=token a span is a run of equal rewards, so
    that adjacent spans of one label count as one. A span that is worth 0 does not count.

    >>> count_paid_spans(np.array([0.0, 1.0, 1.0, 0.0]), "span").tolist()
    [0, 0, 1, 2]
    >>> count_paid_spans(np.array([0.0, 1.0, 1.0, 0.0]), "token").tolist()
    [0, 0, 0, 1]
    """
    is_end = rewards != 0
    if unit == "token":
        following = np.append(rewards[1:], 0.0)
        is_end = is_end & (rewards != following)
    num_ended = np.cumsum(is_end, dtype=np.int64)
    return num_ended - is_end


def compute_label_shares(rewards: np.ndarray) -> dict[str, float]:
    """Return the shares of good, poor and neutral tokens in rewards [N] before placement; all 0 if N is 0."""
    good = int((rewards > 0).sum())
    poor = int((rewards < 0).sum())
    neutral = len(rewards) - good - poor
    counts = {"good": good, "poor": poor, "neutral": neutral}
    return {name: count / max(len(rewards), 1) for name, count in counts.items()}
