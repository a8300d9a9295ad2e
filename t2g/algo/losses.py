"""The clipped losses of PPO. Every mean is over the *global* number of tokens, passed in.

So the values and metrics returned here are shares: they add up over microbatches and ranks to the global mean. A
metric whose name ends in _max is the exception: its maximum is the global one.
"""

import torch

from t2g.algo.corrections import ratio, truncated_importance

Metrics = dict[str, float]


def policy_loss(
    *,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    num_tokens: int,
    clip_eps: float,
    importance_cap: float,
) -> tuple[torch.Tensor, Metrics]:
    """L_pi = -1/N sum_t w_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t)  (arXiv 1707.06347, eq. 7).

    rho_t = exp(logprobs - old_logprobs), both the learner's; w_t = min(exp(old - rollout), C) corrects for the engine.
    All arrays [T]; mask 0 takes a token out of value and gradient, whatever its numbers are; num_tokens is N.

    Worked: A = 2, eps .2, w 1: rho 1.5 gives -2.4 and no gradient; rho .5 gives -1. A = -2: rho 1.5 gives 3; rho .5
    gives 1.6 and no gradient.
    """
    keep = mask.bool()
    logprobs, old_logprobs, rollout_logprobs, advantages = (
        torch.where(keep, x, 0) for x in (logprobs, old_logprobs, rollout_logprobs, advantages)
    )
    rho = ratio(logprobs, old_logprobs)
    weights = truncated_importance(old_logprobs, rollout_logprobs, importance_cap)
    free, clipped = rho * advantages, rho.clamp(1 - clip_eps, 1 + clip_eps) * advantages
    loss = -(weights * torch.minimum(free, clipped)).sum() / num_tokens
    with torch.no_grad():
        log_rho = rho.log()
        metrics = {
            "policy/loss": loss.item(),
            "policy/clip_share": ((rho - 1).abs() > clip_eps).sum().item() / num_tokens,
            "policy/approx_kl": ((rho - 1 - log_rho) * keep).sum().item() / num_tokens,
            "policy/ratio_max": rho.max().item(),
        }
    return loss, metrics


def value_loss(
    *,
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    num_tokens: int,
    value_clip: float,
) -> tuple[torch.Tensor, Metrics]:
    """L_V = 1/N sum_t max((V - ret)^2, (clip(V, V_old +- value_clip) - ret)^2) / 2, before vf_coef.

    All arrays [T]; mask 0 takes a token out of value and gradient; num_tokens is N.
    """
    keep = mask.bool()
    values, old_values, returns = (torch.where(keep, x, 0) for x in (values, old_values, returns))
    clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
    free_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    loss = torch.maximum(free_error, clipped_error).sum() / (2 * num_tokens)
    held = ((values - old_values).abs() > value_clip) & (clipped_error > free_error)
    metrics = {"critic/loss": loss.item(), "critic/clip_share": held.sum().item() / num_tokens}
    return loss, metrics
