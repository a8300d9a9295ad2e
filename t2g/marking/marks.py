"""Store one person's marks: a journal with a line for each change, and the annotated records of finished responses.

The labels of two people can be compared.

    FOLDER/ann/journal.jsonl     {"key": "4b1c...", "critique": "It was a phone.", "spans": [...], "done": true}
    FOLDER/ann/annotated.jsonl   the records of `t2g.feedback.records`, in the order of the data
"""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from t2g.errors import UserError
from t2g.feedback.parse import MAX_ANSWER_CHARS, MAX_QUOTES, make_feedback
from t2g.feedback.records import AnnotatedRecord, make_annotated_record, write_annotated
from t2g.feedback.sources.votes import kappa, label_characters
from t2g.loop.annotation import Sample
from t2g.runs.journal import Journal, read_journal
from t2g.text.segments import printable
from t2g.types import Span

JOURNAL_FILE = "journal.jsonl"
RECORDS_FILE = "annotated.jsonl"


class Mark(BaseModel):
    """A person's annotation of a response."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str = ""  # key of the `Sample`
    critique: str = Field("", max_length=MAX_ANSWER_CHARS)
    spans: tuple[Span, ...] = Field((), max_length=MAX_QUOTES)
    done: bool = False  # finished: it becomes a record
    version: int = Field(0, ge=0)  # number of changes; in a request: the version that the page has loaded


class StaleMark(ValueError):
    """A change of an outdated version: another page has changed the mark since this page loaded it."""


class Marks:
    """The marks of the person `by` on the responses of `samples` that can be judged, each once. Thread-safe."""

    def __init__(self, folder: Path, by: str, samples: Sequence[Sample]) -> None:
        """Read the person's journal and write the annotated records.

        Raises:
            UserError: No sample has a response, or the journal is invalid.
        """
        by_key = {sample.key: sample for sample in samples if not sample.problem}
        self.samples = list(by_key.values())
        if not self.samples:
            raise UserError(f"no record can be judged; {samples[0].problem}")
        self.by = by
        self._root = folder
        self._folder = folder / by
        self._folder.mkdir(parents=True, exist_ok=True)
        self._marks = self._read_marks(by)
        self._journal = Journal(self._folder / JOURNAL_FILE)
        self._lock = Lock()
        self._records: dict[int, AnnotatedRecord] = {}
        for index, is_finished in enumerate(self.finished):
            if is_finished:
                self._records[index] = self._record(index, self[index])
        self._write()

    def __getitem__(self, index: int) -> Mark:
        key = self.samples[index].key
        return self._marks.get(key, Mark(key=key))

    def put(self, index: int, mark: Mark) -> int:
        """Write a change to the disk and return its version.

        Raises:
            StaleMark: `mark.version` is not the version of `self[index]`.
            ValueError: The mark does not fit the response.
            UserError: The disk is full.
        """
        mark = mark.model_copy(update={"key": self.samples[index].key, "version": mark.version + 1})
        if mark.done and not mark.critique.strip():  # training would reject the record
            raise ValueError("a critique is missing: what is right, what is wrong?")
        record = self._record(index, mark)
        with self._lock:
            stored = self[index]
            if mark.model_copy(update={"version": stored.version}) == stored:  # the disk was full behind the journal
                self._write()
                return stored.version
            if mark.version != stored.version + 1:
                raise StaleMark("another tab changed this response: reload this page; its last change is not saved")
            self._journal.append(mark)
            self._journal.sync()
            self._marks[mark.key] = mark
            before = self._records.pop(index, None)
            if mark.done:
                self._records[index] = record
            if mark.done or before:
                self._write()
        return mark.version

    @property
    def finished(self) -> list[bool]:
        return [self[index].done for index in range(len(self.samples))]

    def agreement_messages(self) -> list[str]:
        """Return a sentence for each other person who finished some of the same responses, or has a broken journal."""
        messages = []
        for person in sorted({file.parent.name for file in self._root.glob(f"*/{JOURNAL_FILE}")} - {self.by}):
            try:
                message = self._agreement(person)
            except (UserError, OSError) as error:
                message = f"with {person}: not compared, because {error}"
            if message:
                messages.append(message)
        return [printable(message) for message in messages]

    def close(self) -> None:
        with self._lock:
            self._journal.close()

    def _agreement(self, person: str) -> str | None:
        """Return a sentence on the agreement of the labels of non-blank characters, or None without common responses.

        Raises:
            UserError: The person's journal has a broken line.
        """
        marks = self._read_marks(person)
        own_labels: list[np.ndarray] = []
        other_labels: list[np.ndarray] = []
        for index, sample in enumerate(self.samples):
            mark = self[index]
            other = marks.get(sample.key)
            if mark.done and other is not None and other.done:
                response = sample.response or ""
                own_labels.append(_labels(response, mark.spans))
                other_labels.append(_labels(response, other.spans))
        if not own_labels:
            return None
        own_characters = np.concatenate(own_labels)
        other_characters = np.concatenate(other_labels)
        agreement = kappa(own_characters, other_characters)
        chance = "" if agreement is None else f", kappa {agreement:.2f}"
        share = np.mean(own_characters == other_characters)
        return (
            f"with {person}: {len(own_labels)} responses that both marked, the same label on {share:.0%} "
            f"of {len(own_characters)} characters{chance}"
        )

    def _read_marks(self, name: str) -> dict[str, Mark]:
        return {mark.key: mark for mark in read_journal(self._root / name / JOURNAL_FILE, Mark)}

    def _record(self, index: int, mark: Mark) -> AnnotatedRecord:
        sample = self.samples[index]
        response = sample.response or ""
        good = [span for span in mark.spans if span.label == 1]
        poor = [span for span in mark.spans if span.label == -1]
        feedback = make_feedback(mark.critique, good, poor, response, source="human", version=self.by)
        if feedback.num_located < feedback.num_quotes:
            raise ValueError(f"a span is blank, or not within the {len(response)} characters of the response")
        return make_annotated_record(sample.prompt, response, feedback, sample_index=sample.sample_index)

    def _write(self) -> None:
        in_order = [self._records[index] for index in sorted(self._records)]
        write_annotated(self._folder / RECORDS_FILE, in_order)


def _labels(response: str, spans: Sequence[Span]) -> np.ndarray:
    is_nonblank = np.array([not character.isspace() for character in response], bool)
    return label_characters(spans, len(response))[is_nonblank]
