"""Weights of a response's tokens from a teacher that reads its critique: the size of an update, never its direction."""

from math import log

import numpy as np


def clip_of_gap(bound: float) -> float:
    """Return the log-ratio, in nats, beyond which `weigh_by_teacher` makes no more difference.

    >>> round(clip_of_gap(4.0), 3)
    0.693
    """
    return log(bound) / 2


def weigh_by_teacher(advantages: np.ndarray, gap: np.ndarray, is_trained: np.ndarray, *, bound: float) -> np.ndarray:
    """Return the factors of a response's token advantages, [R] float32, by self-distilled RLVR (arXiv 2604.03128).

        delta_t = log p_teacher(y_t | critique) - log p_old(y_t)                   the gap
        u_t     = exp(clip(sign(A_t) delta_t, -c, c)),   c = log(bound) / 2
        w_t     = u_t / mean of u over the trained tokens of the response

    A praised token counts more if the critique makes it likelier, and a criticised one if the critique makes it less
    likely. Every w_t is positive, so that the rewards alone decide the direction. u and its mean lie between e^-c and
    e^c: their quotient lies between 1 / bound and bound, and its mean is 1. Both need the clip at half of log(bound).
    The paper has clip(exp(sign(A) delta), 1 - eps, 1 + eps) without the mean, and one sign for a response; there a
    teacher that agrees with a response also enlarges its update.

    Args:
        advantages: A, as the loss would read them: after whitening and local credit, [R].
        gap: delta, [R].
        is_trained: Whether the loss counts the token, [R] bool; the other tokens have the factor 1.
        bound: Above 1.

    >>> ones = np.ones(3)
    >>> weigh_by_teacher(np.array([1.0, 1.0, -1.0]), np.array([0.0, 9.0, 9.0]), ones > 0, bound=4.0).round(3)
    array([0.857, 1.714, 0.429], dtype=float32)
    """
    factors = np.ones(len(advantages), np.float32)
    if not is_trained.any():
        return factors
    clip = clip_of_gap(bound)
    bounded = np.clip(gap[is_trained].astype(np.float64), -clip, clip)
    unscaled = np.exp(np.sign(advantages[is_trained]) * bounded)
    factors[is_trained] = unscaled / unscaled.mean()
    return factors
