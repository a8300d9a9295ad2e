"""Weights of a response's tokens from a teacher that reads its critique. They change no sign of an advantage."""

from math import log

import numpy as np


def clip_of_gap(bound: float) -> float:
    """Return the size of a log-ratio, in nats, beyond which `weigh_by_teacher` makes no more difference.

    >>> round(clip_of_gap(2.0), 3)
    0.693
    """
    return log(bound)


def weigh_by_teacher(gap: np.ndarray, is_trained: np.ndarray, *, bound: float) -> np.ndarray:
    """Return the factors of a response's token advantages, [R] float32, after RLSD (arXiv 2604.03128).

        delta_t = log p_teacher(y_t | critique) - log p_old(y_t)                   the gap
        u_t     = exp(min(|delta_t|, c)),   c = log(bound)
        w_t     = u_t / mean of u over the response's trained tokens

    A token counts more if the critique changes its probability, in either direction. Weights are positive and have the
    mean 1. Each u is within [1, bound], and so is their mean: each w is within [1 / bound, bound].

    The paper has exp(sign(A_t) delta_t), clipped. Such a weight depends on the advantage: where that is noise, a or -a
    with equal odds, the mean of w A is a sinh(delta), and noise moves the policy towards the teacher. A teacher that
    cannot follow critiques then destroys it (t2g/study/local-credit.md). Here that mean is 0.

    Args:
        gap: delta, [R].
        is_trained: Whether the loss counts the token, [R] bool; the other tokens have the factor 1.
        bound: Above 1.

    >>> weigh_by_teacher(np.array([0.0, -9.0, 9.0]), np.array([True, True, False]), bound=2.0).round(3)
    array([0.667, 1.333, 1.   ], dtype=float32)
    """
    factors = np.ones(len(gap), np.float32)
    if is_trained.any():
        sizes = np.abs(gap[is_trained].astype(np.float64))
        unscaled = np.exp(np.minimum(sizes, clip_of_gap(bound)))
        factors[is_trained] = unscaled / unscaled.mean()
    return factors
