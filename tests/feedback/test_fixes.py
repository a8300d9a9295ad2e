"""Corrections: from a feedback function's answer to the record and back to the corrected response, exactly."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.config import NoiseConfig
from t2g.feedback.fixes import apply_fixes
from t2g.feedback.parse import parse_answer, read_judgement
from t2g.feedback.records import AnnotatedRecord, make_annotated_record, read_record
from t2g.feedback.sources.noise import add_noise
from t2g.feedback.sources.votes import vote
from t2g.types import MAX_FIX_CHARS, Prompt, Span, SpanFeedback

RESPONSE = "It is 42, not 42."
PROMPT = Prompt(prompt_id="7", prompt_text="Six times four?", task="prompts")


def judge(*poor: Any, good: tuple[Any, ...] = (), response: str = RESPONSE) -> SpanFeedback:
    return read_judgement(("It is 24.", good, poor), response, source="program", version="v")


def record(*poor: Any) -> AnnotatedRecord:
    return make_annotated_record(PROMPT, RESPONSE, judge(*poor))


def test_fixes_replace_delete_and_leave_out_what_overlaps() -> None:
    spans = [Span(start=8, end=15, label=-1, fix=""), Span(start=6, end=8, label=-1, fix="24")]
    assert apply_fixes("It is 42, or so.", spans) == "It is 24."
    assert apply_fixes("It is 42, or so.", [*spans, Span(start=7, end=9, label=-1, fix="?")]) == "It is 24."
    assert apply_fixes("It is 42.", [Span(start=6, end=8, label=-1), Span(start=0, end=2, label=1)]) == "It is 42."


@given(
    pieces=st.lists(
        st.tuples(st.text(max_size=5), st.text(max_size=5), st.text(min_size=1, max_size=5).filter(str.strip)),
        max_size=6,
    )
)
def test_planted_faults_with_their_fixes_give_the_original_through_a_record(pieces: list[tuple[str, str, str]]) -> None:
    original = response = ""
    poor = []
    for between, right, fault in pieces:
        original += between + right
        response += between + fault
        poor.append(Span(start=len(response) - len(fault), end=len(response), label=-1, fix=right))
    line = make_annotated_record(PROMPT, response, judge(*poor, response=response)).model_dump_json()
    assert apply_fixes(response, read_record(json.loads(line)).spans) == original


def test_a_quote_with_a_fix_is_in_the_record_and_not_in_the_reward_models_target() -> None:
    piece = {"quote": "42", "occurrence": 2, "fix": "24"}
    line = json.loads(record(piece).model_dump_json())
    assert (line["poor"], line["spans"][0]["fix"]) == ([piece], "24")
    assert read_record(line) == record(piece) == record(Span(start=14, end=16, label=-1, fix="24"))
    without_spans = read_record({key: value for key, value in line.items() if key != "spans"})
    assert apply_fixes(RESPONSE, without_spans.spans) == "It is 42, not 24."
    assert record(piece).target() == record(("42", 2)).target()
    assert "fix" not in record("42").model_dump_json()
    assert record({"quote": "42", "fix": ""}).spans[0].fix == ""  # delete it


def test_a_reward_model_writes_no_fix() -> None:
    quotes = '[{"quote": "42", "fix": "24"}]'
    answer = parse_answer(f'{{"critique": "c", "good": {quotes}, "poor": []}}', RESPONSE, source="", version="")
    assert [(span.start, span.label, span.fix) for span in answer.spans] == [(6, 1, None)]


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        ({"fix": "24"}, "quote: Field required"),
        ({"quote": "42", "fix": 24}, "fix: Input should be a valid string"),
        ({"quote": "42", "fix": "2" * (MAX_FIX_CHARS + 1)}, f"fix: String should have at most {MAX_FIX_CHARS} char"),
        ({"quote": "42", "fix": "\ud800"}, "fix: Input should be a valid string"),
        (Span(start=6, end=8, label=-1, fix=24), "fix: Input should be a valid string"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_fix_is_one_sentence(piece: Any, reason: str) -> None:
    with pytest.raises(ValueError, match="is neither a quote nor a range of the response") as raised:
        judge(piece)
    assert reason in str(raised.value)


def test_only_poor_pieces_have_a_fix() -> None:
    with pytest.raises(ValueError, match=r"the good piece .*42.* has a fix; only a poor piece has one"):
        judge(good=({"quote": "42", "fix": "24"},))
    with pytest.raises(ValueError, match="a good span has the fix '24'; only a poor span has one"):
        Span(start=0, end=2, label=1, fix="24")
    spans = [{"start": 0, "end": 2, "label": 1, "fix": "24"}]
    with pytest.raises(ValueError, match=r"field spans\.0: a good span has the fix '24'"):
        read_record({"prompt": "p", "response": RESPONSE, "critique": "c", "spans": spans})


def test_votes_and_noise_drop_fixes() -> None:
    judged = judge({"quote": "42", "fix": "24"})
    assert [span.fix for span in vote([judged] * 3, 3, RESPONSE).spans] == [None]
    for flip in (0, 1):
        noisy = add_noise(judged, NoiseConfig(flip=flip), response_text=RESPONSE, rng=np.random.default_rng(0))
        assert [(span.start, span.fix) for span in noisy.spans] == [(6, None)]
