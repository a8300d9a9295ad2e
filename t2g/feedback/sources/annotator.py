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

from pydantic import ConfigDict, ValidationError

from t2g.config import StyleConfig
from t2g.config.validation_errors import format_first_error
from t2g.feedback.cut_answers import load_cut_object
from t2g.feedback.judge_json import find_thinking_end, load_judge_answer
from t2g.feedback.parse import (
    MAX_ANSWER_CHARS,
    MAX_QUOTES,
    Quote,
    make_failed_feedback,
    make_feedback,
    replace_surrogates,
)
from t2g.feedback.sources.chat_client import Completion
from t2g.tasks.base import Task
from t2g.text.quotes import locate
from t2g.text.tokenizer import Message
from t2g.types import Prompt, Span, SpanFeedback

LABELS = {1: "good", -1: "poor"}
MAX_NOTES_CHARS = 8000  # of a human's feedback or a test's log
MAX_FAULTS = 8  # in one follow-up
MAX_REPEATED_CHARS = 4000  # of the model's answer in a follow-up

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
    keys: tuple[str, ...]  # of the answer, in order
    critique: str | None  # if given, the answer has only its spans

    @property
    def has_phrases(self) -> bool:
        return "critique" in self.keys or self.critique is not None


class _Entry(Quote):
    """One of an answer's spans; see `build_answer_schema`."""

    model_config = ConfigDict(extra="ignore")

    label: Literal["good", "poor"]
    phrase: Any = None


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
    pieces = f"the pieces of the response that {'your critique speaks of' if writes_critique else 'decide'}"
    questions = ""
    if critique is not None:
        notes = f"This critique of the response was written; keep to it:\n{critique}"
        pieces = "the pieces of the response that this critique speaks of"
    else:
        notes = (task.notes(prompt, response_text) or "")[:MAX_NOTES_CHARS]
        questions = f" {review.questions}" if review.questions else ""
        if style.labels == "dense":
            pieces = "every piece of the response, so that nothing of it is left out"
        else:
            pieces += f" ({review.sparse})"
    form = _FORMAT.format(questions=questions) + (_CRITIQUE if writes_critique else "")
    phrase = _PHRASE if writes_critique or critique is not None else ""
    if writes_spans:
        form += _SPANS.format(pieces=pieces, severity=review.severity or _SEVERITY, phrase=phrase)
    opening = f"{review.opening} {review.labels}".strip()
    parts = (opening, task.material(prompt, response_text), notes, form)
    return AnnotationRequest(
        messages=(_make_message("user", "\n\n".join(part for part in parts if part)),),
        response_text=response_text,
        keys=("reasoning", *["critique"] * writes_critique, *["spans"] * writes_spans),
        critique=critique,
    )


def _make_message(role: str, content: str) -> Message:
    """Return a message without lone surrogates, which no request can encode."""
    return {"role": role, "content": content.encode("utf-8", errors="replace").decode()}


def build_answer_schema(request: AnnotationRequest) -> dict[str, Any]:
    """Return the JSON schema of an answer, without bounds of lengths and numbers, which some servers refuse."""
    text = {"type": "string"}
    span: dict[str, Any] = {
        "quote": text,
        "occurrence": {"type": "integer"},
        "label": {"type": "string", "enum": list(LABELS.values())},
        "severity": {"type": "integer"},
        "fix": {"type": ["string", "null"]},
    }
    if request.has_phrases:
        span["phrase"] = text
    spans = {"type": "array", "items": _make_object_schema(span)}
    return _make_object_schema({key: spans if key == "spans" else text for key in request.keys})


def _make_object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def read_answer(completion: Completion, request: AnnotationRequest, *, source: str, version: str) -> ParsedAnswer:
    """Return the feedback in an answer, and its faults.

    A quote counts in num_quotes only if it is invalid, blank, not in the response, or overlaps an earlier quote (poor
    quotes come first). A span is kept if its phrase is not found. Equal spans with one label are merged. The complete
    spans of an answer that was cut are kept, if one of them is poor: the good ones alone would pay too much.
    """
    answer = _load(completion, request)
    faults: list[str] = []
    if isinstance(answer, str):
        faults, cut_answer = [f"{answer[0].upper()}{answer[1:]}."], _load_cut(completion, request)
        if not cut_answer:
            unusable = make_failed_feedback("unparsable", source=source, version=version, reason=answer)
            return ParsedAnswer(feedback=unusable, faults=tuple(faults))
        answer = cut_answer
    critique = answer["critique"] if "critique" in request.keys else request.critique or ""
    faults += [] if critique.strip() or not request.has_phrases else ["The critique is empty."]
    items = sorted(answer.get("spans", []), key=lambda item: not _is_poor(item))
    spans: list[Span] = []
    for item in items[: 2 * MAX_QUOTES]:
        span, item_faults = _read_span(item, request, critique)
        other = next((other for other in spans if span and other.start < span.end and span.start < other.end), None)
        if span and other and (other.start, other.end, other.label) != (span.start, span.end, span.label):
            fault = (
                f"The {LABELS[span.label]} quote {_format_json(item['quote'])} overlaps a {LABELS[other.label]} one."
            )
            span, item_faults = None, [fault]
        faults += item_faults
        spans += [span] if span else []
    good, poor = ([span for span in spans if span.label == label] for label in (1, -1))
    not_located = [None] * (len(items) - len(spans))
    feedback = make_feedback(
        critique, [*good, *not_located], poor, request.response_text, source=source, version=version
    )
    return ParsedAnswer(feedback=feedback, faults=tuple(faults))


def _load(completion: Completion, request: AnnotationRequest) -> dict[str, Any] | str:
    """Return the answer's object, or a sentence why there is none. See `load_judge_answer`."""
    if completion.finish_reason == "length":
        return f"the answer was cut after {completion.output_tokens} tokens; it must be shorter"
    return load_judge_answer(completion.text, _get_kinds(request))


def _load_cut(completion: Completion, request: AnnotationRequest) -> dict[str, Any]:
    """Return what is complete of an answer that was cut after its first poor span, else {}."""
    start = completion.text.find("{", find_thinking_end(completion.text))
    if completion.finish_reason != "length" or start < 0:
        return {}
    answer = load_cut_object(completion.text[start : start + MAX_ANSWER_CHARS]).values
    is_complete = all(isinstance(answer.get(key), kind) for key, kind in _get_kinds(request).items())
    items = answer.get("spans")
    has_poor = isinstance(items, list) and any(map(_is_poor, items))
    return answer if is_complete and has_poor else {}


def _get_kinds(request: AnnotationRequest) -> dict[str, type]:
    """Return the required keys of an answer and the types of their values; the reasoning is not required."""
    return {key: list if key == "spans" else str for key in request.keys[1:]}


def _is_poor(item: Any) -> bool:
    return isinstance(item, dict) and item.get("label") == "poor"


def _read_span(item: Any, request: AnnotationRequest, critique: str) -> tuple[Span | None, list[str]]:
    """Return the span of one entry, None if its quote is not located, and the faults of the entry."""
    try:
        entry = _Entry.model_validate(item)
    except ValidationError as error:
        return None, [f"The entry {_format_json(item)} of spans is wrong; {format_first_error(error)}."]
    if not entry.quote.strip():
        return None, ["A quote is empty."]
    faults, critique_range = [], None
    position = locate(request.response_text, entry.quote, entry.occurrence)
    if position is None:
        times = f" {entry.occurrence} times" if locate(request.response_text, entry.quote) is not None else ""
        faults.append(f"The quote {_format_json(entry.quote)} does not occur{times} in the response.")
    if request.has_phrases:
        phrase = entry.phrase
        critique_range = locate(critique, phrase) if isinstance(phrase, str) and phrase.strip() else None
        if critique_range is None:
            faults.append(
                f"The phrase {_format_json(phrase)} of the quote {_format_json(entry.quote)} "
                "does not occur in the critique."
            )
    if position is None:
        return None, faults
    label: Literal[-1, 1] = 1 if entry.label == "good" else -1
    start, end = position
    fix = entry.fix if label == -1 else None
    span = Span(start=start, end=end, label=label, severity=entry.severity, critique_range=critique_range, fix=fix)
    return span, faults


def _format_json(value: Any) -> str:
    """Return JSON of at most 200 characters."""
    text = replace_surrogates(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 200 else text[:200] + "..."


def make_follow_up(request: AnnotationRequest, answer: str, faults: Sequence[str]) -> tuple[Message, ...]:
    """Return the request's messages, then the answer and its faults."""
    sentences = [*faults[:MAX_FAULTS], *([f"{len(faults) - MAX_FAULTS} more."] if len(faults) > MAX_FAULTS else [])]
    complaint = "Your answer cannot be used as it is.\n" + "\n".join(f"- {sentence}" for sentence in sentences)
    return (
        *request.messages,
        _make_message("assistant", answer[:MAX_REPEATED_CHARS] or "(nothing)"),
        _make_message("user", f"{complaint}\nWrite the whole JSON object again, with every quote exact."),
    )
