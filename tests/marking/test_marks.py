"""Marks are journaled at once, become records, and are compared between people."""

import asyncio
import json
from pathlib import Path

import pytest

from t2g.config import DataConfig
from t2g.errors import UserError
from t2g.feedback.fixes import apply_fixes
from t2g.feedback.records import load_annotated
from t2g.feedback.sources.human import HumanFeedback
from t2g.loop.annotation import Sample, make_samples
from t2g.marking.marks import JOURNAL_FILE, RECORDS_FILE, Mark, Marks, StaleMark
from t2g.tasks.base import get_task
from t2g.types import Span

ROWS = [
    {"prompt": "What?", "response": "ab cd", "prompt_id": "x"},
    {"prompt": "What?", "response": "ef"},
    {"prompt": "What?", "response": "ab cd", "prompt_id": "x"},  # a duplicate of the first
    {"prompt": "No response"},
]


def samples() -> list[Sample]:
    return make_samples(ROWS, get_task("prompts"))


def mark(*spans: tuple[int, int, int], critique: str = "so", done: bool = True, version: int = 0) -> Mark:
    mark_spans = tuple(Span(start=a, end=b, label=c) for a, b, c in spans)  # type: ignore[arg-type]
    return Mark(critique=critique, spans=mark_spans, done=done, version=version)


def test_a_start_after_a_kill_has_every_change_and_the_finished_are_records(tmp_path: Path) -> None:
    marks = Marks(tmp_path, "ann", samples())
    assert [sample.response for sample in marks.samples] == ["ab cd", "ef"]
    assert marks.finished == [False, False]
    spans = (Span(start=0, end=2, label=1), Span(start=3, end=5, label=-1, severity=3))
    marks.put(0, Mark(critique="ab is right. cd is wrong.", spans=spans, done=True))
    marks.put(1, mark((0, 1, -1), critique="not yet", done=False))  # and no close
    with (tmp_path / "ann" / JOURNAL_FILE).open("a") as file:
        file.write('{"key": "cut o')
    again = Marks(tmp_path, "ann", samples())
    assert again.finished == [True, False]
    assert again[0].spans == spans
    assert again[1].critique == "not yet"
    assert again[1].spans[0].end == 1
    assert (again[0].version, again[1].version) == (1, 1)
    assert again.put(1, mark(version=1)) == 2
    third = Marks(tmp_path, "ann", samples())
    assert third.finished == [True, True]
    assert third[1].spans == ()


def test_a_save_that_met_a_full_disk_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal has the change, and the file of records does not."""
    marks = Marks(tmp_path, "ann", samples())
    records = tmp_path / "ann" / RECORDS_FILE

    def fail_to_write(*_: object) -> None:
        raise UserError("No space left on device")

    changes = {1: mark((0, 2, 1)), 0: mark((0, 2, 1), done=False, version=1)}  # finished, and finished no more
    for num_finished, change in changes.items():
        before = records.read_text()
        with monkeypatch.context() as full:
            full.setattr(Marks, "_write", fail_to_write)
            with pytest.raises(UserError):
                marks.put(0, change)
        assert records.read_text() == before
        assert marks.put(0, change) == change.version + 1
        assert len(records.read_text().splitlines()) == num_finished
    with pytest.raises(StaleMark):
        marks.put(0, mark((0, 1, 1)))


def test_what_is_finished_no_more_is_no_record(tmp_path: Path) -> None:
    marks = Marks(tmp_path, "ann", samples())
    path = tmp_path / "ann" / RECORDS_FILE
    marks.put(1, mark())
    marks.put(0, mark((0, 2, 1)))
    assert [json.loads(line)["response"] for line in path.read_text().splitlines()] == ["ab cd", "ef"]
    marks.put(1, mark(critique="", done=False, version=1))
    assert [json.loads(line)["response"] for line in path.read_text().splitlines()] == ["ab cd"]


def test_its_file_is_read_as_what_annotate_writes(tmp_path: Path) -> None:
    marks = Marks(tmp_path, "ann", samples())
    spans = (Span(start=3, end=5, label=-1, severity=3, fix="dc"), Span(start=0, end=2, label=1))
    marks.put(0, Mark(critique="ab is right. cd is wrong.", spans=spans, done=True))
    marks.put(1, mark(critique="nothing to say", done=True))
    path = tmp_path / "ann" / RECORDS_FILE
    records = load_annotated(DataConfig(path=str(path)))
    assert [(record.response, record.status) for record in records] == [("ab cd", "ok"), ("ef", "empty")]
    good, poor = records[0].spans
    assert (good.start, good.end, good.label, good.critique_range) == (0, 2, 1, (0, 12))
    assert (poor.start, poor.end, poor.label, poor.severity, poor.critique_range) == (3, 5, -1, 3, (13, 25))
    assert apply_fixes("ab cd", records[0].spans) == "ab dc"
    assert records[0].target() == (
        '{"critique": "ab is right. cd is wrong.", "good": ["ab"], "poor": [{"quote": "cd", "severity": 3}]}'
    )
    assert (records[0].source, records[0].version, records[0].prompt_id) == ("human", "ann", "x")
    source = HumanFeedback([path], get_task("prompts"))  # whom annotate and train_policy ask with source=human
    judged = asyncio.run(source.judge(records[0].to_prompt(), "ab cd"))
    assert (judged.critique, judged.spans, judged.status) == (records[0].critique, records[0].spans, "ok")


def test_people_are_compared_on_what_both_finished(tmp_path: Path) -> None:
    ann, bea = (Marks(tmp_path, by, samples()) for by in ("ann", "bea"))
    ann.put(0, mark((0, 2, 1), (3, 4, -1)))
    ann.put(1, mark((0, 2, 1)))
    assert ann.agreement_messages() == []
    bea.put(0, mark((0, 1, 1), (3, 4, -1)))
    bea.put(1, mark((0, 2, -1), done=False))  # not finished: not compared
    # a, b, c, d: good good poor none against good none poor none; the blank has no label
    kappa = (3 / 4 - 5 / 16) / (1 - 5 / 16)
    agreement = f"1 responses that both marked, the same label on 75% of 4 characters, kappa {kappa:.2f}"
    assert ann.agreement_messages() == [f"with bea: {agreement}"]
    assert bea.agreement_messages() == [f"with ann: {agreement}"]


def test_a_broken_journal_of_another_person_is_a_sentence_and_the_rest_goes_on(tmp_path: Path) -> None:
    ann, cem = (Marks(tmp_path, by, samples()) for by in ("ann", "cem"))
    ann.put(0, mark((0, 2, 1)))
    cem.put(0, mark((0, 2, 1)))
    for name, line in (("bea\x1b", "{]"), ("eve", '{"key": 7}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / JOURNAL_FILE).write_text(f"{line}\n")
    bea, same, eve = ann.agreement_messages()
    assert bea.startswith("with bea␛: not compared, because ")
    assert "journal.jsonl:1 is not a line of this journal" in bea
    assert "with cem: 1 responses" in same and "100%" in same
    assert eve.endswith("journal.jsonl:1 is not a line of this journal: key: Input should be a valid string")


def test_a_change_of_an_older_version_is_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    marks = Marks(tmp_path, "ann", samples())
    path = tmp_path / "ann" / JOURNAL_FILE
    assert marks.put(0, mark((0, 2, 1))) == 1
    content = path.read_text()
    for version in (0, 2):
        with pytest.raises(StaleMark, match="another tab changed this response"):
            marks.put(0, mark((3, 5, -1), version=version))
    assert path.read_text() == content
    assert marks[0].spans[0].label == 1
    assert marks.put(1, mark()) == 1, "each response has versions of its own"


@pytest.mark.parametrize("spans", [((0, 6, 1),), ((2, 3, 1),), ((4, 3, 1),), ((-1, 2, -1),)])
def test_a_span_that_does_not_fit_is_refused_and_nothing_is_kept(
    tmp_path: Path, spans: tuple[tuple[int, int, int], ...]
) -> None:
    marks = Marks(tmp_path, "ann", samples())
    with pytest.raises(ValueError, match="5 characters"):
        marks.put(0, mark(*spans))
    assert marks[0].spans == ()
    assert not (tmp_path / "ann" / JOURNAL_FILE).exists()


def test_nothing_is_finished_without_a_critique(tmp_path: Path) -> None:
    marks = Marks(tmp_path, "ann", samples())
    with pytest.raises(ValueError, match="a critique is missing"):
        marks.put(0, mark((0, 2, 1), critique=" "))
    assert marks.finished == [False, False]


def test_data_without_responses_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data record 1 has no response"):
        Marks(tmp_path, "ann", make_samples(ROWS[3:], get_task("prompts")))


def test_a_changed_response_is_marked_anew(tmp_path: Path) -> None:
    marks = Marks(tmp_path, "ann", samples())
    marks.put(1, mark((0, 2, 1)))
    rows = [ROWS[0], ROWS[1] | {"response": "eg"}]
    assert Marks(tmp_path, "ann", make_samples(rows, get_task("prompts"))).finished == [False, False]
    assert json.loads((tmp_path / "ann" / JOURNAL_FILE).read_text())["critique"] == "so"
