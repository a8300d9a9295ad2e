"""Split a text at the ends of its spans, so that overlapping and nested spans become adjacent segments for HTML."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from t2g.config.secrets import CONTROL
from t2g.types import Span


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a text that the same spans cover."""

    text: str
    good: bool  # covered by a good span
    poor: bool
    opens: tuple[tuple[int, int], ...]  # (index, label) of the spans that begin with this segment
    is_struck: bool = False  # covered by a span with a fix
    fixes: tuple[str, ...] = ()  # fixes of the spans that end with this segment


class _ClippedSpan(NamedTuple):
    """The part of a span that lies in the text, not empty."""

    span_index: int
    start: int
    end: int
    label: int
    fix: str | None


def segments(text: str, spans: Sequence[Span]) -> list[Segment]:
    """Split the text where a span begins or ends. The segments in order are the whole text.

    Spans may overlap, nest, repeat or exceed the text, which may be shortened. Empty spans are ignored.

    >>> spans = [Span(start=0, end=3, label=1), Span(start=2, end=4, label=-1)]
    >>> [(s.text, s.good, s.poor) for s in segments("abcd", spans)]
    [('ab', True, False), ('c', True, True), ('d', False, True)]
    """
    clipped: list[_ClippedSpan] = []
    cuts = {0, len(text)}
    for index, span in enumerate(spans):
        start = max(0, span.start)
        end = min(len(text), span.end)
        if start < end:
            clipped.append(_ClippedSpan(index, start, end, span.label, span.fix))
            cuts |= {start, end}
    return [_make_segment(text, start, end, clipped) for start, end in pairwise(sorted(cuts))]


def _make_segment(text: str, start: int, end: int, spans: Sequence[_ClippedSpan]) -> Segment:
    """Return the segment of a range in which no span begins or ends."""
    labels: set[int] = set()
    opens: list[tuple[int, int]] = []
    fixes: list[str] = []
    is_struck = False
    for span in spans:
        is_covering = span.start <= start and end <= span.end
        if not is_covering:
            continue
        labels.add(span.label)
        if span.start == start:
            opens.append((span.span_index, span.label))
        if span.fix is not None:
            is_struck = True
            if span.end == end:
                fixes.append(span.fix)
    return Segment(
        text=text[start:end],
        good=1 in labels,
        poor=-1 in labels,
        opens=tuple(opens),
        is_struck=is_struck,
        fixes=tuple(fixes),
    )


def mark_spans(text: str, spans: Sequence[Span]) -> str:
    """Return the text as HTML, good spans on green, poor ones on red, both on yellow."""
    colors = {(True, False): "#c6efce", (False, True): "#ffc7ce", (True, True): "#ffeb9c"}
    parts = []
    for segment in segments(printable(text), spans):
        part = html.escape(segment.text)
        color = colors.get((segment.good, segment.poor))
        if color:
            part = f'<mark style="background:{color}">{part}</mark>'
        parts.append(part)
    return "".join(parts)


def printable(text: str) -> str:
    """Replace each control character except tabs and line ends by a symbol or U+FFFD. Character ranges stay valid."""
    return CONTROL.sub(lambda match: _symbol(match[0]), text)


def _symbol(character: str) -> str:
    code = ord(character)
    if character in "\n\t":
        return character
    if code < 32:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return "\ufffd"
