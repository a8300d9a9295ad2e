"""Losses: PPO's clipped losses and k3 penalty, the supervised loss, and DPO. [N] counts response tokens.

weights [N] are each token's share of the *global* mean (`t2g.data.batching.normalize_weights`). They sum to 1 over all
microbatches and ranks of a minibatch. So values and metrics are shares, to be summed over microbatches and ranks. The
exceptions are metrics whose name ends in _max: the global value is their maximum. A token with weight 0 affects neither
value nor gradient, even if its numbers are not finite; `dpo_loss` alone counts every token.
"""

import torch

from t2g import metrics as m
from t2g.algo.corrections import ratio
from t2g.algo.kl import kl_k3
from t2g.config.learning import Surrogate

Metrics = dict[str, float]

KL_RATIO_CAP = 5.0  # a token that became 5 times as likely, or more, has the weight of 5 tokens


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
    sequence_ids: torch.Tensor,
    surrogate: Surrogate = "ppo",
    clip_eps: float,
    clip_eps_high: float,
) -> tuple[torch.Tensor, Metrics]:
    """Return the policy's surrogate loss -sum_t weights_t w_t s_t, by the surrogate s of each token.

        ppo     min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps_high) A_t)     Schulman et al., arXiv 1707.06347, eq. 7
        gspo    the same with the response's ratio in place of rho_t       Zheng et al., arXiv 2507.18071, eq. 13
        cispo   sg(min(rho_t, 1 + eps_high)) A_t log p_t                   MiniMax-M1, arXiv 2506.13585, eq. 4

    rho_t = exp(logprobs - old_logprobs), both of the learner; w_t are the importance weights of learner to engine
    (`t2g.algo.corrections`); sg stops the gradient. The response's ratio is `sequence_ratio`. An eps_high above eps
    lets unlikely tokens rise further (DAPO, arXiv 2503.14476, section 3.1). All arrays [N].

    Example of ppo: A = 2, eps .2, both weights 1: rho 1.5 gives -2.4 and no gradient; rho .5 gives -1. A = -2: rho 1.5
    gives 3; rho .5 gives 1.6 and no gradient.
    """
    logprobs, old_logprobs, importance_weights, advantages = _zero_unweighted(
        weights, logprobs, old_logprobs, importance_weights, advantages
    )
    token_ratio = ratio(logprobs, old_logprobs)
    rho = token_ratio
    if surrogate == "gspo":
        rho = sequence_ratio(logprobs, old_logprobs, weights, sequence_ids)
    if surrogate == "cispo":
        is_clipped = rho > 1 + clip_eps_high
        bounded = rho.detach().clamp(max=1 + clip_eps_high)
        per_token = bounded * advantages * logprobs
    else:
        clipped = rho.clamp(1 - clip_eps, 1 + clip_eps_high)
        is_clipped = clipped * advantages < rho * advantages
        per_token = torch.minimum(rho * advantages, clipped * advantages)
    loss = -(weights * importance_weights * per_token).sum()

    with torch.no_grad():
        k3 = token_ratio - 1 - token_ratio.log()
        ratios_or_one = torch.nn.functional.pad(rho, (0, 1), value=1.0)  # 1 without a token
        metrics = {
            m.POLICY_LOSS: loss.item(),
            m.CLIP_SHARE: (weights * is_clipped).sum().item(),
            m.APPROX_KL: (weights * k3).sum().item(),
            m.RATIO_MAX: ratios_or_one.max().item(),
        }
    return loss, metrics


def sequence_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, weights: torch.Tensor, sequence_ids: torch.Tensor
) -> torch.Tensor:
    """Return for each token the ratio of its response, the geometric mean of those of its tokens with a weight, [N].

    Each token has the gradient of its own logprob, so that it can have an advantage of its own (GSPO-token, arXiv
    2507.18071, eq. 13). With one advantage for the response the sum of the gradients is that of GSPO (eq. 5).
    """
    keep = (weights > 0).to(logprobs.dtype)
    log_ratios = (logprobs - old_logprobs).detach() * keep
    totals = torch.zeros_like(log_ratios).index_add(0, sequence_ids, log_ratios)
    counts = torch.zeros_like(log_ratios).index_add(0, sequence_ids, keep)
    means = totals / counts.clamp(min=1)
    own_gradient = logprobs - logprobs.detach()  # 0, with a gradient of 1
    return ratio(means[sequence_ids] + own_gradient, torch.zeros_like(logprobs))


def kl_loss(
    *,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    importance_weights: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, Metrics]:
    """Return L_KL = sum_t weights_t w_t min(rho_t, KL_RATIO_CAP) k3_t, before the coefficient. All arrays [N].

    k3 estimates KL(policy || reference) from tokens of the *current* policy. The tokens come from the engine, so each
    counts by rho_t w_t, the ratio of current to old and of old to engine (as in `policy_loss`). The gradient passes
    through rho too: where neither bound acts it is that of the exact KL in each state (DeepSeek-V3.2, arXiv 2512.02556,
    section 3.1). Without rho, a token that the update has made unlikely would add reference / policy without bound.
    With rho it adds less than reference / old, or less than rho log(policy / reference).

    Example: old = reference = .5, policy .25, both weights 1: rho .5, k3 = 2 - 1 - log 2, loss .1534.
    """
    logprobs, old_logprobs, ref_logprobs, importance_weights = _zero_unweighted(
        weights, logprobs, old_logprobs, ref_logprobs, importance_weights
    )
    rho = ratio(logprobs, old_logprobs).clamp(max=KL_RATIO_CAP)
    k3 = kl_k3(logprobs, ref_logprobs)
    loss = (weights * importance_weights * rho * k3).sum()
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
