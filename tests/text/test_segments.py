import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.text.folds import to_html
from t2g.text.segments import printable, segments
from t2g.types import Span

SPANS = st.lists(
    st.builds(Span, start=st.integers(-3, 40), end=st.integers(-3, 40), label=st.sampled_from((-1, 1))), max_size=8
)


def cut(text: str, *spans: tuple[int, int, int]) -> list[tuple[str, bool, bool]]:
    cut_segments = segments(text, [Span(start=s, end=e, label=label) for s, e, label in spans])
    return [(s.text, s.good, s.poor) for s in cut_segments]


def test_nested_overlapping_and_equal_spans() -> None:
    assert cut("abcdef", (1, 5, 1), (2, 3, -1)) == [
        ("a", False, False),
        ("b", True, False),
        ("c", True, True),
        ("de", True, False),
        ("f", False, False),
    ]
    assert cut("abc", (0, 3, 1), (0, 3, -1)) == [("abc", True, True)]
    assert cut("abcd", (0, 2, 1), (2, 4, 1)) == [("ab", True, False), ("cd", True, False)]


def test_spans_out_of_reach_and_empty_texts() -> None:
    assert cut("abc", (2, 99, -1), (5, 9, 1), (1, 1, 1)) == [("ab", False, False), ("c", False, True)]
    assert cut("") == []
    assert cut("", (0, 4, 1)) == []


def test_characters_are_those_of_python() -> None:
    assert cut("漢字👍🏽é", (1, 4, 1)) == [("漢", False, False), ("字👍🏽", True, False), ("é", False, False)]


def test_a_span_opens_once_with_its_number() -> None:
    cut_segments = segments(
        "abcd", [Span(start=1, end=4, label=1), Span(start=2, end=3, label=-1), Span(start=2, end=4, label=1)]
    )
    assert [s.opens for s in cut_segments] == [(), ((0, 1),), ((1, -1), (2, 1)), ()]


def test_a_fix_stands_where_its_span_ends() -> None:
    fixed = Span(start=1, end=3, label=-1, fix="x"), Span(start=2, end=9, label=-1, fix="")
    cut_segments = segments("abcde", [*fixed, Span(start=0, end=1, label=1)])
    assert [(s.text, s.is_struck, s.fixes) for s in cut_segments] == [
        ("a", False, ()),
        ("b", True, ()),
        ("c", True, ("x",)),
        ("de", True, ("",)),
    ]


@settings(deadline=None)
@given(st.text(max_size=30), SPANS)
def test_segments_agree_with_a_character_by_character_oracle(text: str, spans: list[Span]) -> None:
    cut_segments = segments(text, spans)
    assert "".join(s.text for s in cut_segments) == text
    by_character = [(s.good, s.poor) for s in cut_segments for _ in s.text]
    expected = []
    for i in range(len(text)):
        labels = [s.label for s in spans if s.start <= i < s.end]
        expected.append((1 in labels, -1 in labels))
    assert by_character == expected
    opened = sorted(i for s in cut_segments for i, _ in s.opens)
    assert opened == [i for i, s in enumerate(spans) if max(0, s.start) < min(len(text), s.end)]


def test_spans_are_colored_in_html_and_the_text_is_escaped() -> None:
    spans = [Span(start=0, end=2, label=1), Span(start=1, end=3, label=-1)]
    assert to_html("<b>\0x", spans) == (
        '<div style="white-space:pre-wrap"><mark style="background:#c6efce">&lt;</mark>'
        '<mark style="background:#ffeb9c">b</mark><mark style="background:#ffc7ce">&gt;</mark>␀x</div>'
    )


@settings(deadline=None)
@given(st.text())
def test_printable_keeps_the_length(text: str) -> None:
    assert len(printable(text)) == len(text)


@pytest.mark.parametrize(
    ("raw", "printed"), [("a\0b", "a␀b"), ("\x1b[31m", "␛[31m"), ("\x7f\r", "␡␍"), ("a\n\tb", "a\n\tb")]
)
def test_printable(raw: str, printed: str) -> None:
    assert printable(raw) == printed
