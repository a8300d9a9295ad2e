"""Annotated records: what stage 1 writes and stage 2 learns from. JSON lines, one judged response each.

    {"prompt_id": "7", "prompt": "I bought a phone ...", "response": "about a laptop.", "critique": "The thing is ...",
     "good": [], "poor": ["laptop"],
     "spans": [{"start": 8, "end": 14, "label": -1, "severity": 1, "critique_range": null}],
     "status": "ok", "reason": "", "source": "program", "version": "my_pkg.feedback:judge", "execution": {},
     "agreement": null, "num_quotes": 1, "num_located": 1, "task": "prompts", "sample_index": 0,
     "payload": {"facts": {"thing": "phone"}}}

prompt, response and critique are needed. Spans are what counts: the quotes of a record without any are located when
it is read, and its quotes are then those of its spans. Files that others published are read as they are
(`t2g.data.published`).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from t2g.config import DataConfig, StyleConfig
from t2g.config.validation_errors import format_first_error
from t2g.data.load import load_records
from t2g.data.published import translate_row
from t2g.errors import UserError
from t2g.feedback.parse import Quote, format_answer, make_feedback, make_quote
from t2g.files import write_atomic
from t2g.tasks.base import SPARSE, Task, stable_id
from t2g.text.quotes import locate
from t2g.types import LABELS, USABLE, FeedbackStatus, Prompt, Span, SpanFeedback

logger = logging.getLogger(__name__)


class AnnotatedRecord(BaseModel):
    """One judged response."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_id: str
    prompt: str  # as the feedback source saw it
    response: str
    critique: str
    good: tuple[Quote, ...] = ()
    poor: tuple[Quote, ...] = ()
    spans: tuple[Span, ...] = ()
    status: FeedbackStatus = "ok"
    reason: str = ""  # why the status is failed or unparsable
    source: str = "human"
    version: str = ""
    execution: dict[str, Any] = {}  # what a program found
    agreement: float | None = None  # mean pairwise F1 of several annotators' labels
    num_quotes: int = 0  # quotes that the source gave; 0 where it is not known
    num_located: int = 0  # quotes that stand in the response
    task: str = ""
    sample_index: int = Field(0, ge=0)
    payload: dict[str, Any] = {}

    @model_validator(mode="after")
    def _spans_lie_in_the_response(self) -> "AnnotatedRecord":
        for i, span in enumerate(self.spans):
            if not 0 <= span.start < span.end <= len(self.response):
                raise ValueError(f"spans[{i}] is [{span.start}, {span.end}) of {len(self.response)} characters")
        return self

    @property
    def usable(self) -> bool:
        """As `SpanFeedback.usable`."""
        return self.status in USABLE

    def to_prompt(self) -> Prompt:
        """The prompt that the reward model's prompt is built from; the policy's ids are not known here."""
        return Prompt(prompt_id=self.prompt_id, prompt_text=self.prompt, task=self.task, payload=self.payload)

    def to_feedback(self) -> SpanFeedback:
        return SpanFeedback(**{field.name: getattr(self, field.name) for field in fields(SpanFeedback)})

    def target(self, style: StyleConfig = SPARSE) -> str:
        """The answer that the reward model learns to write: the critique where the style has one, then the quotes."""
        return format_answer(self.critique, self.good, self.poor, style=style)


def make_annotated_record(
    prompt: Prompt, response_text: str, feedback: SpanFeedback, *, sample_index: int = 0
) -> AnnotatedRecord:
    """The record of one judged response; the quotes are what the spans cover."""
    reason = feedback.reason.encode(errors="replace").decode()  # it may repeat halves of characters
    return AnnotatedRecord(
        prompt_id=prompt.prompt_id, prompt=prompt.prompt_text, response=response_text,
        **vars(feedback) | {"reason": reason}, **_quotes_of(response_text, feedback.spans),
        task=prompt.task, sample_index=sample_index, payload=prompt.payload,
    )  # fmt: skip


def _quotes_of(response: str, spans: Iterable[Span]) -> dict[str, tuple[Quote, ...]]:
    """Fields good and poor: the pieces of the response that the spans cover."""
    quotes = [(span.label, make_quote(response, span)) for span in spans]
    return {name: tuple(quote for of, quote in quotes if of == label) for name, label in LABELS.items()}


def read_record(
    row: Mapping[str, Any], task: Task | None = None, *, on_flaw: Callable[[str], None] = lambda flaw: None
) -> AnnotatedRecord:
    """A record from one row of a file, unknown fields in the payload. ValueError in a sentence for a broken row.

    task: words the prompt of a row that has a post or a question in place of one, as in annotation and RL.
    on_flaw: hears of quotes that are empty or do not stand in the response, which are left out, and of spans that
    overlap or are blank, which stay; a sentence each.
    """
    given, extra = translate_row(row, AnnotatedRecord.model_fields)
    if task is not None and row.get("prompt") is None:
        given["prompt"] = task.prompt_text(row)
    payload = given.get("payload", {})
    if not isinstance(payload, Mapping):
        raise ValueError(f"field payload is {payload!r:.80}; it needs to be an object")
    given["payload"] = {**extra, **payload}
    given["prompt_id"] = str(given["prompt_id"]) if "prompt_id" in given else stable_id(str(given.get("prompt")))
    try:
        record = AnnotatedRecord.model_validate(given)
    except ValidationError as error:
        raise ValueError(f"field {format_first_error(error)}") from error
    quotes = (*record.good, *record.poor)
    if "status" not in given and not (record.critique.strip() or quotes or record.spans):
        raise ValueError("has no feedback: the critique is empty, and there are neither quotes nor spans")
    spans, counts = record.spans, {}
    if quotes and not record.spans:
        said = make_feedback(record.critique, record.good, record.poor, record.response, source="", version="")
        spans = said.spans
        counts = {"num_quotes": said.num_quotes, "num_located": said.num_located}
    elif record.num_quotes == 0:  # not known
        counts = dict.fromkeys(("num_quotes", "num_located"), len(spans))
    status = given.get("status", "ok" if spans else "empty")
    update = {"spans": spans, "status": status, **counts, **_quotes_of(record.response, spans)}
    for flaw in _flaws(() if record.spans else quotes, spans, record.response):
        on_flaw(flaw)
    return record.model_copy(update=update)


def _flaws(quotes: Sequence[Quote], spans: Sequence[Span], response: str) -> Iterator[str]:
    for quote in quotes:
        if not quote.quote.strip():
            yield "a quote is empty"
        elif locate(response, quote.quote, quote.occurrence) is None:
            often = f" {quote.occurrence} times" if quote.occurrence > 1 else ""
            yield f"the quote {quote.quote!r:.80} does not stand{often} in the response"
    reached: Span | None = None
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        if response[span.start : span.end].isspace():
            yield f"the span [{span.start}, {span.end}) is blank"
        if reached is not None and span.start < reached.end:
            yield f"the spans [{reached.start}, {reached.end}) and [{span.start}, {span.end}) overlap"
        if reached is None or span.end > reached.end:
            reached = span


def load_annotated(config: DataConfig, task: Task | None = None) -> list[AnnotatedRecord]:
    """The annotated records of a data file.

    Records that are broken are left out, and they and the flaws of others (see `read_record`) are counted and named by
    the number of the record (from 1) in a warning. UserError when no record is left.
    """
    records = []
    flaws: list[str] = []
    broken: list[str] = []
    for number, row in enumerate(load_records(config), start=1):
        try:
            found: list[str] = []
            records.append(read_record(row, task, on_flaw=found.append))
            flaws += [f"record {number}: {flaw}" for flaw in found]
        except ValueError as error:
            broken.append(f"record {number}: {error}")
    if not records:
        raise UserError(f"{config.path}: none of its {len(broken)} records can be used; {broken[0]}")
    for what, sentences in (("records are left out", broken), ("flaws", flaws)):
        if sentences:
            logger.warning("%s: %d %s; %s", config.path, len(sentences), what, "; ".join(shorten_list(sentences)))
    return records


def shorten_list(items: list[str]) -> list[str]:
    """What a message names of `items`: the first five, and how many more there are."""
    return items if len(items) <= 5 else [*items[:5], f"and {len(items) - 5} more"]


def write_annotated(path: Path, records: Iterable[AnnotatedRecord]) -> None:
    """Write a file that `load_annotated` reads back as it was, whole or not at all."""
    write_atomic(path, "".join(f"{record.model_dump_json()}\n" for record in records).encode())
