"""The figures of a comparison, from curves short enough to do by hand."""

import json
import re
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.errors import Diverged, UserError
from t2g.study.comparison import (
    RunCurve,
    base_run,
    reach_scalar_best,
    read_run,
    subtract_matched,
    summarize,
    summarize_method,
    summarize_noise,
    tables,
)

SCORES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def a_run(*scores: float, step_s: float = 2.0, targeting: dict[str, Any] | None = None) -> RunCurve:
    """Evaluated before training and after each step of 10 samples."""
    steps = range(len(scores))
    return RunCurve(
        samples=tuple(10 * i for i in steps),
        scores=scores,
        seconds=tuple(step_s * i for i in steps),
        step_seconds=step_s,
        targeting=targeting,
    )


def test_a_run_is_read_from_its_metrics() -> None:
    records = [
        {"step": 0, "eval/score": 0.1, "time/eval_s": 9.0},
        {"step": 1, "samples": 8.0, "time/step_s": 5.0},
        {"step": 2, "samples": 16.0, "time/step_s": 2.0, "eval/score": 0.3, "time/eval_s": 9.0},
        {"step": 3, "samples": 24.0, "time/step_s": 3.0},
        {"step": 4, "samples": 32.0, "time/step_s": 2.0, "eval/score": 0.5},
    ]
    run = read_run(records)
    assert run == RunCurve(samples=(0, 16, 32), scores=(0.1, 0.3, 0.5), seconds=(0, 7, 12), step_seconds=2.5)
    line = {"step": 4, "samples": 32, "time/step_s": 8, "eval/score": 0.2}
    at_once = read_run([{"step": 0, "eval/score": 0.1}, line])
    assert (at_once.seconds, at_once.step_seconds) == ((0, 8), 2.0)
    with pytest.raises(UserError, match="no held-out score"):
        read_run([{"step": 1, "time/step_s": 1.0}])


def test_a_run_that_lacks_an_evaluation_is_refused() -> None:
    records = [{"step": 0, "eval/score": 0.1}, {"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "eval/score": 0.5}]
    assert read_run(records, every=4).scores == (0.1, 0.5)
    with pytest.raises(UserError, match="step 2 and lacks it"):
        read_run(records, every=2)
    with pytest.raises(UserError, match="step 3 and lacks it"):
        read_run(records[:4], every=4)


def test_an_evaluation_without_a_score_does_not_shift_the_curve() -> None:
    records = [{"step": 0, "eval/score": 0.1}, {"step": 4, "samples": 8.0, "time/step_s": 5.0, "eval/score": None}]
    with pytest.raises(Diverged, match=r"step 4 .* eval/score"):
        read_run(records)


def test_a_score_is_the_mean_of_the_last_three_evaluations_after_training_began() -> None:
    assert a_run(0.0, 9.0, 1.0, 2.0, 3.0).score == 2.0
    assert a_run(0.0, 1.0, 2.0).score == 1.5  # the base is no part of it
    assert a_run(0.7).score == 0.7  # a method without training has but the one


def test_curves_are_smoothed_by_what_came_before() -> None:
    assert a_run(9.0, 3.0, 6.0, 0.0, 6.0).smoothed == (9.0, 3.0, 4.5, 3.0, 4.0)


@given(SCORES)
def test_the_last_point_of_a_smoothed_curve_is_the_score(scores: list[float]) -> None:
    run = a_run(*scores)
    assert run.score == pytest.approx(sum((scores[1:] or scores)[-3:]) / min(3, max(1, len(scores) - 1)))
    assert min(scores) - 1e-12 <= min(run.smoothed)
    assert max(run.smoothed) <= max(scores) + 1e-12


def test_when_scalar_is_reached() -> None:
    scalar = a_run(0.0, 0.25, 0.5, 0.75, 0.75, 0.25)  # smoothed 0 .25 .375 .5 .667 .583
    faster = a_run(0.0, 0.5, 1.0, 0.5, step_s=3.0)  # smoothed 0 .5 .75 .667
    assert reach_scalar_best(scalar, scalar) == {"samples": 40, "seconds": 8.0, "share": 1.0}
    assert reach_scalar_best(faster, scalar) == {"samples": 20, "seconds": 6.0, "share": 0.5}
    assert reach_scalar_best(a_run(0.0, 0.1), scalar) == {"samples": None, "seconds": None, "share": None}


@given(SCORES, SCORES)
def test_scalar_always_reaches_itself_and_no_share_is_negative(mine: list[float], its: list[float]) -> None:
    scalar = a_run(*its)
    assert reach_scalar_best(scalar, scalar)["samples"] is not None
    samples = reach_scalar_best(a_run(*mine), scalar)["samples"]
    smoothed = a_run(*mine).smoothed
    assert (samples is None) == (max(smoothed) < max(scalar.smoothed))


def test_the_summary_of_two_seeds() -> None:
    still = {"criticised": -2.0, "praised": 1.0, "unmentioned": 0.0, "difference": -2.0, "returns": 0.25}
    base = {1: base_run(a_run(0.2, 0.9)), 2: base_run(a_run(0.4, 0.9))}
    scalar = {1: a_run(0.2, 0.4, 0.6, 0.8), 2: a_run(0.4, 0.4, 0.4, 0.4)}
    good = a_run(0.2, 1.0, 1.0, 1.0, step_s=3.0, targeting=still)
    poor = a_run(0.4, 0.0, 0.0, 0.0, step_s=3.0, targeting=still)
    runs = {"sft": base, "scalar": scalar, "span": {1: good, 2: poor}}
    summary = summarize(runs)
    assert summary["sft"]["score"]["mean"] == pytest.approx(0.3)
    assert summary["sft"]["targeting"]["returns"] is None
    assert summary["sft"]["targeting"]["difference"]["mean"] == 0
    assert summary["scalar"]["score"]["mean"] == pytest.approx(0.5)
    assert summary["scalar"]["overhead"] == 0.0
    assert summary["scalar"]["targeting"] is None
    span = summary["span"]
    assert span["score"]["mean"] == pytest.approx(0.5)
    # paired: 1 - .6 and 0 - .4; t(1) = 12.706, s = .8 / sqrt 2
    assert span["minus_scalar"]["mean"] == pytest.approx(0.0)
    assert span["minus_scalar"]["high"] == pytest.approx(12.706 * 0.4)
    # seed 1: scalar's best is .6 (mean of .4 .6 .8) at 30 samples, span has 1 at 10; seed 2: both begin at it
    assert (span["samples_to_scalar_best"], span["seconds_to_scalar_best"]) == (5, 1.5)
    assert span["share_of_scalar_samples"] == pytest.approx((1 / 3 + 1) / 2)
    assert (span["seeds_at_scalar_best"], span["overhead"]) == (2, 0.5)
    assert span["by_seed"][1]["samples_to_scalar_best"] == 10
    assert span["targeting"]["difference"] == {"mean": -2.0, "low": -2.0, "high": -2.0}
    json.dumps(summary, allow_nan=False)


def test_scores_are_compared_at_the_same_kl() -> None:
    kls = {1: 0.0, 2: 0.4, 3: 0.5, 4: 1.3, 5: 1.5}  # before the update of the step
    scores = {2: 0.6, 4: 0.8, 5: 0.9}
    records: list[dict[str, float]] = [{"step": 0, "eval/score": 0.2}]
    for step, kl in kls.items():
        evaluation = {"eval/score": scores[step]} if step in scores else {}
        records.append({"step": step, "policy/kl": kl} | evaluation)
    run = read_run(records)
    assert run.kls == (0.0, 0.5, 1.5)  # after steps 0, 2 and 4; none is known after step 5
    assert [run.score_at(level, run.kls) for level in (0.25, 0.5, 1.0)] == pytest.approx([0.4, 0.6, 0.7])
    assert run.score_at(2.0, run.kls) is None
    half = replace(run, scores=(0.2, 0.4, 0.5, 0.9))
    by_kl = summarize({"span": {1: run, 2: half}})["span"]["score_at_kl"]
    assert (by_kl["0.5"]["mean"], by_kl["1"]["mean"], by_kl["2"]) == (pytest.approx(0.5), pytest.approx(0.575), None)


def test_scores_are_compared_where_both_have_moved_equally_far() -> None:
    def moved(scores: tuple[float, ...], lengths: tuple[float, ...], kls: tuple[float, ...]) -> RunCurve:
        return replace(a_run(*scores), lengths=lengths, kls=kls)

    span = moved((0.6, 0.9), (50, 30), (0, 2))
    scalar = moved((0.6, 0.8), (50, 40), (0, 1))
    assert subtract_matched(span, scalar, "kls") == pytest.approx(0.75 - 0.8)
    assert subtract_matched(span, scalar, "lengths") == pytest.approx(0.75 - 0.8)
    assert subtract_matched(scalar, span, "lengths") == pytest.approx(0.8 - 0.75)
    assert subtract_matched(span, moved((0.6, 0.8), (50, 60), (0, 1)), "lengths") is None  # the other way
    assert subtract_matched(span, a_run(0.6, 0.8), "kls") is None
    back = moved((0.6, 0.8, 0.9), (50, 30, 45), (0, 2, 1))  # each curve counts where it first was so far
    assert subtract_matched(back, scalar, "kls") == pytest.approx(0.7 - 0.8)
    assert subtract_matched(scalar, back, "lengths") == pytest.approx(0.8 - 0.7)
    base = {seed: base_run(span) for seed in (1, 2)}  # it has not moved
    summary = summarize({"sft": base, "scalar": {1: scalar, 2: scalar}, "span": {1: span, 2: span}})
    assert summary["sft"]["minus_scalar_at_equal"] == {"kls": None, "lengths": None}
    at_equal = summary["span"]["minus_scalar_at_equal"]
    assert at_equal["kls"]["mean"] == pytest.approx(-0.05)
    assert at_equal["lengths"]["high"] == pytest.approx(-0.05)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 9)), min_size=2, max_size=8))
def test_a_run_is_no_better_than_itself_at_an_equal_kl(points: list[tuple[float, float]]) -> None:
    scores = [score for score, _ in points]
    kls = list(accumulate(kl for _, kl in points))
    assert subtract_matched(*[replace(a_run(*scores), kls=tuple(kls))] * 2, "kls") == pytest.approx(0, abs=1e-9)


def test_without_scalar_no_figure_is_relative_to_it() -> None:
    figures = summarize({"span": {1: a_run(0.1, 0.5)}})["span"]
    assert not [name for name in figures if "scalar" in name or name == "overhead"]
    assert figures["score"] == {"mean": 0.5, "low": None, "high": None}


def test_the_table_has_a_cell_for_each_column() -> None:
    runs = {
        "sft": {1: base_run(a_run(0.2, 0.9)), 2: base_run(a_run(0.2, 0.9))},
        "scalar": {1: a_run(0.2, 0.4, 0.6), 2: a_run(0.2, 0.5, 0.7)},
        "span": {1: a_run(0.2, 0.8, 0.8, step_s=3.0), 2: a_run(0.2, 0.1, 0.1, step_s=3.0)},
    }
    runs["span"] = {seed: replace(run, kls=(0.0, 2.0)) for seed, run in runs["span"].items()}
    noise = summarize_noise({"flip": {"span": runs["span"], "scalar": runs["scalar"]}})
    tried = {method: {"0.0001": {}, "0.0003": {}, "0.001": {}} for method in ("scalar", "span")}
    search = {"grid": [1e-4, 3e-4, 1e-3], "scores": tried, "chosen": {"scalar": 3e-4, "span": 1e-3}}
    text = tables({"methods": summarize(runs), "noise": noise, "rewards": {}, "search": search})
    methods, legend, noisy = text.split("\n\n")
    rows = [re.split(r" *\| *", line.strip("| ")) for line in methods.splitlines()]
    assert {len(row) for row in rows} == {15}
    named = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}
    assert list(named) == ["sft", "scalar", "span"]
    assert (named["span"]["lr"], named["span"]["overhead"], named["span"]["s a step"]) == ("0.001*", "+50%", "3.00")
    assert named["scalar"]["lr"] == "0.0003"
    assert (named["span"]["at 1 nat of KL"][:5], named["scalar"]["at 1 nat of KL"]) == ("0.325", "–")  # .5 and .15
    assert named["span"]["samples to scalar's best"] == "at least 15 (1 of 2)"  # seed 2 not within 20
    assert named["sft"]["samples to scalar's best"] == "– (0 of 2)"
    assert named["sft"]["held-out score"] == "0.200 ± 0.000"
    assert legend.startswith("Means over 2 seeds") and "20 samples of" in legend
    assert [line.split("|")[1].strip() for line in noisy.splitlines()[2:]] == ["none", "flip"]


def test_configured_measures_have_columns() -> None:
    targeting = {"criticised": -1.0, "retention": -0.05, "choices_change": -0.03}
    run = a_run(0.2, 0.4, targeting=targeting)
    runs = {"sft": {1: base_run(run)}, "scalar": {1: run}}
    search = {"scores": {}, "chosen": {}}
    table, _ = tables({"methods": summarize(runs), "noise": {}, "rewards": {}, "search": search}).split("\n\n")
    rows = [re.split(r" *\| *", line.strip("| ")) for line in table.splitlines()]
    assert rows[0][-2:] == ["retention", "right choices, change"]
    assert [row[-2:] for row in rows[2:]] == [["0.000", "0.000"], ["-0.050", "-0.030"]]


def test_a_seed_that_never_got_there_counts_with_all_its_samples() -> None:
    scalar = {1: a_run(0.2, 0.4, 0.6), 2: a_run(0.2, 0.5, 0.7), 3: a_run(0.2, 0.1, 0.3)}
    span = {1: a_run(0.2, 0.9, 0.9), 2: a_run(0.2, 0.1, 0.1), 3: base_run(a_run(0.2, 0.1))}
    figures = summarize_method(span, scalar)
    # 10 samples, never in 20, and not trained; the mean over those that got there says 10
    assert figures["samples_to_scalar_best_censored"]["mean"] == 15
    assert (figures["samples_to_scalar_best"], figures["seeds_at_scalar_best"]) == (10, 1)


def test_an_untrained_method_reaches_nothing() -> None:
    scalar = a_run(0.1, 0.2)
    revised = a_run(0.1, 0.9, step_s=0.0)
    untrained = replace(revised, step_seconds=None)
    assert reach_scalar_best(untrained, scalar) == {"samples": None, "seconds": None, "share": None}
