"""locate: exact places, the bounded tolerance, and nothing else."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.feedback import locate

TEXT = st.text("ab é“\"'\u0301\n\u00a0ﬁ", max_size=30) | st.text(max_size=30)


def places(text: str, quote: str) -> list[int]:
    return [i for i in range(len(text)) if text[i : i + len(quote)] == quote]


@given(text=TEXT, bounds=st.tuples(st.integers(0, 30), st.integers(0, 30)), occurrence=st.integers(1, 4))
def test_an_exact_quote_is_found_where_a_slow_search_finds_it(
    text: str, bounds: tuple[int, int], occurrence: int
) -> None:
    quote = text[min(bounds) : max(bounds)]
    starts = places(text, quote) if quote else []
    expected = (starts[occurrence - 1], starts[occurrence - 1] + len(quote)) if occurrence <= len(starts) else None
    assert locate(text, quote, occurrence) == expected


def squeeze(text: str) -> str:
    """What the tolerance says two texts must share, written down another way."""
    for curly, straight in zip("‘’‚‛“”„‟", "'" * 4 + '"' * 4, strict=True):
        text = text.replace(curly, straight)
    return " ".join(unicodedata.normalize("NFKD", text).split())


@given(text=TEXT, quote=TEXT, occurrence=st.integers(1, 3))
def test_a_range_is_within_the_text_and_says_the_same(text: str, quote: str, occurrence: int) -> None:
    found = locate(text, quote, occurrence)
    if found is not None:
        start, end = found
        assert 0 <= start < end <= len(text)
        assert squeeze(text[start:end]) == squeeze(quote)


@pytest.mark.parametrize(
    ("text", "quote", "occurrence", "expected"),
    [
        ("the cat sat on the mat", "the", 1, (0, 3)),
        ("the cat sat on the mat", "the", 2, (15, 18)),
        ("the cat sat on the mat", "the", 3, None),
        ("aaa", "aa", 2, (1, 3)),  # places may overlap
        ("party art", "art", 2, (6, 9)),  # characters, not words
        ("a", "", 1, None),
        ("a", "a", 0, None),
        ("a", "a", -1, None),
        ("", "a", 1, None),
        ("a", "A", 1, None),  # case is never forgiven
        ("wizards", "wiz ards", 1, None),  # nor are words glued
        ("a b", "b a", 1, None),
        # white space
        ("one  two\n three", "one two three", 1, (0, 15)),
        ("one two", " one \n two ", 1, (0, 7)),
        ("x one\u00a0\u00a0two y", "one two", 1, (2, 10)),
        ("a  b, a b", "a b", 1, (6, 9)),  # the exact one, though a tolerant one stands before it
        ("a  b, a b", "a b", 2, None),
        ("a  b, a \n b", "a b", 2, (6, 11)),
        ("a b", "   ", 1, None),
        # quotation marks
        ("he said “no”", 'said "no"', 1, (3, 12)),
        ("it's", "it’s", 1, (0, 4)),
        # Unicode
        ("a caf\u00e9!", "cafe\u0301", 1, (2, 6)),
        ("a cafe\u0301!", "caf\u00e9", 1, (2, 7)),
        ("of\ufb01ce", "office", 1, (0, 5)),
        ("of\ufb01ce", "ofice", 1, None),
        ("of\ufb01ce", "of f", 1, None),
        ("\ufb01x", "f", 1, None),  # half of a ligature is no character of the text
        ("caf\u00e9", "cafe", 1, None),  # nor is a letter without its accent
        ("cafe\u0301 Cafe", "Cafe\u00a0", 1, (6, 10)),
        ("\uac01 x", "\uac00\u00a0", 1, None),  # nor a Hangul syllable without its final
        ("\u1100\u1161\u11a8", "\uac01", 1, (0, 3)),
        ("ＡＢＣ", "ABC", 1, (0, 3)),
    ],
)
def test_by_hand(text: str, quote: str, occurrence: int, expected: tuple[int, int] | None) -> None:
    assert locate(text, quote, occurrence) == expected


def test_an_absurd_occurrence_ends_at_once() -> None:
    assert locate("a" * 10_000, "a", 10**18) is None
