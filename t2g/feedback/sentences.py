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
    return next(iter(sentences[occurrence - 1 :] or sentences), None)


def claim_sentence(
    critique: str, quote: str, occurrence: int, label: int, claimed: dict[tuple[int, int], int]
) -> tuple[int, int] | None:
    """Return and claim `find_sentence`, or a later sentence if a quote of the other label has claimed that one."""
    first = find_sentence(critique, quote, occurrence)
    later = _find_sentences(critique, quote)[occurrence:]
    free = (sentence for sentence in (first, *later) if sentence and claimed.get(sentence, label) == label)
    chosen = next(free, first)
    if chosen is not None:
        claimed.setdefault(chosen, label)
    return chosen


@lru_cache(maxsize=64)  # each quote of an answer is looked up twice
def _find_sentences(critique: str, quote: str) -> tuple[tuple[int, int], ...]:
    """Return the sentences that contain the quote, in order, without duplicates."""
    ends, ranges = _find_sentence_ends(critique), {}
    for first, last in locate_all(critique, quote):
        before, after = bisect_right(ends, first), bisect_left(ends, last)
        start, stop = ends[before - 1] if before else 0, ends[after] if after < len(ends) else len(critique)
        if (start, stop) not in ranges:
            text = critique[start:stop]
            ranges[start, stop] = start + len(text) - len(text.lstrip()), stop - (len(text) - len(text.rstrip()))
    return tuple(ranges.values())


@lru_cache(maxsize=1)  # all quotes of an answer share a critique
def _find_sentence_ends(critique: str) -> list[int]:
    return [match.end() for match in _SENTENCE_END.finditer(critique)]
