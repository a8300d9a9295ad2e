"""Where a quote stands in a text: exact character ranges, or nothing.

Exact first. Only a quote that does not stand in the text as written is looked for with a bounded tolerance: runs of
white space are one space, straight and curly quotation marks are the same, and so are characters that Unicode calls
compatible (NFKD). Letters, case and word order are never forgiven, and no word is glued to another.
"""

import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

# Without these bounds one quote of a repetitive text takes seconds: the work grows with the square of its length.
MAX_MATCHES = 1000  # a quote's places that are looked at, halves of characters among them
MAX_COMBINING = 30  # that combine with one letter; Unicode's stream-safe text (UAX 15) has no more
_MARKS = {**dict.fromkeys("\u2018\u2019\u201a\u201b", "'"), **dict.fromkeys("\u201c\u201d\u201e\u201f", '"')}


def locate(text: str, quote: str, occurrence: int = 1) -> tuple[int, int] | None:
    """Half-open character range of the `occurrence`-th (from 1) place of `quote` in `text`, or None.

    Places that cut no word come first, the others after them: "n" is the variable before it is a letter of "return".
    Places may overlap: "aa" stands twice in "aaa". Where the exact quote stands at least once, only exact places count;
    else the tolerance of this module holds and the range still is one of `text` as it is. None for an empty quote, an
    occurrence below 1 or above MAX_MATCHES, and a quote that stands fewer than `occurrence` times.

        locate("the cat sat on the mat", "the", 2) == (15, 18)
        locate("with it", "it") == (5, 7), and its second place is (1, 3)
        locate("so  “good”", 'so "good"') == (0, 10)
    """
    found = locate_all(text, quote)
    return found[occurrence - 1] if 1 <= occurrence <= len(found) else None


def locate_all(text: str, quote: str) -> list[tuple[int, int]]:
    """All that `locate` finds, MAX_MATCHES at most, in its order."""
    if not quote:
        return []
    if quote in text:
        return [(start, start + len(quote)) for start in _places(text, quote)]
    folded, key = _fold(text), _fold(quote).text.strip(" ")
    if not key:
        return []
    # A match must begin and end between two whole characters of the text: "cafe" is no part of "café".
    whole = [at for at in _places(folded.text, key) if at in folded.begins and at + len(key) in folded.ends]
    return [(folded.begins[at], folded.ends[at + len(key)]) for at in whole]


def find_occurrence(text: str, quote: str, start: int) -> int:
    """Which place of `quote` in `text` begins at `start`, as `locate` counts them; 1 past MAX_MATCHES for none."""
    places = _places(text, quote)
    return places.index(start) + 1 if start in places else MAX_MATCHES + 1


def _places(text: str, quote: str) -> list[int]:
    """Where the first MAX_MATCHES places of `quote` begin: in order, those inside a word after the others."""
    found, at = [], text.find(quote)
    while at >= 0 and len(found) < MAX_MATCHES:
        found.append(at)
        at = text.find(quote, at + 1)
    return sorted(found, key=lambda at: _inside_word(text, at) or _inside_word(text, at + len(quote)))


def _inside_word(text: str, at: int) -> bool:
    """Whether the characters on both sides of a position belong to one word."""
    return 0 < at < len(text) and _in_words(text[at - 1]) and _in_words(text[at])


def _in_words(char: str) -> bool:
    return char.isalnum() or char == "_" or _combines(char)


class _Folded(NamedTuple):
    text: str
    begins: dict[int, int]  # position in `text` where a character of the original begins -> its start there
    ends: dict[int, int]  # position in `text` where one ends -> its end there


@lru_cache(maxsize=64)
def _fold(text: str) -> _Folded:
    """`text` with what the tolerance forgives taken out, and the way back."""
    parts: list[str] = []
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    length = 0
    for start, end in _characters(text):
        part = unicodedata.normalize("NFKD", "".join(_MARKS.get(c, c) for c in text[start:end]))
        if part.isspace():
            if parts and parts[-1] == " ":  # one space for the whole run, which now ends here
                ends[length] = end
                continue
            part = " "
        begins[length] = start
        parts.append(part)
        length += len(part)
        ends[length] = end
    return _Folded("".join(parts), begins, ends)


def _characters(text: str) -> Iterator[tuple[int, int]]:
    """Half-open ranges of characters with the marks that combine with them: accents, vowels and finals of Hangul.

    A mark beyond MAX_COMBINING counts as a character.
    """
    start = 0
    for at in range(1, len(text) + 1):
        if at == len(text) or at - start > MAX_COMBINING or not _combines(text[at]):
            yield start, at
            start = at


def _combines(char: str) -> bool:
    return bool(unicodedata.combining(char)) or "\u1160" <= char <= "\u11ff"
