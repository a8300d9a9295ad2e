"""Losses: PPO's clipped losses and k3 penalty, the supervised loss, and DPO. [N] counts response tokens.

weights [N] are each token's share of the *global* mean (`t2g.data.batching.normalize_weights`). They sum to 1 over all
microbatches and ranks of a minibatch. So values and metrics are shares, to be summed over microbatches and ranks. The
exception are metrics whose name ends in _max: the global value is their maximum. A token with weight 0 affects neither
value nor gradient, even if its numbers are not finite.
"""

import torch

from t2g import metrics as m
from t2g.algo.corrections import ratio
from t2g.algo.kl import kl_k3

Metrics = dict[str, float]


def weighted_sum(per_token: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return sum_t weights_t x_t, both [N]; the loss term of entropy and full KL."""
    weighted = torch.where(weights > 0, per_token, 0)
    return (weights * weighted).sum()


def _zero_unweighted(weights: torch.Tensor, *arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the arrays [N] with 0 where the weight is 0, before a formula can turn an infinity into NaN."""
    return tuple(torch.where(weights > 0, array, 0) for array in arrays)


def policy_loss(
    *,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    importance_weights: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    clip_eps: float,
) -> tuple[torch.Tensor, Metrics]:
    """Return L_pi = -sum_t weights_t w_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t).

    rho_t = exp(logprobs - old_logprobs), both of the learner; w_t are the importance weights of learner to engine
    (`t2g.algo.corrections`). All arrays [N]. Schulman et al., arXiv 1707.06347, eq. 7.

    Example: A = 2, eps .2, both weights 1: rho 1.5 gives -2.4 and no gradient; rho .5 gives -1. A = -2: rho 1.5 gives
    3; rho .5 gives 1.6 and no gradient.
    """
    logprobs, old_logprobs, importance_weights, advantages = _zero_unweighted(
        weights, logprobs, old_logprobs, importance_weights, advantages
    )
    rho = ratio(logprobs, old_logprobs)
    free = rho * advantages
    clipped = rho.clamp(1 - clip_eps, 1 + clip_eps) * advantages
    loss = -(weights * importance_weights * torch.minimum(free, clipped)).sum()
    with torch.no_grad():
        is_outside = (rho - 1).abs() > clip_eps
        k3 = rho - 1 - rho.log()
        ratios_or_one = torch.nn.functional.pad(rho, (0, 1), value=1.0)  # 1 without a token
        metrics = {
            m.POLICY_LOSS: loss.item(),
            m.CLIP_SHARE: (weights * is_outside).sum().item(),
            m.APPROX_KL: (weights * k3).sum().item(),
            m.RATIO_MAX: ratios_or_one.max().item(),
        }
    return loss, metrics


def kl_loss(
    *, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, Metrics]:
    """Return L_KL = sum_t weights_t k3_t, before the coefficient. All arrays [N]; `kl_k3` describes the gradient."""
    logprobs, ref_logprobs = _zero_unweighted(weights, logprobs, ref_logprobs)
    loss = (weights * kl_k3(logprobs, ref_logprobs)).sum()
    return loss, {m.KL_LOSS: loss.item()}


def value_loss(
    *, values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, weights: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, Metrics]:
    """Return L_V = sum_t weights_t max((V - ret)^2, (clip(V, V_old +- value_clip) - ret)^2) / 2, before vf_coef.

    All arrays [N]. An infinite value_clip leaves the first square only.
    """
    values, old_values, returns = _zero_unweighted(weights, values, old_values, returns)
    clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
    free_error = (values - returns).square()
    clipped_error = (clipped - returns).square()
    loss = (weights * torch.maximum(free_error, clipped_error)).sum() / 2
    is_outside = (values - old_values).abs() > value_clip
    is_clipped = is_outside & (clipped_error > free_error)
    return loss, {
        m.CRITIC_LOSS: loss.item(),
        m.VALUE_CLIP_SHARE: (weights * is_clipped).sum().item(),
    }


def supervised_loss(*, logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    """Return L = -sum_t weights_t log p_t, the weighted cross-entropy of the response tokens. Both [N]."""
    loss = -weighted_sum(logprobs, weights)
    return loss, {m.POLICY_LOSS: loss.item()}


def dpo_loss(
    *,
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    weights: torch.Tensor,
    sequence_ids: torch.Tensor,
    num_pairs: int,
    beta: float,
) -> tuple[torch.Tensor, Metrics]:
    """Return L = -log sigmoid(beta * (g_chosen - g_rejected)), the mean over pairs.

    g, the gain of a response, is the sum of logprobs - ref_logprobs over its tokens. Arrays are [N]; sequence 2 i is
    the chosen response of pair i, sequence 2 i + 1 the rejected one. A pair's share of the mean is the sum of its
    weights. Rafailov et al., arXiv 2305.18290, eq. 7.

    accuracy: share of pairs whose chosen response has the larger gain; margin: mean of beta * (g_chosen - g_rejected).
    """

    def per_response(per_token: torch.Tensor) -> torch.Tensor:
        """[num_pairs, 2]"""
        sums = per_token.new_zeros(2 * num_pairs).index_add(0, sequence_ids, per_token)
        return sums.view(num_pairs, 2)

    gains = per_response(logprobs - ref_logprobs)
    margins = beta * (gains[:, 0] - gains[:, 1])
    shares = per_response(weights).sum(1)
    loss = -(shares * torch.nn.functional.logsigmoid(margins)).sum()
    return loss, {
        m.POLICY_LOSS: loss.item(),
        m.ACCURACY: (shares * (margins > 0)).sum().item(),
        m.MARGIN: (shares * margins).sum().item(),
    }
