"""Spans to token rewards: the paper's delta (arXiv 2505.22338, eq. 6), a span's value once, and where it is paid."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from t2g.config import Placement, RewardRuleConfig
from t2g.tasks.base import stable_id
from t2g.types import Span

PER_TOKEN = RewardRuleConfig(unit="token")


def token_rewards(
    offsets: np.ndarray, spans: Sequence[Span], *, text: str, rule: RewardRuleConfig = PER_TOKEN
) -> np.ndarray:
    """What the spans pay at every token: `rule.good` for a good one, `rule.poor[severity - 1]` for a poor one.

    offsets: [R, 2], half-open character ranges of `text`. -> [R] float32, before any placement.
    A token is covered by a span when they share at least one (`cover` any), half or all of the token's non-blank
    characters; a token of blanks or without characters (EOS) is never covered.

    unit token, the paper's delta_t: each covered token is paid. Two spans of one label count once; of several poor ones
    the most severe does. Where labels overlap `rule.overlap` says which wins, or that they add up.
    unit span: each span is paid once, at the last token that it covers. Spans of one label that share characters are
    one, as severe as the most severe; of two with other labels that do `rule.overlap` says which is paid.

        text "so good, so bad", spans good (0, 7), poor (12, 15), tokens "so" " good" "," " so" " bad"
        -> [1, 1, 0, 0, -1] by token, [0, 1, 0, 0, -1] by span
    """
    if rule.unit == "span":
        return _once(offsets, spans, text, rule)
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


def _once(offsets: np.ndarray, spans: Sequence[Span], text: str, rule: RewardRuleConfig) -> np.ndarray:
    merged = {label: _merged([span for span in spans if span.label == label]) for label in (1, -1)}
    paid = np.zeros(len(offsets), np.float32)
    for label, units in merged.items():
        loses = rule.overlap == ("poor" if label == 1 else "good")
        for unit in units:
            at = np.flatnonzero(find_covered_tokens(offsets, [unit], text=text, cover=rule.cover))
            if at.size and not (loses and any(_share(unit, other) for other in merged[-label])):
                paid[at[-1]] += rule.good if label == 1 else rule.poor[unit.severity - 1]
    return paid


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Spans of one label, those that share characters as one."""
    units: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if units and _share(units[-1], span):
            last = units.pop()
            span = replace(last, end=max(last.end, span.end), severity=max(last.severity, span.severity))
        units.append(span)
    return units


def _share(one: Span, other: Span) -> bool:
    return one.start < other.end and other.start < one.end


def find_covered_tokens(offsets: np.ndarray, spans: Sequence[Span], *, text: str, cover: str) -> np.ndarray:
    """Which tokens at least one of `spans` covers. -> [R] bool."""
    ink, starts, ends = _ink(text), offsets[:, 0], offsets[:, 1]
    result = np.zeros(len(offsets), bool)
    for span in spans:
        touched = np.flatnonzero((starts < span.end) & (ends > span.start))
        start, end = starts[touched], ends[touched]
        shared = ink[np.minimum(end, span.end)] - ink[np.maximum(start, span.start)]
        of_token = ink[end] - ink[start]
        needed = {"any": 1, "half": of_token / 2, "all": of_token}[cover]
        result[touched] |= (shared > 0) & (shared >= needed)
    return result


@lru_cache(maxsize=4)  # one text is asked about for each of its spans
def _ink(text: str) -> np.ndarray:
    """[characters + 1] int64: non-blank characters in text[:i]."""
    return np.append(0, np.cumsum([not character.isspace() for character in text], dtype=np.int64))


def compute_step_ids(offsets: np.ndarray, text: str, pattern: str) -> np.ndarray:
    """Which step of the response each token belongs to: 0, 1, ..., rising. -> [R] int32.

    offsets: [R, 2], half-open character ranges of `text`. A step ends with each match of `pattern`
    (`Task.step_pattern`). A token belongs to the step in which its first character lies; one without characters where
    the next character does, at the end of the text (EOS) to the last step.

        text "One. Two", tokens "One" "." " Two" EOS, sentences -> [0, 0, 1, 1]
    """
    ends = {match.end() for match in re.finditer(pattern, text)} - {0, len(text)}
    return np.searchsorted(sorted(ends), offsets[:, 0], side="right").astype(np.int32)


def apply_placement(
    deltas: np.ndarray,
    placement: Placement,
    *,
    step_ids: np.ndarray,
    seed: int = 0,
    prompt_id: str = "",
    sample_index: int = 0,
) -> np.ndarray:
    """Where the deltas of one response are paid. deltas: [R], step_ids: [R], rising -> [R] float32, with the same sum.

    span: where they are. step: each step's sum at its last token. scalar: the sum of all at the last token. shuffled:
    the same deltas at random tokens of the same response, EOS among them since it is an action as well; the draw
    depends on (seed, prompt_id, sample_index) only.
    """
    if placement == "span" or len(deltas) == 0:
        return deltas.astype(np.float32)
    if placement == "shuffled":
        key = int(stable_id(f"{seed}\x1f{sample_index}\x1f{prompt_id}"), 16)
        return np.random.default_rng(key).permutation(deltas).astype(np.float32)
    steps = step_ids if placement == "step" else np.zeros(len(deltas))
    first = np.flatnonzero(np.diff(steps, prepend=steps[0] - 1))
    paid = np.zeros(len(deltas), np.float32)
    paid[np.append(first[1:], len(deltas)) - 1] = np.add.reduceat(deltas.astype(np.float64), first)
    return paid


def compute_label_shares(deltas: np.ndarray) -> dict[str, float]:
    """Shares of good, poor and neutral tokens among deltas [N], before any placement; all 0 where N is 0."""
    count = max(len(deltas), 1)
    good, poor = int((deltas > 0).sum()), int((deltas < 0).sum())
    return {"good": good / count, "poor": poor / count, "neutral": (len(deltas) - good - poor) / count}
