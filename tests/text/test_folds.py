"""Calls and results of tools in a transcript are folded, and nothing of it is lost or moved."""

from dataclasses import replace

from conversations import conversations
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.text.folds import split_folds, to_html
from t2g.text.segments import segments
from t2g.text.transcript import format_reply, list_reply
from t2g.types import PolicyTurn, Rollout, Span, ToolResult

CALL = '<tool_call>{"name": "lookup", "arguments": {"item": "phone", "field": "price"}}</tool_call>'
LONG = "first line\n" + "x" * 100


def make_turn(start: int, answer: str, results: tuple[ToolResult, ...]) -> PolicyTurn:
    characters = (start, start + len(answer))
    return PolicyTurn(tokens=(0, 1), characters=characters, answer_start=start, results=results)


def make_transcript(results: list[str]) -> tuple[str, tuple[PolicyTurn, ...]]:
    """Two turns: a word and a call for each result, and then an answer."""
    answer = "Hm. " + CALL * len(results)
    tool_results = []
    for number, text in enumerate(results):
        start = 4 + number * len(CALL)
        tool_results.append(ToolResult(tool="lookup", text=text, characters=(start, start + len(CALL))))
    reply = format_reply(list_reply("", tool_results))
    text = answer + reply + "7."
    return text, (make_turn(0, answer, tuple(tool_results)), make_turn(len(answer) + len(reply), "7.", ()))


def test_long_calls_and_results_are_folded_and_short_ones_are_not() -> None:
    text, turns = make_transcript([LONG, "7"])
    pieces = split_folds(text, (), turns)
    assert [(piece.title, piece.text) for piece in pieces] == [
        ("", "Hm. "),
        ("call of lookup", CALL),
        ("call of lookup", CALL),
        ("", "\n\n[tool lookup]\n"),
        ("first line …", LONG),
        ("", "\n\n[tool lookup]\n7\n\n[assistant]\n7."),
    ]


def test_a_fold_with_a_span_is_open() -> None:
    text, turns = make_transcript([LONG])
    start = text.index('"phone"')
    page = to_html(text, [Span(start=start, end=start + 7, label=-1)], turns)
    assert "<details open><summary>call of lookup</summary>&lt;tool_call&gt;" in page
    assert "<details><summary>first line …</summary>" in page and page.count("<mark") == 1
    assert "<details" not in to_html(text, ())


RANGES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200), st.sampled_from([-1, 1])), max_size=4)


@settings(max_examples=60, deadline=None)
@given(results=st.lists(st.sampled_from([LONG, "7", "a\nb"]), max_size=3), ranges=RANGES, size=st.integers(0, 600))
def test_the_parts_are_the_transcript_and_cover_what_its_spans_do(
    results: list[str], ranges: list[tuple[int, int, int]], size: int
) -> None:
    text, turns = make_transcript(results)
    text = text[:size]  # a report shortens it
    spans = [Span(start=min(a, b), end=max(a, b), label=label) for a, b, label in ranges]  # type: ignore[arg-type]
    pieces = split_folds(text, spans, turns)
    assert "".join(piece.text for piece in pieces) == text
    covered = []
    for piece in pieces:
        assert len(piece.spans) == len(spans)
        for segment in segments(piece.text, piece.spans):
            covered += [(segment.good, segment.poor)] * len(segment.text)
    expected = []
    for segment in segments(text, spans):
        expected += [(segment.good, segment.poor)] * len(segment.text)
    assert covered == expected


@settings(max_examples=30, deadline=None)
@given(rollout=conversations())
def test_conversations_without_tools_are_one_part(rollout: Rollout) -> None:
    (piece,) = split_folds(rollout.response_text, (), [replace(turn, results=()) for turn in rollout.turns])
    assert piece.text == rollout.response_text and not piece.title
