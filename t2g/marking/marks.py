"""What one person says of responses: a line of a journal for each change, a file of annotated records of what is
finished, and how far two people agree.

    FOLDER/ann/journal.jsonl     {"key": "4b1c...", "critique": "It was a phone.", "spans": [...], "done": true}
    FOLDER/ann/annotated.jsonl   the records of `t2g.feedback.records`, in the order of the data
"""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from t2g.errors import UserError
from t2g.feedback.parse import MAX_ANSWER_CHARS, MAX_QUOTES, make_feedback
from t2g.feedback.records import AnnotatedRecord, make_annotated_record, write_annotated
from t2g.feedback.sources.votes import kappa, label_characters
from t2g.loop.annotation import Sample
from t2g.report.segments import printable
from t2g.runs.journal import Journal, read_journal
from t2g.types import Span

JOURNAL_FILE, RECORDS_FILE = "journal.jsonl", "annotated.jsonl"


class Mark(BaseModel):
    """What somebody has said of a response by now."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str = ""  # of `Sample`
    critique: str = Field("", max_length=MAX_ANSWER_CHARS)
    spans: tuple[Span, ...] = Field((), max_length=MAX_QUOTES)
    done: bool = False  # finished: it becomes a record
    version: int = Field(0, ge=0)  # changes of this response so far; sent with a change: those that the page knew


class StaleMark(ValueError):
    """A change of a version that is not the latest: another page changed the response in between."""


class Marks:
    """The responses of `samples` that can be judged, each once, and what `by` says of them. Several threads may ask."""

    def __init__(self, folder: Path, by: str, samples: Sequence[Sample]) -> None:
        """UserError for data without a response, and for a journal that is none."""
        self.samples = list({sample.key: sample for sample in samples if not sample.problem}.values())
        if not self.samples:
            raise UserError(f"no record can be judged; {samples[0].problem}")
        self.by, self._all, self._folder = by, folder, folder / by
        self._folder.mkdir(parents=True, exist_ok=True)
        self._marks = self._said_by(by)
        self._journal, self._lock = Journal(self._folder / JOURNAL_FILE), Lock()
        done = (place for place, finished in enumerate(self.finished) if finished)
        self._records = {place: self._record(place, self[place]) for place in done}
        self._write()

    def __getitem__(self, place: int) -> Mark:
        key = self.samples[place].key
        return self._marks.get(key, Mark(key=key))

    def put(self, place: int, mark: Mark) -> int:
        """Write a change to the disk and return its version.

        Raises:
            StaleMark: `mark.version` is not the version that `self[place]` has.
            ValueError: the mark does not fit the response.
            UserError: the disk is full.
        """
        mark = mark.model_copy(update={"key": self.samples[place].key, "version": mark.version + 1})
        if mark.done and not mark.critique.strip():  # no source of feedback would take it
            raise ValueError("a critique is missing: what is right, what is wrong?")
        record = self._record(place, mark)
        with self._lock:
            if mark.version != self[place].version + 1:
                raise StaleMark("another tab changed this response: reload this page; its last change is not saved")
            self._journal.append(mark)
            self._journal.sync()
            self._marks[mark.key] = mark
            before = self._records.pop(place, None)
            if mark.done:
                self._records[place] = record
            if mark.done or before:
                self._write()
        return mark.version

    @property
    def finished(self) -> list[bool]:
        return [self[place].done for place in range(len(self.samples))]

    def agreement_messages(self) -> list[str]:
        """Return a sentence for each other person who finished some of the same responses, or has a broken journal."""
        messages = []
        for other in sorted({file.parent.name for file in self._all.glob(f"*/{JOURNAL_FILE}")} - {self.by}):
            try:
                messages += [found] if (found := self._agreement(other)) else []
            except (UserError, OSError) as error:
                messages.append(f"with {other}: not compared, because {error}")
        return [printable(message) for message in messages]

    def close(self) -> None:
        with self._lock:
            self._journal.close()

    def _agreement(self, other: str) -> str | None:
        """Return a sentence on the labels of the characters that are not blank of the responses that both finished.

        None without such a response. UserError for a journal with a broken line.
        """
        theirs = self._said_by(other)
        pairs = [
            [_labels(sample.response or "", mark.spans) for mark in (mine, theirs[sample.key])]
            for sample, mine in ((sample, self[place]) for place, sample in enumerate(self.samples))
            if mine.done and sample.key in theirs and theirs[sample.key].done
        ]
        if not pairs:
            return None
        a, b = (np.concatenate(labels) for labels in zip(*pairs, strict=True))
        by_kappa = kappa(a, b)
        chance = "" if by_kappa is None else f", kappa {by_kappa:.2f}"
        return (
            f"with {other}: {len(pairs)} responses that both marked, the same label on {np.mean(a == b):.0%} "
            f"of {len(a)} characters{chance}"
        )

    def _said_by(self, name: str) -> dict[str, Mark]:
        return {mark.key: mark for mark in read_journal(self._all / name / JOURNAL_FILE, Mark)}

    def _record(self, place: int, mark: Mark) -> AnnotatedRecord:
        sample, sides = self.samples[place], {1: list[Any](), -1: list[Any]()}
        response = sample.response or ""
        for span in mark.spans:
            sides[span.label].append(span)
        said = make_feedback(mark.critique, sides[1], sides[-1], response, source="human", version=self.by)
        if said.num_located < said.num_quotes:
            raise ValueError(f"a span is blank, or not within the {len(response)} characters of the response")
        return make_annotated_record(sample.prompt, response, said, sample_index=sample.sample_index)

    def _write(self) -> None:
        write_annotated(self._folder / RECORDS_FILE, [record for _, record in sorted(self._records.items())])


def _labels(response: str, spans: Sequence[Span]) -> np.ndarray:
    written = np.array([not character.isspace() for character in response], bool)
    return label_characters(spans, len(response))[written]
