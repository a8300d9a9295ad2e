"""Criteria on one scale: each is divided by its own deviation among the samples of the prompt, before weights apply.

So criteria of other scales have equal influence, as in GDPO (arXiv 2601.05242, section 3). A sample may lack a
criterion. A criterion that is the same for all samples of a prompt gets 0 there. Tensors are [B, R], right-padded, and
[B].
"""

from typing import NamedTuple

import torch

from t2g.algo.advantages import gae
from t2g.algo.group_values import extend_returns

TOLERANCE = 1e-6  # a smaller deviation, as a share of the largest absolute value, is rounding


class NormalizedCriterion(NamedTuple):
    """The rewards of a criterion on the scale of each prompt."""

    rewards: torch.Tensor  # [B, R] float64
    scales: torch.Tensor  # [B] float64, factor of the prompt's rewards


def normalize_criterion(
    rewards: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    gamma: float | torch.Tensor,
    is_judged: torch.Tensor,
) -> NormalizedCriterion:
    """Return the rewards of one criterion, divided by the deviation of their returns within each prompt.

        r'_i,t = r_i,t / s,    s^2 = mean over i and t of (G_i,t - mean over j of G_j,t)^2

    G are the returns of this criterion alone, of the prompt's judged samples at each token position, as in
    `group_advantages`. Paid at the last token, s is the standard deviation of the samples' rewards, as in GDPO. The
    deviation of sums does not suit spans: where sums are nearly equal, differences of positions would have no bound.
    The comparison that follows subtracts the means.

    A sample without the criterion gets rewards whose returns are the prompt's mean, at each of its tokens: the
    criterion says nothing about it. After its end its last return still counts in the mean of the
    longer samples, as that of any response that has ended.

    Args:
        rewards: The criterion's rewards before its weight, [B, R].
        mask, groups, gamma: As in `group_advantages`.
        is_judged: Whether the sample has the criterion, [B] bool.

    >>> rewards = torch.tensor([[0.0, 30.0], [0.0, 10.0]])
    >>> judged = torch.tensor([True, True])
    >>> normalize_criterion(rewards, torch.ones(2, 2), torch.zeros(2), 1.0, judged).rewards.tolist()
    [[0.0, 3.0], [0.0, 1.0]]
    """
    in_float64 = rewards.double()
    discounts = torch.as_tensor(gamma, dtype=torch.float64).expand_as(in_float64)
    returns, _ = gae(in_float64, torch.zeros_like(in_float64), mask, discounts, 1.0)
    normalized = torch.zeros_like(in_float64)
    scales = torch.zeros(len(rewards), dtype=torch.float64)
    for group in groups.unique():
        rows = groups == group
        judged = (rows & is_judged).nonzero().squeeze(1)
        extended = extend_returns(returns[judged], mask[judged]) if len(judged) else returns[:0]
        mean = extended.mean(0)
        deviation = _find_deviation(extended, mean)
        if deviation == 0:
            continue
        scales[rows] = 1 / deviation
        normalized[judged] = in_float64[judged] / deviation
        for row in (rows & ~is_judged).nonzero().squeeze(1).tolist():
            length = int(mask[row].sum())
            normalized[row, :length] = _rewards_of_returns(mean / deviation, discounts[row, :length])
    return NormalizedCriterion(normalized, scales)


def _find_deviation(values: torch.Tensor, mean: torch.Tensor) -> float:
    """Return the root mean square of values less their mean; 0 if it is rounding."""
    if values.numel() == 0:
        return 0.0
    deviation = (values - mean).square().mean().sqrt()
    is_rounding = deviation <= TOLERANCE * values.abs().max()
    return 0.0 if is_rounding else float(deviation)


def _rewards_of_returns(returns: torch.Tensor, discounts: torch.Tensor) -> torch.Tensor:
    """Return rewards with these returns, [R] for R discounts; the last return stands for those after the last one."""
    positions = torch.arange(len(discounts)).clamp(max=len(returns) - 1)
    sample_returns = returns[positions]
    following = sample_returns.roll(-1)
    following[-1:] = 0
    return sample_returns - discounts * following


def normalize_outcome(numbers: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return numbers of whole responses less their mean in the prompt, by their standard deviation, [B] float64.

    NaN is a response to which the number does not apply; it counts for neither and gets 0.

    >>> normalize_outcome(torch.tensor([100.0, 300.0, torch.nan, 5.0]), torch.tensor([0, 0, 0, 1])).tolist()
    [-1.0, 1.0, 0.0, 0.0]
    """
    numbers = numbers.double()
    normalized = torch.zeros_like(numbers)
    applies = ~numbers.isnan()
    for group in groups.unique():
        rows = (groups == group) & applies
        values = numbers[rows]
        mean = values.mean()
        deviation = _find_deviation(values, mean)
        if deviation > 0:
            normalized[rows] = (values - mean) / deviation
    return normalized
