"""Importance weights that correct for the gap between the engine that samples and the learner that trains."""

import math
from functools import partial

import numpy as np
import torch

from t2g.config.learning import RolloutCorrection
from t2g.metrics import IMPORTANCE_MEAN, IMPORTANCE_OUTSIDE, IMPORTANCE_P95, IMPORTANCE_TRUNCATED

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: a larger ratio would swamp all other tokens in a float32 sum


def ratio(logprobs: torch.Tensor, base_logprobs: torch.Tensor) -> torch.Tensor:
    """Return exp(logprobs - base_logprobs) with the log-ratio clamped to +-MAX_LOG_RATIO. Any shape."""
    return (logprobs - base_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@torch.no_grad()
def importance_weights(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    sequence_ids: torch.Tensor,
    weights: torch.Tensor,
    mode: RolloutCorrection,
    cap: float,
) -> torch.Tensor:
    """Return bounded importance weights of learner to engine, with r_t = exp(old_t - rollout_t).

        token     min(r_t, cap)                       sequence  min(product of r_t over the response, cap)
        masked    r_t in [1 / cap, cap], else 0       none      1

    Arrays are [N], of response tokens; sequence_ids count from 0. A token with weight 0 is ignored, even if its numbers
    are not finite, and gets 0. There is no gradient. Truncation bounds the variance at the price of a bias (Ionides,
    "Truncated importance sampling", 2008).

    Example: r = 4, .5 in one response, cap 2: token 2, .5; sequence 2, 2; masked 0, .5.
    """
    keep = weights > 0
    log_ratio = torch.where(keep, old_logprobs - rollout_logprobs, 0)
    if mode == "none":
        log_ratio = torch.zeros_like(log_ratio)
    elif mode == "sequence":
        by_response = torch.zeros_like(log_ratio).index_add(0, sequence_ids, log_ratio)
        log_ratio = by_response[sequence_ids]
    r = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if mode == "masked":
        is_bounded = (r >= 1 / cap) & (r <= cap)
        keep = keep & is_bounded
    return torch.where(keep, r.clamp(max=cap), 0)


def importance_metrics(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    sequence_ids: torch.Tensor,
    mode: RolloutCorrection,
    cap: float,
) -> dict[str, float]:
    """Return mean and 95th percentile of r, its share outside [.9, 1.1], and the share of weights the bound changed.

    All arrays are [N >= 1] and hold every token of a step: percentiles of shards cannot be combined.
    """
    r = ratio(old_logprobs, rollout_logprobs).double()
    all_weights = torch.ones_like(old_logprobs)
    weights_for = partial(importance_weights, old_logprobs, rollout_logprobs, sequence_ids, all_weights, mode)
    is_outside = (r < 0.9) | (r > 1.1)
    is_truncated = weights_for(cap) != weights_for(math.inf)
    return {
        IMPORTANCE_MEAN: float(r.mean()),
        IMPORTANCE_P95: float(np.quantile(r.numpy(), 0.95)),  # torch.quantile refuses more than 2**24 elements
        IMPORTANCE_OUTSIDE: float(is_outside.double().mean()),
        IMPORTANCE_TRUNCATED: float(is_truncated.double().mean()),
    }
