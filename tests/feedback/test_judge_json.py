"""The object in a judge's answer: a table of answers, and the time that hostile ones take."""

import time

import pytest
from judge_answers import ANSWERS, DRAFTED, KINDS, OBJECT, Answer, spell

from t2g.feedback.judge_json import MAX_ANSWER_CHARS, MAX_FAILURES, MAX_REPAIRS, load_judge_answer


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
def test_the_object_that_is_meant_is_read_and_no_other(answer: Answer) -> None:
    """A wrong object would be trained on: an unclear answer has none, and the request is repeated."""
    loaded = load_judge_answer(answer.text, KINDS)
    assert (loaded if isinstance(loaded, dict) else None) == answer.meant


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the answer is no JSON object"),
        ("[1]", "the answer is no JSON object"),
        ('{"critique": 3}', "the answer's critique is missing or no str"),
        ('{"critique": "c", "spans": {}}', "the answer's spans is missing or no list"),
        ("x" * (MAX_ANSWER_CHARS + 1), "at most 65536 are read"),
        (spell(r"It\'s"), "the answer is no JSON object: Invalid \\escape"),
        (f"{DRAFTED} {OBJECT[:-3]}", "cannot be read"),
        (f"[{DRAFTED}, {OBJECT}]", "several objects"),
        (f"<think>{'x' * MAX_ANSWER_CHARS}</think>{spell(chr(92) + 's')}", "Invalid \\escape"),
    ],
)
def test_the_reason_is_a_sentence(text: str, reason: str) -> None:
    assert reason in load_judge_answer(text, KINDS)


@pytest.mark.parametrize(
    "piece",
    [
        '{"a":', '{"{"a":1,', '{"a":[1,],', '\\"', '{"x": 1,}{', "{ ", ",]", '{"', "    ", '{"a":{},', '{"a":"b",',
        "</think>", "[/THINK", '{"a":[',
    ],
)  # fmt: skip
def test_hostile_answers_are_read_in_linear_time(piece: str) -> None:
    started = time.process_time()
    for opening in ("", '{"a": "', '{"a":1,'):
        text = (opening + piece * MAX_ANSWER_CHARS)[:MAX_ANSWER_CHARS]
        assert isinstance(load_judge_answer(text, KINDS), str)
    assert time.process_time() - started < 6


@pytest.mark.parametrize(("ending", "limit"), [("", MAX_FAILURES), (" ,}", MAX_REPAIRS)])
def test_after_too_many_braces_the_last_object_is_not_guessed(ending: str, limit: int) -> None:
    assert isinstance(load_judge_answer('{"a' * (limit - 1) + OBJECT + ending, KINDS), dict)
    assert load_judge_answer(OBJECT + '{"a' * (limit + 1) + ending, KINDS) == "the answer is no JSON object"
