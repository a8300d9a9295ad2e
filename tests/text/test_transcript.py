"""Which characters and tokens of a transcript are the policy's."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conversations import conversations
from fakes import LETTERS, letter_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.config import RewardRuleConfig
from t2g.feedback import token_offsets, token_rewards
from t2g.text.offsets import decode
from t2g.text.transcript import compute_answer_mask, judged_characters, rollout_offsets
from t2g.types import PolicyTurn, Rollout, Span


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("letters"))


def with_letters(tokenizer: Any, rollout: Rollout) -> Rollout:
    """The conversation with the ids of its letters, and of `c` for what was inserted."""
    letters = [letter if letter in LETTERS else "c" for letter in rollout.response_text]
    ids = np.array([tokenizer.convert_tokens_to_ids(letter) for letter in letters], np.int32)
    return replace(rollout, response_ids=ids)


@settings(max_examples=60, deadline=None)
@given(
    rollout=conversations(), unit=st.sampled_from(["span", "token"]),
    ranges=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.sampled_from([-1, 1])), max_size=4),
)  # fmt: skip
def test_a_span_pays_sampled_tokens_alone(tokenizer: Any, rollout: Rollout, unit: Any, ranges: Any) -> None:
    rollout = with_letters(tokenizer, rollout)
    offsets = rollout_offsets(tokenizer, rollout)
    mask = rollout.policy_mask
    assert (np.diff(offsets[:, 0]) >= 0).all()
    for (start, end), is_sampled, letter in zip(offsets, mask, rollout.response_text, strict=True):
        assert rollout.response_text[start:end] == (letter if is_sampled else "")
    spans = [Span(start=min(a, b), end=max(a, b), label=label) for a, b, label in ranges]
    text = rollout.response_text
    spans = [span for span in spans if span.end <= len(text)]
    rewards = token_rewards(offsets, spans, text=text, rule=RewardRuleConfig(unit=unit))
    assert not rewards[~mask].any()
    if len(spans) == 1 and (covered := [t for t in range(spans[0].start, spans[0].end) if mask[t]]):
        assert np.flatnonzero(rewards).tolist() == (covered if unit == "token" else covered[-1:])


def test_thinking_is_neither_judged_nor_of_an_answer_in_any_turn(tokenizer: Any) -> None:
    ids = tokenizer("aabbcaabc", add_special_tokens=False)["input_ids"]
    conversation = (
        PolicyTurn(tokens=(0, 4), characters=(0, 4), answer_start=2),
        PolicyTurn(tokens=(5, 9), characters=(6, 10), answer_start=7),
    )
    rollout = Rollout(
        prompt_id="p", sample_index=0, prompt_ids=np.array([7]), response_ids=np.array(ids, np.int32),
        rollout_logprobs=np.zeros(9, np.float32), response_text="aabb\n\naabc", finish_reason="stop",
        policy_versions=(), answer_start=7, environment_turns=conversation,
    )  # fmt: skip
    assert compute_answer_mask(rollout_offsets(tokenizer, rollout), rollout).tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert judged_characters(rollout).tolist() == [2, 3, 4, 5, 7, 8, 9]
    assert rollout.answer == "abc"
    assert rollout.policy_mask.tolist() == [1, 1, 1, 1, 0, 1, 1, 1, 1]


def test_a_response_of_a_single_turn_is_as_before(tokenizer: Any) -> None:
    ids = np.array(tokenizer("abcab", add_special_tokens=False)["input_ids"], np.int32)
    rollout = Rollout(
        prompt_id="p", sample_index=0, prompt_ids=ids, response_ids=ids, rollout_logprobs=np.zeros(5, np.float32),
        response_text=decode(tokenizer, ids), finish_reason="stop", policy_versions=(), answer_start=None,
    )  # fmt: skip
    assert rollout.policy_mask.all()
    assert (rollout_offsets(tokenizer, rollout) == token_offsets(tokenizer, ids)).all()
    assert not compute_answer_mask(token_offsets(tokenizer, ids), rollout).any()
    assert not judged_characters(rollout).size
