"""Weights of a response's tokens from a teacher that reads its critique. They change no sign of an advantage.

A teacher that cannot follow critiques destroys the policy all the same: t2g/study/local-credit-in-code.md.
"""

from math import log

import numpy as np


def clip_of_gap(bound: float) -> float:
    """Return the log-ratio, in nats, beyond which `weigh_by_teacher` makes no more difference.

    >>> round(clip_of_gap(4.0), 3)
    0.693
    """
    return log(bound) / 2


def weigh_by_teacher(advantages: np.ndarray, gap: np.ndarray, is_trained: np.ndarray, *, bound: float) -> np.ndarray:
    """Return the factors of a response's token advantages, [R] float32, after self-distilled RLVR (arXiv 2604.03128).

        delta_t = log p_teacher(y_t | critique) - log p_old(y_t)                   the gap
        u_t     = exp(clip(sign(A_t) delta_t, -c, c)),   c = log(bound) / 2
        w_t     = u_t sum |A_s| / sum u_s |A_s|          over the trained tokens s with the sign of A_t

    A praised token counts more if the critique makes it likelier, and a criticised one if the critique makes it less
    likely. Every w_t is positive. The praise of a response keeps its sum, and so does its criticism: the teacher moves
    each among its tokens. One mean over both would let a teacher that finds the whole response unlikely shrink all
    praise and enlarge all criticism: advantages whose mean is 0 would then unlearn what the policy can.
    Each u is within [e^-c, e^c], and so is their weighted mean: each w is within [1 / bound, bound].
    The paper has clip(exp(sign(A) delta), 1 - eps, 1 + eps) without a sum, and one sign for a response.

    Args:
        advantages: A, as the loss would read them: after whitening and local credit, [R].
        gap: delta, [R].
        is_trained: Whether the loss counts the token, [R] bool; the other tokens have the factor 1.
        bound: Above 1.

    >>> ones = np.ones(3)
    >>> weigh_by_teacher(np.array([1.0, 1.0, -1.0]), np.array([0.0, 9.0, 9.0]), ones > 0, bound=4.0).round(3)
    array([0.667, 1.333, 1.   ], dtype=float32)
    """
    factors = np.ones(len(advantages), np.float32)
    clip = clip_of_gap(bound)
    for sign in (1, -1):
        has_sign = is_trained & (np.sign(advantages) == sign)
        if not has_sign.any():
            continue
        sizes = np.abs(advantages[has_sign].astype(np.float64))
        bounded = np.clip(gap[has_sign].astype(np.float64), -clip, clip)
        unscaled = np.exp(sign * bounded)
        share = sizes / sizes.sum()
        factors[has_sign] = unscaled / (share @ unscaled)
    return factors
