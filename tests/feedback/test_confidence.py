"""The confidence of a span: read, kept, refused, paid and learned."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.config import DataConfig, RewardRuleConfig
from t2g.feedback import token_rewards
from t2g.feedback.parse import Quote, make_quote, parse_answer, parse_piece, read_judgement
from t2g.feedback.records import (
    keep_likely_spans,
    load_annotated,
    make_annotated_record,
    read_record,
    write_annotated,
)
from t2g.feedback.rewards import score_spans
from t2g.report.terminal import span_line
from t2g.runs.judgements import JournaledJudgement
from t2g.types import Prompt, Span, SpanFeedback, read_feedback

RESPONSE = "a red phone, a phone"
PROMPT = Prompt(prompt_id="7", prompt_text="post", task="prompts")
OFFSETS = np.array([[0, 1], [1, 5], [5, 11], [11, 12], [12, 14], [14, 20]], np.int32)
NO_NUMBERS = [-0.1, 1.1, float("nan"), float("inf"), "0.5", True, [0.5]]


def judge(good: Sequence[Any] = (), poor: Sequence[Any] = ()) -> SpanFeedback:
    return read_judgement(("c", good, poor), RESPONSE, source="program", version="v")


def confidences(feedback: SpanFeedback) -> list[float]:
    return [span.confidence for span in feedback.spans]


def test_a_feedback_function_gives_it_with_a_quote_or_a_span() -> None:
    red = {"quote": "red", "confidence": np.float32(0.25)}
    phone = Span(start=6, end=11, label=-1, confidence=0.5)
    judged = judge([red, "a"], [phone, {"quote": "phone", "occurrence": 2, "confidence": 1}])
    assert confidences(judged) == [0.25, 1, 0.5, 1]


@pytest.mark.parametrize("number", NO_NUMBERS)
def test_anything_but_a_number_from_0_to_1_is_a_sentence(number: Any) -> None:
    span = Span(start=0, end=1, label=1, confidence=number)
    for piece in ({"quote": "a", "confidence": number}, span):
        with pytest.raises(ValueError, match="neither a quote nor a range of the response: confidence: Input should"):
            parse_piece(piece, 1)
    row = {"prompt": "p", "response": RESPONSE, "critique": "c", "spans": [asdict(span)]}
    with pytest.raises(ValueError, match=r"field spans\.0\.confidence: Input should"):
        read_record(row)


def test_a_file_keeps_it_and_a_line_without_it_stays_as_it_was(tmp_path: Path) -> None:
    sure = make_annotated_record(PROMPT, RESPONSE, judge(["red"]))
    unsure = make_annotated_record(PROMPT, RESPONSE, judge([{"quote": "red", "confidence": 0.25}]))
    assert "confidence" not in sure.model_dump_json()
    assert unsure.good == (Quote(quote="red", confidence=0.25),)
    path = tmp_path / "records.jsonl"
    write_annotated(path, [sure, unsure])
    assert load_annotated(DataConfig(path=str(path))) == [sure, unsure]
    line = json.loads(path.read_text().splitlines()[1])
    assert line["spans"][0]["confidence"] == line["good"][0]["confidence"] == 0.25
    del line["spans"]  # its quotes alone
    assert read_record(line).spans[0].confidence == 0.25


def test_in_a_table_a_missing_one_is_null() -> None:
    spans = [{"start": 2, "end": 5, "label": "good", "confidence": None}]
    row = {"prompt": "p", "response": RESPONSE, "critique": "c", "spans": spans}
    assert read_record(row).spans == (Span(start=2, end=5, label=1),)


def test_journal_and_checkpoint_keep_it() -> None:
    judged = judge([{"quote": "red", "confidence": 0.1}])
    line = JournaledJudgement(key="k", feedback=judged).model_dump_json()
    assert JournaledJudgement.model_validate_json(line).feedback == judged
    assert read_feedback(json.loads(json.dumps(asdict(judged)))) == judged


def test_a_reward_model_learns_likely_spans_and_no_confidence() -> None:
    judged = judge([{"quote": "red", "confidence": 0.5}, "a"], [{"quote": "phone", "confidence": 0.49}])
    learned = keep_likely_spans(make_annotated_record(PROMPT, RESPONSE, judged))
    assert learned.target() == '{"critique": "c", "good": ["red", "a"], "poor": []}'
    assert confidences(learned.to_feedback()) == [1, 1]
    unlikely = make_annotated_record(PROMPT, RESPONSE, judge((), [{"quote": "phone", "confidence": 0}]))
    assert keep_likely_spans(unlikely).status == "empty"
    sure = make_annotated_record(PROMPT, RESPONSE, judge(["red"]))
    assert keep_likely_spans(sure) is sure


def test_a_reward_models_answer_has_none() -> None:
    text = '{"critique": "c", "good": [{"quote": "red", "confidence": 0.5}], "poor": []}'
    assert confidences(parse_answer(text, RESPONSE, source="reward_model", version="v")) == [1]


def test_the_terminal_shows_it() -> None:
    judged = judge((), [{"quote": "phone", "confidence": 0.25}])
    assert span_line(judged.spans[0], RESPONSE, judged).startswith('poor, severity 1, confidence 0.25: "phone"')
    assert make_quote(RESPONSE, judged.spans[0]).confidence == 0.25


def pay(spans: Sequence[Span], **rule: Any) -> list[float]:
    return token_rewards(OFFSETS, spans, text=RESPONSE, rule=RewardRuleConfig(**rule)).tolist()


def test_it_multiplies_the_reward() -> None:
    red = Span(start=2, end=5, label=1, confidence=0.5)
    phone = Span(start=6, end=12, label=-1, severity=3, confidence=0.25)
    values = {"good": 2.0, "poor": (0.0, -0.5, -4.0)}
    assert pay([red, phone], **values) == [0, 1, 0, -1, 0, 0]
    assert pay([red, phone], unit="token", **values) == [0, 1, -1, -1, 0, 0]
    assert score_spans([red, phone], RewardRuleConfig(**values)) == 0
    assert score_spans([replace(red, confidence=1.0), phone], RewardRuleConfig(**values)) == pytest.approx(1 / 3)


def test_of_overlapping_spans_of_a_label_the_strongest_is_paid() -> None:
    severe = Span(start=2, end=11, label=-1, severity=3, confidence=0.03125)
    slight = Span(start=6, end=12, label=-1, confidence=0.5)
    poor = (-1.0, -2.0, -8.0)
    assert pay([severe, slight], poor=poor) == [0, 0, 0, -0.5, 0, 0]  # 1 x .5 exceeds 8 x .03125
    sure = replace(severe, confidence=0.5)
    assert pay([sure, slight], poor=poor) == [0, 0, 0, -4, 0, 0]
    assert pay([sure, slight], poor=poor, unit="token") == [0, -4, -4, -0.5, 0, 0]


FIELDS = st.tuples(st.integers(0, 19), st.integers(1, 6), st.sampled_from([1, -1]), st.integers(1, 3))


@given(
    fields=st.lists(st.tuples(FIELDS, st.booleans()), max_size=6),
    unit=st.sampled_from(["span", "token"]),
    overlap=st.sampled_from(["poor", "good", "sum"]),
    share=st.floats(0.01, 1),
)
def test_without_confidence_a_span_is_absent_and_a_common_one_is_a_factor(
    fields: list[tuple[tuple[int, int, int, int], bool]], unit: str, overlap: str, share: float
) -> None:
    present: list[Span] = []
    every: list[Span] = []
    for (start, length, label, severity), is_kept in fields:
        end = min(start + length, len(RESPONSE))
        span = Span(start=start, end=end, label=label, severity=severity)  # type: ignore[arg-type]
        every.append(span if is_kept else replace(span, confidence=0.0))
        if is_kept:
            present.append(span)
    rule = {"unit": unit, "overlap": overlap, "poor": (-0.5, -1.0, -2.0)}
    paid = pay(present, **rule)
    assert pay(every, **rule) == paid
    scaled = pay([replace(span, confidence=share) for span in present], **rule)
    assert scaled == pytest.approx([share * reward for reward in paid])
