"""Find the sentence of a critique that speaks of a quote."""

import re
from bisect import bisect_left, bisect_right
from functools import lru_cache

from t2g.text.quotes import locate_all

_SENTENCE_END = re.compile(r"[.!?;](?=\s|$)|[。！？；\n]")


def find_sentence(critique: str, quote: str, occurrence: int = 1) -> tuple[int, int] | None:
    """Return the half-open character range of the critique's sentence about the quote, or None.

    Critiques discuss occurrences of the same text in order, one sentence each. The result is the `occurrence`-th
    sentence that contains the quote, or the first if there are fewer.
    """
    sentences = _find_sentences(critique, quote)
    if not sentences:
        return None
    if occurrence > len(sentences):
        return sentences[0]
    return sentences[occurrence - 1]


def claim_sentence(
    critique: str, quote: str, occurrence: int, label: int, claimed: dict[tuple[int, int], int]
) -> tuple[int, int] | None:
    """Return and claim `find_sentence`, or a later sentence if a quote of the other label has claimed that one."""
    first = find_sentence(critique, quote, occurrence)
    if first is None:
        return None
    later = _find_sentences(critique, quote)[occurrence:]
    free = (sentence for sentence in (first, *later) if claimed.get(sentence, label) == label)
    chosen = next(free, first)
    claimed.setdefault(chosen, label)
    return chosen


@lru_cache(maxsize=64)  # each quote of an answer is looked up twice
def _find_sentences(critique: str, quote: str) -> tuple[tuple[int, int], ...]:
    """Return the sentences that contain the quote, in order, without duplicates."""
    borders = _find_borders(critique)
    ranges: dict[tuple[int, int], tuple[int, int]] = {}  # sentence -> the sentence without blanks around it
    for first, last in locate_all(critique, quote):
        start = borders[bisect_right(borders, first) - 1]
        stop = borders[bisect_left(borders, last)]
        if (start, stop) not in ranges:
            ranges[start, stop] = _strip_blanks(critique, start, stop)
    return tuple(ranges.values())


@lru_cache(maxsize=1)  # all quotes of an answer share a critique
def _find_borders(critique: str) -> list[int]:
    """Return where the sentences end, after 0 and before the end of the critique."""
    ends = [match.end() for match in _SENTENCE_END.finditer(critique)]
    return [0, *ends, len(critique)]


def _strip_blanks(text: str, start: int, stop: int) -> tuple[int, int]:
    """Return the half-open range of text[start:stop] without blanks around it."""
    part = text[start:stop]
    num_leading = len(part) - len(part.lstrip())
    num_trailing = len(part) - len(part.rstrip())
    return start + num_leading, stop - num_trailing
