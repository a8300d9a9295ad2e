"""Annotated records, written by annotation and read by reward model training: JSON lines, one judged response each.

    {"prompt_id": "7", "prompt": "I bought a phone ...", "response": "about a laptop.", "critique": "The thing is ...",
     "good": [], "poor": ["laptop"],
     "spans": [{"start": 8, "end": 14, "label": -1, "severity": 1, "critique_range": null}],
     "status": "ok", "reason": "", "source": "program", "version": "my_pkg.feedback:judge", "execution": {},
     "agreement": null, "num_quotes": 1, "num_located": 1, "task": "prompts", "sample_index": 0,
     "payload": {"facts": {"thing": "phone"}}}

prompt, response and critique are required. Spans have priority over quotes: `read_record` locates the quotes of a
record without spans, and sets the quotes to those of the spans. `t2g.data.published` reads published data sets.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from t2g.config import DataConfig, StyleConfig
from t2g.config.feedback import OffsetUnit
from t2g.config.validation_errors import format_first_error
from t2g.data.load import load_records
from t2g.data.published import LABEL_FIELDS, translate_row
from t2g.errors import UserError
from t2g.feedback.given_spans import NO_LABELS, read_spans
from t2g.feedback.parse import Quote, format_answer, make_feedback, make_quote, replace_surrogates
from t2g.files import write_atomic
from t2g.tasks.base import SPARSE, Task, describe_record, format_id, stable_id
from t2g.text.quotes import locate
from t2g.types import USABLE, CriterionResult, FeedbackStatus, Prompt, Span, SpanFeedback

MIN_LEARNED_CONFIDENCE = 0.5  # a less likely span is rather wrong than right
# Fields whose names other programs use as well, and their types here.
_TYPES_OF_SHARED_FIELDS = {"source": str, "version": str, "task": str, "execution": dict}

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
    reason: str = ""  # why it is failed or unparsable, or was not judged
    source: str = "human"
    version: str = ""
    execution: dict[str, Any] = {}  # results of a program
    # A feedback function's own numbers; no line has an empty one.
    metrics: dict[str, FiniteFloat] = Field({}, exclude_if=lambda metrics: not metrics)
    agreement: FiniteFloat | None = None  # mean pairwise F1 of several annotators' labels
    num_quotes: int = 0  # quotes from the source; 0: unknown
    num_located: int = 0  # quotes that occur in the response
    task: str = ""
    sample_index: int = Field(0, ge=0)
    payload: dict[str, Any] = {}
    data_file: str = Field("", exclude_if=lambda name: not name)  # base name of the input's file
    criteria: dict[str, CriterionResult] = Field({}, exclude_if=lambda criteria: not criteria)

    @model_validator(mode="after")
    def check_spans_are_in_the_response(self) -> "AnnotatedRecord":
        for index, span in enumerate(self.spans):
            if not 0 <= span.start < span.end <= len(self.response):
                raise ValueError(f"spans[{index}] is [{span.start}, {span.end}) of {len(self.response)} characters")
        return self

    @property
    def usable(self) -> bool:
        """Return whether the record can be trained on, as `SpanFeedback.usable`."""
        return self.status in USABLE

    def to_prompt(self) -> Prompt:
        """Return the prompt without the policy's token ids, which the record does not contain."""
        return Prompt(
            prompt_id=self.prompt_id,
            prompt_text=self.prompt,
            task=self.task,
            payload=self.payload,
            data_file=self.data_file,
        )

    def to_feedback(self) -> SpanFeedback:
        names = [field.name for field in fields(SpanFeedback) if field.name != "outcomes"]
        return SpanFeedback(**{name: getattr(self, name) for name in names})

    def target(self, style: StyleConfig = SPARSE) -> str:
        """Return the reward model's target: the critique if the style has one, then the quotes, without confidences."""
        return format_answer(self.critique, self.good, self.poor, style=style)


def make_annotated_record(
    prompt: Prompt, response_text: str, feedback: SpanFeedback, *, sample_index: int = 0
) -> AnnotatedRecord:
    """Return the record of one judged response, with the quotes of its spans."""
    values = dict(vars(feedback))
    del values["outcomes"]
    values["reason"] = replace_surrogates(feedback.reason)  # a user's source may write anything
    values |= _make_quotes(response_text, feedback.spans)
    return AnnotatedRecord(
        prompt_id=prompt.prompt_id,
        prompt=prompt.prompt_text,
        response=response_text,
        task=prompt.task,
        sample_index=sample_index,
        payload=prompt.payload,
        data_file=prompt.data_file,
        **values,
    )


def _make_quotes(response: str, spans: Iterable[Span]) -> dict[str, tuple[Quote, ...]]:
    """Return the fields good and poor: the quotes of the spans."""
    good: list[Quote] = []
    poor: list[Quote] = []
    for span in spans:
        quotes = good if span.label == 1 else poor
        quotes.append(make_quote(response, span))
    return {"good": tuple(good), "poor": tuple(poor)}


def read_record(
    row: Mapping[str, Any],
    task: Task | None = None,
    *,
    offsets: OffsetUnit = "characters",
    labels: Mapping[str, str] = NO_LABELS,
    on_flaw: Callable[[str], None] = lambda flaw: None,
) -> AnnotatedRecord:
    """Return the record of one row of a file, with unknown fields in the payload.

    Args:
        task: Makes the prompt of a row that has, for example, a post instead of a prompt.
        offsets, labels: See `read_spans`.
        on_flaw: Receives a sentence for each quote that is empty or does not occur in the response, which is left out,
            and for each span that overlaps another or is blank, which is kept.

    Raises:
        ValueError: The row is invalid.
    """
    values = _read_values(row, task, offsets, labels)
    try:
        record = AnnotatedRecord.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"field {format_first_error(error)}") from error

    quotes = (*record.good, *record.poor)
    has_feedback = bool(record.critique.strip() or quotes or record.spans)
    has_status = "status" in values
    if not has_status and not has_feedback:
        raise ValueError("has no feedback: the critique is empty, and there are neither quotes nor spans")

    spans = record.spans
    update: dict[str, Any] = {}
    if quotes and not record.spans:
        feedback = make_feedback(record.critique, record.good, record.poor, record.response, source="", version="")
        spans = feedback.spans
        update["num_quotes"] = feedback.num_quotes
        update["num_located"] = feedback.num_located
        if not feedback.usable and record.usable:  # all quotes are lost
            update["status"] = feedback.status
            update["reason"] = feedback.reason
    elif record.num_quotes == 0:  # unknown
        update["num_quotes"] = len(spans)
        update["num_located"] = len(spans)
    if not has_status:
        update.setdefault("status", "ok" if spans else "empty")
    update["spans"] = spans
    update |= _make_quotes(record.response, spans)

    located_quotes = () if record.spans else quotes
    for flaw in _find_flaws(located_quotes, spans, record.response):
        on_flaw(flaw)
    return record.model_copy(update=update)


def _read_values(
    row: Mapping[str, Any], task: Task | None, offsets: OffsetUnit, labels: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of the record's fields, which are not validated yet."""
    row = parse_cells(row)
    values, extra = translate_row(row, AnnotatedRecord.model_fields)
    if "sample_index" not in row:  # every record that t2g has written has it
        extra |= _pop_foreign_fields(values)
    if task is not None and not isinstance(row.get("prompt"), str):
        values["prompt"] = task.prompt_text(row)

    spans = values.get("spans")
    response = values.get("response")
    if isinstance(spans, list | tuple) and isinstance(response, str):
        values["spans"] = read_spans(list(spans), response, offsets=offsets, labels=labels)

    payload = values.get("payload", {})
    if not isinstance(payload, Mapping):
        raise ValueError(f"field payload is {payload!r:.80}; it needs to be an object")
    values["payload"] = {**extra, **payload}

    prompt_id = format_id(values.get("prompt_id"))
    if prompt_id is None:
        prompt = str(values.get("prompt"))
        prompt_id = stable_id(prompt)
    values["prompt_id"] = prompt_id
    return values


def _pop_foreign_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Remove and return the fields that another program uses for something else, such as a version 3.

    A status, reason, metrics or criteria of another type stays, and is refused: it may be a wrong judgement.
    """
    foreign: dict[str, Any] = {}
    for name, kind in _TYPES_OF_SHARED_FIELDS.items():
        if name in values and not isinstance(values[name], kind):
            foreign[name] = values.pop(name)
    return foreign


def parse_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with the lists that a cell of a CSV has in JSON.

    Raises:
        ValueError: A text of good, poor or spans is no JSON.
    """
    values = dict(row)
    for name in LABEL_FIELDS:
        cell = row.get(name)
        if not isinstance(cell, str):
            continue
        try:
            values[name] = json.loads(cell)
        except (ValueError, RecursionError):
            raise ValueError(f"field {name} is {cell!r:.80}; it needs to be a list in JSON") from None
    return values


def _find_flaws(quotes: Sequence[Quote], spans: Sequence[Span], response: str) -> Iterator[str]:
    for quote in quotes:
        if not quote.quote.strip():
            yield "a quote is empty"
        elif locate(response, quote.quote, quote.occurrence) is None:
            times = ""
            if quote.occurrence > 1:
                times = f" {quote.occurrence} times"
            yield f"the quote {quote.quote!r:.80} does not occur{times} in the response"
    previous: Span | None = None  # the earlier span that ends last
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        if response[span.start : span.end].isspace():
            yield f"the span [{span.start}, {span.end}) is blank"
        if previous is not None and span.start < previous.end:
            yield f"the spans [{previous.start}, {previous.end}) and [{span.start}, {span.end}) overlap"
        if previous is None or span.end > previous.end:
            previous = span


def load_annotated(config: DataConfig, task: Task | None = None) -> list[AnnotatedRecord]:
    """Return the annotated records of a data file.

    Invalid records are left out. Warnings list them and the flaws of others (see `read_record`) with the number of the
    record (from 1).

    Raises:
        UserError: No record is left.
    """
    records: list[AnnotatedRecord] = []
    flaws: list[str] = []
    invalid: list[str] = []
    for number, row in enumerate(load_records(config), start=1):
        record_flaws: list[str] = []
        try:
            record = read_record(row, task, on_flaw=record_flaws.append)
        except ValueError as error:
            invalid.append(f"{describe_record(row, number, '')}: {error}")
            continue
        records.append(record)
        flaws += [f"{describe_record(row, number, '')}: {flaw}" for flaw in record_flaws]
    if not records:
        raise UserError(f"{config.name}: none of its {len(invalid)} records can be used; {invalid[0]}")

    for kind, sentences in (("records are left out", invalid), ("flaws", flaws)):
        if sentences:
            shortened = "; ".join(shorten_list(sentences))
            logger.warning("%s: %d %s; %s", config.name, len(sentences), kind, shortened)
    return records


def shorten_list(items: list[str]) -> list[str]:
    """Return the first five of `items`, and the number of the others, for a message."""
    if len(items) <= 5:
        return items
    return [*items[:5], f"and {len(items) - 5} more"]


def select_criterion(records: Sequence[AnnotatedRecord], criterion: str | None, path: str) -> list[AnnotatedRecord]:
    """Return the records with the feedback of one criterion, without those that lack it.

    Records of a single feedback source are returned as they are.

    Raises:
        UserError: The records of several criteria need a name, or no record has the criterion.
    """
    names: dict[str, None] = {}
    for record in records:
        names |= dict.fromkeys(record.criteria)
    if not names:
        if criterion is not None:
            raise UserError(f"{path}: its records have no criteria, and criterion is {criterion}; remove criterion")
        return list(records)
    if criterion not in names:
        raise UserError(
            f"{path}: its records have the criteria {', '.join(names)}, and criterion is {criterion}; set criterion to "
            "one of them"
        )
    selected = [_keep_criterion(record, criterion) for record in records if criterion in record.criteria]
    num_lacking = len(records) - len(selected)
    if num_lacking:
        logger.warning(
            "%s: %d of %d records lack criterion %s and are left out", path, num_lacking, len(records), criterion
        )
    return selected


def _keep_criterion(record: AnnotatedRecord, criterion: str) -> AnnotatedRecord:
    result = record.criteria[criterion]
    start, end = result.critique_range
    criterion_spans = [span for span in record.spans if span.criterion == criterion]
    spans = tuple(_shift_critique_range(span, -start) for span in criterion_spans)
    status = "empty" if result.usable and not spans else result.status
    changes = {"critique": record.critique[start:end], "spans": spans, "status": status, "criteria": {}}
    quotes = _make_quotes(record.response, spans)
    return record.model_copy(update=changes | quotes)


def _shift_critique_range(span: Span, distance: int) -> Span:
    if not span.critique_range:
        return span
    start, end = span.critique_range
    return replace(span, critique_range=(start + distance, end + distance))


def keep_likely_spans(record: AnnotatedRecord) -> AnnotatedRecord:
    """Return the record that a reward model learns: without the spans whose confidence is below MIN_LEARNED_CONFIDENCE.

    The others lose their confidence, as a reward model writes none and each of its spans is paid in full.
    """
    if all(span.confidence == 1 for span in record.spans):
        return record
    likely = [span for span in record.spans if span.confidence >= MIN_LEARNED_CONFIDENCE]
    spans = tuple(replace(span, confidence=1.0) for span in likely)
    status = record.status if spans else "empty"
    quotes = _make_quotes(record.response, spans)
    return record.model_copy(update={"spans": spans, "status": status, **quotes})


def write_annotated(path: Path, records: Iterable[AnnotatedRecord]) -> None:
    """Write the records atomically to a file that `load_annotated` reads back unchanged."""
    lines = [f"{record.model_dump_json()}\n" for record in records]
    write_atomic(path, "".join(lines).encode())
