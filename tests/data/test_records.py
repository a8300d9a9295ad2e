"""Annotated records: written, read back, and made from other files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.config import DataConfig
from t2g.data.records import (
    QuoteRecord,
    annotated_record,
    append_annotated,
    load_annotated,
    read_record,
    recover_annotated,
    write_annotated,
)
from t2g.errors import UserError
from t2g.feedback.parse import make_feedback, parse_answer
from t2g.types import Prompt, Rollout, SpanFeedback

PROMPT = Prompt(
    prompt_id="7", prompt_ids=np.zeros(0, np.int32), prompt_text="post", task="tiny", payload={"facts": {"a": "é"}}
)
ROW = {"prompt": "post", "response": "a phone, a phone", "critique": "c"}


def rollout(text: str) -> Rollout:
    return Rollout(
        prompt_id="7",
        sample_index=2,
        prompt_ids=np.zeros(0, np.int32),
        response_ids=np.zeros(0, np.int32),
        rollout_logprobs=np.zeros(0, np.float32),
        response_text=text,
        finish_reason="stop",
        policy_versions=(),
    )


def feedback(text: str, good: list[Any], poor: list[Any]) -> SpanFeedback:
    return make_feedback("The phone.", good, poor, text, source="program", version="v")


def test_a_record_holds_the_judgement_and_teaches_it() -> None:
    judged = feedback("a phone, a phone", ["a"], [("phone", 2), {"quote": "phone", "severity": 2}])
    record = annotated_record(PROMPT, rollout("a phone, a phone"), judged)
    assert record.good == ("a",)
    assert record.poor == (QuoteRecord(quote="phone", occurrence=2), QuoteRecord(quote="phone", severity=2))
    assert record.to_feedback() == judged
    assert record.target() == (
        '{"critique": "The phone.", "good": ["a"], "poor": [{"quote": "phone", "occurrence": 2}, "phone"]}'
    )
    assert record.to_prompt().prompt_text == "post"


@given(text=st.text("ab ", max_size=12), quotes=st.lists(st.text("ab ", min_size=1, max_size=3), max_size=4))
def test_the_target_of_a_record_says_its_spans(text: str, quotes: list[str]) -> None:
    judged = feedback(text, quotes[:2], [(quote, 2) for quote in quotes[2:]])
    record = annotated_record(PROMPT, rollout(text), judged)
    parsed = parse_answer(record.target(), text, source="program", version="v")
    assert [(s.start, s.end, s.label) for s in parsed.spans] == [(s.start, s.end, s.label) for s in judged.spans]


def test_a_file_is_read_back_as_it_was(tmp_path: Path) -> None:
    texts = ["a phone, a phone", "", 'he said "no"\n']
    records = [annotated_record(PROMPT, rollout(t), feedback(t, ["a phone"], ['"no"\n'])) for t in texts]
    write_annotated(tmp_path / "r.jsonl", records)
    assert load_annotated(DataConfig(path=str(tmp_path / "r.jsonl"))) == records
    assert (tmp_path / "r.jsonl").read_text().count("\n") == 3


def test_records_that_were_added_one_by_one_are_recovered(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert recover_annotated(path) == []
    records = [annotated_record(PROMPT, rollout(t), feedback(t, [], [])) for t in ("a\u2028b", "c")]
    for record in records:
        append_annotated(path, record)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        assert recover_annotated(path) == records[: (end >= first) + (end == len(whole))]
    path.write_bytes(b'{"half\n' + whole)
    with pytest.raises(UserError, match=r"records\.jsonl:1 is no annotated record"):
        recover_annotated(path)


def test_quotes_without_spans_are_located() -> None:
    record = read_record(ROW | {"poor": [{"quote": "phone", "occurrence": 2}, "laptop"], "extra": 3})
    judged = record.to_feedback()
    assert [(s.start, s.end, s.label) for s in judged.spans] == [(11, 16, -1)]
    assert (judged.num_quotes, judged.num_located, judged.source) == (2, 1, "human")
    assert record.payload == {"extra": 3}
    assert len(record.prompt_id) == 16
    assert record.prompt_id == read_record(ROW).prompt_id


def test_the_names_of_published_files() -> None:
    row = {"id": 3, "Post": "p", "generated_summary": "a b", "textual_feedback": "c", "good_spans": ["a"],
           "Poor spans": ["b"], "title": "t"}  # fmt: skip
    record = read_record(row)
    assert (record.prompt_id, record.prompt, record.response, record.critique) == ("3", "p", "a b", "c")
    assert (record.good, record.poor, record.payload) == (("a",), ("b",), {"title": "t"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"response": None}, "field response: Field required"),
        ({"critique": 3}, "field critique"),
        ({"good": "a"}, "field good"),
        ({"good": [{"text": "a"}]}, "field good"),
        ({"spans": [{"start": 0, "end": 99, "label": 1}]}, r"spans\[0\] is \[0, 99\) of 16 characters"),
        ({"spans": [{"start": 2, "end": 2, "label": 1}]}, r"spans\[0\]"),
        ({"spans": [{"start": 0, "end": 1, "label": 0}]}, r"field spans\.0\.label"),
        ({"status": "fine"}, "field status"),
    ],
)
def test_a_broken_record_is_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | change) + "\n")
    with pytest.raises(UserError, match=reason) as error:
        load_annotated(DataConfig(path=str(path)))
    assert "record 2: " in str(error.value)
