"""KL divergence of the policy from the frozen reference: estimators of one token, the adaptive coefficient.

All compare policies at the temperature of the sampling. k1 is paid in the reward; k3 and the full form are terms of the
loss, where they have another gradient.
"""

import torch

from t2g.algo.corrections import MAX_LOG_RATIO


def kl_k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """log p - log q of a token drawn from the policy p: its mean is KL(p || q), one token's may be negative.

    Any shape, nats. Schulman, "Approximating KL Divergence", 2020.
    """
    return logprobs - ref_logprobs


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """q / p - 1 - log(q / p) of a token drawn from the policy p: its mean is KL(p || q), and it is never negative.

    Any shape, nats; q / p is capped at exp(MAX_LOG_RATIO), above which there is no gradient. Schulman, 2020 (`kl_k1`).
    d k3 / d log p = 1 - q / p: as a term of the loss it moves p along the gradient of KL(q || p), whose minimum is the
    same, while the gradient of KL(p || q) is that of k1 in the reward.

    >>> half = torch.tensor(0.5).log()
    >>> round(kl_k3(half, 2 * half).item(), 4)  # p = .5, q = .25: .5 - 1 + log 2
    0.1931
    """
    log_ratio = (ref_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def full_kl(logits: torch.Tensor, ref_logits: torch.Tensor) -> torch.Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) of p = softmax(logits), q = softmax(ref_logits).

    Both [N, V] of any float type, already divided by the temperature. Returns [N] float32, nats, row i about the token
    that row i predicts. Differentiable; a token that p rules out (logit -inf) adds nothing.
    """
    logprobs, ref_logprobs = logits.float().log_softmax(-1), ref_logits.float().log_softmax(-1)
    possible = logprobs > -torch.inf
    gap = torch.where(possible, logprobs, 0) - torch.where(possible, ref_logprobs, 0)
    return (logprobs.exp() * gap).sum(-1)


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
