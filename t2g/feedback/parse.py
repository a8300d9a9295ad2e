"""An answer in JSON to a critique with spans, and back. Answers are untrusted: parsed, bounded, never an exception.

{"critique": "It says phone, which is wrong.", "good": ["by Ann"], "poor": [{"quote": "phone", "occurrence": 2}]}
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from t2g.feedback.spans import locate
from t2g.types import FinishReason, Span, SpanFeedback

MAX_ANSWER_CHARS = 65_536  # of an answer that is looked at; longer ones are unparsable
MAX_QUOTES = 256  # of each label that are looked for; the rest counts as not located
BLOCK = 40  # characters of a block of a bounded text
_SENTENCE_END = re.compile(r"[.!?;]+(?=\s|$)|[。！？；\n]")
_SURROGATES = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class Quote:
    """A piece of the response as the source gave it."""

    text: str
    occurrence: int = 1  # which of its places is meant, from 1
    severity: int = 1  # 1 .. 3
    critique_range: tuple[int, int] | None = None  # characters of the critique that speak of it, if the source knows


def answer_grammar(*, max_critique_chars: int, max_spans: int, max_quote_chars: int) -> str:
    """Grammar (EBNF as xgrammar reads it) of exactly the JSON that `format_answer` writes, bounded in length.

    A JSON schema will not do for this: with `maxLength` xgrammar (0.2.8) allows no escape, so that no quote could hold
    a quotation mark or a line end, and vLLM then writes other separators than those of training. A text of n characters
    with up to n / 40 escapes always fits into a bound of n, and none is longer than 2 n + 39.
    """
    more = f'(", " quote){{0,{max_spans - 1}}}'
    return f"""
root ::= "{{\\"critique\\": \\"" critique "\\", \\"good\\": " quotes ", \\"poor\\": " quotes "}}"
quotes ::= "[]"{f' | "[" quote {more} "]"' if max_spans else ""}
quote ::= "\\"" text "\\"" | "{{\\"quote\\": \\"" text "\\", \\"occurrence\\": " occurrence "}}"
occurrence ::= [2-9] | [1-9] [0-9]
{_bounded_text("critique", max_critique_chars)}
{_bounded_text("text", max_quote_chars)}
escape ::= "\\\\" (["\\\\bfnrt] | "u00" [0-1] [0-9a-f])
"""


def _bounded_text(rule: str, max_chars: int) -> str:
    """Blocks that end with their escape or are full, then a rest: there is one way only to read a text.

    Characters counted one by one, escapes among them, would cost 30 ms a token; this costs 0.3 ms.
    """
    plain = r'[^"\\\x00-\x1F]'
    return (
        f"{rule} ::= {rule}_block{{0,{max_chars * 2 // BLOCK}}} {plain}{{0,{min(max_chars, BLOCK - 1)}}}\n"
        f"{rule}_block ::= {plain}{{{BLOCK},{BLOCK}}} | {plain}{{0,{BLOCK - 1}}} escape"
    )


def answer_schema() -> dict[str, Any]:
    """JSON schema of an answer for endpoints: critique first, no other keys, and nothing of the response in it.

    It has no bounds, so that every OpenAI-compatible server takes it: several refuse lengths and numbers.
    """
    counted = _closed_object({"quote": {"type": "string"}, "occurrence": {"type": "integer"}})
    quotes = {"type": "array", "items": {"anyOf": [{"type": "string"}, counted]}}
    return _closed_object({"critique": {"type": "string"}, "good": quotes, "poor": quotes})


def _closed_object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def format_answer(critique: str, good: Iterable[Any], poor: Iterable[Any]) -> str:
    """The answer that says this, byte for byte as guided decoding by `answer_grammar` can write it.

    Quotes as in `make_feedback`; ValueError for what is no quote.
    """
    return json.dumps(
        {"critique": critique, "good": [_item(quote) for quote in good], "poor": [_item(quote) for quote in poor]},
        ensure_ascii=False,
    )


def _item(item: Any) -> str | dict[str, Any]:
    quote = read_quote(item)
    return quote.text if quote.occurrence == 1 else {"quote": quote.text, "occurrence": quote.occurrence}


def parse_answer(
    text: str, response_text: str, *, source: str, version: str, finish_reason: FinishReason = "stop"
) -> SpanFeedback:
    """The feedback in a model's answer about `response_text`. Never raises.

    Status: ok; empty (it parses, no span was located); unparsable (no such JSON object, cut by length, or longer than
    MAX_ANSWER_CHARS). An entry that is no quote, or does not stand in the response, counts in num_quotes and not in
    num_located.
    """
    answer = _load(text) if finish_reason == "stop" else None
    if answer is None:
        return no_feedback("unparsable", source=source, version=version)
    return make_feedback(
        answer["critique"],
        [_quote_or_none(item) for item in answer["good"]],
        [_quote_or_none(item) for item in answer["poor"]],
        response_text,
        source=source,
        version=version,
    )


def _load(text: str) -> dict[str, Any] | None:
    if len(text) > MAX_ANSWER_CHARS:
        return None
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict) or not isinstance(answer.get("critique"), str):
        return None
    return answer if all(isinstance(answer.get(key), list) for key in ("good", "poor")) else None


def _quote_or_none(item: Any) -> Quote | None:
    try:
        return read_quote(item)
    except ValueError:
        return None


def read_quote(item: Any) -> Quote:
    """A quote from what a source may give: a Quote, "text", {"quote": "text", "occurrence": 2, "severity": 1},
    or (text, occurrence[, (start, end) in the critique]). ValueError for anything else.
    """
    match item:
        case Quote():
            quote = item
        case str(text):
            quote = Quote(text=text)
        case {"quote": str(text), **rest} if set(rest) <= {"occurrence", "severity"}:
            quote = Quote(text=text, **rest)
        case (str(text), occurrence):
            quote = Quote(text=text, occurrence=occurrence)
        case (str(text), occurrence, (int(start), int(end))):
            quote = Quote(text=text, occurrence=occurrence, critique_range=(start, end))
        case _:
            raise ValueError(f"{item!r:.80} is no quote; give a text or (text, occurrence)")
    if not isinstance(quote.text, str):
        raise ValueError(f"a quote's text is {quote.text!r:.80}; it must be a text")
    if type(quote.occurrence) is not int or quote.occurrence < 1:
        raise ValueError(f"a quote's occurrence is {quote.occurrence!r:.80}; it must be a whole number from 1")
    if type(quote.severity) is not int or quote.severity not in (1, 2, 3):
        raise ValueError(f"a quote's severity is {quote.severity!r:.80}; it must be 1, 2 or 3")
    match quote.critique_range:
        case None | (int(), int()):
            return quote
    raise ValueError(f"a quote's critique_range is {quote.critique_range!r:.80}; it must be (start, end) or None")


def read_judgement(answer: Any) -> tuple[str, list[Any], list[Any]]:
    """(critique, good quotes, poor quotes) of what a program or a file gives; ValueError in a sentence for rubbish.

    The quotes may be any iterables, which may raise or never end: at most MAX_QUOTES + 1 of each are taken, so that
    one too many still counts as not located.
    """
    if isinstance(answer, dict):
        if set(answer) != {"critique", "good", "poor"}:
            raise ValueError(f"a dict with the keys {', '.join(map(str, answer))}; it needs critique, good and poor")
        answer = (answer["critique"], answer["good"], answer["poor"])
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise ValueError(f"{answer!r:.80}; it needs to be (critique, good quotes, poor quotes)")
    critique, good, poor = answer
    if not isinstance(critique, str):
        raise ValueError(f"the critique is {critique!r:.80}; it needs to be a text")
    if len(critique) > MAX_ANSWER_CHARS:
        raise ValueError(f"the critique has {len(critique)} characters; it needs to be at most {MAX_ANSWER_CHARS}")
    for quotes in (good, poor):
        if isinstance(quotes, str) or not isinstance(quotes, Iterable):
            raise ValueError(f"the quotes are {quotes!r:.80}; they need to be a list")
    good, poor = ([read_quote(item) for item in islice(quotes, MAX_QUOTES + 1)] for quotes in (good, poor))
    return critique, good, poor


def make_feedback(
    critique: str,
    good: Sequence[Any],
    poor: Sequence[Any],
    response_text: str,
    *,
    source: str,
    version: str,
) -> SpanFeedback:
    """The feedback of a critique with its good and poor quotes (see `read_quote`); None stands for an unreadable one.

    Quotes that do not stand in the response are left out and counted; the same span twice is one span.
    Raises ValueError for what is no quote.
    """
    critique = _SURROGATES.sub("\ufffd", critique)  # JSON can spell halves of characters, which no file can hold
    num_located = 0
    spans: dict[tuple[int, int, int], Span] = {}
    for label, items in ((1, good), (-1, poor)):
        for item in items[:MAX_QUOTES]:
            quote = None if item is None else read_quote(item)
            place = locate(response_text, quote.text, quote.occurrence) if quote and quote.text.strip() else None
            if quote is None or place is None:
                continue
            num_located += 1
            about = quote.critique_range
            if about is None or not 0 <= about[0] < about[1] <= len(critique):
                about = sentence_about(critique, quote.text, quote.occurrence)
            spans.setdefault(
                (*place, label),
                Span(
                    start=place[0],
                    end=place[1],
                    label=label,
                    severity=quote.severity,
                    critique_range=about,
                ),
            )
    return SpanFeedback(
        critique=critique,
        spans=tuple(spans.values()),
        status="ok" if spans else "empty",
        source=source,
        version=version,
        num_quotes=len(good) + len(poor),
        num_located=num_located,
    )


def no_feedback(status: Literal["unparsable", "failed"], *, source: str, version: str) -> SpanFeedback:
    """A judgement that could not be used: `unparsable` or `failed`."""
    return SpanFeedback(critique="", spans=(), status=status, source=source, version=version)


def sentence_about(critique: str, quote: str, occurrence: int = 1) -> tuple[int, int] | None:
    """Half-open characters of the critique's sentence that contains the quote, or None.

    A critique that quotes the same words several times speaks of their places in order: the `occurrence`-th mention is
    taken, or the first where there are fewer.
    """
    place = locate(critique, quote, occurrence) or locate(critique, quote)
    if place is None:
        return None
    ends = [match.end() for match in _SENTENCE_END.finditer(critique)]
    start = max((end for end in ends if end <= place[0]), default=0)
    stop = min((end for end in ends if end >= place[1]), default=len(critique))
    text = critique[start:stop]
    return start + len(text) - len(text.lstrip()), stop - (len(text) - len(text.rstrip()))
