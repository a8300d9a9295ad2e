"""A feedback function that quotes the names, numbers and dates of a summary and checks them against its text."""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from t2g.types import Span

_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_PIECE = re.compile(
    rf"(?P<date>\b(?:{_MONTHS})\b(?: \d{{1,2}}\b)?(?:,? \d{{4}}\b)?|\b(?:1[89]|20)\d\d\b)"
    r"|(?<!\n)(?!^)(?P<number>\b\d[\d.,]*(?<![.,])%?)"  # not the numbers of a numbered list
    r"|(?P<name>\b[A-Z][\w'’-]*(?: (?:of |for |the |and )?[A-Z][\w'’-]*)*)"
)
_OPENS = re.compile(r"(?:^|[.!?:;\n][\"'”’)\]]*)\s*[-*\"'“‘(\[\d.)]*\s*$")  # text before the first word of a sentence
_OPENING_CHARS = 32  # that are searched by _OPENS, whose time grows with their third power
_DATE_PARTS = re.compile(rf"{_MONTHS}|\d")
_WORD = re.compile(r"\w+")
_SEVERITY: dict[str, Literal[1, 2, 3]] = {"date": 3, "number": 3, "name": 2}


class Detail(NamedTuple):
    kind: str  # a name of _SEVERITY
    start: int
    end: int


def feedback_function(prompt_text: str, response_text: str) -> tuple[str, list[Span], list[Span]]:
    """Return critique, good spans and poor spans.

    The first occurrence of a detail that the text has is good. Each occurrence of another detail is poor, with
    severity 3 for a number or date and 2 for a name. A date may have a fix: see `find_correction`.

    >>> feedback_function("Zinc helped 40 of 60.", "In 2019 it helped 40.")[0]
    '2019: the text has no such date. 40: so says the text.'
    """
    text_words = set(_split_words(prompt_text))
    reported = set[str]()
    critique = ""
    good = list[Span]()
    poor = list[Span]()
    for kind, start, end in find_details(response_text):
        detail = response_text[start:end]
        is_true = text_words.issuperset(_split_words(detail))
        if is_true and detail in reported:
            continue
        reported.add(detail)
        sentence = f"{detail}: the text has no such {kind}."
        if is_true:
            sentence = f"{detail}: so says the text."
        if critique:
            critique += " "
        critique += sentence
        about = (len(critique) - len(sentence), len(critique))
        if is_true:
            good.append(Span(start=start, end=end, label=1, severity=1, critique_range=about))
            continue
        fix = None
        if kind == "date":
            fix = find_correction(prompt_text, response_text, detail)
        severity = _SEVERITY[kind]
        poor.append(Span(start=start, end=end, label=-1, severity=severity, critique_range=about, fix=fix))
    return critique or "It names nobody, no number and no date.", good, poor


def find_correction(text: str, response: str, date: str) -> str | None:
    """Return the only date of the text, if it has the form of `date`, as `March 2019` and `May 2020`, and is not in the
    response.
    """
    dates: set[str] = set()
    for kind, start, end in find_details(text):
        if kind == "date":
            dates.add(text[start:end])
    if len(dates) != 1:
        return None
    fix = dates.pop()
    has_same_form = _DATE_PARTS.sub("#", fix) == _DATE_PARTS.sub("#", date)
    if not has_same_form or fix in response:
        return None
    return fix


def find_details(text: str) -> Iterator[Detail]:
    """Yield names, numbers and dates. The first word of a sentence is a name only if it has a further capital: WHO."""
    for match in _PIECE.finditer(text):
        kind = str(match.lastgroup)
        start, end = match.span()
        if kind == "name" and _OPENS.search(text, max(0, start - _OPENING_CHARS), start):
            first, _, rest = match.group().partition(" ")
            if first[1:] in ("", first[1:].lower()):
                start = end - len(rest)
        if start < end and (kind != "name" or text[start:end] not in ("I", "A")):
            yield Detail(kind, start, end)


def _split_words(text: str) -> list[str]:
    return _WORD.findall(text.casefold().replace(",", ""))
