"""What an annotator is asked and how its answer is read: reason step by step, then a critique, then its spans.

    {"reasoning": "...", "critique": "It says laptop, which is wrong.",
     "spans": [{"quote": "laptop", "occurrence": 1, "label": "poor", "severity": 2, "phrase": "laptop"}]}

Answers are untrusted: parsed, bounded, never an exception. What is wrong with one becomes sentences for the model.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError

from t2g.config import StyleConfig
from t2g.config.validation_errors import format_first_error
from t2g.feedback.parse import MAX_QUOTES, Quote, load_answer, make_failed_feedback, make_feedback
from t2g.feedback.sources.chat_client import Completion
from t2g.tasks.base import Task
from t2g.text.quotes import locate
from t2g.text.tokenizer import Message
from t2g.types import Prompt, Span, SpanFeedback

LABELS = {1: "good", -1: "poor"}
MAX_NOTES_CHARS = 8000  # a human's feedback or a test's log is shown up to here
MAX_FAULTS = 8  # that are told to the model at once
MAX_REPEATED_CHARS = 4000  # the model is shown its answer again up to here

_FORMAT = (
    "Answer with one JSON object with these keys in this order.\n"
    '"reasoning": think step by step. Go through the response piece by piece and check each piece.{questions}\n'
)
_CRITIQUE = '"critique": then a short critique: what is right, what is wrong and what is missing.\n'
_SPANS = (
    '"spans": last, {pieces}, each as an object. "quote": the piece, exactly as it stands in the response, character '
    'by character. "occurrence": 1, or 2, 3 ... where the same text stands earlier too and a later place is meant. '
    '"label": "good" or "poor". "severity": of a poor piece: {severity}; of a good one 1.{phrase} '
    "Pieces do not overlap. What is missing from the response has no piece."
)
_SEVERITY = "1, or 2 or 3 where it does more harm"
_PHRASE = ' "phrase": the words of the critique that speak of this piece, exactly as they stand in the critique.'


@dataclass(frozen=True, kw_only=True)
class AnnotationRequest:
    """One question to an annotator about one response."""

    messages: tuple[Message, ...]
    response_text: str
    keys: tuple[str, ...]  # of the answer, in order
    critique: str | None  # given: only its spans are wanted

    @property
    def with_phrases(self) -> bool:
        return "critique" in self.keys or self.critique is not None


class _Entry(Quote):
    """One of an answer's spans; the schema is `answer_schema`."""

    model_config = ConfigDict(extra="ignore")

    label: Literal["good", "poor"]
    phrase: Any = None


@dataclass(frozen=True, kw_only=True)
class ParsedAnswer:
    """An answer as far as it can be used, and what is wrong with it, in sentences for the model."""

    feedback: SpanFeedback
    faults: tuple[str, ...]


def make_request(
    task: Task, prompt: Prompt, response_text: str, style: StyleConfig, critique: str | None = None
) -> AnnotationRequest:
    """What the task judges by, the response, what only annotators are shown, and the form of the answer.

    With a `critique` of somebody else the annotator is asked for the spans of that one.
    """
    review = task.review
    own = style.critique and critique is None  # the annotator writes one
    pieces, questions = f"the pieces of the response that {'your critique speaks of' if own else 'decide'}", ""
    if critique is not None:
        shown: str | None = f"A person has written this critique of the response; keep to it:\n{critique}"
        pieces = "the pieces of the response that this person's critique speaks of"
    else:
        shown = (task.notes(prompt, response_text) or "")[:MAX_NOTES_CHARS]
        questions = f" {review.questions}" if review.questions else ""
        if style.labels == "dense":
            pieces = "every piece of the response, so that nothing of it is left out"
        else:
            pieces += f" ({review.sparse})"
    form = _FORMAT.format(questions=questions) + (_CRITIQUE if own else "")
    phrase = _PHRASE if own or critique is not None else ""
    form += _SPANS.format(pieces=pieces, severity=review.severity or _SEVERITY, phrase=phrase)
    opening = f"{review.opening} {review.labels}".strip()
    parts = (opening, task.material(prompt, response_text), shown, form)
    return AnnotationRequest(
        messages=(_message("user", "\n\n".join(part for part in parts if part)),),
        response_text=response_text,
        keys=("reasoning", "critique", "spans") if own else ("reasoning", "spans"),
        critique=critique,
    )


def _message(role: str, content: str) -> Message:
    """Without halves of characters, which JSON can spell and no request can carry."""
    return {"role": role, "content": content.encode("utf-8", errors="replace").decode()}


def answer_schema(request: AnnotationRequest) -> dict[str, Any]:
    """JSON schema of an answer. It has no bounds, so that every server takes it: several refuse lengths and numbers."""
    text = {"type": "string"}
    span: dict[str, Any] = {
        "quote": text,
        "occurrence": {"type": "integer"},
        "label": {"type": "string", "enum": list(LABELS.values())},
        "severity": {"type": "integer"},
    }
    if request.with_phrases:
        span["phrase"] = text
    spans = {"type": "array", "items": _closed_object(span)}
    return _closed_object({key: spans if key == "spans" else text for key in request.keys})


def _closed_object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def read_answer(completion: Completion, request: AnnotationRequest, *, source: str, version: str) -> ParsedAnswer:
    """The feedback in an answer. Quotes that do not stand in the response, or are blank or no quotes, or overlap one
    before them (poor ones come first) count in num_quotes and not in num_located; a phrase that is not found leaves its
    span. The same piece twice with one label is one span.
    """
    answer = _load(completion, request)
    if isinstance(answer, str):
        nothing = make_failed_feedback("unparsable", source=source, version=version, reason=answer)
        return ParsedAnswer(feedback=nothing, faults=(f"{answer[0].upper()}{answer[1:]}.",))
    critique = answer["critique"] if "critique" in request.keys else request.critique or ""
    faults = [] if critique.strip() or not request.with_phrases else ["The critique is empty."]
    items = sorted(answer["spans"], key=lambda item: not (isinstance(item, dict) and item.get("label") == "poor"))
    spans: list[Span] = []
    for item in items[: 2 * MAX_QUOTES]:
        span, found = _read_span(item, request, critique)
        other = next((other for other in spans if span and other.start < span.end and span.start < other.end), None)
        if span and other and (other.start, other.end, other.label) != (span.start, span.end, span.label):
            fault = f"The {LABELS[span.label]} quote {_show(item['quote'])} overlaps a {LABELS[other.label]} one."
            span, found = None, [fault]
        faults += found
        spans += [span] if span else []
    good, poor = ([span for span in spans if span.label == label] for label in (1, -1))
    lost = [None] * (len(items) - len(spans))
    feedback = make_feedback(critique, [*good, *lost], poor, request.response_text, source=source, version=version)
    return ParsedAnswer(feedback=feedback, faults=tuple(faults))


def _load(completion: Completion, request: AnnotationRequest) -> dict[str, Any] | str:
    """The answer's object, or why it is none. Text around the object is forgiven: not every server follows a schema."""
    if completion.finish_reason == "length":
        return f"the answer was cut after {completion.output_tokens} tokens; it must be shorter"
    text = completion.text
    kinds: dict[str, type] = {key: list if key == "spans" else str for key in request.keys[1:]}
    return load_answer(text[text.find("{") : text.rfind("}") + 1], kinds)


def _read_span(item: Any, request: AnnotationRequest, critique: str) -> tuple[Span | None, list[str]]:
    """The piece that one entry quotes, None if it stands nowhere, and what is wrong with the entry."""
    try:
        entry = _Entry.model_validate(item)
    except ValidationError as error:
        return None, [f"The entry {_show(item)} of spans is wrong; {format_first_error(error)}."]
    if not entry.quote.strip():
        return None, ["A quote is empty."]
    faults, about = [], None
    place = locate(request.response_text, entry.quote, entry.occurrence)
    if place is None:
        often = f" {entry.occurrence} times" if locate(request.response_text, entry.quote) is not None else ""
        faults.append(f"The quote {_show(entry.quote)} does not occur{often} in the response.")
    if request.with_phrases:
        phrase = entry.phrase
        about = locate(critique, phrase) if isinstance(phrase, str) and phrase.strip() else None
        if about is None:
            where = f"of the quote {_show(entry.quote)}"
            faults.append(f"The phrase {_show(phrase)} {where} does not occur in the critique.")
    if place is None:
        return None, faults
    label: Literal[-1, 1] = 1 if entry.label == "good" else -1
    span = Span(start=place[0], end=place[1], label=label, severity=entry.severity, critique_range=about)
    return span, faults


def _show(value: Any) -> str:
    """In quotation marks, at most 200 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + "..."


def make_follow_up(request: AnnotationRequest, answer: str, faults: Sequence[str]) -> tuple[Message, ...]:
    """The question again, with the answer that was given and what is wrong with it."""
    told = [*faults[:MAX_FAULTS], *([f"{len(faults) - MAX_FAULTS} more."] if len(faults) > MAX_FAULTS else [])]
    complaint = "Your answer cannot be used as it is.\n" + "\n".join(f"- {fault}" for fault in told)
    return (
        *request.messages,
        _message("assistant", answer[:MAX_REPEATED_CHARS] or "(nothing)"),
        _message("user", f"{complaint}\nWrite the whole JSON object again, with every quote exact."),
    )
