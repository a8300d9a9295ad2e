"""The advantages of a step: values over sentences and spans, local credit, prompts that carry nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conversations import make_conversation
from pydantic import ValidationError

from t2g.config import ObjectiveConfig
from t2g.feedback.parse import make_feedback
from t2g.loop.step_advantages import compute_advantages, zero_variance_share
from t2g.types import Rollout, ScoredRollout, TokenStats

FEEDBACK = make_feedback("", [], [], "", source="program", version="")


def make_scored(
    rewards: list[float],
    *,
    prompt_id: str = "p",
    sentences: list[int] | None = None,
    per_token: list[float] | None = None,
    finish_reason: Any = "stop",
) -> ScoredRollout:
    length = len(rewards)
    zeros = np.zeros(length, np.float32)
    ids = np.arange(length, dtype=np.int32)
    rollout = Rollout(
        prompt_id=prompt_id,
        sample_index=0,
        prompt_ids=ids[:1],
        response_ids=ids,
        rollout_logprobs=zeros,
        response_text="x" * length,
        finish_reason=finish_reason,
        policy_versions=((0, length, 0),),
    )
    return score(rollout, rewards, sentences=sentences, per_token=per_token)


def score(
    rollout: Rollout, rewards: list[float], *, sentences: list[int] | None = None, per_token: list[float] | None = None
) -> ScoredRollout:
    sentence_ids = sentences or [0] * len(rewards)
    span_values = per_token or rewards
    return ScoredRollout(
        rollout=rollout,
        feedback=FEEDBACK,
        token_rewards=np.array(rewards, np.float32),
        span_values=np.array(span_values, np.float32),
        sentence_ids=np.array(sentence_ids, np.int32),
        answer_mask=rollout.policy_mask,
    )


def zero_stats(scored: list[ScoredRollout]) -> list[TokenStats]:
    stats = []
    for response in scored:
        zeros = np.zeros(len(response.token_rewards), np.float32)
        stats.append(TokenStats(old_logprobs=zeros, ref_logprobs=zeros, values=zeros, entropy=zeros))
    return stats


def advantages_of(scored: list[ScoredRollout], **objective: Any) -> list[list[float]]:
    """Return the advantages of each response without whitening."""
    config = ObjectiveConfig.model_validate({"whiten": "none", "local_coef": 0.0} | objective)
    step = compute_advantages(scored, zero_stats(scored), config, kl_coef=0.0, seed=1)
    rows = []
    for response, row in zip(scored, step.advantages.tolist(), strict=True):
        num_sampled = int(response.rollout.policy_mask.sum())
        rows.append(row[:num_sampled])
    return rows


def test_values_by_sentence_compare_from_the_same_sentence_on() -> None:
    first = make_scored([0, 1, -1, 0], sentences=[0, 0, 1, 1])
    second = make_scored([0, 0, 0, 1], sentences=[0, 1, 1, 1])
    # the last token, EOS, is a state of its own: states 0 0 1 2 and 0 1 1 2
    # V of the first: 1 and 1 for sentences 0 and 1, 1 at the end; of the second: 0, -1, 0
    first_row, second_row = advantages_of([first, second], values="sentence")
    assert first_row == pytest.approx([0 - 1, 0 - 1, -1 - 1, 0 - 1])
    assert second_row == pytest.approx([1 - 0, 1 + 1, 1 + 1, 1 - 0])
    # lambda 0: each state's own TD error
    errors = [1 + 1 - 1, -1 + 1 - 1, 0 - 1]
    assert advantages_of([first, second], values="sentence", lam=0)[0] == pytest.approx([errors[0], *errors])


def test_a_truncated_response_has_no_state_of_its_end() -> None:
    cut = make_scored([0, 1], finish_reason="length")
    other = make_scored([0, 0], finish_reason="length")
    assert advantages_of([cut, other], values="sentence", lam=0) == [[1, 1], [-1, -1]]


def test_values_by_span_compare_after_as_many_spans() -> None:
    first = make_scored([1, 0, 0, -1])
    second = make_scored([0, 0, 1])
    # before a span: 0 for the first and 1 for the second; after one: -1 for the first alone
    assert advantages_of([first, second], values="span") == [
        pytest.approx([-1, -1, -1, -1]),  # G is 0, -1, -1, -1; V is 1 and 0
        pytest.approx([1, 1, 1]),
    ]
    assert advantages_of([first, second], values="span", lam=0)[0] == pytest.approx([1 + 0 - 1, -1, -1, -1])


def test_the_unit_of_reward_does_not_change_what_a_span_is() -> None:
    once = make_scored([0, 0, 3, 0, -1])
    each_token = make_scored([1, 1, 1, 0, -1])
    other = make_scored([0, 0])
    by_span = advantages_of([once, other], values="span", lam=0)[0]
    by_token = advantages_of([each_token, other], values="span", lam=0, rewards={"unit": "token"})[0]
    assert by_span == pytest.approx([3, 3, 3, -1, -1])
    assert by_token == pytest.approx([3, 2, 1, -1, -1])


def test_a_turn_of_a_conversation_is_a_state() -> None:
    """Two turns of two tokens with an inserted token between them; the other conversation earns in its second turn."""
    rollout = make_conversation([2, 2], [1])
    paid_first = score(rollout, [0, 2, 0, 0, 0])
    paid_second = score(rollout, [0, 0, 0, 0, 1])
    expected = [2 + 1 - 1, 2 + 1 - 1, -1, -1]
    assert advantages_of([paid_first, paid_second], values="span", lam=0)[0] == pytest.approx(expected)


def test_few_samples_are_shrunk_to_the_other_prompts() -> None:
    scored = [make_scored([3]), make_scored([0]), make_scored([6], prompt_id="q"), make_scored([0], prompt_id="q")]
    # V of the first: the other sample's 0 and twice the mean 3 of prompt q, by 3
    values = [(0 + 2 * 3) / 3, (3 + 2 * 3) / 3, (0 + 2 * 1.5) / 3, (6 + 2 * 1.5) / 3]
    expected = [[reward - value] for reward, value in zip([3, 0, 6, 0], values, strict=True)]
    assert advantages_of(scored, values="span") == [pytest.approx(row) for row in expected]


def test_lambda_below_one_works_by_position_too() -> None:
    first = make_scored([1, 0, 2])
    second = make_scored([0, 1])
    # V of the first: 1, 1 and 1 (the last return of the shorter response continues)
    errors = [1 + 1 - 1, 0 + 1 - 1, 2 - 1]
    expected = [errors[0] + 0.5 * errors[1] + 0.25 * errors[2], errors[1] + 0.5 * errors[2], errors[2]]
    assert advantages_of([first, second], lam=0.5)[0] == pytest.approx(expected)


@pytest.mark.parametrize("whiten", ["full", "scale_only", "none"])
@pytest.mark.parametrize("values", ["position", "span"])
def test_a_group_that_earns_the_same_has_no_advantage(whiten: str, values: str) -> None:
    equal = [make_scored([1, 0]), make_scored([1, 0, 0])]
    differing = [make_scored([1], prompt_id="q"), make_scored([-1, 0], prompt_id="q")]
    rows = advantages_of([*equal, *differing], whiten=whiten, values=values)
    assert rows[0] == [0, 0]
    assert rows[1] == [0, 0, 0]
    assert all(number != 0 for number in rows[2])


def test_local_credit_adds_a_span_to_its_own_tokens() -> None:
    first = make_scored([0, 1, 0, 0], per_token=[1, 1, 0, 0])
    second = make_scored([0, 0, 0, -1], per_token=[0, 0, 0, -1])
    plain = advantages_of([first, second], whiten="full")
    added = advantages_of([first, second], whiten="full", local_coef=0.3)
    unit = (3 / 8) ** 0.5  # root mean square of the two good tokens and the poor one among eight
    difference = np.array(added) - np.array(plain)
    assert difference.tolist() == [
        pytest.approx([0.3 / unit, 0.3 / unit, 0, 0], abs=1e-6),
        pytest.approx([0, 0, 0, -0.3 / unit], abs=1e-6),
    ]


def test_the_shuffled_control_moves_local_credit_as_well() -> None:
    spans = [1.0] * 5 + [0.0] * 25
    scored = [make_scored([0.0] * 30, per_token=spans), make_scored([0.0] * 30)]
    in_place = np.array(advantages_of(scored, local_coef=1.0)[0])
    moved = np.array(advantages_of(scored, local_coef=1.0, rewards={"placement": "shuffled"})[0])
    assert sorted(in_place) == pytest.approx(sorted(moved))
    assert in_place.tolist() != moved.tolist()


def test_the_share_of_prompts_that_carry_nothing() -> None:
    scored = [
        make_scored([1, 0]),
        make_scored([1, 0]),
        make_scored([0, 1], prompt_id="q"),
        make_scored([1, 0], prompt_id="q"),
        make_scored([5], prompt_id="alone"),
    ]
    assert zero_variance_share(scored, ObjectiveConfig(), seed=1) == 0.5
    # as one number both answers to q earn 1
    scalar = ObjectiveConfig.model_validate({"rewards": {"placement": "scalar"}})
    assert zero_variance_share(scored, scalar, seed=1) == 1.0
    assert zero_variance_share(scored[-1:], ObjectiveConfig(), seed=1) is None


def test_samples_that_earn_the_same_in_every_sentence_carry_nothing_for_values_by_sentence() -> None:
    """One earns 1 in a first sentence of two tokens, the other in one of three."""
    scored = [
        make_scored([0, 1, 0, 0], sentences=[0, 0, 1, 1]),
        make_scored([0, 0, 1, 0], sentences=[0, 0, 0, 1]),
    ]
    by_sentence = ObjectiveConfig(values="sentence", local_coef=0)
    assert zero_variance_share(scored, by_sentence, seed=1) == 1.0
    assert not np.array(advantages_of(scored, values="sentence", local_coef=0)).any()
    assert zero_variance_share(scored, ObjectiveConfig(), seed=1) == 0.0


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"lam": 1.01}, "lam"),
        ({"lam": -0.1}, "lam"),
        ({"values": "sentence", "advantages": "gae"}, "objective.values=sentence"),
        ({"values": "span", "advantages": "group_normalised"}, "objective.values=span"),
        ({"lam": 0.9, "advantages": "group_normalised"}, "objective.lam=0.9"),
        ({"local_coef": 0.3, "span_coef": 0}, "objective.local_coef=0.3"),
        ({"local_cap": 0}, "local_cap"),
        ({"clip_eps_high": 0}, "clip_eps_high"),
        ({"surrogate": "grpo"}, "surrogate"),
    ],
)
def test_an_objective_that_means_nothing_is_refused(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        ObjectiveConfig.model_validate(values)


def test_lambda_follows_the_kind_of_advantages() -> None:
    assert ObjectiveConfig().lam == 1.0
    assert ObjectiveConfig(advantages="gae").lam == 0.95
    assert ObjectiveConfig(advantages="gae", lam=0.5).lam == 0.5


def test_sentences_of_conversations_are_counted_within_their_turns() -> None:
    """Turns of two tokens, the last of which ends the turn; an inserted token between them."""
    rollout = make_conversation([2, 2], [1])
    long_first = score(rollout, [0, 0, 0, 2, 0], sentences=[0, 1, 1, 2, 2])
    plain = score(rollout, [0, 0, 0, 0, 1], sentences=[0, 0, 0, 1, 1])
    # states: start of the first turn, its end, start of the second turn, its end
    rows = advantages_of([long_first, plain], values="sentence", lam=0)
    assert rows[0] == pytest.approx([0 + 1 - 1, 0 + 1 - 1, 2 + 1 - 1, 0 - 1])


def test_thinking_is_one_state() -> None:
    """The first response thinks for three sentences, the second for one: their answers start in the same state."""
    thinks = make_scored([0, 0, 0, 1, 0], sentences=[0, 1, 2, 3, 3], finish_reason="length")
    short = make_scored([0, 0, -1], sentences=[0, 1, 1], finish_reason="length")
    answers = [np.array([False, False, False, True, True]), np.array([False, True, True])]
    scored = [replace(r, answer_mask=a) for r, a in zip([thinks, short], answers, strict=True)]
    rows = advantages_of(scored, values="sentence")
    assert rows[0] == pytest.approx([1 + 1, 1 + 1, 1 + 1, 1 + 1, 0 + 1])


@pytest.mark.parametrize("rewards", [[0.0] * 7, [1.0, -1.0, 3.0, 0.0, 0.0, -2.0, 5.0]])
def test_the_control_without_critiques_counts_the_sampled_tokens_of_each_response(rewards: list[float]) -> None:
    """Turns of 3 and 2 tokens with 2 inserted ones, which have no probability; whatever is paid."""
    conversation = make_conversation([3, 2], [2])
    logprobs = np.array([-1, -5, -2, 0, 0, -6, -0.5], np.float32)
    first = score(replace(conversation, rollout_logprobs=logprobs), rewards)
    second = make_scored(rewards)  # equally likely: the first tokens
    rows = advantages_of([first, second], advantages="unlikely")
    assert rows == [[0, 0, 0, -1, 0], [-1, -1, 0, 0, 0, 0, 0]]
    scaled, _ = advantages_of([first, second], advantages="unlikely", whiten="scale_only")
    assert scaled[3] == pytest.approx(-2), "-1 at three of twelve tokens"


def test_the_control_without_critiques_leaves_out_thinking_that_is_not_trained() -> None:
    response = make_scored([0.0] * 6)
    logprobs = np.array([-9, -8, -1, -2, -1, -1], np.float32)
    rollout = replace(response.rollout, rollout_logprobs=logprobs)
    response = replace(response, rollout=rollout, answer_mask=np.array([0, 0, 1, 1, 1, 1], bool))
    assert advantages_of([response], advantages="unlikely") == [[-1, -1, 0, 0, 0, 0]]
    assert advantages_of([response], advantages="unlikely", train_thinking=False) == [[0, 0, 0, -1, 0, 0]]


@pytest.mark.parametrize("advantages", ["group", "gae"])
def test_thinking_that_is_not_trained_sets_no_scale(advantages: str) -> None:
    """Thinking of eight tokens before an answer of two: scaled as the answer alone, and 0 itself."""
    answer_spans = [[1.0, 0.0], [0.0, -1.0]]
    alone = [make_scored(spans) for spans in answer_spans]
    rule = {"advantages": advantages, "local_coef": 0.5, "local_cap": 1.5, "whiten": "full", "train_thinking": False}
    expected = advantages_of(alone, **rule)

    thinks = [make_scored([0.0] * 8 + spans, sentences=[0] * 10) for spans in answer_spans]
    is_answer = np.array([False] * 8 + [True] * 2)
    rows = advantages_of([replace(response, answer_mask=is_answer) for response in thinks], **rule)
    for row, answer in zip(rows, expected, strict=True):
        assert row[:8] == [0.0] * 8
        assert row[8:] == pytest.approx(answer)
