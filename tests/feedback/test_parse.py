"""Answers in JSON: what guided decoding may write, what is made of it, and what untrusted text cannot do."""

import itertools
import json
import re
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.config import StyleConfig
from t2g.feedback.grammar import make_answer_grammar
from t2g.feedback.parse import (
    MAX_ANSWER_CHARS,
    MAX_METRICS,
    MAX_QUOTES,
    Quote,
    format_answer,
    format_answer_prefix,
    make_feedback,
    parse_answer,
    parse_piece,
    read_judgement,
)
from t2g.feedback.sentences import find_sentence
from t2g.tasks.base import SPARSE
from t2g.text.quotes import locate
from t2g.types import Span, SpanFeedback

RESPONSE = "by Ann, about a phone, about a phone."
BARE = StyleConfig(critique=False)
WORDS = st.text(max_size=8)
OCCURRENCES = st.integers(1, 9)
NUMBERED = st.tuples(WORDS, OCCURRENCES)
RECORDS = st.builds(Quote, quote=WORDS, occurrence=OCCURRENCES, severity=st.integers(1, 3))
QUOTES = st.lists(WORDS | NUMBERED | RECORDS, max_size=4)


def parse(text: str, response: str = RESPONSE, **keywords: Any) -> SpanFeedback:
    return parse_answer(text, response, source="reward_model", version="v", **keywords)


def formatted(critique: str, good: Any, poor: Any, **keywords: Any) -> str:
    good_quotes = [parse_piece(item, 1) for item in good]
    poor_quotes = [parse_piece(item, 1) for item in poor]
    return format_answer(critique, good_quotes, poor_quotes, **keywords)


def make(critique: str, good: list[Any], poor: list[Any]) -> SpanFeedback:
    return make_feedback(critique, good, poor, RESPONSE, source="program", version="v")


def test_by_hand() -> None:
    feedback = parse(
        '{"critique": "It is by Ann. It says phone, twice.", "good": ["Ann"],'
        ' "poor": [{"quote": "about a phone", "occurrence": 2}, "laptop"]}'
    )
    assert feedback == SpanFeedback(
        critique="It is by Ann. It says phone, twice.",
        spans=(
            Span(start=3, end=6, label=1, critique_range=(0, 13)),
            Span(start=23, end=36, label=-1, critique_range=None),
        ),
        status="ok",
        source="reward_model",
        version="v",
        num_quotes=3,
        num_located=2,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "It is fine.",
        "[]",
        "null",
        '"critique"',
        '{"critique": "c", "good": []}',
        '{"critique": "c", "good": [], "poor": "phone"}',
        '{"critique": 3, "good": [], "poor": []}',
        '{"critique": "c", "good": [], "poor": []',  # cut
        '{"critique": "c", "good": [], "poor": []} and more',
        "[" * 100_000,
        '{"critique": "c", "good": [], "poor": [' + "1" * 5000 + "]}",  # Python refuses such a number
        '{"critique": "' + "c" * MAX_ANSWER_CHARS + '", "good": [], "poor": []}',
    ],
)
def test_unparsable(text: str) -> None:
    feedback = parse(text)
    assert (feedback.status, feedback.critique, feedback.spans) == ("unparsable", "", ())
    assert feedback.reason.startswith("the answer")


def test_why_an_answer_is_unparsable() -> None:
    assert parse('{"critique": "c", "good": []}').reason == "the answer's poor is missing or no list"
    assert parse("c" * (MAX_ANSWER_CHARS + 1)).reason == "the answer has 65537 characters; at most 65536 are read"


def test_the_complete_quotes_of_a_cut_answer_are_kept_wherever_it_was_cut() -> None:
    quotes = ["by Ann", {"quote": "about a phone", "occurrence": 2}], ["about", {"quote": "phone", "severity": 2}]
    answer = json.dumps({"critique": "c", "good": quotes[0], "poor": quotes[1]})
    first_poor = answer.index('"about", {') + len('"about"')
    for length in range(len(answer) + 1):
        feedback = parse(answer[:length], finish_reason="length")
        labels = [span.label for span in feedback.spans]
        if length < first_poor:  # what is good alone would pay more than the whole answer
            assert (feedback.status, labels) == ("unparsable", [])
        else:
            assert (feedback.status, labels[:3]) == ("ok", [1, 1, -1])
            assert len(labels) == 3 + (length >= len(answer) - 2)
    assert parse(answer, finish_reason="length") == parse(answer)
    closed = parse('{"critique": "c", "good": ["by Ann"], "poor": []', finish_reason="length")
    assert [span.label for span in closed.spans] == [1]


@given(text=st.text('{}[]":, criticquegodpA1\\\n', max_size=80), style=st.sampled_from([SPARSE, BARE]))
def test_no_cut_text_raises(text: str, style: StyleConfig) -> None:
    for start in ("", '{"critique": "c", "good": [', '{"good": ["Ann"], "poor": ['):
        feedback = parse(start + text, finish_reason="length", style=style)
        assert feedback.status in ("ok", "empty", "unparsable")


@pytest.mark.parametrize(
    ("good", "poor", "share"), [(["Ann"], [], 0.0), (["Ann", "by"], [], 1.0), ([], ["a"] * 3, 1.0)]
)
def test_an_answer_at_max_spans_is_counted(good: list[str], poor: list[str], share: float) -> None:
    answer = json.dumps({"critique": "c", "good": good, "poor": poor})
    assert parse(answer, max_spans=2).metrics == {"at_max_spans": share}
    assert parse(answer).metrics == {}


def test_lost_quotes_are_no_neutral_reward() -> None:
    lost = make("It says laptop.", [], ["laptop", "tablet"])
    assert (lost.status, lost.usable, lost.num_quotes, lost.num_located) == ("unparsable", False, 2, 0)
    assert lost.critique == "It says laptop."
    assert make("c", ["Ann"], ["laptop"]).status == "ok"
    assert make("c", [], []).status == "empty"
    assert make("c", [], [(5, 5), (7, 8)]).status == "empty"  # blank ranges quote nothing
    assert make("c", [], [(5, 5), "laptop"]).status == "unparsable"


def test_an_answer_without_a_critique() -> None:
    feedback = parse('{"good": ["Ann"], "poor": []}', style=BARE)
    assert (feedback.critique, feedback.status) == ("", "ok")
    assert [(s.start, s.end, s.label) for s in feedback.spans] == [(3, 6, 1)]
    assert parse('{"good": ["Ann"], "poor": []}').status == "unparsable"  # in a style with a critique
    assert parse('{"critique": "c", "good": ["Ann"], "poor": []}', style=BARE) == feedback


@pytest.mark.parametrize(
    "entry", [3, None, [], {}, {"quote": 3}, {"quote": "Ann", "occurrence": 0}, {"quote": "Ann", "occurrence": True},
              {"quote": "Ann", "occurrence": 1.5}, {"quote": "Ann", "at": 3}, "", "  ", "laptop",
              {"quote": "Ann", "occurrence": 2}, {"quote": "Ann", "severity": 4}, ["Ann"]],
)  # fmt: skip
def test_an_entry_that_is_no_quote_of_the_response_is_counted_and_left_out(entry: Any) -> None:
    feedback = parse(json.dumps({"critique": "c", "good": ["Ann"], "poor": [entry]}))
    assert [span.label for span in feedback.spans] == [1]
    assert (feedback.num_quotes, feedback.num_located) == (2, 1)
    alone = parse(json.dumps({"critique": "c", "good": [], "poor": [entry]}))
    assert (alone.status, alone.critique, alone.num_quotes, alone.num_located) == ("unparsable", "c", 1, 0)
    assert alone.reason == "none of its 1 quotes occurs in the response"


def test_no_quotes_is_empty() -> None:
    feedback = parse('{"critique": "The day is missing.", "good": [], "poor": []}')
    assert (feedback.status, feedback.spans, feedback.num_quotes) == ("empty", (), 0)


def test_the_same_span_twice_is_one_span() -> None:
    feedback = make("c", ["Ann", ("Ann", 1)], ["Ann"])
    assert [(s.start, s.end, s.label) for s in feedback.spans] == [(3, 6, 1), (3, 6, -1)]
    assert (feedback.num_quotes, feedback.num_located) == (3, 3)


def test_an_empty_response_has_no_spans() -> None:
    assert parse('{"critique": "Nothing is said.", "good": [], "poor": []}', "").status == "empty"


def test_halves_of_characters_do_not_reach_a_file() -> None:
    feedback = parse('{"critique": "bad \\ud83d end", "good": ["\\ud83d"], "poor": []}')
    assert feedback.critique == "bad \ufffd end"
    assert feedback.critique.encode()


@given(text=st.text(max_size=60) | st.text('{}[]":, critquegodpAn\\u2', max_size=60))
def test_no_text_raises(text: str) -> None:
    assert parse(text).status in ("ok", "empty", "unparsable")


@given(critique=st.text(max_size=30), good=QUOTES, poor=QUOTES, style=st.sampled_from([SPARSE, BARE]))
def test_an_answer_comes_back_as_it_was_given(
    critique: str, good: list[Any], poor: list[Any], style: StyleConfig
) -> None:
    answer = formatted(critique, good, poor, style=style)
    parsed = parse(answer, style=style)
    expected = make(critique if style.critique else "", good, poor)
    assert answer.startswith(format_answer_prefix(critique)) == style.critique
    assert (parsed.critique, parsed.spans, parsed.status) == (expected.critique, expected.spans, expected.status)
    assert (parsed.num_quotes, parsed.num_located) == (len(good) + len(poor), expected.num_located)


def test_format_by_hand() -> None:
    assert formatted('It\'s "é".', ["a", ("b", 1)], [("c", 2), "d"]) == (
        '{"critique": "It\'s \\"é\\".", "good": ["a", "b"], "poor": [{"quote": "c", "occurrence": 2}, "d"]}'
    )
    heavy = [Quote(quote="a", severity=3), Quote(quote="b", occurrence=2, severity=2), Quote(quote="c", severity=1)]
    assert format_answer("dropped", [], heavy, style=BARE) == (
        '{"good": [], "poor": [{"quote": "a", "severity": 3}, {"quote": "b", "occurrence": 2, "severity": 2}, "c"]}'
    )


def grammar_accepts(answer: str, **changes: Any) -> bool:
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string

    settings = {"max_critique_chars": 100, "max_spans": 3, "max_quote_chars": 60} | changes
    return _is_grammar_accept_string(xgrammar.Grammar.from_ebnf(make_answer_grammar(**settings)), answer)


@settings(deadline=None)  # the first example imports torch
@given(critique=st.text(max_size=5), quotes=st.lists(st.text(max_size=3), max_size=3))
def test_guided_decoding_can_write_what_training_teaches(critique: str, quotes: list[str]) -> None:
    # Any character at all, escapes among them; one escape in forty characters always fits.
    spread = [re.sub("(.)", r"\1" + "." * 39, text, flags=re.DOTALL) for text in (critique, *quotes)]
    heavy = [Quote(quote=quote, occurrence=1 + i, severity=3 - i) for i, quote in enumerate(spread[1:])]
    for style in (SPARSE, BARE):
        answer = formatted(spread[0], spread[1:], heavy, style=style)
        assert grammar_accepts(answer, max_critique_chars=200, max_quote_chars=120, style=style)


@settings(deadline=None)
@given(critique=st.text(max_size=20) | st.text('"\\\\\n\u2028é😀', max_size=9), data=st.data())
def test_a_given_critique_is_gone_on_from_wherever_it_was_cut(critique: str, data: st.DataObject) -> None:
    answer = formatted(critique, ["a"], [("b", 2)])
    begun = format_answer_prefix(critique)
    cut = data.draw(st.integers(0, len(begun)))
    assert answer.startswith(begun)
    assert grammar_accepts(answer[cut:], critique_suffix=begun[cut:])
    assert not grammar_accepts(answer[cut:], critique_suffix=begun[cut:] + "x")


def test_guided_decoding_keeps_to_its_bounds() -> None:
    def accepts(critique: str = "c", good: Any = ("a",), poor: Any = (("b", 2),), **bounds: int) -> bool:
        return grammar_accepts(formatted(critique, good, poor), **bounds)

    assert accepts()
    assert accepts("c" * (2 * 100 + 39))
    assert not accepts("c" * (2 * 100 + 40))
    assert accepts("ccc", max_critique_chars=3)
    assert not accepts("cccc", max_critique_chars=3)
    assert accepts(good=["a"] * 3)
    assert not accepts(good=["a"] * 4)
    assert accepts(good=[], poor=[], max_spans=0)
    assert not accepts(max_spans=0)
    assert accepts(good=["a" * (3 * 40 + 39)])
    assert not accepts(good=["a" * (3 * 40 + 40)])
    assert accepts(good=['"no"\n'])  # three escapes fit into three blocks
    assert not accepts(good=['"no"\n\n'])
    assert accepts(poor=[("b", 99)])
    assert not accepts(poor=[("b", 100)])


@pytest.mark.parametrize(
    "answer",
    [
        '{"good": [], "critique": "c", "poor": []}',
        '{"critique": "c", "good": []}',
        '{"critique":"c","good":[],"poor":[]}',
        '{"critique": "c", "good": [], "poor": [], "more": 1}',
        '{"critique": "a\nb", "good": [], "poor": []}',
        '{"critique": "a\\", "good": [], "poor": []}',
        '{"critique": "c", "good": [{"quote": "a", "occurrence": 1}], "poor": []}',
        '{"critique": "c", "good": [{"quote": "a", "severity": 1}], "poor": []}',
        '{"critique": "c", "good": [{"quote": "a", "severity": 4}], "poor": []}',
        '{"critique": "c", "good": [{"quote": "a", "severity": 2, "occurrence": 2}], "poor": []}',
        '{"critique": "c", "good": [{"quote": "a"}], "poor": []}',
        '{"good": [], "poor": []}',
    ],
)
def test_guided_decoding_writes_nothing_else(answer: str) -> None:
    assert not grammar_accepts(answer)


def test_guided_decoding_without_a_critique_writes_none() -> None:
    assert grammar_accepts('{"good": ["a"], "poor": []}', style=BARE)
    assert not grammar_accepts('{"critique": "c", "good": ["a"], "poor": []}', style=BARE)


def test_pieces_that_a_feedback_function_may_give() -> None:
    assert parse_piece("a", 1) == Quote(quote="a")
    assert parse_piece(("a", 2), 1) == Quote(quote="a", occurrence=2)
    assert parse_piece({"quote": "a", "severity": 3}, 1) == Quote(quote="a", severity=3)
    quote = Quote(quote="a", occurrence=2, severity=3)
    span = Span(start=0, end=1, label=-1, severity=3)
    assert (parse_piece(quote, -1), parse_piece(span, -1)) == (quote, span)
    assert parse_piece((3, 9), -1) == Span(start=3, end=9, label=-1)
    assert parse_piece(Span(start=0, end=1, label=-1, severity=3, criterion="style"), -1) == span, (
        "only the config names criteria"
    )


def test_numbers_of_numpy_are_numbers() -> None:
    two = np.int64(2)
    three = np.int32(3)
    assert parse_piece((two, three), -1) == parse_piece(np.array([2, 3]), -1) == Span(start=2, end=3, label=-1)
    assert parse_piece(("a", two), 1) == parse_piece({"quote": "a", "occurrence": two}, 1)
    span = Span(start=two, end=three, label=-1, severity=three, critique_range=(two, three))  # type: ignore[arg-type]
    expected = Span(start=2, end=3, label=-1, severity=3, critique_range=(2, 3))
    assert parse_piece(span, -1) == expected
    spans = judged(("c", [], [(two, three), span])).spans
    assert all(type(bound) is int for read_span in spans for bound in (read_span.start, read_span.end))


@pytest.mark.parametrize(
    "rubbish",
    [3, None, ("a", "b"), ("a", 0), ("a", True), ("a", 1, 2), {"text": "a"}, b"a", (3, "a"), (3, 4.5), {"quote": 5},
     {"quote": "a", "severity": 4}, Span(start=0, end=1, label=1), Span(start=0, end=1, label=-1, severity=4),
     Span(start="x", end=1, label=-1), Span(start=0, end=1, label=-1, critique_range="ab")],  # type: ignore[arg-type]
)  # fmt: skip
def test_what_is_no_piece(rubbish: Any) -> None:
    with pytest.raises(ValueError, match="neither a quote nor a range"):
        parse_piece(rubbish, -1)


def test_ranges_are_taken_as_they_are() -> None:
    feedback = make("First phone: right. Second phone: repeated.", [(16, 21)], [(31, 36), (5, 5), (7, 8)])
    assert [(s.start, s.end, s.label, s.critique_range) for s in feedback.spans] == [
        (16, 21, 1, (0, 19)),
        (31, 36, -1, (20, 43)),  # the second phone of the response and of the critique
    ]
    assert (feedback.num_quotes, feedback.num_located) == (4, 2)  # empty, blank


@pytest.mark.parametrize("piece", [(30, 99), (-3, 2), (5, 4), (38, 38), Span(start=30, end=99, label=-1)])
def test_a_range_outside_of_the_response_is_an_error(piece: Any) -> None:
    with pytest.raises(ValueError, match=r"\(-?\d+, \d+\) is no range of the response's 37 characters"):
        judged(("c", [], [piece]))
    assert len(RESPONSE) == 37
    assert judged(("c", [], [(37, 37)])).status == "empty"


def test_a_list_is_understood_where_a_tuple_is_meant() -> None:
    spans = [(0, 5), ["phone", 2], [16, 21], "phone"]
    assert judged(["c", spans[:2], spans[2:]]) == judged(("c", [(0, 5), ("phone", 2)], [(16, 21), "phone"]))


def test_metrics_are_finite_numbers_by_name() -> None:
    answer = {"critique": "c", "good": [], "poor": []}
    numbers = {"tone": 1, "facts/right": np.float32(0.5), "is_short": True}
    assert judged({**answer, "metrics": numbers}).metrics == {"tone": 1.0, "facts/right": 0.5, "is_short": 1.0}
    assert judged(answer).metrics == judged(("c", [], [])).metrics == {}
    many = {f"m{i}": 1.0 for i in range(MAX_METRICS + 1)}
    for wrong in (None, [1], {"a": "high"}, {"a": float("nan")}, {"a": 10**400}, {"": 1}, {"a b": 1}, {3: 1}, many):
        with pytest.raises(
            ValueError, match=f"the metrics are .*need to be at most {MAX_METRICS} finite numbers by name"
        ):
            judged({**answer, "metrics": wrong})


def test_an_unknown_and_a_missing_key_are_named() -> None:
    with pytest.raises(ValueError, match="a dict with the unknown key 'bad'; it needs critique, good, poor, and may"):
        judged({"critique": "c", "good": [], "poor": [], "bad": []})
    with pytest.raises(ValueError, match="a dict with the unknown key 'score', no key 'poor'; it needs"):
        judged({"critique": "c", "good": [], "score": 3})


@pytest.mark.parametrize(
    "answer",
    [None, "fine", 3, ("c", []), ("c", [], [], []), (3, [], []), ("c", "Ann", []), ("c", [], None), ("c", [3], []),
     ("c" * (MAX_ANSWER_CHARS + 1), [], []),
     {"critique": "c", "good": []}, {"critique": "c", "good": [], "poor": [], "bad": []}],
)  # fmt: skip
def test_invalid_answers_of_a_program_are_distinguished(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"needs? to be|needs critique|neither a quote"):
        judged(answer)


def judged(answer: Any) -> SpanFeedback:
    return read_judgement(answer, RESPONSE, source="program", version="v")


def test_pieces_without_end_are_cut_and_still_count_as_too_many() -> None:
    feedback = judged(("c", itertools.repeat("Ann"), ()))
    assert (feedback.num_quotes, feedback.num_located) == (MAX_QUOTES + 1, MAX_QUOTES)


def test_judgements_of_a_program() -> None:
    expected = make("c", ["Ann"], [("phone", 2)])
    assert judged(("c", ["Ann"], (("phone", 2),))) == expected
    assert judged({"critique": "c", "good": ["Ann"], "poor": [("phone", 2)]}) == expected


def test_the_outcome_of_a_program_is_a_copy_that_a_file_can_hold() -> None:
    outcome = {"passed": False, "log": "bad \ud83d end", "failed": ("t1", 2)}
    feedback = judged({"critique": "c", "good": [], "poor": [], "execution": outcome})
    assert feedback.execution == {"passed": False, "log": "bad \ufffd end", "failed": ["t1", 2]}
    assert make("c", [], []).execution == {}


def deep() -> dict[str, Any]:
    """What json.loads reads, and a journal does not."""
    return json.loads('{"a": ' * 300 + "1" + "}" * 300)


def endless() -> dict[str, Any]:
    outcome: dict[str, Any] = {}
    outcome["again"] = outcome
    return outcome


@pytest.mark.parametrize(
    "outcome",
    [None, True, [], {"at": object()}, {"loss": float("nan")}, {"log": "x" * MAX_ANSWER_CHARS}, deep(), endless()],
)
def test_an_outcome_that_is_no_plain_json_is_refused(outcome: Any) -> None:
    with pytest.raises(ValueError, match=r"the execution .*needs to be"):
        judged({"critique": "c", "good": [], "poor": [], "execution": outcome})


@pytest.mark.parametrize(
    ("critique", "quote", "occurrence", "expected"),
    [
        ("One. It says phone: wrong. Two.", "phone", 1, "It says phone: wrong."),
        ("phone", "phone", 1, "phone"),
        ("No such word.", "phone", 1, None),
        ("It costs 3.50 euro. Fine.", "3.50", 1, "It costs 3.50 euro."),
        ("First phone: right. Second phone: repeated.", "phone", 2, "Second phone: repeated."),
        ("First phone: right.", "phone", 2, "First phone: right."),
        (
            "It is Mira, it says Mira: right. It is Mira, it says Mira: repeated.",
            "Mira",
            2,
            "It is Mira, it says Mira: repeated.",
        ),
        ("A. by Ann. For B! C", "Ann. For", 1, "by Ann. For B!"),  # a quote that runs on
        ("良い。電話は違う。終わり", "電話", 1, "電話は違う。"),
        ("a\n - phone is bad\n b", "phone", 1, "- phone is bad"),
    ],
)
def test_the_sentence_that_speaks_of_a_quote(critique: str, quote: str, occurrence: int, expected: str | None) -> None:
    sentence = find_sentence(critique, quote, occurrence)
    assert (None if sentence is None else critique[slice(*sentence)]) == expected


WORDS = st.text("ab.!?; \n。", max_size=15)


@given(before=WORDS, quote=st.text("ab. ", min_size=1, max_size=3), after=WORDS)
def test_sentences_are_those_of_a_slow_search(before: str, quote: str, after: str) -> None:
    critique = before + quote + after
    place = locate(critique, quote)[0]
    ends: list[int] = []
    for end, sign in enumerate(critique, start=1):
        is_before_blank = end == len(critique) or critique[end].isspace()
        if sign in "。\n" or (sign in ".!?;" and is_before_blank):
            ends.append(end)
    sentence = find_sentence(critique, quote)
    start = max([0, *(end for end in ends if end <= place)])
    stop = min([len(critique), *(end for end in ends if end >= place + len(quote))])
    assert sentence is not None
    assert critique[slice(*sentence)] == critique[start:stop].strip()


@pytest.mark.parametrize("critique", ["phone. " * 9000, "phone" + "." * 60_000 + "x"])
def test_the_longest_critique_with_the_most_quotes_takes_no_time(critique: str) -> None:
    started = time.process_time()
    feedback = make_feedback(
        critique, ["phone"] * MAX_QUOTES, ["phone"] * MAX_QUOTES, RESPONSE, source="program", version="v"
    )
    assert time.process_time() - started < 1.0  # looking for sentences once for each quote takes seconds
    assert feedback.num_located == 2 * MAX_QUOTES


def test_the_sentence_that_praises_a_word_is_not_the_one_that_blames_it() -> None:
    critique = "The place is Paris, it says Paris: right. The name is Nadia, it says Paris: wrong."
    text = "in Paris, by Nadia."
    good, poor = make_feedback(critique, ["Paris"], ["Paris"], text, source="program", version="v").spans
    assert critique[slice(*good.critique_range)].endswith("right.")
    assert critique[slice(*poor.critique_range)].endswith("wrong.")


def test_a_program_knows_its_sentences_better() -> None:
    def about(start: int, end: int) -> Any:
        span = Span(start=3, end=6, label=1, critique_range=(start, end))
        return make("Ann. Ann!", [span], []).spans[0].critique_range

    assert about(5, 9) == (5, 9)
    assert about(5, 99) == (0, 4)  # beyond the critique
