"""KL divergence of the policy from the frozen reference: the estimator paid in the reward, the adaptive coefficient."""

import torch


def kl_k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """log p - log q of a token drawn from the policy p: its mean is KL(p || q), one token's may be negative.

    Any shape, nats. Schulman, "Approximating KL Divergence", 2020.
    """
    return logprobs - ref_logprobs


def sequence_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor) -> float:
    """Mean over sequences of the *sum* of k1 over tokens, nats: what the controller holds against its target.

    All [B, R]; mask 1 on response tokens.
    """
    return float((kl_k1(logprobs, ref_logprobs) * mask).sum(dim=1).mean())


def adapt_kl_coef(kl_coef: float, *, kl: float, target: float, num_samples: int, horizon: int) -> float:
    """The coefficient of the next step: beta * (1 + clip(KL / target - 1, -.2, .2) * n_samples / horizon).

    kl and target in nats per sequence (`sequence_kl`). Ziegler et al., arXiv 1909.08593, section 2.2.

    >>> round(adapt_kl_coef(0.05, kl=6.6, target=6.0, num_samples=1000, horizon=10_000), 6)  # 10 % above: + 1 %
    0.0505
    """
    error = min(0.2, max(-0.2, kl / target - 1))
    return kl_coef * (1 + error * num_samples / horizon)
