"""Votes of annotators, against numbers worked out by hand and a slow oracle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.feedback.sources.votes import agreement, f1, find_labelled_runs, kappa, label_characters, majority, vote
from t2g.types import Span, SpanFeedback

TEXT = "the red cat sat"  # the: 0-3, red: 4-7, cat: 8-11, sat: 12-15


def feedback(critique: str, *spans: Span) -> SpanFeedback:
    return SpanFeedback(
        critique=critique,
        spans=spans,
        status="ok" if spans else "empty",
        source="llm",
        version="v",
        num_quotes=len(spans) + 1,
        num_located=len(spans),
    )


def span(start: int, end: int, label: int, **fields: object) -> Span:
    return Span(start=start, end=end, label=label, **fields)  # type: ignore[arg-type]


def test_a_label_needs_more_than_half_of_all_annotators() -> None:
    assert majority(np.array([[1, -1, 0], [1, 1, 0], [1, -1, -1]]), 3).tolist() == [1, -1, 0]
    assert majority(np.array([[1, -1], [1, -1]]), 4).tolist() == [0, 0]  # two of four, two of them silent
    assert majority(np.array([[1, -1], [1, 0]]), 2).tolist() == [1, 0]


def test_poor_counts_where_an_annotator_says_both() -> None:
    assert label_characters((span(1, 3, -1), span(0, 2, 1)), 4).tolist() == [1, -1, -1, 0]


def test_f1_by_hand() -> None:
    a = np.array([1, 1, 0, -1])
    b = np.array([1, -1, 0, 0])
    assert f1(a, b) == 2 * 1 / (3 + 2)
    assert f1(a, a) == f1(np.zeros(4), np.zeros(4)) == 1.0
    assert f1(a, np.zeros(4)) == 0.0


def test_agreement_is_the_mean_over_pairs() -> None:
    labels = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert agreement(labels) == pytest.approx((2 / 3 + 0 + 0) / 3)
    assert agreement(labels[:1]) is None


def test_three_annotators() -> None:
    red = span(4, 7, 1, critique_range=(3, 6))
    cat = span(8, 11, -1, severity=1, critique_range=(8, 11))
    answers = [
        feedback("A: red is fine, cat is wrong", red, span(8, 15, -1, severity=3)),
        feedback("B: red, cat", span(0, 7, 1), cat),
        feedback("C: cat", span(8, 11, -1, severity=2)),
    ]
    voted = vote(answers, 3, TEXT)
    # Closest to {red good, cat poor}, 6 characters: A 2*6/(9+6) = .8 ("sat" too), B 2*6/(9+6) = .8, C 2*3/(3+6).
    assert voted.critique == answers[0].critique
    assert voted.spans == (span(4, 7, 1, confidence=2 / 3, critique_range=(3, 6)), span(8, 11, -1, severity=2))
    assert (voted.status, voted.num_quotes, voted.num_located) == ("ok", 8, 5)
    # Without blanks: A has 9 labels, B 9, C 3. A and B share red and cat, each shares cat with C.
    assert voted.agreement == pytest.approx((2 * 6 / 18 + 2 * 3 / 12 + 2 * 3 / 12) / 3)


def test_the_confidence_of_a_voted_span_is_the_share_that_agrees() -> None:
    first = feedback("A", span(0, 7, 1))
    second = feedback("B", span(4, 7, 1, confidence=0.5))
    third = feedback("C", span(4, 7, -1), span(0, 4, 1))
    (voted,) = vote([first, second, third], 3, TEXT).spans
    assert (voted.start, voted.end) == (0, 7)
    the = (1 + 0 + 1) / 3  # three characters, as have those of "red"; the blank between them does not count
    red = (1 + 0.5 + 0) / 3
    assert voted.confidence == pytest.approx((the + red) / 2)
    (silent,) = vote([first, first], 3, TEXT).spans
    assert silent.confidence == pytest.approx(2 / 3)


def test_annotators_who_share_nothing_leave_no_span() -> None:
    voted = vote([feedback("A", span(0, 3, 1)), feedback("B", span(4, 7, 1)), feedback("C", span(0, 3, -1))], 3, TEXT)
    assert (voted.spans, voted.status, voted.agreement) == ((), "empty", 0.0)


def test_an_empty_response() -> None:
    voted = vote([feedback("A"), feedback("B")], 2, "")
    assert (voted.spans, voted.critique, voted.agreement) == ((), "A", 1.0)


def test_runs_have_no_blanks_at_their_ends() -> None:
    assert find_labelled_runs(np.array([1, 1, 1, 0, -1]), "ab cd") == [(0, 2, 1), (4, 5, -1)]
    assert find_labelled_runs(np.array([1, 1, 1]), "a b") == [(0, 3, 1)]
    assert find_labelled_runs(np.array([0, 1, 0]), "a b") == []


def span_of_size(start: int, size: int, label: int, severity: int, quarters: int) -> Span:
    end = min(start + size, len(TEXT))
    return span(start, end, label, severity=severity, confidence=quarters / 4)


starts = st.integers(0, len(TEXT) - 1)
sizes = st.integers(1, len(TEXT))
any_span = st.builds(span_of_size, starts, sizes, st.sampled_from((-1, 1)), st.integers(1, 3), st.integers(0, 4))
spans = st.lists(any_span, max_size=4)


def label_at(annotation: list[Span], at: int) -> int:
    """Return the label of a character: poor before good, 0 for none."""
    labels = {span.label for span in annotation if span.start <= at < span.end and span.confidence > 0}
    return min(labels, default=0)


def slow_confidence(lists: list[list[Span]], voted_span: Span, num_annotators: int) -> float:
    """Return the mean over the non-blank characters of a voted span of what its annotators give."""
    shares: list[float] = []
    for at in range(voted_span.start, voted_span.end):
        if TEXT[at].isspace():
            continue
        total = 0.0
        for answer_spans in lists:
            if label_at(answer_spans, at) == voted_span.label:
                covering = [s.confidence for s in answer_spans if s.start <= at < s.end and s.label == voted_span.label]
                total += max(covering)
        shares.append(total / num_annotators)
    return sum(shares) / len(shares)


@given(st.lists(spans, min_size=1, max_size=5), st.integers(0, 2))
def test_every_written_character_has_the_label_that_most_gave_it(lists: list[list[Span]], num_silent: int) -> None:
    num_annotators = len(lists) + num_silent
    voted = vote([feedback(str(i), *answer_spans) for i, answer_spans in enumerate(lists)], num_annotators, TEXT)
    for at, character in enumerate(TEXT):
        given_labels = [label_at(answer_spans, at) for answer_spans in lists]
        expected = next((label for label in (1, -1) if given_labels.count(label) > num_annotators / 2), 0)
        actual = [s.label for s in voted.spans if s.start <= at < s.end]
        if not character.isspace():
            assert actual == ([expected] if expected else [])
    assert all(s.start < s.end and TEXT[s.start : s.end].strip() == TEXT[s.start : s.end] for s in voted.spans)
    for voted_span in voted.spans:
        expected = slow_confidence(lists, voted_span, num_annotators)
        assert voted_span.confidence == pytest.approx(expected)
    assert voted.agreement is None if len(lists) == 1 else 0 <= voted.agreement <= 1  # type: ignore[operator]


def test_kappa_by_hand() -> None:
    # 3 of 4 alike; by chance 2/4 x 1/4 good, 1/4 x 1/4 poor, 1/4 x 2/4 none: 5/16
    assert kappa(np.array([1, 1, -1, 0]), np.array([1, 0, -1, 0])) == pytest.approx((3 / 4 - 5 / 16) / (1 - 5 / 16))
    assert kappa(np.array([1, 0]), np.array([1, 0])) == 1
    assert kappa(np.array([1, 0]), np.array([0, 1])) == -1
    assert kappa(np.array([1, 1, 0, 0]), np.array([1, 0, 1, 0])) == 0
    assert kappa(np.zeros(3), np.zeros(3)) is None
