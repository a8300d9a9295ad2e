"""Intervals and tests of paired figures: by simulation with known truth, by enumeration, and by hand."""

from itertools import product

import numpy as np
import pytest

from t2g.study.paired import Draws, bootstrap_interval, compare, flip_p, holm, make_mean, mcnemar_p, resolvable

NUM_PROMPTS = 50
NUM_SIMULATIONS = 1000
DRAWS = Draws(NUM_PROMPTS, seed=1, num_draws=2000)


def means(sums: np.ndarray) -> np.ndarray:
    return sums / NUM_PROMPTS


def draw_values(shape: str, rng: np.random.Generator, size: tuple[int, int]) -> tuple[np.ndarray, float]:
    """Samples of one prompt's value, [N, S], and their true mean."""
    if shape == "normal":
        return rng.normal(0.3, 1, size), 0.3
    if shape == "passes":
        return (rng.random(size) < 0.4).astype(float), 0.4
    if shape == "skewed":
        return rng.beta(1, 3, size), 0.25
    assert shape == "four samples a prompt"
    return rng.binomial(4, rng.beta(1, 1, size)) / 4, 0.5


@pytest.mark.parametrize("shape", ["normal", "passes", "skewed", "four samples a prompt"])
def test_intervals_hold_the_truth_in_95_of_100_evaluations(shape: str) -> None:
    values, truth = draw_values(shape, np.random.default_rng(2), (NUM_PROMPTS, NUM_SIMULATIONS))
    low, high = bootstrap_interval(means(DRAWS.sum_resamples(values)), NUM_PROMPTS)
    assert 0.93 <= ((low <= truth) & (truth <= high)).mean() <= 0.97


def test_equal_policies_differ_in_at_most_6_of_100_evaluations() -> None:
    """Not exchangeable by their looks: one policy's values are the other's, rounded, or of another spread."""
    rng = np.random.default_rng(3)
    size = (NUM_PROMPTS, NUM_SIMULATIONS)
    hard = rng.beta(1, 1, size)  # a prompt is hard for both
    one = rng.binomial(4, hard) / 4
    other = (rng.random(size) < hard).astype(float)
    p = flip_p(one, other, means, DRAWS)
    assert 0.03 <= (p <= 0.05).mean() <= 0.06
    both = rng.random((2, *size)) < hard
    wins, losses = ((both[i] & ~both[1 - i]).sum(0) for i in (0, 1))
    exact = np.array([mcnemar_p(int(w), int(v)) for w, v in zip(wins, losses, strict=True)])
    assert (exact <= 0.05).mean() <= 0.06


def test_the_resolvable_difference_is_found_in_4_of_5_evaluations() -> None:
    rng = np.random.default_rng(4)
    noise = rng.normal(0, 0.2, (NUM_PROMPTS, NUM_SIMULATIONS))
    size = resolvable(means(DRAWS.sum_resamples(noise)), NUM_PROMPTS).mean()
    assert size == pytest.approx(2.85 * 0.2 / np.sqrt(NUM_PROMPTS), rel=0.02)
    is_significant = flip_p(noise + size, np.zeros_like(noise), means, DRAWS) <= 0.05
    assert is_significant.mean() == pytest.approx(0.8, abs=0.03)


def test_p_is_that_of_all_swaps() -> None:
    """Eight prompts have 256 assignments of signs: the drawn p is near the enumerated one."""
    rng = np.random.default_rng(5)
    one, other = rng.random((2, 8, 1))
    signs = np.array([*product((1, -1), repeat=8)])
    exact = (np.abs(signs @ (one - other)) >= abs((one - other).sum()) - 1e-12).mean()
    assert flip_p(one, other, make_mean(8), Draws(8, seed=1)) == pytest.approx(exact, abs=0.015)


def test_equal_values_differ_by_exactly_nothing() -> None:
    values = np.random.default_rng(6).random((NUM_PROMPTS, 1))
    same = compare(values, values.copy(), make_mean(NUM_PROMPTS), DRAWS)
    assert same["value"] == same["low"] == same["high"] == same["resolvable"] == 0
    assert (same["p"], same["wins"], same["ties"], same["losses"]) == (1, 0, NUM_PROMPTS, 0)


def test_a_difference_by_hand_and_its_sign() -> None:
    one = np.zeros((NUM_PROMPTS, 1))
    other = np.zeros((NUM_PROMPTS, 1))
    # wins three, loses ten: both are pass or fail
    one[:3] = 1
    other[3:13] = 1
    difference = compare(one, other, make_mean(NUM_PROMPTS), DRAWS)
    assert difference["value"] == pytest.approx(-7 / 50)
    assert difference["low"] < -7 / 50 < difference["high"]
    assert (difference["wins"], difference["ties"], difference["losses"]) == (3, 37, 10)
    assert difference["exact"]
    assert difference["p"] == pytest.approx(2 * (1 + 13 + 78 + 286) / 2**13)
    shifted = compare(one + 2.5, other, make_mean(NUM_PROMPTS), DRAWS)
    assert not shifted["exact"] and shifted["p"] == 1 / 2001  # no draw is as far: never 0


def test_a_figure_of_several_sums_is_resampled_as_a_whole() -> None:
    """A ratio: correct over total. Both policies share their draws, so a constant factor leaves no doubt."""
    rng = np.random.default_rng(7)
    totals = rng.integers(1, 20, NUM_PROMPTS).astype(float)
    one = np.stack([totals * 0.5, totals], 1)
    other = np.stack([totals * 0.25, totals], 1)
    difference = compare(one, other, lambda sums: sums[..., 0] / sums[..., 1], DRAWS)
    assert [difference[key] for key in ("value", "low", "high")] == pytest.approx([0.25] * 3)
    assert difference["wins"] is None and difference["p"] < 0.001


def test_holm_keeps_order_and_never_falls() -> None:
    p = [0.04, 0.001, 0.03, 0.8]
    assert holm(p) == pytest.approx([0.09, 0.004, 0.09, 0.8])
    assert holm([]) == []
