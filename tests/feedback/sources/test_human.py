"""Judgements from a file."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t2g.config import AnnotateConfig, FeedbackConfig
from t2g.errors import UserError
from t2g.feedback.parse import make_feedback
from t2g.feedback.records import make_annotated_record
from t2g.feedback.sources.combined import combine_feedback
from t2g.feedback.sources.human import HumanFeedback
from t2g.feedback.sources.make import make_local_source
from t2g.tasks.base import get_task
from t2g.tasks.prompts_only import PromptsTask
from t2g.types import Prompt, SpanFeedback

DATA = Path(__file__).parents[2] / "data"


def prompt(prompt_id: str, text: str) -> Prompt:
    return Prompt(prompt_id=prompt_id, prompt_ids=np.zeros(0, np.int32), prompt_text=text, task="prompts")


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def judge(source: HumanFeedback, question: Prompt, response: str) -> SpanFeedback:
    return asyncio.run(source.judge(question, response))


def human(path: Path, **keywords: Any) -> HumanFeedback:
    return HumanFeedback([path], PromptsTask(), **keywords)


def spans(feedback: SpanFeedback) -> list[tuple[int, int, int, int]]:
    return [(s.start, s.end, s.label, s.severity) for s in feedback.spans]


ROW = {"prompt_id": "7", "response": "a phone", "critique": "Wrong thing: a phone.", "poor": ["phone"]}


class Aligner:
    """Blames the first word that the critique has in common with the response."""

    def __init__(self) -> None:
        self.critiques: list[str] = []

    async def align(self, prompt: Prompt, response_text: str, critique: str) -> SpanFeedback:
        self.critiques.append(critique)
        word = next(word for word in response_text.split() if word in critique)
        return make_feedback("other words", (), [word], response_text, source="llm", version="judge#1")


def test_by_id_and_by_text(tmp_path: Path) -> None:
    by_text = {"prompt": "What?", "response": "yes", "critique": "Right.", "good": [{"quote": "yes", "severity": 3}]}
    path = write(tmp_path / "human.jsonl", ROW, by_text)
    source = make_local_source(FeedbackConfig(source="human", human_file=str(path)), PromptsTask())
    assert isinstance(source, HumanFeedback)
    feedback = judge(source, prompt("7", "anything"), "a phone")
    assert spans(feedback) == [(2, 7, -1, 1)]
    assert (feedback.status, feedback.source, feedback.num_located) == ("ok", "human", 1)
    assert feedback.version.startswith("human.jsonl@")
    assert judge(source, prompt("8", "What?"), "yes").spans[0].severity == 3


def test_the_text_of_a_prompt_counts_before_an_id_that_another_data_set_may_have(tmp_path: Path) -> None:
    def row(critique: str, **question: str) -> dict[str, Any]:
        return {"response": "yes", "critique": critique, "good": [], **question}

    rows = row("id", prompt_id="7"), row("text", prompt="Who?"), row("both", prompt_id="7", prompt="Why?")
    source = human(write(tmp_path / "human.jsonl", *rows))
    critiques = {
        question: judge(source, prompt(*question), "yes").critique
        for question in (("7", "Who?"), ("7", "Why?"), ("7", "When?"), ("8", "Who?"))
    }
    assert list(critiques.values()) == ["text", "both", "id", "text"]
    assert judge(source, prompt("8", "Why?"), "yes").status == "failed"  # judged for prompt 7 only


def test_a_response_without_judgement_is_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = human(write(tmp_path / "human.jsonl", ROW))
    assert judge(source, prompt("8", ""), "a phone").status == "failed"
    assert "no judgement of this response to prompt 7" in judge(source, prompt("7", ""), "a phone.").reason
    assert ["no judgement of this response to prompt 8" in message for message in caplog.messages] == [True]


def test_a_table_as_a_spreadsheet_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "human.csv"
    path.write_bytes(
        b"\xef\xbb\xbfQuestion,response,critique,good,poor,spans\r\n"
        b'Why?,"two\r\nlines, ""so""",Not so.,,"[""so""]",\r\n'
        b"\r\n"
        b'Who?,Ann did.,Right.,,,"[{""start"": 0, ""end"": 3, ""label"": ""good"", ""severity"": 2}]"\r\n'
        b"How?,With care.,Fine.,[],,\r\n"
        b"When?,Now.,Hm.,nothing,,\r\n"
    )
    source = human(path, columns={"prompt": "Question"})
    assert spans(judge(source, prompt("1", "Why?"), 'two\r\nlines, "so"')) == [(13, 15, -1, 1)]
    assert spans(judge(source, prompt("1", "Who?"), "Ann did.")) == [(0, 3, 1, 2)]
    assert judge(source, prompt("1", "How?"), "With care.").status == "empty"
    broken = judge(source, prompt("1", "When?"), "Now.")
    assert broken.reason == f"{path}:7: field good is 'nothing'; it needs to be a list in JSON"


@pytest.mark.parametrize(
    ("span_rows", "expected"),
    [
        ([{"start": 2, "end": 7, "label": -1}], [(2, 7, -1, 1)]),
        ([{"start": 0, "end": 1, "label": "good"}, {"start": 8, "end": 9, "label": "poor", "severity": 3}],
         [(0, 1, 1, 1), (8, 9, -1, 3)]),
        ([], []),
    ],
)  # fmt: skip
def test_offsets(tmp_path: Path, span_rows: list[dict[str, Any]], expected: list[tuple[int, int, int, int]]) -> None:
    row = {"prompt_id": "7", "response": "a phone a", "critique": "A phone is wrong.", "spans": span_rows}
    feedback = judge(human(write(tmp_path / "h.jsonl", row)), prompt("7", ""), "a phone a")
    assert (spans(feedback), feedback.status) == (expected, "ok" if expected else "empty")


@pytest.mark.parametrize(
    ("written", "is_named"),
    [
        ("a caf\u00e9\r\n\r\nb", True),
        ("a cafe\u0301\n\nb", True),
        ("a caf\u00e9\n\nb\n", True),
        ("a caf\u00e9 b", False),
    ],
)
def test_a_judgement_of_a_response_that_looks_the_same_is_named(tmp_path: Path, written: str, is_named: bool) -> None:
    source = human(write(tmp_path / "h.jsonl", ROW | {"response": written, "poor": ["b"]}))
    feedback = judge(source, prompt("7", ""), "a caf\u00e9\n\nb")
    assert feedback.status == "failed"
    assert ("h.jsonl:1" in feedback.reason) is is_named


@pytest.mark.parametrize("critique", [{}, {"critique": None}, {"critique": " "}])
def test_without_critiques_in_the_style_spans_are_a_judgement(tmp_path: Path, critique: dict[str, Any]) -> None:
    marked = {"prompt_id": "7", "response": "a phone", "spans": [span(2, 7, -1)]} | critique
    unmarked = {"prompt_id": "8", "response": "a phone"} | critique
    flawless = {"prompt_id": "9", "response": "a phone", "good": [], "poor": []} | critique
    source = human(write(tmp_path / "h.jsonl", marked, unmarked, flawless), needs_critique=False)
    feedback = judge(source, prompt("7", ""), "a phone")
    assert (spans(feedback), feedback.status, feedback.critique) == ([(2, 7, -1, 1)], "ok", "")
    assert judge(source, prompt("9", ""), "a phone").status == "empty"
    assert judge(source, prompt("8", ""), "a phone").status == "failed"


def span(start: Any, end: Any, label: Any = 1, **more: Any) -> dict[str, Any]:
    return {"start": start, "end": end, "label": label, **more}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"critique": None}, "the critique is None; it needs to be a text, unless style.critique=false"),
        ({"critique": " "}, "the critique is ' '"),
        ({"good": "a"}, "good is 'a'; it needs to be a list in JSON"),
        ({"good": [3]}, "field good.0"),
        ({"good": [" "]}, "a quote is empty"),
        ({"good": ["b"]}, "the quote 'b' does not occur in the response"),
        ({"good": [{"quote": "a", "occurrence": 2}]}, "the quote 'a' does not occur 2 times in the response"),
        ({"good": ["a phone"]}, "the spans [0, 7) and [2, 7) overlap"),
        ({"spans": 3}, "field spans"),
        ({"spans": [3]}, "field spans.0"),
        ({"spans": [span(0, 1, "fine")]}, "spans[0] has the label 'fine'; it needs to be good or poor"),
        ({"spans": [span(0, 1, [1, -1])]}, "spans[0] has the label [1, -1]"),
        ({"spans": [span(0, 1, None)]}, "spans[0] has the label None"),
        ({"spans": [{"start": 0, "end": 1}]}, "field spans.0.label"),
        ({"spans": {"from": [0], "to": [1]}}, "field spans is {'from': [0], 'to': [1]}; it needs to be a list"),
        ({"spans": [span(2, 2)]}, "spans[0] is [2, 2) of 7 characters"),
        ({"spans": [span(0, 1), span(2, 8)]}, "spans[1] is [2, 8) of 7 characters"),
        ({"spans": [span(1, 2)]}, "the span [1, 2) is blank"),
        ({"spans": [span(0, 1, severity=4)]}, "field spans.0.severity"),
        ({"spans": [span(0, 4), span(3, 7, -1)]}, "the spans [0, 4) and [3, 7) overlap"),
    ],
)  # fmt: skip
def test_a_broken_line_is_failed_feedback_that_names_it(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = write(tmp_path / "human.jsonl", ROW, ROW | {"prompt_id": "8"} | change)
    source = human(path)
    feedback = judge(source, prompt("8", ""), "a phone")
    assert (feedback.status, feedback.reason[: len(f"{path}:2: ")]) == ("failed", f"{path}:2: ")
    assert reason in feedback.reason
    assert judge(source, prompt("7", ""), "a phone").status == "ok"


def test_labels_and_offsets_of_other_tools(tmp_path: Path) -> None:
    response = "😀😀 a phone"  # JavaScript counts two units for each emoji
    row = {"prompt_id": "7", "response": response, "critique": "c"}
    row["spans"] = [{"start": 7, "end": 12, "labels": ["Hallucination"]}, {"start": 5, "end": 6, "label": "Positive"}]
    path = write(tmp_path / "h.jsonl", row)
    config = AnnotateConfig(
        source="human", human_file=str(path), offsets="utf16", human_labels={"Hallucination": "poor"}
    )
    source = make_local_source(config, PromptsTask())
    assert isinstance(source, HumanFeedback)
    assert spans(judge(source, prompt("7", ""), response)) == [(5, 10, -1, 1), (3, 4, 1, 1)]


def test_of_two_judgements_by_one_person_the_first_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ann = ROW | {"version": "ann"}
    bare = {name: ROW[name] for name in ("prompt_id", "response")}
    bare |= {"critique": "No spans.", "version": "ann"}
    path = write(tmp_path / "human.jsonl", ann, ann | {"critique": "Other."}, bare, ROW, ROW)
    source = human(path)
    source.check_alignment()
    feedback = judge(source, prompt("7", ""), "a phone")
    assert (feedback.critique, feedback.agreement, spans(feedback)) == (ROW["critique"], 1.0, [(2, 7, -1, 1)])
    sentence = f"not used: 3 judgements of a response that the same person judged before, {path}:2, {path}:3, {path}:5"
    assert caplog.messages == [sentence]


ANN = {"prompt": "What?", "response": "a red phone", "critique": "Ann.", "spans": [{"start": 2, "end": 5, "label": -1}]}
BOB = {**ANN, "critique": "Bob.", "spans": [{"start": 2, "end": 11, "label": -1, "severity": 3}]}
CAT = {**ANN, "critique": "Cat.", "good": ["a"], "poor": ["phone"], "spans": None}


@pytest.mark.parametrize(
    ("rows", "expected", "agreement"),
    [
        ([ANN, BOB], [(2, 5, -1, 1)], 2 * 3 / (3 + 8)),
        ([BOB, ANN], [(2, 5, -1, 1)], 2 * 3 / (3 + 8)),
        ([ANN, BOB, CAT], [(2, 5, -1, 1), (6, 11, -1, 1)], (6 / 11 + 0 + 10 / 14) / 3),
        ([ANN, {**ANN, "critique": "Fine.", "spans": []}], [], 0.0),
        ([ANN, {**BOB, "critique": ""}], [(2, 5, -1, 1)], None),
        ([{**ANN, "prompt_id": "7"}, BOB], [(2, 5, -1, 1)], 6 / 11),
    ],
)
def test_people_vote_as_models_do(
    tmp_path: Path, rows: list[dict[str, Any]], expected: list[tuple[int, int, int, int]], agreement: float | None
) -> None:
    """In one file and in several: of two people a label needs both, of three two; a broken line does not vote."""
    joined = human(write(tmp_path / "all.jsonl", *rows))
    files = [write(tmp_path / f"{number}.jsonl", row) for number, row in enumerate(rows)]
    config = FeedbackConfig(source="human", human_file=tuple(map(str, files)))
    for source in (joined, make_local_source(config, PromptsTask())):
        assert isinstance(source, HumanFeedback)
        feedback = judge(source, prompt("7", "What?"), "a red phone")
        assert spans(feedback) == expected
        assert feedback.agreement == pytest.approx(agreement)


def test_a_voted_record_is_current_as_long_as_each_line_is(tmp_path: Path) -> None:
    question = prompt("7", "What?")
    bare = {**ANN, "critique": "No phone.", "spans": None}
    first = human(write(tmp_path / "h.jsonl", bare, BOB), aligner=Aligner())
    assert first.needs_aligner(question, "a red phone")
    feedback = judge(first, question, "a red phone")
    assert (spans(feedback), feedback.version[-9:]) == ([(6, 11, -1, 1)], ", judge#1")
    record = make_annotated_record(question, "a red phone", feedback)
    assert first.is_current(record)
    assert not human(write(tmp_path / "h.jsonl", bare, {**BOB, "critique": "!"})).is_current(record)
    assert not human(write(tmp_path / "h.jsonl", bare)).is_current(record)


def test_a_record_whose_aligner_failed_is_current_too(tmp_path: Path) -> None:
    """Otherwise each start would ask for it again, and the annotation would never end."""

    class FailingAligner(Aligner):
        async def align(self, prompt: Prompt, response_text: str, critique: str) -> SpanFeedback:
            if critique == "No phone.":
                return await super().align(prompt, response_text, critique)
            return make_feedback(critique, (), ["nowhere"], response_text, source="llm", version="judge#1")

    question = prompt("7", "What?")
    rows = [{**ANN, "critique": "No phone.", "spans": None}, {**BOB, "critique": "Hm.", "spans": None}]
    source = human(write(tmp_path / "h.jsonl", *rows), aligner=FailingAligner())
    feedback = judge(source, question, "a red phone")
    assert feedback.status == "unparsable"
    assert source.is_current(make_annotated_record(question, "a red phone", feedback))


def test_a_broken_line_does_not_hide_a_whole_one(tmp_path: Path) -> None:
    source = human(write(tmp_path / "human.jsonl", ROW | {"critique": None}, ROW))
    assert judge(source, prompt("7", ""), "a phone").status == "ok"


def test_lines_that_judge_nothing_are_counted_and_the_first_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = {"response": "a"}, ROW, {"prompt_id": "1"}, {"prompt": ["a"], "response": "a"}
    human(write(tmp_path / "human.jsonl", *rows))
    assert "3 lines judge no response, the first at" in caplog.messages[0]
    assert "human.jsonl:1: " in caplog.messages[0]


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        human(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="holds no judgements"):
        human(write(tmp_path / "empty.jsonl"))


def test_a_critique_without_spans_is_aligned_and_stays_the_persons(tmp_path: Path) -> None:
    bare = {"prompt_id": "8", "response": "a red phone", "critique": "No phone."}
    path = write(tmp_path / "human.jsonl", ROW, bare)
    aligner = Aligner()
    source = human(path, aligner=aligner)
    source.check_alignment()
    assert not source.needs_aligner(prompt("7", ""), "a phone")
    assert source.needs_aligner(prompt("8", ""), "a red phone")
    feedback = judge(source, prompt("8", ""), "a red phone")
    assert (spans(feedback), feedback.critique, feedback.source) == ([(6, 11, -1, 1)], "No phone.", "human")
    assert feedback.version.endswith(", judge#1")
    assert judge(source, prompt("7", ""), "a phone").status == "ok"
    assert aligner.critiques == ["No phone."]
    with pytest.raises(UserError, match=r"1 critiques have no spans, the first at .*human\.jsonl:2; set align to llm"):
        make_local_source(AnnotateConfig(source="human", human_file=str(path)), PromptsTask())


def test_a_combined_record_is_current_as_long_as_its_human_line_is(tmp_path: Path) -> None:
    path = tmp_path / "human.jsonl"
    question = prompt("7", "")
    other = SpanFeedback(critique="", spans=(), status="empty", source="program", version="p#1")
    first = human(write(path, ROW))
    answers = {"facts": other, "people": judge(first, question, "a phone"), "style": other}
    record = make_annotated_record(question, "a phone", combine_feedback(answers, required=["facts"]))
    assert first.is_current(record, "people")
    assert not human(write(path, ROW | {"critique": "Better."})).is_current(record, "people")
    unjudged = human(write(path, ROW | {"response": "else"}))
    assert not unjudged.is_current(record, "people")
    answers["people"] = judge(unjudged, question, "a phone")
    without = make_annotated_record(question, "a phone", combine_feedback(answers, required=["facts"]))
    assert unjudged.is_current(without, "people") and not first.is_current(without, "people")


@pytest.mark.parametrize("name", ["human.jsonl", "ann, bob.jsonl"])
def test_a_record_is_current_as_long_as_its_own_line_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    question = prompt("7", "")
    bare = {"prompt_id": "8", "response": "a red phone", "critique": "No phone."}
    first = human(write(path, ROW, bare), aligner=Aligner())
    records = [
        make_annotated_record(question, "a phone", judge(first, question, "a phone")),
        make_annotated_record(prompt("8", ""), "a red phone", judge(first, prompt("8", ""), "a red phone")),
    ]
    assert [first.is_current(record) for record in records] == [True, True]
    second = human(write(path, ROW | {"prompt_id": "9"}, ROW | {"critique": "Better."}, bare), aligner=Aligner())
    assert [second.is_current(record) for record in records] == [False, True]
    assert not second.is_current(records[0].model_copy(update={"prompt_id": "3"}))


@pytest.mark.parametrize(
    ("name", "file", "critique"),
    [
        ("summarization", "slf5k.json", "It was the sail that was torn, not the mast"),
        ("qa", "ultrafeedback.json", "Right in every point"),
    ],
)
def test_the_critiques_that_published_records_hold(name: str, file: str, critique: str) -> None:
    task = get_task(name)
    aligner = Aligner()
    rows = json.loads((DATA / file).read_text())
    row = next(iter(rows.values())) if isinstance(rows, dict) else rows[0]
    if isinstance(rows, dict):
        row = {"id": next(iter(rows)), **row}
    source = HumanFeedback([DATA / file], task, aligner)
    question = replace(prompt(str(task.prompt_id(row)), task.prompt_text(row)), payload=task.payload(row))
    response = task.response(row)
    assert response is not None and source.needs_aligner(question, response)
    assert judge(source, question, response).critique.startswith(critique)
