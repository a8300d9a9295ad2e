"""What a reward fleet keeps; the fleet itself is in tests/integration."""

import numpy as np

from actors.reward import Answers
from t2g.types import Prompt, SpanFeedback


def prompt(text: str) -> Prompt:
    return Prompt(prompt_id="1", prompt_ids=np.zeros(1, np.int32), prompt_text=text, task="prompts")


def feedback(critique: str) -> SpanFeedback:
    return SpanFeedback(critique=critique, spans=(), status="empty", source="reward_model", version="v")


def test_two_data_sets_may_use_the_same_ids() -> None:
    answers = Answers(9)
    answers.keep(prompt("a"), "x", feedback("of a"))
    answers.keep(prompt("b"), "x", feedback("of b"))
    assert [answers.get(prompt(p), "x").critique for p in "ab"] == ["of a", "of b"]
    assert answers.get(prompt("a"), "y") is None


def test_the_answer_unused_for_longest_is_the_first_to_go() -> None:
    answers = Answers(2)
    answers.keep(prompt("a"), "1", feedback("1"))
    answers.keep(prompt("a"), "2", feedback("2"))
    answers.get(prompt("a"), "1")
    answers.keep(prompt("a"), "3", feedback("3"))
    assert [answers.get(prompt("a"), r) is not None for r in "123"] == [True, False, True]
