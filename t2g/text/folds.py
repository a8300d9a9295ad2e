"""The calls and results of tools in a transcript, which readers see folded.

    <tool_call>{"name": "lookup", "arguments": {"item": "phone", "field": "price"}}</tool_call>

    [tool lookup]
    7

    [assistant]
    The price is 7.

The call is folded to "call of lookup". The result is short and stays, as does every text of one line that is no longer
than its title could be.
"""

import html
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from t2g.text.segments import mark_spans, printable
from t2g.text.transcript import UNKNOWN_TOOL, format_reply, list_reply
from t2g.types import PolicyTurn, Span, ToolResult

MAX_TITLE_CHARS = 60


class Piece(NamedTuple):
    """A part of a transcript; the parts in order are the whole."""

    text: str
    spans: list[Span]  # all spans of the transcript, in characters of the part; those elsewhere are empty
    title: str  # what a reader sees of a part that is folded; "" for the others

    @property
    def is_judged(self) -> bool:
        """Return whether a span covers a character of the part."""
        return any(span.start < span.end for span in self.spans)


class _Fold(NamedTuple):
    """A range of the transcript that is folded."""

    start: int
    end: int
    title: str


def split_folds(text: str, spans: Sequence[Span], turns: Sequence[PolicyTurn]) -> list[Piece]:
    """Return the parts of a transcript: calls and results of tools, which are folded, and what is between them.

    Args:
        text: The transcript, which may be shortened.
        turns: Its turns; () for a response of a single turn.
    """
    pieces: list[Piece] = []
    position = 0
    for fold in _find_folds(text, turns):
        if fold.start < position or fold.end > len(text):
            continue  # calls within each other, or a shortened text
        if fold.start > position:
            pieces.append(_cut(text, spans, position, fold.start, ""))
        pieces.append(_cut(text, spans, fold.start, fold.end, fold.title))
        position = fold.end
    if position < len(text) or not pieces:
        pieces.append(_cut(text, spans, position, len(text), ""))
    return pieces


def to_html(text: str, spans: Sequence[Span], turns: Sequence[PolicyTurn] = ()) -> str:
    """Return a transcript as HTML with colored spans. A part that is folded is open if a span covers some of it."""
    content = ""
    for piece in split_folds(text, spans, turns):
        part = mark_spans(piece.text, piece.spans)
        if piece.title:
            state = " open" if piece.is_judged else ""
            title = html.escape(printable(piece.title))
            part = f"<details{state}><summary>{title}</summary>{part}</details>"
        content += part
    return f'<div style="white-space:pre-wrap">{content}</div>'


def _cut(text: str, spans: Sequence[Span], start: int, end: int, title: str) -> Piece:
    cut_spans: list[Span] = []
    for span in spans:
        first = min(max(span.start, start), end) - start
        last = min(max(span.end, start), end) - start
        cut_spans.append(replace(span, start=first, end=last))
    return Piece(text[start:end], cut_spans, title)


def _find_folds(text: str, turns: Sequence[PolicyTurn]) -> list[_Fold]:
    folds: list[_Fold] = []
    for turn in turns:
        for result in turn.results:
            start = (turn.answer_start or 0) + result.characters[0]
            end = (turn.answer_start or 0) + result.characters[1]
            folds.append(_Fold(start, end, f"call of {result.tool or UNKNOWN_TOOL}"))
        if turn.results:
            folds += _find_results(turn.characters[1], turn.results)
    return [fold for fold in folds if not _is_short(text[fold.start : fold.end])]


def _find_results(position: int, results: Sequence[ToolResult]) -> list[_Fold]:
    """Return the results of a turn that ends at a position, as `format_reply` writes them after it."""
    folds: list[_Fold] = []
    for message in list_reply("", results):
        heading, _, _ = format_reply([message | {"content": "\0"}]).partition("\0")
        start = position + len(heading)
        position = start + len(message["content"])
        folds.append(_Fold(start, position, _make_title(message["content"])))
    return folds


def _make_title(result: str) -> str:
    first_line = result.strip().partition("\n")[0]
    return f"{first_line[:MAX_TITLE_CHARS]} …"


def _is_short(text: str) -> bool:
    return len(text) <= MAX_TITLE_CHARS and "\n" not in text
