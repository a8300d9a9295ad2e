"""How sure a figure is that was measured on some prompts, and the difference of two policies on the same ones.

A figure is a function of sums over prompts, which are the clusters: samples of one prompt are summed up before. A mean
is one sum; corpus BLEU is made of ten. Every figure of an evaluation is drawn with the same `Draws`, so that policies
stay paired. Pure, and no figure knows what it measures.
"""

from collections.abc import Callable, Sequence
from math import comb, inf, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

NUM_DRAWS = 10_000
_BLOCK = 1_000  # draws that are at one time in memory as floats
_LEVEL = 0.95
_POWER = 0.8

Figure = Callable[[np.ndarray], np.ndarray]  # sums over all prompts [..., K] -> the figure [...]


class Draws:
    """Resamples of N prompts, and of which policy gave which of two responses: the same for every figure."""

    def __init__(self, num_prompts: int, *, seed: int, num_draws: int = NUM_DRAWS) -> None:
        """Three bytes a draw and prompt. num_prompts: 2 or more; num_draws: a multiple of 1,000."""
        rng = np.random.default_rng(seed)
        blocks, share = range(num_draws // _BLOCK), np.full(num_prompts, 1 / num_prompts)
        self.num_prompts, self.num_draws = num_prompts, num_draws
        # How often each prompt was drawn: a resample's sums are one product (Efron, Annals of Statistics 1979).
        self._counts = [rng.multinomial(num_prompts, share, _BLOCK).astype(np.uint16) for _ in blocks]
        self._signs = [rng.integers(0, 2, (_BLOCK, num_prompts), np.int8) * np.int8(2) - np.int8(1) for _ in blocks]

    def resampled(self, columns: np.ndarray) -> np.ndarray:
        """Sums over prompts drawn with replacement. columns [N, K] -> [B, K] float64"""
        return np.concatenate([counts.astype(float) @ columns for counts in self._counts])

    def flipped(self, columns: np.ndarray) -> np.ndarray:
        """Sums over all prompts, each with a sign by chance. columns [N, K] -> [B, K] float64"""
        return np.concatenate([signs.astype(float) @ columns for signs in self._signs])


def mean_of(num_prompts: int) -> Figure:
    """The mean over prompts of the only column."""
    return lambda sums: sums[..., 0] / num_prompts


def interval(drawn: np.ndarray, num_prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Low and high end of the 95 % interval of each figure. drawn: over resamples, [B, ...] -> [...], [...]

    Percentiles, a little further out than 2.5 and 97.5: a resample of few prompts varies less than a new sample would
    (Hesterberg, "What teachers should know about the bootstrap", 2015, section 3.1: the expanded percentile interval).
    """
    tail = NormalDist().cdf(-sqrt(num_prompts / (num_prompts - 1)) * t_quantile(num_prompts - 1))
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return low, high


def t_quantile(freedom: int) -> float:
    """Of Student's t, .975, to three digits from 9 degrees of freedom on (Cornish-Fisher).

    >>> round(t_quantile(9), 2), round(t_quantile(49), 3), round(t_quantile(999), 3)
    (2.26, 2.01, 1.962)
    """
    z = NormalDist().inv_cdf(0.5 + _LEVEL / 2)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def told(drawn: np.ndarray, value: np.ndarray, num_prompts: int) -> dict[str, float]:
    """A figure and its 95 % interval as JSON values. drawn: over resamples, [B]; value: of all prompts, []."""
    low, high = interval(drawn, num_prompts)
    return {"value": float(value), "low": float(low), "high": float(high)}


def compare(one: np.ndarray, other: np.ndarray, figure: Figure, draws: Draws) -> dict[str, Any]:
    """`figure` of one policy minus that of the other, as `told`, on the same prompts. one, other: [N, K].

    p: two-sided, of no difference; see `flip_p`, and `mcnemar_p` where the only column is pass or fail. resolvable: the
    smallest true difference that this many prompts find in 4 of 5 evaluations. wins, ties, losses: prompts where one's
    value is above, at and below the other's; None where no single column says.
    """
    drawn = figure(draws.resampled(one)) - figure(draws.resampled(other))
    found = told(drawn, figure(one.sum(0)) - figure(other.sum(0)), draws.num_prompts)
    signs = np.sign(one - other) if one.shape[1] == 1 else None
    sides = {"wins": 1, "ties": 0, "losses": -1}
    counts = {name: None if signs is None else int((signs == sign).sum()) for name, sign in sides.items()}
    exact = signs is not None and bool(np.isin([one, other], [0.0, 1.0]).all())
    p = mcnemar_p(counts["wins"], counts["losses"]) if exact else float(flip_p(one, other, figure, draws))
    return {**found, **counts, "p": p, "exact": exact, "resolvable": float(resolvable(drawn, draws.num_prompts))}


def resolvable(drawn: np.ndarray, num_prompts: int) -> np.ndarray:
    """The true difference that a test at 5 % finds in 4 of 5 evaluations: (t + 0.84) x its standard error, about 2.8.

    drawn: of a difference, over resamples, [B, ...] -> [...]
    """
    error = drawn.std(0) * sqrt(num_prompts / (num_prompts - 1))
    return (t_quantile(num_prompts - 1) + NormalDist().inv_cdf(_POWER)) * error


def flip_p(one: np.ndarray, other: np.ndarray, figure: Figure, draws: Draws) -> np.ndarray:
    """How often a difference at least as large comes of policies swapped on prompts by chance. [N, K] each.

    The observed one counts as a draw, so that p is never 0 (Phipson and Smyth, 2010). Of a mean this is the sign-flip
    test of the differences.
    """
    middle, apart = (one.sum(0) + other.sum(0)) / 2, draws.flipped(one - other) / 2
    drawn = np.abs(figure(middle + apart) - figure(middle - apart))
    observed = np.abs(figure(one.sum(0)) - figure(other.sum(0)))
    return (1 + (drawn >= observed * (1 - 1e-9) - 1e-12).sum(0)) / (1 + draws.num_draws)


def mcnemar_p(wins: int, losses: int) -> float:
    """Exact (binomial) test of McNemar (1947): of the prompts where the two differ, each side wins half by chance.

    >>> mcnemar_p(0, 0), mcnemar_p(1, 0), mcnemar_p(0, 6)
    (1.0, 1.0, 0.03125)
    """
    num = wins + losses
    return min(1.0, 2 * sum(comb(num, k) for k in range(min(wins, losses) + 1)) / 2**num)


def holm(values: Sequence[float]) -> list[float]:
    """p-values of one table, adjusted so that any false positive among them has the level (Holm, 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, least = [inf] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        least = max(least, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = least
    return adjusted
