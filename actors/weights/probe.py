"""Whether an engine computes what the learner computes: the logprobs that both give of the same tokens.

Two programs that round in other places never agree to the bit, and how far apart they are depends on model, dtype and
kernels. So it is measured once, on the checkpoint that both have loaded from the same files, before anything is sent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PROBE_TOKENS = 64
PROBE_SEED = 20250522
SLACK = 3.0  # training makes logits larger, and with them what rounding does
MEDIAN_SHARE = 0.1  # of the floor: rounding has long tails, wrong weights move every token


@dataclass(frozen=True, kw_only=True)
class Gap:
    """|engine - learner| over the probe's logprobs, nats. All are inf where one value is NaN or infinite."""

    largest: float
    p95: float
    median: float


def gap_between(engine: np.ndarray, learner: np.ndarray) -> Gap:
    """Of [N - 1] logprobs each.

    >>> gap_between(np.array([-1.0, -2.0, -3.0]), np.array([-1.0, -2.5, -3.25])).largest
    0.5
    """
    gaps = np.abs(engine.astype(np.float64) - learner)
    if not np.isfinite(gaps).all():
        return Gap(largest=np.inf, p95=np.inf, median=np.inf)
    return Gap(largest=float(gaps.max()), p95=float(np.percentile(gaps, 95)), median=float(np.median(gaps)))


def why_refused(gap: Gap, *, floor: float, baseline_gap: Gap | None) -> str:
    """Return what is wrong with a gap, "" if nothing.

    The largest difference may be `floor`, or SLACK x that of the baseline; the median MEDIAN_SHARE x `floor`, or SLACK
    x that of the baseline.

    Args:
        baseline_gap: The gap at the checkpoint; None if it was never measured.
    """
    usual = baseline_gap or Gap(largest=0.0, p95=0.0, median=math.inf)
    for what, found, base, least in (
        ("at the most", gap.largest, usual.largest, floor),
        ("in the median", gap.median, usual.median, floor * MEDIAN_SHARE),
    ):
        if found > (limit := max(least, SLACK * base)):
            allowed = f"allowed is {limit:.3g}, by learner.probe_tolerance={floor:g} and {base:.3g} on the checkpoint"
            return f"{found:.3g} nats apart {what}; {allowed}"
    return ""


def is_stuck(scores: Sequence[np.ndarray], logprobs: Sequence[np.ndarray], baseline_gap: Gap) -> bool:
    """Whether an engine answers to the bit what it answered before, though the learner moved by more than the two were
    ever apart: it computes with the old weights. Each is (before, now).
    """
    return bool(np.array_equal(*scores) and np.max(np.abs(np.subtract(*logprobs))) > baseline_gap.largest)


def probe_ids(prompts: Sequence[np.ndarray], vocab_size: int, num_tokens: int) -> np.ndarray:
    """[N] int32: the first tokens of the prompts, one after the other; where they are too few, random ones follow."""
    fill = np.random.default_rng(PROBE_SEED).integers(0, vocab_size, num_tokens, dtype=np.int32)
    return np.concatenate([*prompts[:num_tokens], fill])[:num_tokens].astype(np.int32)
