"""Annotated records: what stage 1 writes and stage 2 learns from. JSON lines, one judged response each.

    {"prompt_id": "7", "prompt": "I bought a phone ...", "response": "about a laptop.", "critique": "The thing is ...",
     "good": [], "poor": ["laptop"], "spans": [{"start": 8, "end": 14, "label": -1}], "status": "ok",
     "source": "program", "version": "my_pkg.critics:critic", "payload": {"facts": {"thing": "phone"}}}

prompt, response and critique are needed; quotes without `spans` are located when the record is read.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from t2g.checkpoint import full_disk_in_words, write_atomic
from t2g.config import DataConfig
from t2g.data.load import load_records
from t2g.errors import UserError
from t2g.feedback.parse import format_answer, make_feedback
from t2g.tasks.base import stable_id
from t2g.types import FeedbackStatus, Prompt, Rollout, Span, SpanFeedback

# Names in the paper's published files, beside ours.
_ALIASES = {
    "id": "prompt_id",
    "post": "prompt",
    "Post": "prompt",
    "generated_summary": "response",
    "textual_feedback": "critique",
    "good_spans": "good",
    "poor_spans": "poor",
    "Good spans": "good",
    "Poor spans": "poor",
}


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class QuoteRecord(_Frozen):
    """A quote that is not the first of its kind in the response, or weighs more than others."""

    quote: str
    occurrence: int = Field(1, ge=1)
    severity: int = Field(1, ge=1, le=3)


class SpanRecord(_Frozen):
    start: int = Field(ge=0)  # half-open character range of the response
    end: int
    label: Literal[-1, 1]
    severity: int = Field(1, ge=1, le=3)
    critique_range: tuple[int, int] | None = None


class AnnotatedRecord(_Frozen):
    """One judged response."""

    prompt_id: str
    prompt: str  # as the feedback source saw it
    response: str
    critique: str
    good: tuple[str | QuoteRecord, ...] = ()
    poor: tuple[str | QuoteRecord, ...] = ()
    spans: tuple[SpanRecord, ...] | None = None  # none: located from the quotes
    status: FeedbackStatus = "ok"
    source: str = "human"
    version: str = ""
    task: str = ""
    sample_index: int = Field(0, ge=0)
    payload: dict[str, Any] = {}

    @model_validator(mode="after")
    def _spans_lie_in_the_response(self) -> "AnnotatedRecord":
        for i, span in enumerate(self.spans or ()):
            if not span.start < span.end <= len(self.response):
                raise ValueError(f"spans[{i}] is [{span.start}, {span.end}) of {len(self.response)} characters")
        return self

    def to_prompt(self) -> Prompt:
        """The prompt that the reward model's prompt is built from; the policy's ids are not known here."""
        return Prompt(
            prompt_id=self.prompt_id,
            prompt_ids=np.zeros(0, np.int32),
            prompt_text=self.prompt,
            task=self.task,
            payload=self.payload,
        )

    def to_feedback(self) -> SpanFeedback:
        """Critique and spans, located from the quotes where the record has no spans."""
        if self.spans is None:
            return make_feedback(
                self.critique, *self._quotes(), self.response, source=self.source, version=self.version
            )
        count = len(self.good) + len(self.poor)
        return SpanFeedback(
            critique=self.critique,
            spans=tuple(Span(**span.model_dump()) for span in self.spans),
            status=self.status,
            source=self.source,
            version=self.version,
            num_quotes=count,
            num_located=min(count, len(self.spans)),
        )

    def _quotes(self) -> list[list[str | dict[str, Any]]]:
        return [[q if isinstance(q, str) else q.model_dump() for q in side] for side in (self.good, self.poor)]

    def target(self) -> str:
        """The answer that the reward model learns to write: the critique, then the quotes."""
        return format_answer(self.critique, *self._quotes())

    def line(self) -> str:
        """The record as one line of JSON, line end included."""
        return self.model_dump_json(exclude_defaults=True) + "\n"


def annotated_record(prompt: Prompt, rollout: Rollout, feedback: SpanFeedback) -> AnnotatedRecord:
    """The record of one judged response; the quotes are what the spans cover."""
    quotes = {
        label: tuple(_quote(rollout.response_text, span) for span in feedback.spans if span.label == label)
        for label in (1, -1)
    }
    return AnnotatedRecord(
        prompt_id=prompt.prompt_id,
        prompt=prompt.prompt_text,
        response=rollout.response_text,
        critique=feedback.critique,
        good=quotes[1],
        poor=quotes[-1],
        spans=tuple(
            SpanRecord(start=s.start, end=s.end, label=s.label, severity=s.severity, critique_range=s.critique_range)
            for s in feedback.spans
        ),
        status=feedback.status,
        source=feedback.source,
        version=feedback.version,
        task=prompt.task,
        sample_index=rollout.sample_index,
        payload=prompt.payload,
    )


def _quote(response: str, span: Span) -> str | QuoteRecord:
    text = response[span.start : span.end]
    occurrence = sum(response.startswith(text, at) for at in range(span.start + 1))
    if occurrence == 1 and span.severity == 1:
        return text
    return QuoteRecord(quote=text, occurrence=occurrence, severity=span.severity)


def read_record(row: Mapping[str, Any]) -> AnnotatedRecord:
    """A record from one row of a file, unknown fields in the payload. ValueError in a sentence for a broken one."""
    fields: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, value in row.items():
        name = key if key in AnnotatedRecord.model_fields else _ALIASES.get(key)
        if name is None or name in fields:
            extra[key] = value
        elif value is not None:
            fields[name] = value
    fields["payload"] = {**extra, **(fields.get("payload") or {})}
    fields["prompt_id"] = str(fields["prompt_id"]) if "prompt_id" in fields else stable_id(str(fields.get("prompt")))
    try:
        return AnnotatedRecord.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "spans"
        raise ValueError(f"field {where}: {first['msg'].removeprefix('Value error, ')}") from error


def load_annotated(config: DataConfig) -> list[AnnotatedRecord]:
    """The annotated records of a data file. UserError with the number of the record for one that is broken."""
    records = []
    for number, row in enumerate(load_records(config), start=1):
        try:
            records.append(read_record(row))
        except ValueError as error:
            raise UserError(f"{config.path}, record {number}: {error}") from error
    return records


def write_annotated(path: Path, records: Iterable[AnnotatedRecord]) -> None:
    """Write a file that `load_annotated` reads back as it was, whole or not at all."""
    write_atomic(path, "".join(record.line() for record in records).encode())


def append_annotated(path: Path, record: AnnotatedRecord) -> None:
    """One more line, which survives the end of this process. UserError when the disk is full."""
    with full_disk_in_words(path), path.open("a", encoding="utf-8") as file:
        file.write(record.line())


def recover_annotated(path: Path) -> list[AnnotatedRecord]:
    """What `append_annotated` wrote before its process ended, without a last line that was cut off; [] for no file.

    UserError with the number of the line for any other line that is no record.
    """
    if not path.exists():
        return []
    *lines, _cut_off = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(read_record(json.loads(line)))
        except (ValueError, AttributeError) as error:
            raise UserError(f"{path}:{number} is no annotated record: {error}") from error
    return records
