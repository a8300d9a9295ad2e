"""Confidence intervals and paired tests of statistics measured on a sample of prompts.

A statistic is a function of sums over prompts. Prompts are the clusters: samples of one prompt are summed before. A
mean needs one sum, corpus BLEU ten. All statistics of an evaluation share one `Draws`, which keeps policies paired.
"""

from collections.abc import Callable, Sequence
from math import comb, inf, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from t2g.study.tables import t_quantile

NUM_DRAWS = 10_000
_BLOCK = 1_000  # draws that are in memory as float64 at one time
_POWER = 0.8

Statistic = Callable[[np.ndarray], np.ndarray]  # sums over all prompts [..., K] -> the statistic [...]


class Draws:
    """Resamples of N prompts and random signs for them, shared by all statistics of an evaluation.

    Memory: three bytes per draw and prompt. The prompts may be records of another kind.
    """

    def __init__(self, num_prompts: int, *, seed: int, num_draws: int = NUM_DRAWS) -> None:
        """Draw the resamples and the signs.

        Args:
            num_draws: A multiple of 1,000.
        """
        self.num_prompts = num_prompts
        self.num_draws = num_draws
        rng = np.random.default_rng(seed)
        blocks = range(num_draws // _BLOCK)
        share = np.full(num_prompts, 1 / num_prompts)
        # Counts of each prompt, so that a resample's sums are one product (Efron, Annals of Statistics 1979).
        self._counts = [rng.multinomial(num_prompts, share, _BLOCK).astype(np.uint16) for _ in blocks]
        bits = [rng.integers(0, 2, (_BLOCK, num_prompts), np.int8) for _ in blocks]
        self._signs = [block * np.int8(2) - np.int8(1) for block in bits]

    def sum_resamples(self, columns: np.ndarray) -> np.ndarray:
        """Return sums over prompts drawn with replacement. columns [N] or [N, K] -> [B] or [B, K]"""
        return np.concatenate([counts.astype(float) @ columns for counts in self._counts])

    def sum_sign_flips(self, columns: np.ndarray) -> np.ndarray:
        """Return sums over all prompts with random signs. columns [N, K] -> [B, K] float64"""
        return np.concatenate([signs.astype(float) @ columns for signs in self._signs])


def make_mean(num_prompts: int) -> Statistic:
    """Return the statistic that is the mean over prompts of a single column."""
    return lambda sums: sums[..., 0] / num_prompts


def bootstrap_interval(drawn: np.ndarray, num_prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the low and high ends of each statistic's 95 % interval.

    The percentiles are a little further out than 2.5 and 97.5: a resample of few prompts varies less than a new sample
    (Hesterberg, "What teachers should know about the bootstrap", 2015, section 3.1: expanded percentile interval).

    Args:
        drawn: The statistics over resamples, [B, ...].
    """
    expansion = sqrt(num_prompts / (num_prompts - 1))
    tail = NormalDist().cdf(-expansion * t_quantile(num_prompts - 1))
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return low, high


def with_interval(drawn: np.ndarray, value: np.ndarray, num_prompts: int) -> dict[str, float]:
    """Return a statistic and its 95 % interval as JSON values.

    Args:
        drawn: The statistic over resamples, [B].
        value: The statistic of all prompts, [].
    """
    low, high = bootstrap_interval(drawn, num_prompts)
    return {"value": float(value), "low": float(low), "high": float(high)}


def compare(a: np.ndarray, b: np.ndarray, statistic: Statistic, draws: Draws) -> dict[str, Any]:
    """Compare two policies on the same prompts: statistic(a) - statistic(b). a, b: [N, K].

    Returns:
        The difference `with_interval`, and
        p: Two-sided p-value of no difference, by `mcnemar_p` for a single column of 0 and 1, else by `flip_p`.
        exact: Whether p is by `mcnemar_p`.
        resolvable: The smallest true difference that so many prompts find in 4 of 5 evaluations.
        wins, ties, losses: Prompts on which a's value is above, equal to and below b's; None for several columns.
    """
    drawn = statistic(draws.sum_resamples(a)) - statistic(draws.sum_resamples(b))
    value = statistic(a.sum(0)) - statistic(b.sum(0))
    result: dict[str, Any] = with_interval(drawn, value, draws.num_prompts)

    has_single_column = a.shape[1] == 1
    signs = np.sign(a - b)
    for name, sign in (("wins", 1), ("ties", 0), ("losses", -1)):
        result[name] = int((signs == sign).sum()) if has_single_column else None

    exact = has_single_column and bool(np.isin([a, b], [0.0, 1.0]).all())
    p = mcnemar_p(result["wins"], result["losses"]) if exact else float(flip_p(a, b, statistic, draws))
    smallest = float(resolvable(drawn, draws.num_prompts))
    return result | {"p": p, "exact": exact, "resolvable": smallest}


def resolvable(drawn: np.ndarray, num_prompts: int) -> np.ndarray:
    """Return the true difference that a test at 5 % finds in 4 of 5 evaluations.

    It is (t + 0.84) x the standard error, about 2.8 standard errors.

    Args:
        drawn: A difference over resamples, [B, ...].
    """
    error = drawn.std(0) * sqrt(num_prompts / (num_prompts - 1))
    return (t_quantile(num_prompts - 1) + NormalDist().inv_cdf(_POWER)) * error


def flip_p(a: np.ndarray, b: np.ndarray, statistic: Statistic, draws: Draws) -> np.ndarray:
    """Return the p-value of the permutation test that swaps the two policies on random prompts. a, b: [N, K].

    It is the share of swaps with a difference at least as large as the observed one. The observed difference counts as
    a draw, so that p is never 0 (Phipson and Smyth, 2010). For a mean this is the sign-flip test of the differences.
    """
    middle = (a.sum(0) + b.sum(0)) / 2
    half = draws.sum_sign_flips(a - b) / 2
    drawn = np.abs(statistic(middle + half) - statistic(middle - half))
    observed = np.abs(statistic(a.sum(0)) - statistic(b.sum(0)))
    threshold = observed * (1 - 1e-9) - 1e-12  # rounding must not make an equal difference a smaller one
    num_as_large = (drawn >= threshold).sum(0)
    return (1 + num_as_large) / (1 + draws.num_draws)


def mcnemar_p(wins: int, losses: int) -> float:
    """Return the p-value of McNemar's exact (binomial) test (1947).

    Null hypothesis: on a prompt where the policies differ, each one wins with probability 1/2.

    >>> mcnemar_p(0, 0), mcnemar_p(1, 0), mcnemar_p(0, 6)
    (1.0, 1.0, 0.03125)
    """
    num = wins + losses
    tail = sum(comb(num, count) for count in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**num)


def holm(values: Sequence[float]) -> list[float]:
    """Return the p-values of a table, adjusted for the family-wise error rate (Holm, 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [inf] * len(values)
    ascending = sorted(range(len(values)), key=values.__getitem__)
    least = 0.0
    for rank, index in enumerate(ascending):
        scaled = (len(values) - rank) * values[index]
        least = max(least, min(1.0, scaled))
        adjusted[index] = least
    return adjusted
