"""Annotated records: what stage 1 writes and stage 2 learns from. JSON lines, one judged response each.

    {"prompt_id": "7", "prompt": "I bought a phone ...", "response": "about a laptop.", "critique": "The thing is ...",
     "good": [], "poor": ["laptop"],
     "spans": [{"start": 8, "end": 14, "label": -1, "severity": 1, "critique_range": null}],
     "status": "ok", "reason": "", "source": "program", "version": "my_pkg.critics:critic", "outcome": {},
     "agreement": null, "num_quotes": 1, "num_located": 1, "task": "prompts", "sample_index": 0,
     "payload": {"facts": {"thing": "phone"}}}

prompt, response and critique are needed; quotes without `spans` are located when the record is read, and `spans`
without quotes are quoted. Files that others published are read as they are (`t2g.data.published`).
"""

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from t2g.config import DataConfig, StyleConfig
from t2g.data.load import load_records
from t2g.data.published import translate
from t2g.errors import UserError
from t2g.feedback.parse import format_answer, make_feedback
from t2g.files import write_atomic
from t2g.tasks.base import SPARSE, Task, stable_id
from t2g.text.quotes import occurrence_at
from t2g.types import USABLE, FeedbackStatus, Prompt, Span, SpanFeedback

logger = logging.getLogger(__name__)


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class QuoteRecord(_Frozen):
    """A quote that is not the first of its kind in the response, or weighs more than others."""

    quote: str
    occurrence: int = Field(1, ge=1)
    severity: int = Field(1, ge=1, le=3)


class AnnotatedRecord(_Frozen):
    """One judged response."""

    prompt_id: str
    prompt: str  # as the feedback source saw it
    response: str
    critique: str
    good: tuple[str | QuoteRecord, ...] = ()
    poor: tuple[str | QuoteRecord, ...] = ()
    spans: tuple[Span, ...] | None = None  # none: located from the quotes
    status: FeedbackStatus = "ok"
    reason: str = ""  # why the status is failed or unparsable
    source: str = "human"
    version: str = ""
    outcome: dict[str, Any] = {}  # what a program found
    agreement: float | None = None  # of several annotators
    num_quotes: int = 0  # quotes that the source gave; 0 where it is not known
    num_located: int = 0  # of these, found in the response
    task: str = ""
    sample_index: int = Field(0, ge=0)
    payload: dict[str, Any] = {}

    @model_validator(mode="after")
    def _spans_lie_in_the_response(self) -> "AnnotatedRecord":
        for i, span in enumerate(self.spans or ()):
            if not 0 <= span.start < span.end <= len(self.response):
                raise ValueError(f"spans[{i}] is [{span.start}, {span.end}) of {len(self.response)} characters")
            if span.severity not in (1, 2, 3):
                raise ValueError(f"spans[{i}] has severity {span.severity}; it must be 1, 2 or 3")
        return self

    @property
    def usable(self) -> bool:
        """As `SpanFeedback.usable`."""
        return self.status in USABLE

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
        said = {field.name: getattr(self, field.name) for field in dataclasses.fields(SpanFeedback)}
        if self.num_quotes == 0:  # not known
            count = len(self.good) + len(self.poor)
            said |= {"num_quotes": count, "num_located": min(count, len(self.spans))}
        return SpanFeedback(**said)

    def _quotes(self) -> list[list[str | dict[str, Any]]]:
        return [[q if isinstance(q, str) else q.model_dump() for q in side] for side in (self.good, self.poor)]

    def target(self, style: StyleConfig = SPARSE) -> str:
        """The answer that the reward model learns to write: the critique where the style has one, then the quotes."""
        return format_answer(self.critique, *self._quotes(), style=style)

    def line(self) -> str:
        """The record as one line of JSON with every field, line end included."""
        return self.model_dump_json() + "\n"


def annotated_record(
    prompt: Prompt, response_text: str, feedback: SpanFeedback, *, sample_index: int = 0
) -> AnnotatedRecord:
    """The record of one judged response; the quotes are what the spans cover."""
    reason = feedback.reason.encode(errors="replace").decode()  # it may repeat halves of characters
    return AnnotatedRecord(
        prompt_id=prompt.prompt_id, prompt=prompt.prompt_text, response=response_text,
        **vars(feedback) | {"reason": reason}, **_quotes_of(response_text, feedback.spans),
        task=prompt.task, sample_index=sample_index, payload=prompt.payload,
    )  # fmt: skip


def _quotes_of(response: str, spans: Iterable[Span]) -> dict[str, Any]:
    """Fields good and poor: the pieces of the response that the spans cover."""
    pieces = [(span.label, _quote(response, span)) for span in spans]
    return {name: tuple(q for of, q in pieces if of == label) for name, label in (("good", 1), ("poor", -1))}


def _quote(response: str, span: Span) -> str | QuoteRecord:
    text = response[span.start : span.end]
    occurrence = occurrence_at(response, text, span.start)
    if occurrence == 1 and span.severity == 1:
        return text
    return QuoteRecord(quote=text, occurrence=occurrence, severity=span.severity)


def read_record(row: Mapping[str, Any], task: Task | None = None) -> AnnotatedRecord:
    """A record from one row of a file, unknown fields in the payload. ValueError in a sentence for a broken one.

    task: words the prompt of a row that has a post or a question in place of one, as in annotation and RL.
    """
    fields, extra = translate(row, AnnotatedRecord.model_fields)
    if task is not None and row.get("prompt") is None:
        fields["prompt"] = task.prompt_text(row)
    payload = fields.get("payload", {})
    if not isinstance(payload, Mapping):
        raise ValueError(f"field payload is {payload!r:.80}; it needs to be an object")
    fields["payload"] = {**extra, **payload}
    fields["prompt_id"] = str(fields["prompt_id"]) if "prompt_id" in fields else stable_id(str(fields.get("prompt")))
    try:
        record = AnnotatedRecord.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "spans"
        raise ValueError(f"field {where}: {first['msg'].removeprefix('Value error, ')}") from error
    quotes = (*record.good, *record.poor)
    if "status" not in fields and not (record.critique.strip() or quotes or record.spans):
        raise ValueError("has no feedback: the critique is empty, and there are neither quotes nor spans")
    if record.spans and not quotes:
        return record.model_copy(update=_quotes_of(record.response, record.spans))
    return record


def load_annotated(config: DataConfig, task: Task | None = None) -> list[AnnotatedRecord]:
    """The annotated records of a data file, each with its spans and with quotes that stand in the response.

    Records that are broken, quotes that are empty or do not stand in the response are left out, counted and named by
    the number of the record (from 1) in a warning, and so are records with overlapping spans, which stay.
    UserError when no record is left.
    """
    records = []
    flaws: dict[str, list[int]] = defaultdict(list)
    broken: list[str] = []
    for number, row in enumerate(load_records(config), start=1):
        try:
            record = read_record(row, task)
        except ValueError as error:
            broken.append(f"record {number}: {error}")
            continue
        for flaw in _flaws(record):
            flaws[flaw].append(number)
        if record.spans is None:
            record = _with_spans(record)
        records.append(record)
    if not records:
        raise UserError(f"{config.path}: none of its {len(broken)} records can be used; {broken[0]}")
    if broken:
        logger.warning("%s: %d records are left out; %s", config.path, len(broken), "; ".join(first_few(broken)))
    for flaw, numbers in flaws.items():
        where = ", ".join(first_few([str(number) for number in dict.fromkeys(numbers)]))
        logger.warning("%s: %d %s, in the records %s", config.path, len(numbers), flaw, where)
    return records


def _with_spans(record: AnnotatedRecord) -> AnnotatedRecord:
    """The record with the spans that its quotes have, and no quotes but those of its spans."""
    feedback = record.to_feedback()
    counts = {"num_quotes": feedback.num_quotes, "num_located": feedback.num_located}
    quotes = _quotes_of(record.response, feedback.spans)
    return record.model_copy(update=counts | quotes | {"spans": feedback.spans})


def _flaws(record: AnnotatedRecord) -> list[str]:
    """One entry for each quote of no use and each overlap of a record's spans."""
    feedback = record.to_feedback()
    empty = lost = 0
    if record.spans is None:
        texts = [quote if isinstance(quote, str) else quote.quote for quote in (*record.good, *record.poor)]
        empty = sum(not text.strip() for text in texts)
        lost = feedback.num_quotes - feedback.num_located - empty
    places = sorted((span.start, span.end) for span in feedback.spans)
    reached = accumulate((end for _, end in places), max)
    overlaps = sum(start < before for (start, _), before in zip(places[1:], reached, strict=False))
    return (
        ["empty quotes are left out"] * empty
        + ["quotes do not stand in their response and are left out"] * lost
        + ["spans overlap another one"] * overlaps
    )


def first_few(items: list[str]) -> list[str]:
    """What a message names of `items`: the first five, and how many more there are."""
    return items if len(items) <= 5 else [*items[:5], f"and {len(items) - 5} more"]


def write_annotated(path: Path, records: Iterable[AnnotatedRecord]) -> None:
    """Write a file that `load_annotated` reads back as it was, whole or not at all."""
    write_atomic(path, "".join(record.line() for record in records).encode())
