"""Compare engine and learner by their logprobs of the same tokens.

Their kernels round differently, so the logprobs never match exactly. The usual gap depends on model, dtype and kernels.
It is measured once, on the checkpoint that both loaded from the same files, before any weights are sent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PROBE_TOKENS = 64
PROBE_SEED = 20250522
SLACK = 3.0  # training makes logits larger, and with them the rounding errors
MEDIAN_SHARE = 0.1  # share of the tolerance: rounding has long tails, wrong weights change every token


@dataclass(frozen=True, kw_only=True)
class Gap:
    """|engine - learner| over the probe's logprobs, in nats. All fields are inf if one value is NaN or infinite."""

    largest: float
    p95: float
    median: float


def compute_gap(engine: np.ndarray, learner: np.ndarray) -> Gap:
    """Return the gap between two arrays of logprobs, [N - 1] each.

    >>> compute_gap(np.array([-1.0, -2.0, -3.0]), np.array([-1.0, -2.5, -3.25])).largest
    0.5
    """
    gaps = np.abs(engine.astype(np.float64) - learner)
    if not np.isfinite(gaps).all():
        return Gap(largest=np.inf, p95=np.inf, median=np.inf)
    return Gap(
        largest=float(gaps.max()),
        p95=float(np.percentile(gaps, 95)),
        median=float(np.median(gaps)),
    )


def explain_refusal(gap: Gap, *, tolerance: float, baseline_gap: Gap | None) -> str:
    """Return why a gap is too large, "" if it is not.

    The largest difference may be max(`tolerance`, SLACK x that of the baseline), and the median
    max(MEDIAN_SHARE x `tolerance`, SLACK x that of the baseline).

    Args:
        baseline_gap: The gap at the checkpoint; None if it was never measured.
    """
    baseline = baseline_gap or Gap(largest=0.0, p95=0.0, median=math.inf)
    for what, value, base, minimum in (
        ("largest", gap.largest, baseline.largest, tolerance),
        ("median", gap.median, baseline.median, tolerance * MEDIAN_SHARE),
    ):
        limit = max(minimum, SLACK * base)
        if value > limit:
            measured = f", baseline gap {base:.3g}" if baseline_gap else ""
            origin = f"from learner.probe_tolerance={tolerance:g}{measured}"
            return f"the {what} difference on the probe is {value:.3g} nats, above {limit:.3g} ({origin})"
    return ""


def is_stuck(engine: Sequence[np.ndarray], learner: Sequence[np.ndarray], baseline_gap: Gap) -> bool:
    """Return whether an engine still computes with its old weights.

    Its logprobs are then bitwise equal to the previous ones, although the learner's logprobs changed by more than the
    baseline gap.

    Args:
        engine: Its (previous, current) logprobs.
        learner: Its (previous, current) logprobs.
    """
    if not np.array_equal(*engine):
        return False
    changes = np.abs(np.subtract(*learner))
    return bool(np.max(changes) > baseline_gap.largest)


def make_probe_ids(prompts: Sequence[np.ndarray], vocab_size: int, num_tokens: int) -> np.ndarray:
    """Return [N] int32: the first N tokens of the concatenated prompts, filled up with random tokens."""
    rng = np.random.default_rng(PROBE_SEED)
    fill = rng.integers(0, vocab_size, num_tokens, dtype=np.int32)
    ids = np.concatenate([*prompts[:num_tokens], fill])
    return ids[:num_tokens].astype(np.int32)
