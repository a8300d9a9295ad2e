"""Feedback on a terminal and off it: colors or marks, and never a control character of the model's."""

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from t2g.report.terminal import MAX_LINE_CHARS, mark_text, show_feedback, span_line
from t2g.text.transcript import format_reply, list_reply
from t2g.types import PolicyTurn, Span, SpanFeedback, ToolResult

RESPONSE = "about a laptop by Ann."
POOR = Span(start=8, end=14, label=-1, severity=3, critique_range=(15, 36))
GOOD = Span(start=18, end=21, label=1)
COLOR = re.compile(r"\x1b\[[0-9;]*m")


def says(*spans: Span, critique: str = "Ann is right . it says laptop : bad .", lost: int = 0) -> SpanFeedback:
    return SpanFeedback(
        critique=critique, spans=spans, status="ok", source="s", version="v",
        num_quotes=len(spans) + lost, num_located=len(spans),
    )  # fmt: skip


def render(response: str, feedback: SpanFeedback, *, terminal: bool = False, no_color: bool | None = None) -> str:
    out = io.StringIO()
    environ = {"TERM": "xterm-256color", "COLUMNS": "40"}
    console = Console(
        file=out, force_terminal=terminal, no_color=no_color, _environ=environ, color_system="auto", width=40
    )
    show_feedback(console, response, feedback)
    return out.getvalue()


def test_without_a_terminal_spans_stand_between_marks() -> None:
    assert render(RESPONSE, says(GOOD, POOR)) == (
        "Ann is right . it says laptop : bad .\n\nabout a [-laptop-] by [+Ann+].\n\n"
        'poor, severity 3: "laptop" (it says laptop : bad)\n'
        'good, severity 1: "Ann"\n'
    )


def test_on_a_terminal_good_is_green_and_poor_is_red() -> None:
    out = render(RESPONSE, says(GOOD, POOR), terminal=True)
    assert "about a \x1b[1;31mlaptop\x1b[0m by \x1b[1;32mAnn\x1b[0m." in out
    assert "[-" not in out


def test_a_terminal_without_colors_gets_marks() -> None:
    out = render(RESPONSE, says(GOOD, POOR), terminal=True, no_color=True)
    assert "[-laptop-]" in out and "[+Ann+]" in out and "\x1b" not in out


def test_calls_and_results_of_tools_are_titles_unless_a_span_covers_them() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"town": "Oslo", "days": 2, "unit": "C"}}</tool_call>'
    result = ToolResult(tool="f", text="rain\n" + "x" * 90, characters=(0, len(call)))
    text = call + format_reply(list_reply("", [result])) + "Rain."
    turn = PolicyTurn(tokens=(0, 1), characters=(0, len(call)), answer_start=0, results=(result,))
    assert mark_text(text, says(), True, [turn]).plain == "<call of f>\n\n[tool f]\n<rain …>\n\n[assistant]\nRain."
    poor = says(Span(start=call.index("2"), end=call.index("2") + 1, label=-1))
    assert mark_text(text, poor, False, [turn]).plain.startswith(call.replace("2", "[-2-]") + "\n\n[tool f]\n<rain …>")


def test_a_fix_follows_its_span() -> None:
    fixed = says(replace(POOR, fix="phone\x1b"), Span(start=21, end=22, label=-1, fix=""))
    marks = render(RESPONSE, fixed)
    assert render(RESPONSE, fixed, terminal=True, no_color=True) == marks
    assert "about a [-laptop-]{phone␛} by Ann[-.-]\n" in marks
    assert 'poor, severity 3: "laptop", should be "phone␛" (it says' in marks and '".", should be ""\n' in marks
    colored = render(RESPONSE, fixed, terminal=True)
    assert "\x1b[1;9;31mlaptop\x1b[0m\x1b[32m{phone␛}\x1b[0m by Ann\x1b[1;9;31m.\x1b[0m" in colored


def test_where_good_and_poor_overlap() -> None:
    both = says(Span(start=0, end=5, label=1), Span(start=3, end=7, label=-1))
    assert mark_text("abcdefgh", both, colors=False).plain == "[+abc+][±de±][-fg-]h"


def test_no_critique_no_spans_and_quotes_that_were_not_found() -> None:
    assert render("ab", says(critique="", lost=2)) == (
        "(no critique)\n\nab\n\nno spans\n2 of 2 quotes are not in the response\n"
    )


def test_a_long_span_is_one_short_line() -> None:
    text = "word\n" * 200
    line = span_line(Span(start=0, end=len(text), label=1), text, says())
    assert "\n" not in line
    assert line.endswith('…"')
    assert len(line) == MAX_LINE_CHARS + len('good, severity 1: ""')


def test_brackets_are_words_and_no_markup() -> None:
    assert "[red]x[/red] :smile:" in render("a", says(critique="[red]x[/red] :smile:"))


@pytest.mark.parametrize(
    "evil", ["\x1b[2J", "\x9b31m", "\x1b]0;title\x07", "a\rb", "\b\b", "\u202egnp.exe", "\x00", "\x7f", "\ud83d"]
)
def test_what_a_terminal_would_obey_is_shown_instead(evil: str) -> None:
    feedback = says(Span(start=0, end=len(evil), label=-1, critique_range=(0, len(evil))), critique=evil)
    for terminal in (True, False):
        out = COLOR.sub("", render(evil, feedback, terminal=terminal))
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", out), repr(out)


@settings(deadline=None)
@given(response=st.text(max_size=20), critique=st.text(max_size=20), start=st.integers(0, 9), size=st.integers(1, 9))
def test_no_text_at_all_gets_a_control_character_through(response: str, critique: str, start: int, size: int) -> None:
    span = Span(start=start, end=start + size, label=1, critique_range=(start, start + size))
    out = render(response, says(span, critique=critique))
    assert all(character.isprintable() or character in "\n\t" or ord(character) >= 0xA0 for character in out)
