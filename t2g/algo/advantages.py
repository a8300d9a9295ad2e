"""Token rewards to advantages: combined rewards, GAE, group baselines, whitening (arXiv 2505.22338, section 3.3)."""

from math import ceil

import torch

from t2g.algo.group_values import extend_returns, find_zero_variance_groups, position_values, starts_state, state_values
from t2g.algo.kl import kl_k1
from t2g.config.learning import Whitening

TOKENS_PER_UNLIKELY = 5  # one of so many tokens is among the least likely


def combine_rewards(
    token_rewards: torch.Tensor,
    final_rewards: torch.Tensor,
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    span_coef: float,
    kl_coef: float,
) -> torch.Tensor:
    """Return r_t = span_coef * place(d)_t + [t = T] * R_end - kl_coef * k1_t, 0 where mask is 0.

    final_rewards is [B] and is paid at each row's last token with mask 1; the other tensors are [B, R]. k1 is the KL
    estimate of `t2g.algo.kl.kl_k1` to the reference.
    """
    kl = kl_k1(logprobs, ref_logprobs)
    rewards = span_coef * token_rewards - kl_coef * kl
    keep = mask.bool()
    num_left = keep.long().flip(1).cumsum(1).flip(1)  # unmasked tokens from t to the end
    is_last = num_left == 1
    rewards = rewards + final_rewards[:, None] * is_last
    return torch.where(keep, rewards, 0)


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float | torch.Tensor,
    lam: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return GAE advantages and returns, two [B, R] tensors (Schulman et al., arXiv 1506.02438, eq. 16).

        A_t = sum_l (gamma * lam)^l * (r_{t+l} + gamma * V_{t+l+1} - V_{t+l}),    returns_t = A_t + V_t

    rewards, values, mask: [B, R]. values[t] is the value of the state *before* token t. V after the last token is 0,
    also for truncated responses. Tokens with mask 0 get 0, and the sum skips them. The returns belong to unwhitened
    advantages. gamma and lam: a number, or [B, R], of the step from token t to the next one.

    >>> one, zero = torch.ones(1, 3), torch.zeros(1, 3)
    >>> advantages, _ = gae(torch.tensor([[0.0, 1.0, 0.0]]), zero, one, 1.0, 0.5)
    >>> advantages.tolist()  # a reward affects earlier tokens, never later ones
    [[0.5, 1.0, 0.0]]
    """
    if not rewards.shape == values.shape == mask.shape or rewards.ndim != 2:
        shapes = [list(tensor.shape) for tensor in (rewards, values, mask)]
        raise ValueError(f"gae needs three [B, R] tensors of one shape, got {shapes}")
    keep = mask.bool()
    discounts = torch.as_tensor(gamma, dtype=rewards.dtype).expand_as(rewards)
    lambdas = torch.as_tensor(lam, dtype=rewards.dtype).expand_as(rewards)
    advantages = torch.zeros_like(values)
    advantage = values.new_zeros(len(values))
    next_value = values.new_zeros(len(values))
    for t in reversed(range(rewards.shape[1])):
        is_kept = keep[:, t]
        discount = discounts[:, t]
        value = values[:, t]
        td_error = rewards[:, t] + discount * next_value - value
        advantage = torch.where(is_kept, td_error + discount * lambdas[:, t] * advantage, advantage)
        next_value = torch.where(is_kept, value, next_value)
        advantages[:, t] = torch.where(is_kept, advantage, 0)
    returns = torch.where(keep, advantages + values, 0)
    return advantages, returns


def group_advantages(
    rewards: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor, gamma: float | torch.Tensor, *, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages without a critic, and returns: token returns less those of the prompt's other samples.

        G_t = sum_{l >= t} gamma^(l-t) r_l,   A_i,t = G_i,t - mean over the others j of G_j,min(t, R_j - 1)

    A response that has ended continues with its last return. With a scalar reward (gamma 1) A_i is R_i less the mean
    of the others: RLOO (Ahmadian et al., arXiv 2402.14740).

    normalize: A_i,t is G_i,t less the mean of the *whole* group, divided by s + 1e-6. s is the root mean square of
    these differences over the group's samples and positions. With a scalar reward s is the standard deviation of the
    group's rewards: GRPO (Shao et al., arXiv 2402.03300). The deviation of the total returns does not work for spans:
    it is 0 if totals are equal and only the positions of the spans differ.

    rewards, mask: [B, R], mask 1 on the first R_i tokens; groups: [B] int64, equal for samples of one prompt; gamma as
    in `gae`. A single sample gets 0. Returns two [B, R] tensors.

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, -1.0]])
    >>> group_advantages(rewards, torch.ones(3, 2), torch.zeros(3), 1.0, normalize=False)[0].tolist()
    [[1.0, 1.5], [-0.5, 0.0], [-0.5, -1.5]]
    """
    # In float64: otherwise normalizing would amplify rounding errors between equal returns and their mean.
    no_values = torch.zeros_like(rewards, dtype=torch.float64)
    returns, _ = gae(rewards.double(), no_values, mask, gamma, 1.0)
    advantages = torch.zeros_like(returns)
    for group in groups.unique():
        rows = (groups == group).nonzero().squeeze(1)
        extended = extend_returns(returns[rows], mask[rows])
        difference = extended - extended.mean(0)
        if normalize:
            deviation = difference.square().mean().sqrt()
            difference = difference / (deviation + 1e-6)
        else:
            num_others = max(len(rows) - 1, 1)
            difference = difference * len(rows) / num_others  # from the mean of the others
        advantages[rows, : extended.shape[1]] = difference
    advantages = torch.where(mask.bool(), advantages, 0)
    return advantages.to(rewards.dtype), returns.to(rewards.dtype)


def whiten(advantages: torch.Tensor, mask: torch.Tensor, mode: Whitening) -> torch.Tensor:
    """Return advantages at unit scale over all tokens of the *global* batch, before it is cut into minibatches.

    full: (A - mean) / sqrt(var + 1e-8), population variance. scale_only: A / sqrt(mean(A^2) + 1e-8), which keeps zeros.
    none: unchanged. Tokens with mask 0 become 0 in every mode and are left out of mean and variance. Any shape, with
    the mask of the same shape.

    >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1.0, 1.0, 0.0]), "full").tolist()
    [-1.0, 1.0, 0.0]
    """
    keep = mask.bool()
    unmasked = advantages[keep]
    if mode != "none" and unmasked.numel():
        mean = unmasked.mean() if mode == "full" else 0.0
        variance = (unmasked - mean).square().mean()
        advantages = (advantages - mean) * (variance + 1e-8).rsqrt()
    return torch.where(keep, advantages, 0)


def compare_samples(
    rewards: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    gamma: float | torch.Tensor,
    *,
    state_ids: torch.Tensor | None,
    lam: float,
    normalize: bool,
    whitening: Whitening,
    is_trained: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scaled advantages without a critic, and returns: `gae` over values from the prompt's other samples.

    A group whose samples have equal returns, or that has one sample, gets 0: whitening and the means of other prompts
    would move it in a direction that none of its samples speaks for.

    Args:
        rewards: [B, R]; mask, groups and gamma as in `group_advantages`.
        state_ids: States of `group_values.state_values`, [B, R]; None: values by token position.
        lam: Lambda of `gae` between states. With values by position, 1 gives `group_advantages`.
        normalize: See `group_advantages`; needs values by position and lambda 1.
        whitening: Mode of `whiten`.
        is_trained: Tokens that the loss counts, [B, R]: the scale is theirs, and the others get 0.
    """
    if state_ids is None and lam == 1:
        advantages, returns = group_advantages(rewards, mask, groups, gamma, normalize=normalize)
    else:
        in_float64 = rewards.double()
        returns, _ = gae(in_float64, torch.zeros_like(in_float64), mask, gamma, 1.0)
        if state_ids is None:
            values = position_values(returns, mask, groups)
            lambdas = torch.full_like(values, lam)
        else:
            values = state_values(returns, mask, state_ids, groups)
            lambdas = boundary_lambdas(state_ids, lam)
        advantages, _ = gae(in_float64, values, mask, gamma, lambdas)
        advantages = advantages.to(rewards.dtype)
        returns = returns.to(rewards.dtype)

    is_constant = find_zero_variance_groups(returns, mask, groups, state_ids)[:, None]
    # Constant groups are zeroed before whitening, too: their state values shrink to other prompts and move the mean.
    compared = torch.where(is_constant, 0, advantages)
    whitened = whiten(compared, is_trained, whitening)
    return torch.where(is_constant, 0, whitened), returns


def boundary_lambdas(state_ids: torch.Tensor, lam: float) -> torch.Tensor:
    """Return lambda of `gae` for values that change between states only, [B, R]: lam at a state's last token, else 1.

    So credit fades with the number of sentences or spans in between, not with their lengths.
    """
    lambdas = torch.ones(state_ids.shape, dtype=torch.float64)
    ends_state = starts_state(state_ids)[:, 1:]
    lambdas[:, :-1][ends_state] = lam
    return lambdas


def punish_unlikely(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return -1 at the least likely fifth of each response's tokens, at least one, and 0 elsewhere, [B, R].

    This is a control for teachers, whose gain may come from suppressed noise and not from the critique. It is the fixed
    negative advantage of arXiv 2608.31046, without the paper's weights by entropy.

    Args:
        logprobs: Log-probabilities of the sampled tokens when they were sampled, [B, R].
        mask: 1 on the tokens that are trained; only they are counted.

    >>> logprobs = torch.tensor([[-1.0, -4.0, -0.5, -2.0, -0.1, -3.0]])
    >>> punish_unlikely(logprobs, torch.ones(1, 6)).tolist()
    [[0.0, -1.0, 0.0, 0.0, 0.0, -1.0]]
    """
    advantages = torch.zeros_like(logprobs)
    for row, keep in enumerate(mask.bool()):
        positions = keep.nonzero().squeeze(1)
        num_unlikely = ceil(len(positions) / TOKENS_PER_UNLIKELY)
        order = logprobs[row, positions].argsort(stable=True)
        advantages[row, positions[order[:num_unlikely]]] = -1
    return advantages


def add_local_credit(
    advantages: torch.Tensor,
    span_values: torch.Tensor,
    mask: torch.Tensor,
    *,
    coef: float,
    cap: float,
    keep_sign: bool,
) -> torch.Tensor:
    """Return A_t + coef * c_t * min(1 / rms(c), cap / max|c|), the spans' own values on their own tokens added.

    A_t holds the rewards after token t. c_t is the critique's label of token t itself, without the noise of later
    spans. rms is over the step's tokens, as is the scale of A after `whiten`. CAPO (arXiv 2508.02298), RTT (2604.02795)
    and CorVer (2605.29648) add such a term to the response's advantage.

    Args:
        advantages: A, whitened, [B, R].
        span_values: c, the value of the spans that cover token t, [B, R]; 0 elsewhere.
        mask: 1 on the tokens that the loss counts; the others get 0.
        coef: Weight of the local term.
        cap: Bound of the local term before `coef`. Where few tokens have spans, the rms makes each of them large. The
            bound is one factor for all: spans of unequal severity or confidence keep their ratio.
        keep_sign: Whether the sum keeps the sign of an A that is not 0; a span that would turn it leaves 0.

    >>> advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    >>> spans = torch.tensor([[0.0, -1.0, 1.0, 0.0]])
    >>> add_local_credit(advantages, spans, torch.ones(1, 4), coef=0.5, cap=1.0, keep_sign=False).tolist()
    [[1.0, 0.5, -0.5, -1.0]]
    """
    local = whiten(span_values, mask, "scale_only")
    largest = float(local.abs().max()) if local.numel() else 0.0
    bounded = local * (cap / max(largest, cap))
    combined = advantages + coef * bounded
    if keep_sign:
        has_turned = combined * advantages.sign() < 0
        combined = torch.where(has_turned, 0, combined)
    return torch.where(mask.bool(), combined, 0)
