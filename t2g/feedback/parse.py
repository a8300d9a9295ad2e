"""An answer in JSON to a critique with spans, and back. Answers are untrusted: parsed, bounded, never an exception.

    {"critique": "It says phone, which is wrong.", "good": ["by Ann"], "poor": [{"quote": "phone", "occurrence": 2}]}

A quote is a text, or an object with those of occurrence and severity that are not 1. Without a critique
(`StyleConfig.critique` off) the answer is {"good": [...], "poor": [...]}.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from t2g.config import StyleConfig
from t2g.tasks.base import SPARSE
from t2g.text.quotes import locate
from t2g.types import FinishReason, Span, SpanFeedback

MAX_ANSWER_CHARS = 65_536  # of an answer, a critique or an outcome that is looked at
MAX_QUOTES = 256  # of each label that are looked for; the rest counts as not located
_SENTENCE_END = re.compile(r"[.!?;](?=\s|$)|[。！？；\n]")
_SURROGATES = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class Quote:
    """A piece of the response as the source gave it."""

    text: str
    occurrence: int = 1  # which of its places is meant, from 1
    severity: int = 1  # 1 .. 3
    critique_range: tuple[int, int] | None = None  # characters of the critique that speak of it, if the source knows


class Judgement(NamedTuple):
    """What a program or a person says of one response, read and bounded."""

    critique: str
    good: list[Quote]
    poor: list[Quote]
    outcome: dict[str, Any]  # plain JSON: what a program found beside its words


def format_answer(critique: str, good: Iterable[Any], poor: Iterable[Any], *, style: StyleConfig = SPARSE) -> str:
    """The answer that says this, byte for byte as guided decoding by `t2g.feedback.grammar` can write it.

    Quotes as in `make_feedback`; ValueError for what is no quote. Without a critique in the style it is left out.
    """
    answer: dict[str, Any] = {"critique": critique} if style.critique else {}
    answer |= {"good": [_item(quote) for quote in good], "poor": [_item(quote) for quote in poor]}
    return json.dumps(answer, ensure_ascii=False)


def _item(item: Any) -> str | dict[str, Any]:
    quote = read_quote(item)
    other = {key: value for key in ("occurrence", "severity") if (value := getattr(quote, key)) != 1}
    return {"quote": quote.text, **other} if other else quote.text


def begun_answer(critique: str) -> str:
    """`format_answer` up to the last character of the critique, its closing quotation mark not included."""
    return f'{{"critique": {json.dumps(_whole(critique), ensure_ascii=False)[:-1]}'


def parse_answer(
    text: str,
    response_text: str,
    *,
    source: str,
    version: str,
    finish_reason: FinishReason = "stop",
    style: StyleConfig = SPARSE,
) -> SpanFeedback:
    """The feedback in a model's answer about `response_text`. Never raises.

    Status: ok; empty (it parses, no span was located); unparsable (no such JSON object, cut by length, or longer than
    MAX_ANSWER_CHARS). An entry that is no quote, or does not stand in the response, counts in num_quotes and not in
    num_located. In a style without a critique the critique is "", whatever the answer says.
    """
    answer = _load(text, style) if finish_reason == "stop" else "the answer was cut at its length limit"
    if isinstance(answer, str):
        return no_feedback("unparsable", source=source, version=version, reason=answer)
    return make_feedback(
        answer["critique"] if style.critique else "",
        [_quote_or_none(item) for item in answer["good"]],
        [_quote_or_none(item) for item in answer["poor"]],
        response_text,
        source=source,
        version=version,
    )


def _load(text: str, style: StyleConfig) -> dict[str, Any] | str:
    """The answer's object, or why it is none."""
    if len(text) > MAX_ANSWER_CHARS:
        return f"the answer has {len(text)} characters; at most {MAX_ANSWER_CHARS} are read"
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return "the answer is no JSON"
    if not isinstance(answer, dict):
        return "the answer is no JSON object"
    kinds: dict[str, type] = ({"critique": str} if style.critique else {}) | {"good": list, "poor": list}
    wrong = [key for key, kind in kinds.items() if not isinstance(answer.get(key), kind)]
    return f"the answer's {wrong[0]} is missing or no {kinds[wrong[0]].__name__}" if wrong else answer


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


def read_judgement(answer: Any) -> Judgement:
    """What a program or a file gives: (critique, good quotes, poor quotes), or a dict of critique, good, poor and
    perhaps outcome. ValueError in a sentence for rubbish.

    The quotes may be any iterables, which may raise or never end: at most MAX_QUOTES + 1 of each are taken, so that
    one too many still counts as not located.
    """
    outcome: Any = {}
    if isinstance(answer, dict):
        if set(answer) - {"outcome"} != {"critique", "good", "poor"}:
            raise ValueError(f"a dict with the keys {', '.join(map(str, answer))}; it needs critique, good and poor")
        outcome = answer.get("outcome", {})
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
    return Judgement(critique, good, poor, _plain_outcome(outcome))


def _plain_outcome(outcome: Any) -> dict[str, Any]:
    """A copy that a JSON file can hold. ValueError for anything else."""
    if not isinstance(outcome, dict):
        raise ValueError(f"the outcome is {outcome!r:.80}; it needs to be a dict of plain JSON")
    try:
        text = _whole(json.dumps(outcome, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the outcome needs to be plain JSON: {error!s:.100}") from error
    if len(text) > MAX_ANSWER_CHARS:
        raise ValueError(f"the outcome has {len(text)} characters of JSON; it needs to be at most {MAX_ANSWER_CHARS}")
    return json.loads(text)


def make_feedback(
    critique: str,
    good: Sequence[Any],
    poor: Sequence[Any],
    response_text: str,
    *,
    source: str,
    version: str,
    outcome: Mapping[str, Any] = MappingProxyType({}),
) -> SpanFeedback:
    """The feedback of a critique with its good and poor quotes (see `read_quote`); None stands for an unreadable one.

    Quotes that do not stand in the response are left out and counted; the same span twice is one span.
    Raises ValueError for what is no quote.
    """
    critique = _whole(critique)
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
                Span(start=place[0], end=place[1], label=label, severity=quote.severity, critique_range=about),
            )
    return SpanFeedback(
        critique=critique,
        spans=tuple(spans.values()),
        status="ok" if spans else "empty",
        source=source,
        version=version,
        num_quotes=len(good) + len(poor),
        num_located=num_located,
        outcome=dict(outcome),
    )


def no_feedback(
    status: Literal["unparsable", "failed"], *, source: str, version: str, reason: str = ""
) -> SpanFeedback:
    """A judgement that could not be used: `unparsable` or `failed`, and why in a sentence."""
    return SpanFeedback(critique="", spans=(), status=status, source=source, version=version, reason=reason)


def _whole(text: str) -> str:
    """`text` without halves of characters, which JSON can spell and no file can hold."""
    return _SURROGATES.sub("\ufffd", text)


def sentence_about(critique: str, quote: str, occurrence: int = 1) -> tuple[int, int] | None:
    """Half-open characters of the critique's sentence that contains the quote, or None.

    A critique that quotes the same words several times speaks of their places in order: the `occurrence`-th mention is
    taken, or the first where there are fewer.
    """
    place = locate(critique, quote, occurrence) or locate(critique, quote)
    if place is None:
        return None
    ends = _sentence_ends(critique)
    before, after = bisect_right(ends, place[0]), bisect_left(ends, place[1])
    start = ends[before - 1] if before else 0
    stop = ends[after] if after < len(ends) else len(critique)
    text = critique[start:stop]
    return start + len(text) - len(text.lstrip()), stop - (len(text) - len(text.rstrip()))


@lru_cache(maxsize=1)  # all quotes of an answer ask about one critique
def _sentence_ends(critique: str) -> list[int]:
    return [match.end() for match in _SENTENCE_END.finditer(critique)]
