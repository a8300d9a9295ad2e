"""Quotes with the wrong number of backslashes, as JSON decodes them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.feedback.escapes import correct_escapes
from t2g.feedback.parse import Quote
from t2g.text.quotes import locate

SPLITS = "fields = line.split(' ')\nlines = text.split('\\n')\n"
LATEX = r"The answer is \(\frac{1}{2}\), or 2 \times 3 by \beta."


@pytest.mark.parametrize(
    ("response", "written", "quoted"),
    [
        (SPLITS, r"split('\n')", r"split('\n')"),
        (SPLITS, r"text.split('\n')", r"text.split('\n')"),
        (SPLITS, r"(' ')\nlines = text.split('\n')", "(' ')\nlines = text.split('\\n')"),
        ("words = ' '.join(a)\nout = '\\n'.join(b)\n", r"'\n'.join", r"'\n'.join"),
        ('print("\\t")', r"\"\t\"", r'"\t"'),
        (LATEX, r"\frac{1}{2}", r"\frac{1}{2}"),
        (LATEX, r"2 \times 3", r"2 \times 3"),
        (LATEX, r"\beta", r"\beta"),
        ("def f():\n    return 1", r"def f():\\n    return 1", "def f():\n    return 1"),
        ('print("a")', r"print(\\\"a\\\")", 'print("a")'),
        # as they are
        ("a\nb 'a\\nb'", r"a\nb", "a\nb"),
        (r"a \n b", r"a \\n b", r"a \n b"),
        ("one  two\n three", r"two\nthree", "two\nthree"),
        ("nothing of it", r"\frac", "\frac"),
    ],
)
def test_a_quote_is_read_as_the_response_has_it(response: str, written: str, quoted: str) -> None:
    quote = Quote(quote=json.loads(f'"{written}"'))
    assert correct_escapes(quote, response).quote == quoted


@pytest.mark.parametrize(
    ("response", "written", "fix", "expected"),
    [
        (LATEX, r"\frac{1}{2}", r"\frac{1}{3}", r"\frac{1}{3}"),
        (LATEX, r"2 \times 3", r"3 \times 3", r"3 \times 3"),
        (SPLITS, r"split('\n')", r"split('\n\n')", r"split('\n\n')"),
        (SPLITS, r"split('\n')", "splitlines()", "splitlines()"),
        ("def f():\n    return 1", r"def f():\\n    return 1", r"def f():\\n    return 2", "def f():\n    return 2"),
        ("a\nb", r"a\nb", r"a\nc", "a\nc"),
        ("1/2 is", "1/2", r"\frac{1}{2}", r"\frac{1}{2}"),
        (SPLITS, r"(' ')\nlines = text.split('\n')", r"(',')\nlines = text.split('\n')", None),
    ],
)
def test_a_fix_has_the_backslashes_of_its_quote(response: str, written: str, fix: str, expected: str | None) -> None:
    entry = json.loads(f'{{"quote": "{written}", "fix": "{fix}"}}')
    assert correct_escapes(Quote(**entry), response).fix == expected


def test_a_corrected_quote_is_located_where_the_line_end_is_spelled() -> None:
    corrected = correct_escapes(Quote(quote="split('\n')"), SPLITS)
    start = SPLITS.index("split('\\n')")
    assert locate(SPLITS, corrected.quote) == (start, start + len(corrected.quote))


@given(response=st.text("a\\n\n", max_size=12), bounds=st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_a_quote_that_stands_in_the_response_is_never_changed(response: str, bounds: tuple[int, int]) -> None:
    quote = Quote(quote=response[min(bounds) : max(bounds)])
    assert correct_escapes(quote, response) == quote
