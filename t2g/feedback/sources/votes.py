"""Majority vote of several annotators on every character of the response.

The vote is by character, since annotators and policy have different tokenizers.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, groupby
from statistics import median_low
from typing import Any

import numpy as np

from t2g.types import Span, SpanFeedback


def label_characters(spans: Sequence[Span], length: int) -> np.ndarray:
    """Return the label of each of `length` characters, [C] int8: +1 good, -1 poor (has priority), 0 neither."""
    labels = np.zeros(length, np.int8)
    for span in sorted(spans, key=lambda span: -span.label):
        labels[span.start : span.end] = span.label
    return labels


def label_confidences(spans: Sequence[Span], length: int) -> np.ndarray:
    """Return the confidence of each label of `label_characters`, [C] float64, 0 for none.

    Where spans of the label overlap, the highest confidence counts.
    """
    confidences = np.zeros(length)
    for span in sorted(spans, key=lambda span: (-span.label, span.confidence)):
        confidences[span.start : span.end] = span.confidence
    return confidences


def majority(labels: np.ndarray, num_annotators: int) -> np.ndarray:
    """Return the label that more than half of all annotators gave, or 0, [C] int8, from the labels [n, C] of n answers.

    majority([[1, -1, 0], [1, 1, 0], [1, -1, -1]], 3) == [1, -1, 0]
    """
    labels = np.asarray(labels)
    num_good = (labels == 1).sum(axis=0)
    num_poor = (labels == -1).sum(axis=0)
    is_good = 2 * num_good > num_annotators
    is_poor = 2 * num_poor > num_annotators
    return is_good.astype(np.int8) - is_poor.astype(np.int8)


def f1(first: np.ndarray, second: np.ndarray) -> float:
    """Return 2 |same label| / (|first labelled| + |second labelled|) over characters; 1 if nothing is labelled."""
    num_labelled = np.count_nonzero(first) + np.count_nonzero(second)
    if num_labelled == 0:
        return 1.0
    is_same = (first == second) & (first != 0)
    return float(2 * np.count_nonzero(is_same) / num_labelled)


def agreement(labels: np.ndarray) -> float | None:
    """Return the mean F1 over all pairs of annotators, `labels` [n, C]; None for fewer than two."""
    scores = [f1(first, second) for first, second in combinations(labels, 2)]
    if not scores:
        return None
    return sum(scores) / len(scores)


def kappa(first: np.ndarray, second: np.ndarray) -> float | None:
    """Return Cohen's kappa (1960) of two annotators' labels, [C] each: (p - e) / (1 - e).

    p is the share of characters with the same label, e its expectation for independent annotators with the same label
    frequencies. The result is None if e is 1: both gave all characters one label.

    kappa([1, 1, -1, 0], [1, 0, -1, 0]) == (3/4 - 5/16) / (1 - 5/16)
    """
    num_same = np.count_nonzero(first == second)
    counts = [(np.count_nonzero(first == label), np.count_nonzero(second == label)) for label in (-1, 0, 1)]
    value = float(kappa_of_counts(num_same, counts))
    return None if np.isnan(value) else value


def kappa_of_counts(num_same: Any, counts: Sequence[tuple[Any, Any]]) -> np.ndarray:
    """Return Cohen's kappa, NaN where it is not defined. All counts are numbers, or arrays of one shape.

    Args:
        num_same: Number of items with the same label of both annotators.
        counts: For each label the numbers of items to which either annotator gave it.
    """
    # p, e and 1, each times the squared number of items: integers, without rounding
    num_items = sum(first for first, _ in counts)
    by_chance = sum(first * second for first, second in counts)
    agreement = num_items * num_same - by_chance
    largest = np.asarray(num_items * num_items - by_chance, float)
    undefined = np.full(largest.shape, np.nan)
    return np.divide(agreement, largest, out=undefined, where=largest != 0)


def find_labelled_runs(labels: np.ndarray, text: str) -> list[tuple[int, int, int]]:
    """Return (start, end, label) of the maximal runs of one label in `labels` [C], without blanks at their ends.

    find_labelled_runs([1, 1, 1, 0, -1], "ab cd") == [(0, 2, 1), (4, 5, -1)]
    """
    runs: list[tuple[int, int, int]] = []
    start = 0
    for label, group in groupby(np.asarray(labels).tolist()):
        end = start + len(list(group))
        piece = text[start:end]
        if label and piece.strip():
            first = end - len(piece.lstrip())
            last = start + len(piece.rstrip())
            runs.append((first, last, label))
        start = end
    return runs


def _drop_absent(answer: SpanFeedback) -> SpanFeedback:
    """Return the answer without its spans of confidence 0, which count as absent."""
    spans = tuple(span for span in answer.spans if span.confidence > 0)
    return replace(answer, spans=spans)


def vote(answers: Sequence[SpanFeedback], num_annotators: int, response_text: str) -> SpanFeedback:
    """Return one feedback from the usable `answers` (at least one) of `num_annotators`.

    Spans are the runs of characters with one label from more than half of all annotators. A span's confidence is the
    share of all annotators that give its characters this label, each by its own confidence, averaged over the span's
    non-blank characters. Its severity is the lower median over the annotators with its label; it has no fix. The
    critique is that of the annotator closest to the result. Quotes are counted over all answers. The status is empty if
    no label has a majority.
    """
    length = len(response_text)
    answers = [_drop_absent(answer) for answer in answers]
    labels = np.stack([label_characters(answer.spans, length) for answer in answers])
    confidences = np.stack([label_confidences(answer.spans, length) for answer in answers])
    winner = majority(labels, num_annotators)
    is_nonblank = np.array([not character.isspace() for character in response_text], bool)
    similarities = [f1(answer_labels[is_nonblank], winner[is_nonblank]) for answer_labels in labels]
    closest = answers[similarities.index(max(similarities))]

    spans: list[Span] = []
    for start, end, label in find_labelled_runs(winner, response_text):
        critique_range = None
        matches = _find_matches(closest, start, end, label)
        if matches:
            cited = max(matches, key=lambda span: _overlap(span, start, end))
            critique_range = cited.critique_range
        support = np.where(labels == label, confidences, 0).sum(axis=0) / num_annotators
        in_span = is_nonblank[start:end]
        voted = Span(
            start=start,
            end=end,
            label=label,
            severity=_vote_severity(answers, start, end, label),
            confidence=float(support[start:end][in_span].mean()),
            critique_range=critique_range,
        )
        spans.append(voted)

    return replace(
        closest,
        spans=tuple(spans),
        status="ok" if spans else "empty",
        num_quotes=sum(answer.num_quotes for answer in answers),
        num_located=sum(answer.num_located for answer in answers),
        agreement=agreement(labels[:, is_nonblank]),
    )


def _vote_severity(answers: Sequence[SpanFeedback], start: int, end: int, label: int) -> int:
    severities: list[int] = []
    for answer in answers:
        matches = _find_matches(answer, start, end, label)
        if matches:
            severities.append(max(span.severity for span in matches))
    return median_low(severities)


def _find_matches(answer: SpanFeedback, start: int, end: int, label: int) -> list[Span]:
    return [span for span in answer.spans if span.label == label and _overlap(span, start, end) > 0]


def _overlap(span: Span, start: int, end: int) -> int:
    return min(span.end, end) - max(span.start, start)
