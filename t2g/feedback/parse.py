"""Conversion between JSON answers and feedback. Answers are untrusted: bounded, and no answer raises.

    {"critique": "It says phone, which is wrong.", "good": ["by Ann"], "poor": [{"quote": "phone", "occurrence": 2}]}

A quote is a text, or an object with occurrence and severity where they are not 1. Without a critique
(`StyleConfig.critique` off) the answer is {"good": [...], "poor": [...]}. A feedback function's quote may have a
`confidence`, 0 to 1, and a poor one a `fix`, the text that should stand there; a reward model's answer has neither.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_serializer, model_validator

from t2g.config import StyleConfig
from t2g.config.validation_errors import format_first_error
from t2g.data.load import describe_unserializable
from t2g.feedback.judge_json import MAX_ANSWER_CHARS
from t2g.feedback.sentences import claim_sentence
from t2g.feedback.truncated_answers import load_truncated_object
from t2g.tasks.base import SPARSE
from t2g.text.quotes import find_occurrence, locate
from t2g.text.segments import printable
from t2g.types import (
    MAX_FIX_CHARS,
    Confidence,
    FeedbackStatus,
    FinishReason,
    Occurrence,
    Severity,
    Span,
    SpanFeedback,
)

MAX_QUOTES = 256  # quotes of each label that are located; further ones count as not located
MAX_METRICS = 32  # metrics of a judgement
AT_MAX_SPANS = "at_max_spans"  # metric of an answer
REQUIRED_KEYS = ("critique", "good", "poor")  # keys of a judgement as a dict
OPTIONAL_KEYS = ("execution", "metrics")
_SURROGATES = re.compile(r"[\ud800-\udfff]")
_SPAN = TypeAdapter(Span)
_METRIC_NAME = Annotated[str, Field(pattern=r"^[\w.-][\w./-]{0,63}$")]
_METRIC = Annotated[float, Field(allow_inf_nan=False)]
_METRICS = TypeAdapter(Annotated[dict[_METRIC_NAME, _METRIC], Field(max_length=MAX_METRICS)])


class Quote(BaseModel):
    """A quoted piece of the response. In JSON a plain text if the other fields have their defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    quote: str
    occurrence: Occurrence = 1  # 1: first occurrence in the response
    severity: Severity = 1
    confidence: Confidence = 1.0  # as `Span.confidence`
    fix: str | None = Field(None, max_length=MAX_FIX_CHARS)  # replacement of a poor piece, as `Span.fix`

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"quote": value}
        return value

    @model_serializer
    def _write_short(self) -> str | dict[str, Any]:
        values = dict(vars(self))
        del values["quote"]
        details = {name: value for name, value in values.items() if value not in (1, None)}
        if not details:
            return self.quote
        return {"quote": self.quote, **details}


def make_quote(response_text: str, span: Span) -> Quote:
    """Return the quote of a span."""
    text = response_text[span.start : span.end]
    occurrence = find_occurrence(response_text, text, span.start)
    return Quote(quote=text, occurrence=occurrence, severity=span.severity, confidence=span.confidence, fix=span.fix)


def parse_piece(item: Any, label: Literal[-1, 1]) -> Quote | Span:
    """Return the quote or span that a feedback function gives for a piece of the response.

    Args:
        item: "text", (text, occurrence), a Quote or its JSON, a half-open range (start, end) of the response's
            characters, or a Span of this label, whose criterion is not used: the config names criteria. Numbers may be
            those of NumPy.

    Raises:
        ValueError: It is anything else.
    """
    plain = _to_plain(item)
    try:
        piece = _validate_piece(plain, label)
    except ValidationError as error:
        reason = format_first_error(error)
        raise ValueError(f"{item!r:.80} is neither a quote nor a range of the response: {reason}") from None
    if label == 1 and piece.fix is not None:
        raise ValueError(f"the good piece {item!r:.80} has a fix; only a poor piece has one")
    return piece


def _validate_piece(plain: Any, label: Literal[-1, 1]) -> Quote | Span:
    match plain:
        case Span() if plain.label == label:
            return _SPAN.validate_python(replace(plain, criterion=None))
        case (int(start), int(end)):
            return _SPAN.validate_python({"start": start, "end": end, "label": label})
        case (text, occurrence):
            return Quote.model_validate({"quote": text, "occurrence": occurrence})
    return Quote.model_validate(plain)


def _to_plain(item: Any) -> Any:
    """Return a piece with Python's numbers in place of NumPy's."""
    match item:
        case np.generic() | np.ndarray():
            return item.tolist()
        case Span():
            values = {name: _to_plain(value) for name, value in vars(item).items()}
            return replace(item, **values)
        case list() | tuple() if type(item) in (list, tuple):
            return type(item)(map(_to_plain, item))
        case dict():
            return {key: _to_plain(value) for key, value in item.items()}
    return item


def format_answer(critique: str, good: Iterable[Quote], poor: Iterable[Quote], *, style: StyleConfig = SPARSE) -> str:
    """Return the JSON answer, in exactly the format that guided decoding by `t2g.feedback.grammar` allows.

    In a style without a critique the critique is left out. Fixes and confidences are left out: reward models do not
    write them.
    """
    answer: dict[str, Any] = {}
    if style.critique:
        answer["critique"] = critique
    answer["good"] = _dump_quotes(good)
    answer["poor"] = _dump_quotes(poor)
    return json.dumps(answer, ensure_ascii=False)


def _dump_quotes(quotes: Iterable[Quote]) -> list[Any]:
    return [_drop_details(quote).model_dump() for quote in quotes]


def format_answer_prefix(critique: str) -> str:
    """Return `format_answer` up to the critique's last character, without the closing quotation mark."""
    literal = json.dumps(replace_surrogates(critique), ensure_ascii=False)
    open_literal = literal[:-1]
    return f'{{"critique": {open_literal}'


def parse_answer(
    text: str,
    response_text: str,
    *,
    source: str,
    version: str,
    finish_reason: FinishReason = "stop",
    style: StyleConfig = SPARSE,
    max_spans: int | None = None,
) -> SpanFeedback:
    """Return the feedback in a model's answer about `response_text`. Never raises.

    The status is ok; empty if the answer has no quotes; unparsable if the answer is no such JSON object, exceeds
    MAX_ANSWER_CHARS, or if none of its quotes occurs in the response. An entry that is no quote, or does not occur in
    the response, counts in num_quotes and not in num_located. In a style without a critique, a critique in the answer
    is ignored.

    The complete quotes of an answer that was truncated at its length limit are kept. Good quotes come first: an answer
    that was truncated before its first poor quote was complete is unparsable, because it would pay for what is good
    alone.

    Args:
        max_spans: The grammar's bound. The metric AT_MAX_SPANS is 1 if the good or the poor quotes reached it, else 0.
    """
    kinds: dict[str, type] = {}
    if style.critique:
        kinds["critique"] = str
    kinds["good"] = list
    kinds["poor"] = list

    load = load_answer if finish_reason == "stop" else _load_truncated_answer
    answer = load(text, kinds)
    if isinstance(answer, str):
        return make_failed_feedback("unparsable", source=source, version=version, reason=answer)

    critique = answer["critique"] if style.critique else ""
    good = [_quote_or_none(item) for item in answer["good"]]
    poor = [_quote_or_none(item) for item in answer["poor"]]
    feedback = make_feedback(critique, good, poor, response_text, source=source, version=version)
    if not max_spans:
        return feedback
    is_at_limit = max(len(good), len(poor)) >= max_spans
    return replace(feedback, metrics={AT_MAX_SPANS: float(is_at_limit)})


def _load_truncated_answer(text: str, kinds: Mapping[str, type]) -> dict[str, Any] | str:
    """Return `load_answer` of an answer that was truncated at its length limit, see `parse_answer`."""
    if len(text) > MAX_ANSWER_CHARS:
        return load_answer(text, kinds)
    answer, truncated_key = load_truncated_object(text)
    is_complete = _find_wrong_key(answer, kinds) is None
    if not is_complete or (truncated_key == "poor" and not answer["poor"]):
        return "the answer was truncated at its length limit, before its first poor quote was complete"
    return answer


def load_answer(text: str, kinds: Mapping[str, type]) -> dict[str, Any] | str:
    """Return the answer's object if it has these keys with values of these types, else the reason as a sentence."""
    if len(text) > MAX_ANSWER_CHARS:
        return f"the answer has {len(text)} characters; at most {MAX_ANSWER_CHARS} are read"
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return "the answer is no JSON"
    if not isinstance(answer, dict):
        return "the answer is no JSON object"
    wrong_key = _find_wrong_key(answer, kinds)
    if wrong_key is not None:
        return f"the answer's {wrong_key} is missing or no {kinds[wrong_key].__name__}"
    return answer


def _find_wrong_key(answer: Mapping[str, Any], kinds: Mapping[str, type]) -> str | None:
    """Return the first key whose value is missing or has another type, or None."""
    for key, kind in kinds.items():
        if not isinstance(answer.get(key), kind):
            return key
    return None


def _quote_or_none(item: Any) -> Quote | None:
    try:
        return _drop_details(Quote.model_validate(item))
    except ValidationError:
        return None


def _drop_details(quote: Quote) -> Quote:
    """Return the quote without what a reward model does not write."""
    return quote.model_copy(update={"confidence": 1.0, "fix": None})


def read_judgement(answer: Any, response_text: str, *, source: str, version: str) -> SpanFeedback:
    """Return the feedback in the result of a feedback function.

    Args:
        answer: (critique, good pieces, poor pieces), or a dict of REQUIRED_KEYS and OPTIONAL_KEYS. The pieces (see
            `parse_piece`) may be iterables that raise or never end: at most MAX_QUOTES + 1 are read, so that an excess
            still counts as not located.

    Raises:
        ValueError: The answer has another form.
    """
    match answer:
        case {"critique": critique, "good": good, "poor": poor, **rest} if rest.keys() <= set(OPTIONAL_KEYS):
            pass
        case dict():
            raise ValueError(_describe_wrong_keys(answer))
        case (critique, good, poor):
            rest = {}
        case _:
            raise ValueError(f"{answer!r:.80}; it needs to be (critique, good pieces, poor pieces)")
    check_critique(critique)
    for side in (good, poor):
        if isinstance(side, str) or not isinstance(side, Iterable):
            raise ValueError(f"the good or poor pieces are {side!r:.80}; they need to be a list")
    good = list(islice(good, MAX_QUOTES + 1))
    poor = list(islice(poor, MAX_QUOTES + 1))
    execution = _copy_execution(rest.get("execution", {}))
    metrics = read_metrics(rest.get("metrics", {}))
    feedback = make_feedback(critique, good, poor, response_text, source=source, version=version, execution=execution)
    return replace(feedback, metrics=metrics)


def _describe_wrong_keys(answer: Mapping[Any, Any]) -> str:
    known_keys = (*REQUIRED_KEYS, *OPTIONAL_KEYS)
    unknown = [f"the unknown key {key!r:.40}" for key in answer if key not in known_keys]
    missing = [f"no key {key!r}" for key in REQUIRED_KEYS if key not in answer]
    problems = ", ".join(unknown + missing)
    required = ", ".join(REQUIRED_KEYS)
    optional = ", ".join(OPTIONAL_KEYS)
    return f"a dict with {problems}; it needs {required}, and may have {optional}"


def read_metrics(metrics: Any) -> dict[str, float]:
    """Return the metrics of a judgement or reply. ValueError if they are not finite numbers by name."""
    try:
        return _METRICS.validate_python(metrics)
    except ValidationError as error:
        needs = f"at most {MAX_METRICS} finite numbers by name (letters, digits, ., _, - and /)"
        raise ValueError(f"the metrics are {metrics!r:.80}; they need to be {needs}") from error


def check_critique(critique: Any) -> str:
    """Return the critique of a feedback function. ValueError if it is no text, or too long."""
    if not isinstance(critique, str):
        raise ValueError(f"the critique is {critique!r:.80}; it needs to be a text")
    if len(critique) > MAX_ANSWER_CHARS:
        raise ValueError(f"the critique has {len(critique)} characters; it needs to be at most {MAX_ANSWER_CHARS}")
    return critique


def _copy_execution(execution: Any) -> dict[str, Any]:
    """Return a copy that a JSON file can hold. ValueError if there is none."""
    if not isinstance(execution, dict):
        raise ValueError(f"the execution is {execution!r:.80}; it needs to be a dict of plain JSON")
    if reason := describe_unserializable(execution):
        raise ValueError(f"the execution needs to be plain JSON: it {reason}")
    try:
        text = json.dumps(execution, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the execution needs to be plain JSON: {error}") from error
    text = replace_surrogates(text)
    if len(text) > MAX_ANSWER_CHARS:
        raise ValueError(f"the execution has {len(text)} characters of JSON; it needs to be at most {MAX_ANSWER_CHARS}")
    return json.loads(text)


def make_feedback(
    critique: str,
    good: Sequence[Any],
    poor: Sequence[Any],
    response_text: str,
    *,
    source: str,
    version: str,
    execution: Mapping[str, Any] = MappingProxyType({}),
) -> SpanFeedback:
    """Return the feedback of a critique with its good and poor pieces (see `parse_piece`).

    Blank pieces, pieces that do not occur in the response and None (an unreadable piece) count in num_quotes only.
    The first of equal spans counts. Feedback whose quotes were all lost is unparsable: as a reward of 0 it would be
    worth more than an honest criticism. Blank ranges are not quotes.

    Raises:
        ValueError: An item is no piece, or a range outside of the response.
    """
    critique = replace_surrogates(critique)
    num_located = 0
    num_lost = 0  # quotes
    spans: dict[tuple[int, int, int], Span] = {}
    claimed: dict[tuple[int, int], int] = {}  # sentence of the critique -> label of its spans
    for label, items in ((1, good), (-1, poor)):
        for item in items[:MAX_QUOTES]:
            piece = None if item is None else parse_piece(item, label)
            span = _locate_piece(piece, label, response_text)
            if span is None:
                num_lost += not isinstance(piece, Span)
                continue

            num_located += 1
            if not _has_critique_range(span, critique):
                quote = piece if isinstance(piece, Quote) else make_quote(response_text, span)
                sentence = claim_sentence(critique, quote.quote, quote.occurrence, label, claimed)
                span = replace(span, critique_range=sentence)
            spans.setdefault((span.start, span.end, label), span)

    status: FeedbackStatus = "ok" if spans else "empty"
    reason = ""
    if num_lost and not spans:
        status = "unparsable"
        reason = f"none of its {num_lost} quotes occurs in the response"
    return SpanFeedback(
        critique=critique,
        spans=tuple(spans.values()),
        status=status,
        source=source,
        version=version,
        num_quotes=len(good) + len(poor),
        num_located=num_located,
        execution=dict(execution),
        reason=reason,
    )


def _locate_piece(piece: Quote | Span | None, label: Literal[-1, 1], response_text: str) -> Span | None:
    """Return the span of a piece, None if it is unreadable, blank or does not occur in the response."""
    if piece is None:
        return None
    span = _locate_quote(piece, label, response_text) if isinstance(piece, Quote) else piece
    if span is None:
        return None
    if not 0 <= span.start <= span.end <= len(response_text):
        raise ValueError(f"({span.start}, {span.end}) is no range of the response's {len(response_text)} characters")
    is_blank = not response_text[span.start : span.end].strip()
    return None if is_blank else span


def _locate_quote(quote: Quote, label: Literal[-1, 1], response_text: str) -> Span | None:
    position = locate(response_text, quote.quote, quote.occurrence)
    if position is None:
        return None
    start, end = position
    return Span(start=start, end=end, label=label, severity=quote.severity, confidence=quote.confidence, fix=quote.fix)


def _has_critique_range(span: Span, critique: str) -> bool:
    if span.critique_range is None:
        return False
    start, end = span.critique_range
    return 0 <= start < end <= len(critique)


def make_failed_feedback(
    status: Literal["unparsable", "failed"], *, source: str, version: str, reason: str = ""
) -> SpanFeedback:
    """Return feedback that cannot be used, with the reason, such as an untrusted exception's text, as a sentence."""
    reason = printable(replace_surrogates(reason))  # it is printed to terminals
    return SpanFeedback(critique="", spans=(), status=status, source=source, version=version, reason=reason)


def replace_surrogates(text: str) -> str:
    """Return `text` without lone surrogates, which JSON can represent and UTF-8 cannot."""
    return _SURROGATES.sub("\ufffd", text)
