"""Cuts a text at the ends of its spans, so that overlapping and nested spans become plain neighbours for HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from t2g.config.texts import CONTROL
from t2g.types import Span


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of text that the same spans cover; joined in order, segments give the text back."""

    text: str
    good: bool  # a good span covers it
    poor: bool
    opens: tuple[tuple[int, int], ...]  # (index, label) of the spans that begin here


def segments(text: str, spans: Sequence[Span]) -> list[Segment]:
    """The text in order, cut where a span begins or ends.

    Spans may overlap, nest, repeat or reach beyond the text (it may have been shortened); empty ones are left out.

    >>> spans = [Span(start=0, end=3, label=1), Span(start=2, end=4, label=-1)]
    >>> [(s.text, s.good, s.poor) for s in segments("abcd", spans)]
    [('ab', True, False), ('c', True, True), ('d', False, True)]
    """
    inside = [(i, max(0, s.start), min(len(text), s.end), s.label) for i, s in enumerate(spans)]
    inside = [item for item in inside if item[1] < item[2]]
    cuts = sorted({0, len(text), *(start for _, start, _, _ in inside), *(end for _, _, end, _ in inside)})
    result = []
    for start, end in pairwise(cuts):
        covering = {label for _, first, last, label in inside if first <= start and end <= last}
        opens = tuple((i, label) for i, first, _, label in inside if first == start)
        result.append(Segment(text=text[start:end], good=1 in covering, poor=-1 in covering, opens=opens))
    return result


def printable(text: str) -> str:
    """Replace each character that a page or a terminal would obey by a picture or U+FFFD: ranges stay right.

    Tabs and line ends are kept.
    """
    return CONTROL.sub(lambda found: _picture(found[0]), text)


def _picture(character: str) -> str:
    code = ord(character)
    return character if character in "\n\t" else chr(0x2400 + code) if code < 32 else "␡" if code == 0x7F else "\ufffd"
