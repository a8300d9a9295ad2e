import re
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.config import AlarmConfig
from t2g.loop.alarms import find_alarms

CONFIG = AlarmConfig(max_kl=40, max_kl_per_token=0.2, min_entropy=0.01, length_ratio=2, max_failed_share=0.1)


def steps(name: str, *values: float | None) -> list[dict[str, float | None]]:
    return [{"step": i, name: value} for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("name", "values", "fragments"),
    [
        ("policy/kl", (3.0, 41.0), ["41.0 nats", "alarms.max_kl=40", "objective.kl_coef"]),
        ("policy/entropy", (0.5, 0.0042), ["0.0042 nats", "alarms.min_entropy=0.01", "rollout.temperature"]),
        ("response/length_mean", (40.0, 60.0, 90.0), ["90.0 tokens", "2.25 times", "40.0", "longer"]),
        ("response/length_mean", (40.0, 19.0), ["19.0 tokens", "0.47 times", "40.0", "shorter"]),
        (
            "response/truncated_share",
            (0.1, 0.3),
            ["truncated 30%", "alarms.max_truncated_share=25%", "truncation_penalty"],
        ),
        ("response/unanswered_share", (1.0,), ["100% of the responses", "thinking", "rollout.max_new_tokens"]),
        ("feedback/failed_share", (0.0, 0.25), ["25% of the responses", "alarms.max_failed_share=10%", "feedback.log"]),
        ("group/zero_variance_share", (0.2, 0.95), ["95% of the prompts", "alarms.max_zero_variance_share=90%"]),
        ("policy/kl_per_token", (0.1, 0.3), ["0.3 nats per token", "alarms.max_kl_per_token=0.2"]),
        ("feedback/located_rate", (0.9, 0.5), ["50% of the feedback's quotes", "alarms.min_located_rate=75%", "exact"]),
        ("tokens/neutral_share", (0.7, 0.995), ["0.5% of the tokens", "alarms.min_labelled_share=1.0%", "samples"]),
        ("policy/kl", (0.0, 4.0, 9.9, 20.1), ["from 9.9 to 20.1 nats", "alarms.max_kl=40", "learner.policy.lr"]),
        ("policy/kl", (0.0, 12.0), ["from 0.0 to 12.0 nats"]),
        ("teacher/contrast", (-0.62,), ["-0.62 nats", "objective.teacher"]),
        ("teacher/share", (0.4, 0.0), ["objective.teacher", "rollout.max_model_len"]),
        (
            "feedback/recall_repeated",
            (0.9, 0.9, 0.16, 0.14),
            ["40% of the faults of class repeated", "min_fault_recall=50%", "checkpoint.export=true"],
        ),
    ],
)
def test_a_sentence_says_number_bound_and_what_to_try(
    name: str, values: tuple[float, ...], fragments: list[str]
) -> None:
    (sentence,) = find_alarms(steps(name, *values), CONFIG)
    for fragment in fragments:
        assert fragment in sentence


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("policy/kl", (20.0, 40.0)),
        ("feedback/located_rate", (1.0, 0.75)),
        ("policy/kl", (0.0, 0.5, 2.0, 5.0, 10.0)),
        ("policy/kl", (4.0, 9.0, None)),
        ("teacher/share", (0.01,)),
        ("policy/entropy", (0.01,)),
        ("response/length_mean", (40.0, 80.0)),
        ("response/length_mean", (40.0, 20.0)),
        ("response/length_mean", (0.0, 0.0)),
        ("feedback/failed_share", (0.1,)),
        ("response/truncated_share", (0.25,)),
        ("response/unanswered_share", (0.25,)),
        ("feedback/recall_invented", (0.8, 0.9, 0.4)),
        ("teacher/contrast", (1.7, -0.5)),
        ("policy/kl", (3.0, None)),
        ("policy/kl", ()),
    ],
)
def test_silence_at_the_bound_and_without_a_number(name: str, values: tuple[float | None, ...]) -> None:
    assert find_alarms(steps(name, *values), CONFIG) == []


@pytest.mark.parametrize(("penalty", "is_advised"), [(0.0, True), (-1.0, False), (-0.5, False)])
def test_a_penalty_that_is_paid_already_is_not_advised(penalty: float, is_advised: bool) -> None:
    history = steps("response/truncated_share", 0.1, 0.3)
    (sentence,) = find_alarms(history, CONFIG, truncation_penalty=penalty)
    assert ("set objective.truncation_penalty below 0" in sentence) == is_advised
    assert (f"objective.truncation_penalty={penalty:g}" in sentence) == (not is_advised)


def test_raised_on_crossing_and_again_after_recovery() -> None:
    history = steps("policy/kl", 1.0, 50.0, 60.0, None, 55.0, 2.0, 45.0)
    raised = [i for i in range(len(history)) if find_alarms(history[: i + 1], CONFIG)]
    assert raised == [1, 6], "50 and 45 are above the bound, and only below it a doubling has a sentence of its own"


def test_first_step_counts_as_a_crossing_and_all_bounds_speak() -> None:
    step = {"policy/kl": 99.0, "policy/entropy": 0.0, "feedback/failed_share": 1.0, "response/length_mean": 12.0}
    sentences = find_alarms([step], CONFIG)
    assert len(sentences) == 3
    assert all(re.search(r"alarms\.\w+=", sentence) for sentence in sentences)


@settings(deadline=None)
@given(st.lists(st.floats(0, 100)))
def test_alarms_are_the_upward_crossings(values: list[float]) -> None:
    history = steps("policy/kl", *values)
    raised = ["above alarms.max_kl" in " ".join(find_alarms(history[: i + 1], CONFIG)) for i in range(len(history))]
    over = [False, *(value > 40 for value in values)]
    assert raised == [now and not before for before, now in pairwise(over)]


def evaluations(*pairs: tuple[float, float], **more: float | None) -> list[dict[str, float | None]]:
    """Return the history of two steps for each pair of training reward and held-out score, after an evaluation."""
    more = {"eval/score_se": 0.01} | more
    history: list[dict[str, float | None]] = [{"step": 0, "eval/score": 0.9, **more}]
    for reward, score in pairs:
        history += [{"reward/total_mean": reward - 1}, {"reward/total_mean": reward + 1, "eval/score": score, **more}]
    return history


def alarmed(history: list[dict[str, float | None]], **config: int) -> list[int]:
    """Return the evaluations after which an alarm is raised, from 1."""
    raised = [i for i in range(len(history)) if find_alarms(history[: i + 1], AlarmConfig(**config))]
    assert all(i % 2 == 0 for i in raised)
    return [i // 2 for i in raised]


def test_a_reward_that_rises_while_the_held_out_measure_falls_is_reward_hacking() -> None:
    falling = [
        (1.0, 0.9),
        (2.0, 0.8),
        (3.0, 0.7),
        (4.0, 0.6),
        (5.0, 0.5),
        (4.0, 0.4),
        (5.0, 0.3),
        (6.0, 0.2),
        (7.0, 0.1),
    ]
    history = evaluations(*falling)
    assert alarmed(history) == [4, 9], "once, and again after the reward fell"
    assert alarmed(history, hacking_evaluations=4) == [5]
    assert alarmed(history, hacking_evaluations=1) == [2, 7]
    (sentence,) = find_alarms(history[:9], AlarmConfig())
    for fragment in (
        "suspected",
        "4 evaluations (1.000 to 4.000)",
        "(0.9000 to 0.6000)",
        "samples.jsonl",
        "checkpoints/best",
    ):
        assert fragment in sentence


@pytest.mark.parametrize(
    ("pairs", "more"),
    [
        ([(1.0, 0.9), (2.0, 0.8), (3.0, 0.7)], {}),  # too few
        ([(1.0, 0.9), (2.0, 0.8), (3.0, 0.85), (4.0, 0.7)], {}),  # the measure rose
        ([(1.0, 0.9), (2.0, 0.8), (1.5, 0.7), (3.0, 0.6)], {}),  # the reward fell
        ([(1.0, 0.9), (1.0, 0.8), (1.0, 0.7), (1.0, 0.6)], {}),
        ([(1.0, 0.9), (2.0, 0.8), (3.0, 0.7), (4.0, 0.6)], {"eval/score_se": 0.11}),  # 0.3 < 2 sqrt(2) 0.11
        ([(1.0, 0.9), (2.0, 0.8), (3.0, 0.7), (4.0, 0.6)], {"eval/score_se": None}),
    ],
)
def test_no_reward_hacking(pairs: list[tuple[float, float]], more: dict[str, Any]) -> None:
    assert alarmed(evaluations(*pairs, **more)) == []


def test_a_score_of_the_feedback_itself_is_no_evidence_of_reward_hacking() -> None:
    falling = evaluations((1.0, 0.9), (2.0, 0.8), (3.0, 0.7), (4.0, 0.6), **{"eval/failed_share": 0.0})
    assert alarmed(falling) == [4], "with an environment too, the task measures"
    for step in falling:
        step.pop("eval/score_se", None)
    assert alarmed(falling) == []


def test_a_slow_fall_is_reported_once_it_exceeds_the_noise() -> None:
    falling = [(float(i), 0.9 - 0.1 * i) for i in range(9)]
    assert alarmed(evaluations(*falling, **{"eval/score_se": 0.16})) == [6], "0.5 > 2 sqrt(2) 0.16 > 0.4"


def test_noise_alone_raises_few_alarms_and_a_true_fall_is_found() -> None:
    """20 evaluations of a rising reward. Without the bound 48 % of 20000 flat runs have an alarm."""

    def share(fall: float) -> float:
        rng = np.random.default_rng(0)
        num_runs = 300
        scores = 0.5 + 0.02 * (rng.normal(size=(num_runs, 20)) - fall * np.arange(20))
        return fmean(bool(alarmed(evaluations(*enumerate(row), **{"eval/score_se": 0.02}))) for row in scores)

    assert share(fall=0.0) < 0.2
    assert share(fall=2.0) > 0.95
