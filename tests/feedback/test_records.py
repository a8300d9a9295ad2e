"""Annotated records: written, read back, and made from other files."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.config import DataConfig
from t2g.errors import UserError
from t2g.feedback.parse import Quote, make_feedback, parse_answer
from t2g.feedback.records import load_annotated, make_annotated_record, read_record, write_annotated
from t2g.tasks.base import get_task, stable_id
from t2g.types import Prompt, SpanFeedback

PROMPT = Prompt(
    prompt_id="7", prompt_ids=np.zeros(0, np.int32), prompt_text="post", task="tiny", payload={"facts": {"a": "é"}}
)
ROW = {"prompt": "post", "response": "a phone, a phone", "critique": "c"}


def feedback(text: str, good: list[Any], poor: list[Any]) -> SpanFeedback:
    return make_feedback("The phone.", good, poor, text, source="program", version="v")


def test_a_record_holds_the_judgement_and_teaches_it() -> None:
    judged = feedback("a phone, a phone", ["a"], [("phone", 2), {"quote": "phone", "severity": 2}])
    record = make_annotated_record(PROMPT, "a phone, a phone", judged)
    assert record.good == (Quote(quote="a"),)
    assert record.poor == (Quote(quote="phone", occurrence=2), Quote(quote="phone", severity=2))
    assert record.to_feedback() == judged
    assert record.target() == (
        '{"critique": "The phone.", "good": ["a"], "poor": [{"quote": "phone", "occurrence": 2}, '
        '{"quote": "phone", "severity": 2}]}'
    )
    assert record.to_prompt().prompt_text == "post"


@given(text=st.text("ab ", max_size=12), quotes=st.lists(st.text("ab ", min_size=1, max_size=3), max_size=4))
def test_the_target_of_a_record_says_its_spans(text: str, quotes: list[str]) -> None:
    judged = feedback(text, quotes[:2], [(quote, 2) for quote in quotes[2:]])
    record = make_annotated_record(PROMPT, text, judged)
    parsed = parse_answer(record.target(), text, source="program", version="v")
    assert [(s.start, s.end, s.label) for s in parsed.spans] == [(s.start, s.end, s.label) for s in judged.spans]


def test_a_file_is_read_back_as_it_was(tmp_path: Path) -> None:
    texts = ["a phone, a phone", "", 'he said "no"\n']
    records = [make_annotated_record(PROMPT, t, feedback(t, ["a phone"], ['"no"\n'])) for t in texts]
    write_annotated(tmp_path / "r.jsonl", records)
    assert load_annotated(DataConfig(path=str(tmp_path / "r.jsonl"))) == records
    assert (tmp_path / "r.jsonl").read_text().count("\n") == 3


@pytest.mark.parametrize("without", [{}, {"spans": None}, {"spans": []}])
def test_quotes_without_spans_are_located(without: dict[str, Any]) -> None:
    record = read_record(ROW | {"poor": [{"quote": "phone", "occurrence": 2}, "laptop"], "extra": 3} | without)
    judged = record.to_feedback()
    assert [(s.start, s.end, s.label) for s in judged.spans] == [(11, 16, -1)]
    assert (judged.num_quotes, judged.num_located, judged.source) == (2, 1, "human")
    assert record.payload == {"extra": 3}
    assert len(record.prompt_id) == 16
    assert record.prompt_id == read_record(ROW).prompt_id


@pytest.mark.parametrize("status", [{}, {"status": "empty"}, {"status": "ok"}])
def test_a_record_whose_quotes_are_all_lost_teaches_nothing(status: dict[str, Any]) -> None:
    record = read_record(ROW | {"poor": ["laptop", "tablet"]} | status)
    assert (record.status, record.usable, record.num_quotes, record.num_located) == ("unparsable", False, 2, 0)
    assert record.reason == "none of its 2 quotes occurs in the response"


def test_a_line_holds_every_field() -> None:
    judged = replace(
        feedback("a phone", ["a"], []), execution={"passed": False}, agreement=0.5, reason="so", metrics={"tone": 0.5}
    )
    line = json.loads(make_annotated_record(PROMPT, "a phone", judged, sample_index=2).model_dump_json())
    expected = {
        "prompt_id": "7", "prompt": "post", "response": "a phone", "critique": "The phone.", "good": ["a"], "poor": [],
        "spans": [{"start": 0, "end": 1, "label": 1, "severity": 1, "critique_range": None}],
        "status": "ok", "reason": "so", "source": "program", "version": "v", "execution": {"passed": False},
            "metrics": {"tone": 0.5},
        "agreement": 0.5, "num_quotes": 1, "num_located": 1, "task": "tiny", "sample_index": 2,
        "payload": {"facts": {"a": "é"}},
    }  # fmt: skip
    assert line == expected
    assert read_record(line).to_feedback() == judged
    old = {"outcome" if key == "execution" else key: value for key, value in line.items()}  # version 0.1
    assert read_record(old) == read_record(line)


def test_spans_without_quotes_are_quoted() -> None:
    record = read_record(ROW | {"spans": [{"start": 11, "end": 16, "label": -1, "severity": 3}]})
    assert (record.good, record.poor) == ((), (Quote(quote="phone", occurrence=2, severity=3),))


@pytest.mark.parametrize("name", ["spans", "annotations"])
def test_spans_stored_as_columns_are_transposed(tmp_path: Path, name: str) -> None:
    """`datasets` stores a sequence of objects as an object of lists, in JSON lines and in Parquet."""
    columns = {"start": [2, 11], "end": [7, 16], "label": [1, -1]}
    record = read_record(ROW | {name: columns})
    assert [(s.start, s.end, s.label) for s in record.spans] == [(2, 7, 1), (11, 16, -1)]
    assert record.status == "ok"
    assert read_record(ROW | {name: {key: [] for key in columns}}).status == "empty"
    pq.write_table(pa.Table.from_pylist([ROW | {name: columns}]), tmp_path / "r.parquet")
    (loaded,) = load_annotated(DataConfig(path=str(tmp_path / "r.parquet")))
    assert loaded.spans == record.spans
    quotes = read_record(ROW | {"poor": {"quote": ["phone", "a"], "occurrence": [2, 1]}})
    assert quotes.poor == (Quote(quote="phone", occurrence=2), Quote(quote="a"))


def test_spans_in_the_field_annotations_are_read() -> None:
    spans = [{"start": 2, "end": 7, "label": 1}, {"start": 11, "end": 16, "label": "poor"}]
    assert read_record(ROW | {"annotations": spans}).spans == read_record(ROW | {"spans": spans}).spans


@pytest.mark.parametrize(
    "field",
    [
        {"annotations": {"start_offset": [2], "end_offset": [7], "label": ["poor"]}},
        {"annotations": [{"result": [{"value": {"start": 2, "end": 7, "labels": ["poor"]}}]}]},
        {"labels": [{"start": 2, "end": 7, "label": "poor"}]},
        {"label": [[2, 7, "poor"]]},
    ],
)
def test_spans_in_a_form_that_is_not_read_are_no_empty_judgement(field: dict[str, Any]) -> None:
    """A model would learn to mark nothing. Beside marks such a field is a copy, and other fields of the name stay."""
    (name,) = field
    with pytest.raises(ValueError, match=f"field {name} is .*; spans are read from the field spans"):
        read_record(ROW | field)
    assert read_record(ROW | field | {"spans": []}).status == "empty"
    assert read_record(ROW | {name: {"rating": {"end": 5}}}).status == "empty"


def test_null_in_a_table_is_a_missing_value() -> None:
    quote = {"quote": "phone", "occurrence": None, "severity": None, "confidence": None}
    span = {"start": 2, "end": 7, "label": -1, "severity": None, "confidence": None}
    for marks in ({"poor": [quote]}, {"spans": [span]}):
        (read,) = read_record(ROW | marks).spans
        assert (read.start, read.end, read.severity, read.confidence) == (2, 7, 1, 1.0)


def test_a_column_of_integers_with_gaps_holds_floats() -> None:
    quotes = [{"quote": "phone", "occurrence": 2.0, "severity": 3.0}, {"quote": "phone", "severity": float("nan")}]
    record = read_record(ROW | {"poor": quotes})
    assert [(span.start, span.severity) for span in record.spans] == [(11, 3), (2, 1)]
    with pytest.raises(ValueError, match=r"field poor\.0\.severity"):
        read_record(ROW | {"poor": [{"quote": "phone", "severity": 1.5}]})
    rows = [ROW | {"id": prompt_id, "poor": ["phone"]} for prompt_id in (7.0, float("nan"), None)]
    ids = [read_record(row).prompt_id for row in rows]
    assert ids == ["7", stable_id(ROW["prompt"]), stable_id(ROW["prompt"])]


def test_fields_of_another_program_are_no_part_of_the_judgement() -> None:
    foreign = {"version": 3, "task": 7, "source": None, "execution": "ok"}
    record = read_record(ROW | foreign | {"poor": ["phone"]})
    assert (record.version, record.task, record.execution) == ("", "", {})
    assert record.payload == {"version": 3, "task": 7, "execution": "ok"}
    with pytest.raises(ValueError, match="field version"):
        read_record(ROW | foreign | {"poor": ["phone"], "sample_index": 0})


def test_a_cell_of_a_csv_holds_a_list_in_json() -> None:
    record = read_record(ROW | {"good": '["a"]', "poor": '[{"quote": "phone", "occurrence": 2}]'})
    assert [(span.start, span.label) for span in record.spans] == [(0, 1), (11, -1)]
    with pytest.raises(ValueError, match="poor is 'phone'; it needs to be a list in JSON"):
        read_record(ROW | {"poor": "phone"})


def test_a_chat_is_a_prompt_of_the_task() -> None:
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
    record = read_record(ROW | {"prompt": chat, "poor": ["phone"]}, get_task("prompts"))
    assert "Be short." in record.prompt and "Why?" in record.prompt


def test_a_task_writes_the_prompt_of_a_published_row() -> None:
    row = {"question": "Add.", "test": "from solution import add\n", "solution": "x", "code_feedback": "Wrong."}
    assert read_record(row).prompt == "Add."
    assert read_record(row, get_task("code")).prompt == get_task("code").prompt_text(row) != "Add."
    assert read_record(row | {"prompt": "As it was."}, get_task("code")).prompt == "As it was."


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"response": None}, "field response: Field required"),
        ({"critique": 3}, "field critique"),
        ({"good": "a"}, "field good"),
        ({"good": [{"text": "a"}]}, "field good"),
        ({"spans": [{"start": 0, "end": 99, "label": 1}]}, r"spans\[0\] is \[0, 99\) of 16 characters"),
        ({"spans": [{"start": 2, "end": 2, "label": 1}]}, r"spans\[0\]"),
        ({"spans": [{"start": 0, "end": 1, "label": 0}]}, r"spans\[0\] has the label 0"),
        ({"spans": {"start": [0, 2], "end": [1], "label": [1]}}, "field spans is .* an object of lists of one length"),
        ({"spans": {"pieces": ["a"]}}, "field spans is .*; it needs to be a list of objects with start, end and label"),
        ({"spans": [{"start": 0, "end": 10**400, "label": 1}]}, r"spans\[0\] is \[0, 10000"),
        ({"metrics": {"tone": float("nan")}}, r"field metrics\.tone"),
        ({"agreement": float("inf")}, "field agreement"),
        ({"status": "fine"}, "field status"),
        ({"critique": " "}, "has no feedback"),
        ({"payload": "abc"}, "field payload is 'abc'; it needs to be an object"),
        ({"payload": [1]}, r"field payload is \[1\]"),
        ({"payload": 0}, "field payload is 0"),
    ],
)
def test_a_broken_record_is_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | change) + "\n")
    assert len(load_annotated(DataConfig(path=str(path)))) == 1
    assert re.search(rf"r\.jsonl: 1 records are left out; record 2 .*r\.jsonl:2.: .*{reason}", caplog.text)
    path.write_text(json.dumps(ROW | change) + "\n")
    with pytest.raises(UserError, match=rf"none of its 1 records can be used; record 1 .*r\.jsonl:1.: .*{reason}"):
        load_annotated(DataConfig(path=str(path)))


def test_quotes_of_no_use_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        ROW | {"good": ["a", " "], "poor": ["laptop"]},
        ROW,
        ROW | {"good": ["a phone"], "poor": ["phone", "", "tablet"]},
    ]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, _, third = load_annotated(DataConfig(path=str(path)))
    assert (first.good, first.poor) == ((Quote(quote="a"),), ())
    assert (third.good, third.poor) == ((Quote(quote="a phone"),), (Quote(quote="phone"),))
    assert [(s.start, s.end, s.label) for s in third.spans] == [(0, 7, 1), (2, 7, -1)]
    assert [third.to_feedback().num_quotes, third.to_feedback().num_located] == [4, 2]
    flaws = (
        "record 1 (r.jsonl:1): a quote is empty",
        "record 1 (r.jsonl:1): the quote 'laptop' does not occur in the response",
        "record 3 (r.jsonl:3): a quote is empty",
        "record 3 (r.jsonl:3): the quote 'tablet' does not occur in the response",
        "record 3 (r.jsonl:3): the spans [0, 7) and [2, 7) overlap",
    )
    assert f"r.jsonl: 5 flaws; {'; '.join(flaws)}" in caplog.text


@pytest.mark.parametrize(
    ("quotes", "overlaps"), [(["a", "phone"], 0), (["a phone", "a", "phone"], 2), (["a phone, a", ("a phone", 2)], 1)]
)
def test_overlapping_spans_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, quotes: list[Any], overlaps: int
) -> None:
    good = [quote if isinstance(quote, str) else {"quote": quote[0], "occurrence": quote[1]} for quote in quotes]
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(ROW | {"good": good}) + "\n")
    load_annotated(DataConfig(path=str(path)))
    assert caplog.text.count(") overlap") == overlaps
