"""Requests to annotators and their answers: step-by-step reasoning, then a critique, then its spans.

    {"reasoning": "...", "critique": "It says laptop, which is wrong.",
     "spans": [{"quote": "laptop", "occurrence": 1, "label": "poor", "severity": 2, "fix": "phone",
      "phrase": "laptop"}]}

Answers are untrusted: bounded, and no answer raises. Faults of an answer become sentences for the model.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError, model_validator

from t2g.config import StyleConfig
from t2g.config.validation_errors import format_first_error
from t2g.feedback.escapes import correct_escapes
from t2g.feedback.given_spans import LABEL_SYNONYMS, format_label
from t2g.feedback.judge_json import OPENING_TAG, find_last_object, find_thinking_end, load_judge_answer
from t2g.feedback.parse import (
    MAX_ANSWER_CHARS,
    MAX_QUOTES,
    Quote,
    make_failed_feedback,
    make_feedback,
    replace_surrogates,
)
from t2g.feedback.sources.chat_client import ChatCompletion
from t2g.feedback.truncated_answers import load_truncated_object
from t2g.tasks.base import Review, Task
from t2g.text.quotes import cuts_word, locate, locate_all
from t2g.text.tokenizer import Message
from t2g.types import LABELS, MAX_FIX_CHARS, MAX_SEVERITY, Prompt, Span, SpanFeedback

LABEL_NAMES = {1: "good", -1: "poor"}
MAX_NOTES_CHARS = 8000  # characters of a human's feedback or a test's log
MAX_FAULTS = 8  # in one follow-up
MAX_DIGITS = 4000  # digits of an integer; Python raises for more than 4,300
MAX_REPEATED_CHARS = 4000  # characters of the model's answer in a follow-up

_FORMAT = (
    "Answer with one JSON object with these keys in this order.\n"
    '"reasoning": think step by step. Go through the response piece by piece and check each piece.{questions}\n'
)
_CRITIQUE = '"critique": then a short critique: what is right, what is wrong and what is missing.\n'
_SPANS = (
    '"spans": last, {pieces}, each as an object. "quote": the piece, exactly as it stands in the response, character '
    'by character. "occurrence": 1, or 2, 3 ... where the same text stands earlier too and a later place is meant. '
    '"label": "good" or "poor". "severity": of a poor piece: {severity}; of a good one 1. "fix": of a poor piece the '
    'text that should stand in its place, "" to delete it; null where you do not know, and of a good one.{phrase} '
    "Pieces do not overlap. What is missing from the response has no piece."
)
_SEVERITY = "1, or 2 or 3 where it does more harm"
_PHRASE = ' "phrase": the words of the critique that speak of this piece, exactly as they stand in the critique.'


@dataclass(frozen=True, kw_only=True)
class AnnotationRequest:
    """One request to an annotator about one response."""

    messages: tuple[Message, ...]
    response_text: str
    keys: tuple[str, ...]  # keys of the answer, in order
    critique: str | None  # if given, the answer has only its spans

    @property
    def has_phrases(self) -> bool:
        return "critique" in self.keys or self.critique is not None


class _Entry(Quote):
    """One of an answer's spans; see `build_answer_schema`."""

    model_config = ConfigDict(extra="ignore")

    label: Literal["good", "poor"]
    phrase: Any = None

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, value: Any) -> Any:
        """Read numbers and labels as models write them, and drop what the label or the schema has no use for.

        Models volunteer a confidence of any scale. A good piece has neither severity nor fix. A number out of range
        becomes the nearest one, and an unusable fix is dropped: without its poor pieces an answer would pay too much.
        """
        if not isinstance(value, dict):
            return value
        dropped = {"confidence"}
        label = _read_label(value)
        if label == "good":
            dropped |= {"severity", "fix"}
        entry = {key: item for key, item in value.items() if key not in dropped}
        if label is not None:
            entry["label"] = label
        for key, largest in (("occurrence", None), ("severity", MAX_SEVERITY)):
            number = _clamp_integer(_read_integer(entry.pop(key, None)), largest)
            if number is not None:
                entry[key] = number
        if not _is_valid_fix(entry.get("fix")):
            del entry["fix"]
        return entry


@dataclass(frozen=True, kw_only=True)
class ParsedAnswer:
    """The usable part of an answer, and its faults as sentences for the model."""

    feedback: SpanFeedback
    faults: tuple[str, ...]


def make_request(
    task: Task, prompt: Prompt, response_text: str, style: StyleConfig, critique: str | None = None
) -> AnnotationRequest:
    """Return a request with the task's criteria, the response, notes for annotators, and the answer format.

    Args:
        critique: A critique by another author; the annotator then finds its spans only.
    """
    review = task.review
    writes_critique = style.critique and critique is None
    writes_spans = style.spans or critique is not None
    questions = ""
    if critique is not None:
        notes = f"This critique of the response was written; keep to it:\n{critique}"
    else:
        notes = (task.notes(prompt, response_text) or "")[:MAX_NOTES_CHARS]
        if review.questions:
            questions = f" {review.questions}"

    keys = ["reasoning"]
    form = _FORMAT.format(questions=questions)
    if writes_critique:
        keys.append("critique")
        form += _CRITIQUE
    if writes_spans:
        keys.append("spans")
        form += _SPANS.format(
            pieces=_describe_pieces(review, style, critique),
            severity=review.severity or _SEVERITY,
            phrase=_PHRASE if writes_critique or critique is not None else "",
        )

    opening = f"{review.opening} {review.labels}".strip()
    parts = filter(None, (opening, task.material(prompt, response_text), notes, form))
    message = _make_message("user", "\n\n".join(parts))
    return AnnotationRequest(messages=(message,), response_text=response_text, keys=tuple(keys), critique=critique)


def _describe_pieces(review: Review, style: StyleConfig, critique: str | None) -> str:
    if critique is not None:
        return "the pieces of the response that this critique speaks of"
    if style.labels == "dense":
        return "every piece of the response, so that nothing of it is left out"
    selection = "your critique speaks of" if style.critique else "decide"
    return f"the pieces of the response that {selection} ({review.sparse})"


def _make_message(role: str, content: str) -> Message:
    """Return a message without lone surrogates, which no request can encode."""
    return {"role": role, "content": content.encode("utf-8", errors="replace").decode()}


def build_answer_schema(request: AnnotationRequest) -> dict[str, Any]:
    """Return the JSON schema of an answer, without bounds of lengths and numbers, which some servers refuse."""
    text = {"type": "string"}
    span: dict[str, Any] = {
        "quote": text,
        "occurrence": {"type": "integer"},
        "label": {"type": "string", "enum": list(LABEL_NAMES.values())},
        "severity": {"type": "integer"},
        "fix": {"type": ["string", "null"]},
    }
    if request.has_phrases:
        span["phrase"] = text
    properties: dict[str, Any] = dict.fromkeys(request.keys, text)
    if "spans" in request.keys:
        properties["spans"] = {"type": "array", "items": _make_object_schema(span)}
    return _make_object_schema(properties)


def _make_object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def read_answer(completion: ChatCompletion, request: AnnotationRequest, *, source: str, version: str) -> ParsedAnswer:
    """Return the feedback in an answer, and its faults.

    A quote that is invalid, blank, not in the response, or overlaps an earlier one counts in num_quotes and not in
    num_located; poor quotes come first. A span is kept if its phrase is not found. Equal spans with one label are
    merged. The complete spans of an answer that was truncated are kept, if one of them is poor: the good ones alone
    would pay too much.
    """
    answer = _load(completion, request)
    faults: list[str] = []
    if isinstance(answer, str):
        reason = answer
        faults.append(f"{reason[0].upper()}{reason[1:]}.")
        answer = _load_truncated(completion, request)
        if not answer:
            unusable = make_failed_feedback("unparsable", source=source, version=version, reason=reason)
            return ParsedAnswer(feedback=unusable, faults=tuple(faults))

    critique = answer["critique"] if "critique" in request.keys else request.critique or ""
    if request.has_phrases and not critique.strip():
        faults.append("The critique is empty.")

    items = sorted(answer.get("spans", []), key=lambda item: not _is_poor(item))
    spans, span_faults = _read_spans(items[: 2 * MAX_QUOTES], request, critique)
    faults += span_faults
    good = [span for span in spans if span.label == 1]
    poor = [span for span in spans if span.label == -1]
    not_located = [None] * (len(items) - len(spans))
    good_pieces = [*good, *not_located]
    feedback = make_feedback(critique, good_pieces, poor, request.response_text, source=source, version=version)
    return ParsedAnswer(feedback=feedback, faults=tuple(faults))


def _read_spans(items: Sequence[Any], request: AnnotationRequest, critique: str) -> tuple[list[Span], list[str]]:
    """Return the spans of the entries, without those that overlap an earlier one, and the faults of the entries."""
    spans: list[Span] = []
    faults: list[str] = []
    for item in items:
        span, item_faults = _read_span(item, request, critique)
        if span is None:
            faults += item_faults
            continue

        quote = _format_json(item["quote"])
        is_repeated = _is_repeated(span, spans, request.response_text)
        if is_repeated:
            faults.append(f"The quote {quote} occurs more than once; give each of its entries the occurrence it means.")
        other = _find_overlapping(span, spans)
        if other is None:
            faults += item_faults
            spans.append(span)
        elif not is_repeated:
            faults.append(f"The {LABEL_NAMES[span.label]} quote {quote} overlaps a {LABEL_NAMES[other.label]} one.")
    return spans, faults


def _is_repeated(span: Span, spans: Sequence[Span], response_text: str) -> bool:
    """Return whether an earlier entry has the same place, although the same words stand elsewhere as well."""
    places = {(other.start, other.end) for other in spans}
    if (span.start, span.end) not in places:
        return False
    return _occurs_again(response_text, response_text[span.start : span.end])


def _occurs_again(text: str, quote: str) -> bool:
    """Return whether a quote has a second match in the text that cuts no word."""
    second = locate(text, quote, 2)
    return second is not None and not cuts_word(text, *second)


def _find_overlapping(span: Span, spans: Sequence[Span]) -> Span | None:
    """Return the first of `spans` that shares characters with the span; None if that one is equal to it."""
    for other in spans:
        if other.start < span.end and span.start < other.end:
            is_equal = (other.start, other.end, other.label) == (span.start, span.end, span.label)
            return None if is_equal else other
    return None


def _load(completion: ChatCompletion, request: AnnotationRequest) -> dict[str, Any] | str:
    """Return the answer's object, or a sentence why there is none. See `load_judge_answer`."""
    if completion.finish_reason == "length":
        return f"the answer was truncated after {completion.output_tokens} tokens; it must be shorter"
    return load_judge_answer(completion.text, _get_kinds(request))


def _load_truncated(completion: ChatCompletion, request: AnnotationRequest) -> dict[str, Any]:
    """Return what is complete of an answer that was truncated after its first poor span, else {}.

    It is the last object of the answer that counts, and none of thinking that was truncated: those are drafts.
    """
    if completion.finish_reason != "length":
        return {}
    kinds = _get_kinds(request)
    text = completion.text[find_thinking_end(completion.text) :]
    start = find_last_object(text, next(iter(kinds)))
    if OPENING_TAG.search(text) or start is None:
        return {}
    answer = load_truncated_object(text[start : start + MAX_ANSWER_CHARS]).values
    is_complete = all(isinstance(answer.get(key), kind) for key, kind in kinds.items())
    items = answer.get("spans")
    has_poor = isinstance(items, list) and any(map(_is_poor, items))
    if not (is_complete and has_poor):
        return {}
    return answer


def _get_kinds(request: AnnotationRequest) -> dict[str, type]:
    """Return the required keys of an answer and the types of their values; the reasoning is not required."""
    kinds: dict[str, type] = dict.fromkeys(request.keys[1:], str)
    if "spans" in kinds:
        kinds["spans"] = list
    return kinds


def _is_poor(item: Any) -> bool:
    return isinstance(item, dict) and _read_label(item) == "poor"


def _read_label(item: dict[str, Any]) -> str | None:
    """Return good or poor for a label that means it, another text as it is, or None if the label is no text."""
    label = format_label(item.get("label"))
    return LABEL_SYNONYMS.get(label.strip().lower(), label) or None


def _read_integer(value: Any) -> Any:
    """Return 2 of 2.0 and "2"; other values are returned as they are, and refused later."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value[:MAX_DIGITS])
    return value


def _clamp_integer(value: Any, largest: int | None) -> Any:
    """Return an integer in 1 to `largest`, for one out of this range the nearest; other values as they are."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    at_least_one = max(value, 1)
    return at_least_one if largest is None else min(at_least_one, largest)


def _is_valid_fix(value: Any) -> bool:
    if value is None:
        return True
    # A half emoji is no text that a record could hold.
    return isinstance(value, str) and len(value) <= MAX_FIX_CHARS and value == replace_surrogates(value)


def _locate_entry(text: str, entry: _Entry) -> tuple[int, int] | None:
    """Return the range of an entry's quote, or None.

    `locate` counts matches within words last, and an annotator may count them in the order of the text: "n" occurs
    first within "return n". A match within a word therefore yields to the whole word at that count.
    """
    position = locate(text, entry.quote, entry.occurrence)
    if position is None or not cuts_word(text, *position):
        return position
    in_text_order = sorted(locate_all(text, entry.quote))
    counted = in_text_order[entry.occurrence - 1]
    return position if cuts_word(text, *counted) else counted


def _read_span(item: Any, request: AnnotationRequest, critique: str) -> tuple[Span | None, list[str]]:
    """Return the span of one entry, None if its quote is not located, and the faults of the entry."""
    try:
        entry = _Entry.model_validate(item)
    except ValidationError as error:
        return None, [f"The entry {_format_json(item)} of spans is wrong; {format_first_error(error)}."]
    faults: list[str] = []
    quote = _format_json(entry.quote)
    entry = correct_escapes(entry, request.response_text)
    if not entry.quote.strip():
        return None, ["A quote is empty."]
    position = _locate_entry(request.response_text, entry)
    if position is None and not _occurs_again(request.response_text, entry.quote):
        position = locate(request.response_text, entry.quote)  # whatever the occurrence, there is one match
    if position is None:
        occurs_less_often = locate(request.response_text, entry.quote) is not None
        times = f" {entry.occurrence} times" if occurs_less_often else ""
        faults.append(f"The quote {quote} does not occur{times} in the response.")

    critique_range = None
    if request.has_phrases:
        critique_range = _locate_phrase(critique, entry.phrase)
        if critique_range is None:
            phrase = _format_json(entry.phrase)
            faults.append(f"The phrase {phrase} of the quote {quote} does not occur in the critique.")

    if position is None:
        return None, faults
    label = LABELS[entry.label]
    start, end = position
    span = Span(
        start=start,
        end=end,
        label=label,
        severity=entry.severity,
        critique_range=critique_range,
        fix=entry.fix,
    )
    return span, faults


def _locate_phrase(critique: str, phrase: Any) -> tuple[int, int] | None:
    if not isinstance(phrase, str) or not phrase.strip():
        return None
    return locate(critique, phrase)


def _format_json(value: Any) -> str:
    """Return JSON of at most 200 characters."""
    text = replace_surrogates(json.dumps(value, ensure_ascii=False))
    if len(text) <= 200:
        return text
    return text[:200] + "..."


def make_follow_up(request: AnnotationRequest, answer: str, faults: Sequence[str]) -> tuple[Message, ...]:
    """Return the request's messages, then the answer and its faults."""
    lines = ["Your answer cannot be used as it is."]
    lines += [f"- {fault}" for fault in faults[:MAX_FAULTS]]
    num_others = len(faults) - MAX_FAULTS
    if num_others > 0:
        lines.append(f"- {num_others} more.")
    lines.append("Write the whole JSON object again, with every quote exact.")

    repeated = _make_message("assistant", answer[:MAX_REPEATED_CHARS] or "(nothing)")
    complaint = _make_message("user", "\n".join(lines))
    return (*request.messages, repeated, complaint)
