"""Annotated records as others publish them: every spelling becomes the same record."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.data.published import make_word_spans
from t2g.feedback.parse import Quote
from t2g.feedback.records import read_record

SPELLINGS: list[dict[str, Any]] = [
    {"good_spans": ["red"], "poor_spans": ["laptop"], "textual_feedback": "c"},
    {"Good spans": ["red"], "Poor Spans": ["laptop"], "Textual Feedback": "c"},
    {"good": ["red"], "poor": ["laptop"], "critique": "c"},
    {"critique": "c", "annotations": {"good_spans": ["red"], "poor_spans": ["laptop"]}},
    {"critique": "c", "spans": {"Good spans": ["red"], "Poor spans": ["laptop"]}},
    {"critique": '```json\n{"textual_feedback": "c", "good_spans": ["red"], "poor_spans": ["laptop"]}\n```'},
    {"textual_feedback": "c", "word_score_list": [["a", 0], ["red", 1], ["laptop", -1], ["hums", 0]]},
    {"textual_feedback": "c", "word_score_list": [{"word": "red", "score": "1"}, {"word": "laptop", "score": "-1"}]},
]


@pytest.mark.parametrize("fields", SPELLINGS)
@pytest.mark.parametrize("head", [{"id": "t3_1", "post": "p"}, {"id": "t3_1", "Post": "p"}])
def test_a_summary(head: dict[str, Any], fields: dict[str, Any]) -> None:
    record = read_record(head | {"generated_summary": "a red laptop hums"} | fields)
    assert (record.prompt_id, record.prompt, record.response, record.critique) == (
        "t3_1", "p", "a red laptop hums", "c",
    )  # fmt: skip
    spans = [(span.start, span.end, span.label) for span in record.to_feedback().spans]
    assert (record.good, record.poor, spans) == (
        (Quote(quote="red"),),
        (Quote(quote="laptop"),),
        [(2, 5, 1), (6, 12, -1)],
    )
    assert record.payload == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"code_feedback": "c", "wrong_code": ["x = 2"], "improvement_code": ["print(x)"]},
        {"analysis": {"Code Feedback": "c", "wrong_code": ["x = 2"], "improvable_code": ["print(x)"]}},
        {"analysis": {"Code feedback": "c", "Wrong code": ["x = 2"], "Improvement code": ["print(x)"]}, "log": None},
    ],
)
def test_code(fields: dict[str, Any]) -> None:
    record = read_record({"question_id": "P_1", "question": "q", "solution": "x = 2\nprint(x)\n"} | fields)
    assert (record.prompt_id, record.prompt, record.critique) == ("P_1", "q", "c")
    assert record.poor == (Quote(quote="x = 2", severity=3), Quote(quote="print(x)", severity=1))
    spans = [(s.start, s.end, s.label, s.severity) for s in record.to_feedback().spans]
    assert spans == [(0, 5, -1, 3), (6, 14, -1, 1)]


def test_a_conversation_ends_with_the_response() -> None:
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    row = {"prompt": "Why?", "prompt_id": "u1", "response": turns, "critique": "c", "good_spans": ["So"], "score": 8.0}
    record = read_record(row)
    assert (record.response, record.good, record.payload) == ("So.", (Quote(quote="So"),), {"score": 8.0})
    for last in ({"from": "gpt", "value": "So."}, {"role": "assistant", "content": [{"type": "text", "text": "So."}]}):
        assert read_record(row | {"response": [turns[0], last]}).response == "So."


def test_names_of_ours_count_first() -> None:
    row = {"solution": "theirs", "question": "q", "response": "ours", "critique": "c", "Code Feedback": "d"}
    record = read_record(row)
    assert (record.response, record.critique) == ("ours", "c")
    assert record.payload == {"solution": "theirs", "Code Feedback": "d"}


def test_a_users_own_outcome_is_no_execution() -> None:
    record = read_record({"prompt": "q", "response": "r", "critique": "c", "outcome": "solved"})
    assert (record.execution, record.payload) == ({}, {"outcome": "solved"})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"wrong_code": "x"}, "field wrong_code is 'x'; it needs to be a list of quotes"),
        ({"wrong_code": ["x"], "poor": "y"}, "field poor is 'y'"),
        ({"word_score_list": {"a": 1}}, "field word_score_list is"),
        ({"word_score_list": [["a"]]}, r"an entry of word_score_list is \['a'\]; it needs to be \[word, score\]"),
        ({"word_score_list": [["a", "many"]]}, "an entry of word_score_list"),
        ({"word_score_list": [["a", 10**400]]}, "an entry of word_score_list"),
        ({"word_score_list": [[" ", 1]]}, "an entry of word_score_list"),
        ({"response": []}, "field response is a list that does not end"),
        ({"response": [{"role": "assistant", "content": []}]}, "field response is a list that does not end"),
        ({"response": [{"role": "assistant", "content": [{"type": "image"}]}]}, "field response is a list"),
        ({"response": [{"role": "assistant"}]}, "field response is a list that does not end"),
        ({"critique": '{"textual_feedback": "c", '}, "an answer in JSON that is broken"),
        ({"critique": None, "analysis": {"error": "failed"}}, "field critique: Field required"),
    ],
)
def test_what_cannot_be_meant(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_record({"prompt": "p", "response": "a", "critique": "c"} | fields)


@given(st.lists(st.tuples(st.sampled_from(["a", "bb", "c,"]), st.sampled_from([-1, 0, 1])), max_size=8))
def test_word_spans_cover_the_words_that_have_a_score(words: list[tuple[str, int]]) -> None:
    """Slow oracle: label every character, then cut runs that only blanks or nothing interrupt."""
    response = " ".join(word for word, _ in words)
    spans = make_word_spans([list(pair) for pair in words], response)
    labels = {i: span["label"] for span in spans for i in range(span["start"], span["end"])}
    at = 0
    for word, score in words:
        assert {labels.get(i, 0) for i in range(at, at + len(word))} == {score}
        at += len(word) + 1
    assert all(before["end"] < after["start"] for before, after in pairwise(spans))


def test_a_word_that_does_not_come_ends_the_run() -> None:
    assert make_word_spans([["a", 1], ["x", 1], ["b", 1]], "a b") == [
        {"start": 0, "end": 1, "label": 1},
        {"start": 2, "end": 3, "label": 1},
    ]
