"""The gap between the engine that sampled and the learner that trains, as importance weights (method.md, stage 3)."""

import torch

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: beyond it float32 sums lose every other token


def ratio(logprobs: torch.Tensor, base_logprobs: torch.Tensor) -> torch.Tensor:
    """exp(logprobs - base_logprobs), the log-ratio clamped to +-MAX_LOG_RATIO before exp. Any shape."""
    return (logprobs - base_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated_importance(old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """w = min(exp(old - rollout), cap): how much more likely the learner finds a token than the engine that drew it.

    No gradient. Truncation bounds the variance at the price of a bias (Ionides, "Truncated importance sampling", 2008).
    """
    return ratio(old_logprobs, rollout_logprobs).clamp(max=cap).detach()


def importance_metrics(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor, cap: float
) -> dict[str, float]:
    """Mean and 95th percentile of the untruncated weights, share outside [.9, 1.1], share truncated, over mask 1.

    All [N], over the global batch: a percentile cannot be put together from those of shards.
    """
    weights = ratio(old_logprobs, rollout_logprobs)[mask.bool()].double()
    return {
        "importance/mean": float(weights.mean()),
        "importance/p95": float(weights.quantile(0.95)),
        "importance/outside_share": float(((weights < 0.9) | (weights > 1.1)).double().mean()),
        "importance/truncated_share": float((weights > cap).double().mean()),
    }
