"""KL divergence of the policy from the frozen reference: per-token estimators and the adaptive coefficient.

All compare policies at the sampling temperature. k1 is part of the reward; k3 and the full KL are loss terms, where
their gradient differs.
"""

import math

import torch

from t2g.algo.corrections import MAX_LOG_RATIO


def kl_k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return log p - log q of a token sampled from p; its mean is KL(p || q), a single value may be negative.

    Any shape, nats. Schulman, "Approximating KL Divergence", 2020.
    """
    return logprobs - ref_logprobs


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return q / p - 1 - log(q / p) of a token sampled from p; its mean is KL(p || q), and it is never negative.

    Any shape, nats; q / p is capped at exp(MAX_LOG_RATIO), without a gradient above it. Schulman, 2020 (`kl_k1`).
    d k3 / d log p = 1 - q / p, which follows the gradient of KL(q || p). As a loss term k3 is therefore multiplied by
    the ratio of the policy to the one that sampled (`t2g.algo.losses.kl_loss`): d (rho k3) / d log p = rho log(p / q).

    >>> half = torch.tensor(0.5).log()
    >>> round(kl_k3(half, 2 * half).item(), 4)  # p = .5, q = .25: .5 - 1 + log 2
    0.1931
    """
    log_ratio = (ref_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def full_kl(logits: torch.Tensor, ref_logits: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) = sum_v p_v (log p_v - log q_v) of p = softmax(logits), q = softmax(ref_logits).

    Both are [N, V] of any float type, divided by the temperature. Returns [N] float32, nats; row i belongs to the token
    that row i predicts. Differentiable; a token that p excludes (logit -inf) adds 0.
    """
    logprobs = logits.float().log_softmax(-1)
    ref_logprobs = ref_logits.float().log_softmax(-1)
    possible = logprobs > -torch.inf
    gap = torch.where(possible, logprobs, 0) - torch.where(possible, ref_logprobs, 0)
    return (logprobs.exp() * gap).sum(-1)


def top_k_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) over k outcomes and one for all others, which has the remaining probability.

    It is at most the KL over the whole vocabulary, and equal to it if the k outcomes are the whole vocabulary. It is
    the top-k loss of SDPO (arXiv 2601.20802). Differentiable in both.

    Args:
        logprobs: Those of p, [N, k] float32, nats, normalized over the whole vocabulary.
        ref_logprobs: Those of q for the same outcomes.

    Returns:
        [N] float32, nats.

    >>> half = torch.tensor([[0.5]]).log()
    >>> round(top_k_kl(half, half / 2).item(), 4)  # p = .5 and .5, q = .7071 and .2929
    0.0942
    """
    outcomes = _add_remaining(logprobs)
    ref_outcomes = _add_remaining(ref_logprobs)
    possible = outcomes > -torch.inf
    gap = torch.where(possible, outcomes, 0) - torch.where(possible, ref_outcomes, 0)
    return (outcomes.exp() * gap).sum(-1)


def _add_remaining(logprobs: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities with that of all other outcomes, [N, k + 1]."""
    return torch.cat([logprobs, _log_remaining(logprobs)], dim=-1)


def _log_remaining(logprobs: torch.Tensor) -> torch.Tensor:
    """Return log(1 - sum_k p_k), [N, 1], at least log 1e-7: rounding may take the sum above 1."""
    log_total = logprobs.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.log(-torch.expm1(log_total))


def sequence_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the mean over sequences of the *sum* of k1 over tokens, nats; the KL controller compares it to its target.

    All tensors are [B, R]; mask is 1 on response tokens.
    """
    per_sequence = (kl_k1(logprobs, ref_logprobs) * mask).sum(dim=1)
    return float(per_sequence.mean())


def adapt_kl_coef(kl_coef: float, *, kl: float, target: float, num_samples: int, horizon: int) -> float:
    """Return the coefficient of the next step: beta * exp(clip(KL / target - 1, -.2, .2) * n_samples / horizon).

    kl and target in nats per sequence (`sequence_kl`). Ziegler et al., arXiv 1909.08593, section 2.2, uses 1 + x
    instead of exp(x); 1 + x is negative for many samples and a short horizon.

    >>> round(adapt_kl_coef(0.05, kl=6.6, target=6.0, num_samples=1000, horizon=10_000), 6)  # 10 % above: + 1 %
    0.0505
    """
    error = min(0.2, max(-0.2, kl / target - 1))
    return kl_coef * math.exp(error * num_samples / horizon)
