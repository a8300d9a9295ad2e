"""Spans to token rewards: the paper's delta (arXiv 2505.22338, eq. 6) or one reward per span, and their placement."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from t2g.config import Placement, RewardRuleConfig
from t2g.tasks.base import stable_id
from t2g.types import Span

PER_TOKEN = RewardRuleConfig(unit="token")


def token_rewards(
    offsets: np.ndarray,
    spans: Sequence[Span],
    *,
    text: str,
    rule: RewardRuleConfig = PER_TOKEN,
    weights: Mapping[str | None, float] = MappingProxyType({}),
) -> np.ndarray:
    """Return the reward of every token: `rule.good` for a good span, `rule.poor[severity - 1]` for a poor span.

    Spans of different criteria do not affect each other: the rewards of each criterion, times its weight, add up.

    A span covers a token if they share at least one (`cover` any), half or all of the token's non-blank characters. A
    token of blanks or without characters (EOS) is never covered.

    - unit token, the paper's delta_t: each covered token is paid. Several spans of one label count once, with the
      highest severity. `rule.overlap` selects the label of a token that both labels cover, or adds their rewards.
    - unit span: each span is paid once, at the last token that it covers. Spans of one label that share characters are
      merged, with the highest severity. `rule.overlap` selects the label that is paid if spans of both labels overlap.

    Args:
        offsets: [R, 2], half-open character ranges of `text`.
        weights: Criterion -> factor of its rewards, by default 1.

    Returns:
        [R] float32, before placement.

        text "so good, so bad", spans good (0, 7), poor (12, 15), tokens "so" " good" "," " so" " bad"
        -> [1, 1, 0, 0, -1] by token, [0, 1, 0, 0, -1] by span
    """
    total = np.zeros(len(offsets), np.float32)
    for criterion in dict.fromkeys(span.criterion for span in spans):
        own = [span for span in spans if span.criterion == criterion]
        pay = _pay_spans if rule.unit == "span" else _pay_tokens
        total += np.float32(weights.get(criterion, 1.0)) * pay(offsets, own, text, rule)
    return total


def score_spans(
    spans: Sequence[Span], rule: RewardRuleConfig, weights: Mapping[str | None, float] = MappingProxyType({})
) -> float:
    """Return the sum of the spans' rewards over the sum of their absolute values, -1 to 1; 0 without a reward.

    It is a rate, because a sum would grow with the length of the response. Two good spans and a poor one: 1/3.

    Args:
        weights: Criterion -> factor of its rewards, by default 1.
    """
    values = []
    for span in spans:
        value = rule.good if span.label > 0 else rule.poor[span.severity - 1]
        values.append(weights.get(span.criterion, 1.0) * value)
    return sum(values) / sum(map(abs, values)) if any(values) else 0.0


def _pay_tokens(offsets: np.ndarray, spans: Sequence[Span], text: str, rule: RewardRuleConfig) -> np.ndarray:
    good = find_covered_tokens(offsets, [span for span in spans if span.label == 1], text=text, cover=rule.cover)
    severity = np.zeros(len(offsets), np.int64)  # 0: no poor span
    for level in (1, 2, 3):
        poor = [span for span in spans if span.label == -1 and span.severity == level]
        severity[find_covered_tokens(offsets, poor, text=text, cover=rule.cover)] = level
    if rule.overlap == "poor":
        good &= severity == 0
    elif rule.overlap == "good":
        severity[good] = 0
    return (rule.good * good + np.array([0.0, *rule.poor])[severity]).astype(np.float32)


def _pay_spans(offsets: np.ndarray, spans: Sequence[Span], text: str, rule: RewardRuleConfig) -> np.ndarray:
    merged = {label: _merge_spans([span for span in spans if span.label == label]) for label in (1, -1)}
    paid = np.zeros(len(offsets), np.float32)
    for label, units in merged.items():
        yields = rule.overlap == ("poor" if label == 1 else "good")  # to spans of the other label
        for unit in units:
            covered = np.flatnonzero(find_covered_tokens(offsets, [unit], text=text, cover=rule.cover))
            if covered.size and not (yields and any(_overlap(unit, other) for other in merged[-label])):
                paid[covered[-1]] += rule.good if label == 1 else rule.poor[unit.severity - 1]
    return paid


def _merge_spans(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of one label, with overlapping ones merged."""
    units: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if units and _overlap(units[-1], span):
            last = units.pop()
            span = replace(last, end=max(last.end, span.end), severity=max(last.severity, span.severity))
        units.append(span)
    return units


def _overlap(a: Span, b: Span) -> bool:
    return a.start < b.end and b.start < a.end


def find_covered_tokens(offsets: np.ndarray, spans: Sequence[Span], *, text: str, cover: str) -> np.ndarray:
    """Return whether at least one of `spans` covers a token, [R] bool."""
    num_nonblank, starts, ends = _count_nonblank(text), offsets[:, 0], offsets[:, 1]
    result = np.zeros(len(offsets), bool)
    for span in spans:
        touched = np.flatnonzero((starts < span.end) & (ends > span.start))
        start, end = starts[touched], ends[touched]
        shared = num_nonblank[np.minimum(end, span.end)] - num_nonblank[np.maximum(start, span.start)]
        token_chars = num_nonblank[end] - num_nonblank[start]
        needed = {"any": 1, "half": token_chars / 2, "all": token_chars}[cover]
        result[touched] |= (shared > 0) & (shared >= needed)
    return result


@lru_cache(maxsize=4)  # called for each span of a text
def _count_nonblank(text: str) -> np.ndarray:
    """Return the number of non-blank characters in text[:i], [characters + 1] int64."""
    return np.append(0, np.cumsum([not character.isspace() for character in text], dtype=np.int64))


def compute_step_ids(offsets: np.ndarray, text: str, pattern: str, *, starts: Sequence[int] = ()) -> np.ndarray:
    """Return the step of each token: 0, 1, ..., rising, [R] int32.

    A token belongs to the step of its first character. A token without characters belongs to the step of the next
    character; at the end of the text (EOS) to the last step.

    Args:
        offsets: [R, 2], half-open character ranges of `text`.
        pattern: Each match ends a step (`Task.step_pattern`).
        starts: First characters of the turns of a conversation, where steps start as well.

        text "One. Two", tokens "One" "." " Two" EOS, sentences -> [0, 0, 1, 1]
    """
    ends = {*starts, *(match.end() for match in re.finditer(pattern, text))} - {0, len(text)}
    return np.searchsorted(sorted(ends), offsets[:, 0], side="right").astype(np.int32)


def apply_placement(
    rewards: np.ndarray,
    placement: Placement,
    *,
    step_ids: np.ndarray,
    seed: int = 0,
    prompt_id: str = "",
    sample_index: int = 0,
) -> np.ndarray:
    """Return the token rewards of one response at the tokens where they are paid, [R] float32, with the same sum.

    - span: unchanged.
    - step: the sum of each step at its last token.
    - scalar: the sum of all at the last token.
    - shuffled: the same rewards at random tokens of the response, EOS included since it is an action. The draw depends
      on (seed, prompt_id, sample_index) only.

    Args:
        rewards: [R].
        step_ids: [R], rising.
    """
    if placement == "span" or len(rewards) == 0:
        return rewards.astype(np.float32)
    if placement == "shuffled":
        key = int(stable_id(f"{seed}\x1f{sample_index}\x1f{prompt_id}"), 16)
        return np.random.default_rng(key).permutation(rewards).astype(np.float32)
    steps = step_ids if placement == "step" else np.zeros(len(rewards))
    first = np.flatnonzero(np.diff(steps, prepend=steps[0] - 1))
    paid = np.zeros(len(rewards), np.float32)
    paid[np.append(first[1:], len(rewards)) - 1] = np.add.reduceat(rewards.astype(np.float64), first)
    return paid


def compute_label_shares(rewards: np.ndarray) -> dict[str, float]:
    """Return the shares of good, poor and neutral tokens in rewards [N] before placement; all 0 if N is 0."""
    count = max(len(rewards), 1)
    good, poor = int((rewards > 0).sum()), int((rewards < 0).sum())
    return {"good": good / count, "poor": poor / count, "neutral": (len(rewards) - good - poor) / count}
