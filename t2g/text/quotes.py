"""Locate quotes in a text: exact character ranges, or nothing.

An exact match is searched first. Only without one is a bounded tolerance applied: runs of white space equal one space;
quotation marks of one kind are equal, and so are hyphens, dashes and minus; characters without a width count as
nothing, as do the `**` of bold text and the backticks of code around words; and characters that are compatible in
Unicode (NFKD) are equal. Letters, case, ellipses and word order must match, and words are never joined.
"""

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

# Without these bounds one quote of a repetitive text takes seconds: the work grows with the square of its length.
MAX_MATCHES = 1000  # candidate matches of a quote, including those that begin or end inside a character
MAX_COMBINING = 30  # combining marks of one letter; the limit of Unicode's stream-safe text (UAX 15)
_PLAIN_FORMS = {
    **dict.fromkeys("\u2018\u2019\u201a\u201b\u00b4\u02bc\u2032\u2039\u203a", "'"),
    **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033", '"'),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
    # Soft hyphen, characters of no width, marks of direction, byte order mark, variation selectors.
    **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\ufe0e\ufe0f", ""),
}
# Scripts without blanks between words: Thai, Lao, Burmese, Khmer, kana, Chinese characters.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
_WORD = rf"[^\W{_UNSPACED}]"
_WORD_CHARACTER = re.compile(_WORD)
# Marks of bold text and of code open or close a word; between blanks and within a word, as in x**2, they are text.
_AT_WORD = rf"(?:(?<!{_WORD}MARK)(?=\S)|(?<=\SMARK)(?!{_WORD}))"
_BOLD = r"(?<!\*)\*\*(?!\*)" + _AT_WORD.replace("MARK", r"\*\*")
_CODE = r"(?<!`)`(?!`)" + _AT_WORD.replace("MARK", "`")
_CODE_BLOCK = r"(?<!`)```(?!`)" + _AT_WORD.replace("MARK", "```")
_MARKUP = re.compile(f"{_BOLD}|{_CODE}|{_CODE_BLOCK}")
_NUMBER = re.compile(r"\d(?:\.\d|,\d{3}(?!\d))")  # a decimal point, or a comma before thousands


def locate(text: str, quote: str, occurrence: int = 1) -> tuple[int, int] | None:
    """Return the half-open character range of the `occurrence`-th (from 1) match of `quote` in `text`, or None.

    Matches at word borders come before those that cut a word: "n" is the variable before it is a letter of "return".
    This order is part of the format of records and of the answers of reward models.
    Matches may overlap: "aa" occurs twice in "aaa". If the exact quote occurs, only exact matches count. Otherwise the
    module's tolerance applies, and the range still refers to the unchanged `text`. None for an empty quote, an
    occurrence below 1 or above MAX_MATCHES, and a quote with fewer matches.

        locate("the cat sat on the mat", "the", 2) == (15, 18)
        locate("with it", "it") == (5, 7), and its second match is (1, 3)
        locate("3.5 or 5", "5") == (7, 8)
        locate("so  “good”", 'so "good"') == (0, 10)
    """
    ranges = locate_all(text, quote)
    if not 1 <= occurrence <= len(ranges):
        return None
    return ranges[occurrence - 1]


def locate_all(text: str, quote: str) -> list[tuple[int, int]]:
    """Return all matches of `locate`, at most MAX_MATCHES, in its order."""
    if not quote:
        return []
    if quote in text:
        return [(start, start + len(quote)) for start in _find_starts(text, quote)]
    folded = _fold(text)
    key = _fold(quote).text.strip(" ")
    if not key:
        return []
    matches: list[tuple[int, int]] = []
    for folded_start in _find_starts(folded.text, key):
        start = folded.begins.get(folded_start)
        end = folded.ends.get(folded_start + len(key))
        # A match must begin and end at a character border of the text: "cafe" is not a part of "café".
        if start is not None and end is not None:
            matches.append((start, end))
    return matches


def cuts_word(text: str, start: int, end: int) -> bool:
    """Return whether a range begins or ends within a word or number."""
    return _inside_word(text, start) or _inside_word(text, end)


def find_occurrence(text: str, quote: str, start: int) -> int:
    """Return the `occurrence` of `locate` whose match begins at `start`; MAX_MATCHES + 1 if there is none."""
    starts = _find_starts(text, quote)
    if start not in starts:
        return MAX_MATCHES + 1
    return starts.index(start) + 1


@lru_cache(maxsize=64)  # an answer may quote one piece hundreds of times, with other occurrences
def _find_starts(text: str, quote: str) -> tuple[int, ...]:
    """Return where the first MAX_MATCHES matches of `quote` begin: in order, those that cut a word after the others."""
    starts: list[int] = []
    start = text.find(quote)
    while start >= 0 and len(starts) < MAX_MATCHES:
        starts.append(start)
        start = text.find(quote, start + 1)
    starts.sort(key=lambda start: cuts_word(text, start, start + len(quote)))
    return tuple(starts)


def _inside_word(text: str, at: int) -> bool:
    """Return whether the characters on both sides of a position belong to one word or number."""
    if not 0 < at < len(text):
        return False
    if _is_accent(text[at]):
        return True
    if _is_word_character(text[at - 1]) and _is_word_character(text[at]):
        return True
    before_mark = _NUMBER.match(text, at - 1)
    behind_mark = at > 1 and _NUMBER.match(text, at - 2)
    return bool(before_mark or behind_mark)


def _is_word_character(char: str) -> bool:
    return _is_accent(char) or _WORD_CHARACTER.match(char) is not None


def _is_accent(char: str) -> bool:
    """Return whether a character is a mark on the one before it: an accent or a vowel sign."""
    return unicodedata.category(char).startswith("M")


class _Folded(NamedTuple):
    text: str
    begins: dict[int, int]  # position in `text` where a character of the original begins -> its start in the original
    ends: dict[int, int]  # position in `text` where such a character ends -> its end in the original


@lru_cache(maxsize=64)
def _fold(text: str) -> _Folded:
    """Normalize `text` by the tolerance, and map positions back to the original."""
    parts: list[str] = []
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    length = 0
    markup: set[int] = set()  # positions of marks of bold text and of code
    for match in _MARKUP.finditer(text):
        markup.update(range(*match.span()))
    for start, end in _characters(text):
        character = "".join([_PLAIN_FORMS.get(char, char) for char in text[start:end]])
        part = unicodedata.normalize("NFKD", character).replace("\u2044", "/")  # NFKD of one half is 1, \u2044 and 2
        if not part or start in markup:
            continue
        if part.isspace():
            if parts and parts[-1] == " ":  # one space for the run, which now ends at `end`
                ends[length] = end
                continue
            part = " "
        begins[length] = start
        parts.append(part)
        length += len(part)
        ends[length] = end
    return _Folded("".join(parts), begins, ends)


def _characters(text: str) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges of characters with their combining marks: accents, vowels and finals of Hangul.

    A mark beyond MAX_COMBINING counts as a character.
    """
    start = 0
    for at in range(1, len(text)):
        if at - start > MAX_COMBINING or not _combines(text[at]):
            yield start, at
            start = at
    if text:
        yield start, len(text)


def _combines(char: str) -> bool:
    return bool(unicodedata.combining(char)) or "\u1160" <= char <= "\u11ff"
