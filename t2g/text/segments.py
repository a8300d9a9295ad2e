"""Split a text at the ends of its spans, so that overlapping and nested spans become adjacent segments for HTML."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from t2g.config.texts import CONTROL
from t2g.types import Span


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a text that the same spans cover."""

    text: str
    good: bool  # covered by a good span
    poor: bool
    opens: tuple[tuple[int, int], ...]  # (index, label) of the spans that begin with this segment
    is_struck: bool = False  # covered by a span with a fix
    fixes: tuple[str, ...] = ()  # of the spans that end with this segment


def segments(text: str, spans: Sequence[Span]) -> list[Segment]:
    """Split the text where a span begins or ends. The segments in order are the whole text.

    Spans may overlap, nest, repeat or exceed the text, which may be shortened. Empty spans are ignored.

    >>> spans = [Span(start=0, end=3, label=1), Span(start=2, end=4, label=-1)]
    >>> [(s.text, s.good, s.poor) for s in segments("abcd", spans)]
    [('ab', True, False), ('c', True, True), ('d', False, True)]
    """
    inside = [(i, max(0, s.start), min(len(text), s.end), s) for i, s in enumerate(spans)]
    inside = [item for item in inside if item[1] < item[2]]
    cuts = sorted({0, len(text), *(start for _, start, _, _ in inside), *(end for _, _, end, _ in inside)})
    result = []
    for start, end in pairwise(cuts):
        covering = [span for _, first, last, span in inside if first <= start and end <= last]
        labels = {span.label for span in covering}
        result.append(
            Segment(
                text=text[start:end],
                good=1 in labels,
                poor=-1 in labels,
                opens=tuple((i, span.label) for i, first, _, span in inside if first == start),
                is_struck=any(span.fix is not None for span in covering),
                fixes=tuple(span.fix for _, _, last, span in inside if last == end and span.fix is not None),
            )
        )
    return result


def to_html(text: str, spans: Sequence[Span]) -> str:
    """Return the text as HTML, good spans on green, poor ones on red, both on yellow."""
    colours = {(True, False): "#c6efce", (False, True): "#ffc7ce", (True, True): "#ffeb9c"}
    parts = []
    for segment in segments(printable(text), spans):
        colour = colours.get((segment.good, segment.poor))
        escaped = html.escape(segment.text)
        parts.append(f'<mark style="background:{colour}">{escaped}</mark>' if colour else escaped)
    return f'<div style="white-space:pre-wrap">{"".join(parts)}</div>'


def printable(text: str) -> str:
    """Replace each control character except tabs and line ends by a symbol or U+FFFD. Character ranges stay valid."""
    return CONTROL.sub(lambda match: _symbol(match[0]), text)


def _symbol(character: str) -> str:
    code = ord(character)
    return character if character in "\n\t" else chr(0x2400 + code) if code < 32 else "␡" if code == 0x7F else "\ufffd"
