"""Spans of annotation tools: the marked text decides, units of offsets, labels."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.config.feedback import AnnotateConfig, OffsetUnit
from t2g.feedback.given_spans import NEARBY, read_spans
from t2g.feedback.records import read_record

TEXTS = st.text("a b😀é\u0301한\n", max_size=20)
SIZES: dict[OffsetUnit, Any] = {
    "characters": len,
    "utf16": lambda text: len(text.encode("utf-16-le")) // 2,
    "bytes": lambda text: len(text.encode()),
}


def read_one(span: dict[str, Any], response: str, **options: Any) -> tuple[Any, Any, Any]:
    (read,) = read_spans([{"label": 1, **span}], response, **options)
    return read["start"], read["end"], read["label"]


def test_an_emoji_does_not_move_the_span_of_a_tool_that_counts_utf16() -> None:
    response = "😀 this is an annotation."
    assert response[14:24] == "nnotation."
    assert read_one({"start": 14, "end": 24, "text": "annotation"}, response) == (13, 23, 1)
    assert read_one({"start": 13, "end": 23, "text": "annotation"}, response) == (13, 23, 1)
    record = read_record(
        {"prompt": "p", "response": response, "critique": "c", "spans": [{"start": 14, "end": 24, "label": "Poor",
         "text": "annotation"}]}
    )  # fmt: skip
    assert [quote.quote for quote in record.poor] == ["annotation"]


@given(text=TEXTS, bounds=st.tuples(st.integers(0, 20), st.integers(0, 20)), unit=st.sampled_from([*SIZES]))
def test_every_unit_gives_the_characters_back(text: str, bounds: tuple[int, int], unit: OffsetUnit) -> None:
    start, end = (min(bound, len(text)) for bound in sorted(bounds))
    counted = {"start": SIZES[unit](text[:start]), "end": SIZES[unit](text[:end])}
    assert read_one(counted, text, offsets=unit) == (start, end, 1)
    if piece := text[start:end]:
        assert read_one({**counted, "text": piece}, text, offsets=unit) == (start, end, 1)


@given(text=TEXTS, bounds=st.tuples(st.integers(0, 20), st.integers(0, 20)), unit=st.sampled_from([*SIZES]))
def test_a_span_with_a_text_is_that_text_or_refused(text: str, bounds: tuple[int, int], unit: OffsetUnit) -> None:
    start, end = (min(bound, len(text)) for bound in sorted(bounds))
    if piece := text[start:end].strip():
        counted = {"start": SIZES[unit](text[:start]), "end": SIZES[unit](text[:end]), "text": piece}
        try:
            first, last, _ = read_one(counted, text)
        except ValueError:
            return
        assert text[first:last] == piece


@pytest.mark.parametrize(
    ("span", "options", "problem"),
    [
        ({"start": 2, "end": 5, "text": "red"}, {}, "spans[0] is [2, 5), and its text 'red' occurs 2 times near them"),
        ({"start": 1, "end": 4, "text": "blue"}, {}, "its text 'blue' does not occur near them"),
        ({"start": 0, "end": 3, "text": "far"}, {}, "its text 'far' does not occur near them"),
        ({"start": 1, "end": 4}, {"offsets": "utf16"}, "spans[0] has the offset 1, where no character"),
        ({"start": 0, "end": 999}, {"offsets": "bytes"}, "spans[0] has the offset 999"),
        ({"start": 0, "end": 10**400}, {"offsets": "bytes"}, "spans[0] has the offset 1000"),
        ({"start": 0, "end": 1, "label": 10**400}, {}, "spans[0] has the label 1000"),
        ({"start": 0, "end": 1, "label": "Neutral"}, {}, "spans[0] has the label 'Neutral'"),
        ({"start": 0, "end": 1, "label": ["good", "poor"]}, {}, "spans[0] has the label ['good', 'poor']"),
    ],
)
def test_a_span_that_is_not_understood_is_refused(span: dict[str, Any], options: Any, problem: str) -> None:
    response = "😀red red" + " " * (NEARBY + 8) + "far"
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_one(span, response, **options)


@pytest.mark.parametrize(
    ("given_label", "expected"),
    [("Poor", -1), ("negative", -1), (["poor"], -1), (" GOOD ", 1), ("-1", -1), (-1.0, -1), (1, 1), ("Fluent", 1)],
)
def test_labels(given_label: Any, expected: int) -> None:
    assert read_one({"start": 0, "end": 1, "label": given_label}, "ab", labels={"Fluent": "good"})[2] == expected
    (read,) = read_spans([{"start": 0, "end": 1, "labels": given_label}], "ab", labels={"Fluent": "good"})
    assert read["label"] == expected
    (read,) = read_spans(
        [{"start": 0, "end": 1, "label": None, "labels": given_label}], "ab", labels={"Fluent": "good"}
    )
    assert read["label"] == expected


@pytest.mark.parametrize(("class_id", "expected"), [(0, 1), (1, -1), (2.0, -1), ("1", -1), (-1, -1)])
def test_class_ids_have_the_meaning_that_the_config_gives(class_id: Any, expected: int) -> None:
    labels = AnnotateConfig.model_validate({"human_labels": {0: "good", 1: "poor", "2": "poor"}}).human_labels
    assert read_one({"start": 0, "end": 1, "label": class_id}, "ab", labels=labels)[2] == expected


def test_what_is_no_object_or_range_is_left_to_the_records_validation() -> None:
    given_spans = [3, {"start": None, "end": float("nan"), "label": 1}]
    assert read_spans(given_spans, "ab") == given_spans
