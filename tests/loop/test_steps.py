"""The pure pieces of a step, by hand."""

import itertools
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from fakes import LetterTask, letter_prompts
from hypothesis import given
from hypothesis import strategies as st

from t2g.config import ObjectiveConfig
from t2g.errors import RunStopped
from t2g.feedback.parse import make_failed_feedback, make_feedback, parse_answer
from t2g.loop.step_metrics import compute_fault_recall, step_metrics, sync_metrics
from t2g.loop.steps import (
    compute_step_kl,
    compute_token_staleness,
    make_sampling_seed,
    make_train_samples,
    next_kl_coef,
    select_prompts,
)
from t2g.metrics import CRITERION_FAILED, CRITERION_REWARD
from t2g.tasks.tiny.task import TinyTask
from t2g.text.thinking import NO_ANSWER
from t2g.types import CriterionResult, JudgedResponse, Prompt, Rollout, ScoredRollout, TokenStats, WeightSyncResult


@given(num_prompts=st.integers(1, 30), per_step=st.integers(1, 30), seed=st.integers(0, 5))
def test_an_epoch_holds_each_prompt_at_most_once_and_leaves_out_less_than_a_step(
    num_prompts: int, per_step: int, seed: int
) -> None:
    if per_step > num_prompts:
        steps = [select_prompts(num_prompts=num_prompts, per_step=per_step, step=k, seed=seed) for k in range(1, 6)]
        counts = [Counter(indices) for indices in steps]
        assert all(count.total() == per_step and len(count) == num_prompts for count in counts)
        assert all(max(count.values()) - min(count.values()) <= 1 for count in counts), "no prompt is preferred"
        return
    steps = num_prompts // per_step
    for epoch in range(2):
        seen = [
            i
            for step in range(epoch * steps + 1, (epoch + 1) * steps + 1)
            for i in select_prompts(num_prompts=num_prompts, per_step=per_step, step=step, seed=seed)
        ]
        assert len(set(seen)) == len(seen) == steps * per_step > num_prompts - per_step
        assert set(seen) <= set(range(num_prompts))


def test_sampling_seeds_of_steps_and_splits_never_meet() -> None:
    places = itertools.product(range(3), ("train", "eval"), range(200))
    seeds = {make_sampling_seed(seed, split, step) for seed, split, step in places}
    assert len(seeds) == 3 * 2 * 200
    assert all(0 <= seed < 2**63 for seed in seeds)


def scored_pair(
    rewards: list[float], *, prompt_id: str = "p", steps: list[int] | None = None, outcome_reward: float = 0.0
) -> tuple[Prompt, ScoredRollout]:
    length = len(rewards)
    text = "x" * length
    logprobs = np.full(length, -1.0, np.float32)
    rollout = Rollout(
        prompt_id=prompt_id,
        sample_index=0,
        prompt_ids=np.array([1], np.int32),
        response_ids=np.arange(length, dtype=np.int32),
        rollout_logprobs=logprobs,
        response_text=text,
        finish_reason="stop",
        policy_versions=((0, length, 0),),
    )
    feedback = make_feedback("", [], [], text, source="reward_model", version="v")
    sentence_ids = np.array(steps or [0] * length, np.int32)
    token_rewards = np.array(rewards, np.float32)
    answer_mask = np.ones(length, bool)
    scored = ScoredRollout(
        rollout=rollout,
        feedback=feedback,
        token_rewards=token_rewards,
        span_values=token_rewards,
        sentence_ids=sentence_ids,
        answer_mask=answer_mask,
        outcome_reward=outcome_reward,
    )
    return letter_prompts(1)[0], scored


def test_each_token_is_as_stale_as_the_updates_since_its_weights() -> None:
    old, mixed = (scored_pair([0.0] * length)[1].rollout for length in (2, 3))
    old = replace(old, policy_versions=((0, 2, 3),))
    mixed = replace(mixed, policy_versions=((0, 1, 4), (1, 3, 5)))
    assert compute_token_staleness([old, mixed], policy_version=5, max_staleness=2).tolist() == [2, 2, 1, 0, 0]
    for version, max_staleness in ((5, 1), (4, 2)):  # too old, and newer than the learner
        with pytest.raises(RunStopped, match=rf"at {version}: rollout.max_staleness={max_staleness} forbids"):
            compute_token_staleness([mixed, old], policy_version=version, max_staleness=max_staleness)


def test_a_weight_sync_tells_all_its_numbers() -> None:
    result = WeightSyncResult(
        policy_version=4, seconds=2.0, bytes=48, probe_gap=0.5, timings={"load": 0.25}, num_calls=7, missed=("w0", "w2")
    )
    assert sync_metrics(result) == {
        "time/sync_s": 2.0,
        "sync/bytes": 48.0,
        "sync/probe_gap": 0.5,
        "sync/load_s": 0.25,
        "sync/calls": 7.0,
        "sync/missed": 2.0,
    }


def stats(length: int, *, old: float = -1.0, ref: float = -1.0, value: float = 0.0) -> TokenStats:
    row = np.ones(length, np.float32)
    return TokenStats(old_logprobs=old * row, ref_logprobs=ref * row, values=value * row, entropy=0.5 * row)


def test_one_labelled_token_gives_the_identity_of_the_method() -> None:
    objective = ObjectiveConfig(advantages="gae", lam=0.5, whiten="none")
    _, scored = scored_pair([0.0, 0.0, -1.0, 0.0])
    samples = make_train_samples([scored], [stats(4)], objective, kl_coef=0.3, seed=1)
    np.testing.assert_allclose(samples[0].advantages, [-0.25, -0.5, -1.0, 0.0])


def test_scalar_placement_pays_the_sum_at_the_end_and_the_kl_where_it_arises() -> None:
    objective = ObjectiveConfig(advantages="gae", lam=1.0, whiten="none", rewards={"placement": "scalar"})
    _, scored = scored_pair([1.0, -1.0, 1.0])
    learner_stats = [stats(3, old=-1.0, ref=-1.5)]
    samples = make_train_samples([scored], learner_stats, objective, kl_coef=0.2, seed=1)
    assert compute_step_kl([scored], learner_stats) == pytest.approx(1.5)
    _, short = scored_pair([0.0])
    assert compute_step_kl([scored, short], [*learner_stats, stats(1)]) == pytest.approx(0.75)
    # rewards -.1, -.1, 1 - .1; lambda 1 and no values: the sum from here to the end
    np.testing.assert_allclose(samples[0].advantages, [0.7, 0.8, 0.9], rtol=1e-6)


def test_step_placement_pays_each_step_at_its_end_and_the_outcome_reward_at_the_last_token() -> None:
    objective = ObjectiveConfig(advantages="gae", lam=0.0, whiten="none", span_coef=0.5, rewards={"placement": "step"})
    _, scored = scored_pair([1.0, 1.0, -1.0, 0.0], steps=[0, 0, 1, 1], outcome_reward=0.5)
    samples = make_train_samples([scored], [stats(4)], objective, kl_coef=0.0, seed=1)
    assert samples[0].advantages.tolist() == [0, 1, 0, -0.5 + 0.5]


@pytest.mark.parametrize("estimator", ["k3", "full"])
def test_a_penalty_in_the_loss_is_not_paid_in_the_reward_as_well(estimator: str) -> None:
    objective = ObjectiveConfig(advantages="gae", lam=1.0, whiten="none", kl_estimator=estimator)
    _, scored = scored_pair([0.0, 1.0])
    samples = make_train_samples([scored], [stats(2, ref=-1.5)], objective, kl_coef=0.2, seed=1)
    assert samples[0].advantages.tolist() == [1, 1]
    assert samples[0].ref_logprobs.tolist() == [-1.5, -1.5]
    assert compute_step_kl([scored], [stats(2, ref=-1.5)]) == 1.0  # the controller sees it


def test_a_truncated_response_pays_its_penalty_at_its_last_token_in_any_placement() -> None:
    for placement, expected in (("span", [1.0, 0.0, -0.5]), ("scalar", [0.0, 0.0, 0.5])):
        objective = ObjectiveConfig(advantages="gae", lam=0.0, whiten="none", rewards={"placement": placement})
        _, scored = scored_pair([1.0, 0.0, 0.0])
        truncated = replace(scored, truncation_penalty=-0.5)
        alone = objective.model_copy(update={"span_coef": 0.0})
        (only,) = make_train_samples([truncated], [stats(3)], alone, kl_coef=0.0, seed=1)
        assert only.advantages.tolist() == [0.0, 0.0, -0.5], "it is a reward of its own"
        whole, short = make_train_samples([scored, truncated], [stats(3)] * 2, objective, kl_coef=0.0, seed=1)
        assert short.advantages.tolist() == expected
        assert truncated.rewards.tolist() == [1.0, 0.0, -0.5]
        assert whole.advantages.sum() == 1
        assert scored.token_rewards.tolist() == [1, 0, 0]


def test_groups_are_the_samples_of_one_prompt() -> None:
    objective = ObjectiveConfig(advantages="group", whiten="none", rewards={"placement": "scalar"})
    pairs = [("p", [1.0, 0.0]), ("q", [1.0]), ("p", [0.0]), ("p", [1.0, -1.0, 2.0])]
    scored = [scored_pair(rewards, prompt_id=prompt_id)[1] for prompt_id, rewards in pairs]
    learner_stats = [stats(len(rewards), value=9.0) for _, rewards in pairs]
    samples = make_train_samples(scored, learner_stats, objective, kl_coef=0.0, seed=1)
    # p: sums 1, 0, 2; each less the mean of the other two. q stands alone
    assert [s.advantages.tolist() for s in samples] == [[0, 0], [0], [-1.5], [1.5, 1.5, 1.5]]


def test_padding_of_a_short_response_takes_no_part_in_whitening() -> None:
    objective = ObjectiveConfig(advantages="gae", lam=0.0, whiten="full")
    pairs = [scored_pair([1.0, 1.0, 0.0, 0.0])[1], scored_pair([1.0, 0.0])[1]]
    samples = make_train_samples(pairs, [stats(4), stats(2)], objective, kl_coef=0.0, seed=1)
    # six tokens 1 1 0 0 1 0: mean .5, deviation .5
    np.testing.assert_allclose(samples[0].advantages, [1, 1, -1, -1], rtol=1e-6)
    np.testing.assert_allclose(samples[1].advantages, [1, -1], rtol=1e-6)


def test_what_the_feedback_sees_of_known_faults() -> None:
    """One of two repeats is called poor, the invention is neutral, the wrong value is praised; failed feedback and
    correct facts do not count."""
    facts = {"name": "Mira", "thing": "phone", "fault": "hums", "day": "Monday", "place": "Oslo"}
    prompt = Prompt(prompt_id="p", prompt_text="A post.", task="tiny", payload={"facts": facts})
    cases = [
        ("it hums, it hums, it hums.", make_feedback, ["hums"], [("hums", 3)]),
        ("plays chess, in Lima, by Mira.", make_feedback, ["Lima"], ["Mira"]),
    ]
    pairs = []
    for text, make, good, poor in cases:
        rollout = replace(scored_pair([0.0])[1].rollout, response_text=text)
        pairs.append((prompt, rollout, make("c", good, poor, text, source="s", version="v")))
    silent = make_failed_feedback("failed", source="s", version="v")
    metrics = compute_fault_recall(TinyTask(), [*pairs, (prompt, pairs[0][1], silent)])
    assert metrics == {
        "feedback/recall_invented": 0.0,
        "feedback/recall_repeated": 0.5,
        "feedback/recall_wrong": 0.0,
        "feedback/faults_praised": 0.25,
    }
    assert compute_fault_recall(LetterTask(), pairs) == {} == compute_fault_recall(TinyTask(), [])


def test_metrics_of_a_function_are_averaged_over_the_responses_that_have_them() -> None:
    prompt, scored = scored_pair([1.0])
    numbers = ({"tone": 1.0, "facts/right": 0.25}, {"tone": 0.0}, {})
    pairs = [JudgedResponse(prompt, scored.rollout, replace(scored.feedback, metrics=row)) for row in numbers]
    metrics = step_metrics(pairs, [scored] * 3, [stats(1)] * 3, ObjectiveConfig(), kl=0.0, kl_coef=0.1)
    averages = {name: value for name, value in metrics.items() if name.startswith("feedback/metrics/")}
    assert averages == {"feedback/metrics/tone": 0.5, "feedback/metrics/facts/right": 0.25}


def test_judgements_without_a_span_are_counted_and_responses_without_an_answer_are_not() -> None:
    prompt, scored = scored_pair([1.0])
    empty = replace(scored.feedback, spans=(), status="empty")
    with_reason = replace(empty, reason="style: the request failed")  # of one of two criteria
    without_answer = replace(scored.rollout, answer_start=None)
    pairs = [
        JudgedResponse(prompt, scored.rollout, scored.feedback),
        JudgedResponse(prompt, scored.rollout, empty),
        JudgedResponse(prompt, scored.rollout, with_reason),
        JudgedResponse(prompt, without_answer, replace(empty, reason=NO_ANSWER)),
    ]
    metrics = step_metrics(pairs, [scored] * 4, [stats(1)] * 4, ObjectiveConfig(), kl=0.0, kl_coef=0.1)
    assert metrics["feedback/empty_share"] == 3 / 4


def test_quotes_of_responses_that_are_dropped_count_and_so_do_answers_at_max_spans() -> None:
    prompt, scored = scored_pair([1.0])
    answers = (
        ({"critique": "c", "good": ["x"], "poor": []}, "ok"),
        ({"critique": "c", "good": ["y"], "poor": ["z", "y"]}, "unparsable"),  # all quotes are lost
        ({"critique": "c", "good": [], "poor": []}, "empty"),
    )
    pairs = []
    for answer, status in answers:
        text = json.dumps(answer)
        feedback = parse_answer(text, "x", source="reward_model", version="v", max_spans=2)
        assert feedback.status == status
        pairs.append(JudgedResponse(prompt, scored.rollout, feedback))
    metrics = step_metrics(pairs, [scored] * 2, [stats(1)] * 2, ObjectiveConfig(), kl=0.0, kl_coef=0.1)
    assert metrics["feedback/located_rate"] == 1 / 4
    assert metrics["feedback/metrics/at_max_spans"] == 1 / 3
    assert metrics["feedback/empty_share"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("order", [1, -1])
def test_a_response_without_an_answer_has_no_criteria_and_earns_0(order: int) -> None:
    prompt, scored = scored_pair([1.0])
    results = {
        "facts": CriterionResult(status="failed", critique_range=(0, 0)),
        "style": CriterionResult(status="ok", critique_range=(0, 1)),
    }
    judged = replace(
        scored,
        feedback=replace(scored.feedback, criteria=results),
        criterion_rewards={"facts": 0.0, "style": 3.0},
    )
    rows = [judged, scored][::order]
    pairs = [JudgedResponse(prompt, row.rollout, row.feedback) for row in rows]
    metrics = step_metrics(pairs, rows, [stats(1)] * 2, ObjectiveConfig(), kl=0.0, kl_coef=0.1)
    assert {name: metrics[f"{CRITERION_REWARD}{name}"] for name in results} == {"facts": 0.0, "style": 1.5}
    assert {name: metrics[f"{CRITERION_FAILED}{name}"] for name in results} == {"facts": 1.0, "style": 0.0}


def test_step_metrics_by_hand() -> None:
    prompt, one = scored_pair([1.0, -1.0, 0.0, 0.0], outcome_reward=0.5)
    one = replace(one, feedback=replace(one.feedback, outcomes={"task": 1.0, "m:f": -0.5}))
    _, two = scored_pair([1.0, 1.0])
    two = replace(two, feedback=replace(two.feedback, outcomes={"task": 0.0}))  # m:f does not apply
    pairs = [
        JudgedResponse(prompt, s.rollout, s.feedback) for s in (one, two, two)
    ]  # the last one's feedback was dropped
    learner_stats = [stats(4), stats(2, old=-1.2)]
    objective = ObjectiveConfig(outcome_rewards=[{"source": "task", "weight": 0.5}], span_coef=2.0)
    metrics = step_metrics(pairs, [one, two], learner_stats, objective, kl=0.4, kl_coef=0.1)
    once = replace(two, token_rewards=np.array([0, 1], np.float32))  # a span of two tokens
    by_span = step_metrics(pairs, [one, once], learner_stats, ObjectiveConfig(), kl=0.4, kl_coef=0.1)
    assert (by_span["tokens/good_share"], by_span["reward/response_mean"]) == (
        pytest.approx(3 / 6),
        pytest.approx(1 / 2),
    )
    assert metrics["reward/outcome_mean"] == pytest.approx(0.25)
    assert metrics["reward/outcome/task"] == 0.5 and metrics["reward/outcome/m:f"] == -0.5
    assert metrics["reward/total_mean"] == pytest.approx((2 * 0 + 0.5 + 2 * 2) / 2)
    assert "reward/outcome_mean" not in step_metrics(
        pairs, [one, two], learner_stats, ObjectiveConfig(), kl=0.4, kl_coef=0.1
    )
    assert metrics["reward/token_mean"] == pytest.approx(2 / 6)
    assert metrics["reward/response_mean"] == pytest.approx((0 + 2) / 2)
    assert metrics["tokens/good_share"] == pytest.approx(3 / 6)
    assert metrics["tokens/poor_share"] == pytest.approx(1 / 6)
    assert metrics["feedback/empty_share"] == 1
    assert metrics["feedback/source/reward_model"] == 1.0
    assert metrics["gap/logprob_mean"] == pytest.approx(2 * 0.2 / 6, rel=1e-5)
    assert metrics["response/length_mean"] == pytest.approx(8 / 3)
    assert metrics["response/truncated_share"] == 0

    cut = replace(one, rollout=replace(one.rollout, finish_reason="length"), truncation_penalty=-0.5)
    pairs = [JudgedResponse(prompt, s.rollout, s.feedback) for s in (cut, two, two)]
    penalized = step_metrics(pairs, [cut, two], learner_stats, ObjectiveConfig(), kl=0.4, kl_coef=0.1)
    assert penalized["response/truncated_share"] == pytest.approx(1 / 3)
    weighted = step_metrics(pairs, [cut, two], learner_stats, objective, kl=0.4, kl_coef=0.1)
    assert weighted["reward/total_mean"] == pytest.approx((2 * 0 - 0.5 + 0.5 + 2 * 2) / 2)
    assert penalized["reward/token_mean"] == pytest.approx((2 - 0.5) / 6)
    assert penalized["reward/response_mean"] == pytest.approx((0 - 0.5 + 2) / 2)
    assert penalized["tokens/poor_share"] == metrics["tokens/poor_share"], "no span is worth less"


@pytest.mark.parametrize("length", [2, 400])
def test_a_kl_target_per_token_grows_with_the_responses(length: int) -> None:
    """400 tokens at .01 nats a token are 4 nats a response; the coefficient moves as it does there."""
    _, scored = scored_pair([0.0] * length)
    per_response = ObjectiveConfig(kl_target=0.01 * length)
    per_token = ObjectiveConfig(kl_target_per_token=0.01)
    for kl in (0.005 * length, 0.011 * length, 0.02 * length):
        next_coef = next_kl_coef(per_token, 0.05, kl=kl, scored=[scored, scored], num_samples=100)
        expected = next_kl_coef(per_response, 0.05, kl=kl, scored=[scored], num_samples=100)
        assert next_coef == pytest.approx(expected)
        assert (next_coef > 0.05) == (kl > 0.01 * length)
    assert next_kl_coef(ObjectiveConfig(kl_target=None), 0.05, kl=9, scored=[scored], num_samples=100) == 0.05
