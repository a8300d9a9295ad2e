"""A feedback function that quotes the names, numbers and dates of a summary, and says which of them its text has."""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from t2g.types import Span

_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_PIECE = re.compile(
    rf"(?P<date>\b(?:{_MONTHS})\b(?: \d{{1,2}}\b)?(?:,? \d{{4}}\b)?|\b(?:1[89]|20)\d\d\b)"
    r"|(?<!\n)(?!^)(?P<number>\b\d[\d.,]*(?<![.,])%?)"  # but for those that count the lines of a list
    r"|(?P<name>\b[A-Z][\w'’-]*(?: (?:of |for |the |and )?[A-Z][\w'’-]*)*)"
)
_OPENS = re.compile(r"(?:^|[.!?:;\n][\"'”’)\]]*)\s*[-*\"'“‘(\[\d.)]*\s*$")  # what stands before a sentence's first word
_WORD = re.compile(r"\w+")
_SEVERITY: dict[str, Literal[1, 2, 3]] = {"date": 3, "number": 3, "name": 2}


class Piece(NamedTuple):
    kind: str  # a name of _SEVERITY
    start: int
    end: int


def feedback_function(prompt_text: str, response_text: str) -> tuple[str, list[Span], list[Span]]:
    """(critique, good spans, poor spans): a piece that the text has is good where it stands first, one that it does not
    have is poor wherever it stands; a wrong number or date does more harm (severity 3) than a name (2).

    >>> feedback_function("Zinc helped 40 of 60.", "In 2019 it helped 40.")[0]
    '2019: the text has no such date. 40: so says the text.'
    """
    known, told = set(_words(prompt_text)), set[str]()
    critique, good, poor = "", list[Span](), list[Span]()
    for kind, start, end in pieces(response_text):
        piece, label = response_text[start:end], 1 if set(_words(response_text[start:end])) <= known else -1
        if label == 1 and piece in told:
            continue
        told.add(piece)
        sentence = f"{piece}: {'so says the text' if label == 1 else f'the text has no such {kind}'}."
        critique += sentence if not critique else f" {sentence}"
        about, severity = (len(critique) - len(sentence), len(critique)), 1 if label == 1 else _SEVERITY[kind]
        span = Span(start=start, end=end, label=1 if label == 1 else -1, severity=severity, critique_range=about)
        (good if label == 1 else poor).append(span)
    return critique or "It names nobody, no number and no date.", good, poor


def pieces(text: str) -> Iterator[Piece]:
    """Names, numbers and dates. The word that opens a sentence is a name only where it goes on after a capital: WHO."""
    for match in _PIECE.finditer(text):
        kind, start, end = str(match.lastgroup), match.start(), match.end()
        if kind == "name" and _OPENS.search(text[:start]):
            first, _, rest = match.group().partition(" ")
            if first[1:] in ("", first[1:].lower()):
                start = end - len(rest)
        if start < end and (kind != "name" or text[start:end] not in ("I", "A")):
            yield Piece(kind, start, end)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold().replace(",", ""))
