"""Values without a critic: what the prompt's other samples earned from the same state on.

A state is a place that several responses reach: the start of sentence k, or the moment after k finished spans. Its
index k rises along a response. Tensors are [B, R], right-padded, and [B]; returns are those of `gae` with values 0.
"""

from typing import NamedTuple

import torch

PRIOR_SAMPLES = 2.0  # weight of the other prompts' mean, in samples of the own prompt


class _StateSums(NamedTuple):
    """Sums over samples of the returns at the first token of each state, and the number of these samples."""

    totals: torch.Tensor  # [..., K]
    counts: torch.Tensor  # [..., K]


def state_values(
    returns: torch.Tensor, mask: torch.Tensor, state_ids: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """Return the value of each token's state, [B, R] float64, from the samples other than the token's own.

        V_i(k) = (sum over the prompt's other samples of G_j(k) + 2 M_i(k)) / (their number + 2)

    G_j(k) is the return of sample j at its first token in state k; samples that ended before are left out. M_i(k) is
    the mean of G(k) over the samples of the step's other prompts, to which few samples are shrunk. A state that no
    sample of another prompt reaches is not shrunk; a state that no other sample reaches has the value 0.

    A sample's own return is no part of its values.

    Args:
        returns: Discounted sums of later rewards.
        mask: 1 on the first R_i tokens of response i.
        state_ids: State before token t, 0 or more, never falling along a response. States may be skipped.
        groups: Equal for samples of one prompt.

    >>> returns = torch.tensor([[1.0, 1.0], [3.0, 2.0], [5.0, 0.0]])
    >>> state_ids = torch.tensor([[0, 1], [0, 1], [0, 0]])
    >>> state_values(returns, torch.ones(3, 2), state_ids, torch.tensor([0, 0, 1])).tolist()[0]
    [4.333333333333333, 2.0]
    """
    sample_sums = _get_returns_at_state_starts(returns, mask, state_ids)
    _, group_index = groups.unique(return_inverse=True)
    in_group = _sum_groups(sample_sums, group_index)
    total = sample_sums.totals.sum(0) - in_group.totals
    count = sample_sums.counts.sum(0) - in_group.counts
    mean_elsewhere = total / count.clamp(min=1)

    prior = PRIOR_SAMPLES * (count > 0)
    total_others = in_group.totals - sample_sums.totals
    count_others = in_group.counts - sample_sums.counts
    weight = count_others + prior
    values = (total_others + prior * mean_elsewhere) / weight.clamp(min=1)
    values_of_tokens = values.gather(1, state_ids)
    return torch.where(mask.bool(), values_of_tokens, 0)


def _get_returns_at_state_starts(returns: torch.Tensor, mask: torch.Tensor, state_ids: torch.Tensor) -> _StateSums:
    """Return, for each sample and state, the return at the sample's first token there and the count 1, [B, K] each.

    Both are 0 in a state that the sample does not reach.
    """
    num_states = int(state_ids.max()) + 1 if state_ids.numel() else 1
    totals = torch.zeros(len(returns), num_states, dtype=torch.float64)
    counts = torch.zeros_like(totals)
    is_first = starts_state(state_ids) & mask.bool()
    rows, columns = is_first.nonzero(as_tuple=True)
    states = state_ids[rows, columns]
    totals[rows, states] = returns[rows, columns].double()
    counts[rows, states] = 1.0
    return _StateSums(totals, counts)


def _sum_groups(sample_sums: _StateSums, group_index: torch.Tensor) -> _StateSums:
    """Return the sums over the group of each sample, [B, K] each."""
    num_groups = int(group_index.max()) + 1 if len(group_index) else 0
    empty = sample_sums.totals.new_zeros(num_groups, sample_sums.totals.shape[1])
    totals = empty.index_add(0, group_index, sample_sums.totals)
    counts = empty.index_add(0, group_index, sample_sums.counts)
    return _StateSums(totals[group_index], counts[group_index])


def starts_state(state_ids: torch.Tensor) -> torch.Tensor:
    """Return whether a token is the first of its state, [B, R] bool."""
    is_first = torch.ones_like(state_ids, dtype=torch.bool)
    is_first[:, 1:] = state_ids[:, 1:] != state_ids[:, :-1]
    return is_first


def position_values(returns: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the mean return of the prompt's other samples at the same token position, [B, R] float64.

    A response that has ended continues with its last return, as in `group_advantages`. A single sample gets its own
    returns, so that its advantages are 0 with lambda 1.
    """
    values = torch.zeros_like(returns, dtype=torch.float64)
    for group in groups.unique():
        rows = (groups == group).nonzero().squeeze(1)
        extended = extend_returns(returns[rows].double(), mask[rows])
        num_others = len(rows) - 1
        if num_others == 0:
            values[rows, : extended.shape[1]] = extended
            continue
        total_others = extended.sum(0) - extended
        values[rows, : extended.shape[1]] = total_others / num_others
    return torch.where(mask.bool(), values, 0)


def extend_returns(returns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the returns up to the longest response, [B, max R_i]; a response that ended repeats its last return."""
    lengths = mask.sum(1).long()
    last_positions = (lengths[:, None] - 1).clamp(min=0)
    positions = torch.arange(int(lengths.max()))
    return returns.gather(1, positions.minimum(last_positions))


def find_zero_variance_groups(
    returns: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor, state_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Return whether the comparison of a prompt's samples says nothing, [B] bool.

    That holds where all of them have equal returns at every token position, or, with `state_ids`, at the start of
    every state. A single sample has nothing to be compared with: True.
    """
    is_constant = torch.zeros(len(returns), dtype=torch.bool)
    for group in groups.unique():
        rows = (groups == group).nonzero().squeeze(1)
        if state_ids is None:
            extended = extend_returns(returns[rows].double(), mask[rows])
            spread = extended.amax(0) - extended.amin(0)
        else:
            spread = _spread_by_state(returns[rows], mask[rows], state_ids[rows])
        tolerance = 1e-6 * returns[rows].abs().max() if returns.shape[1] else 0.0
        is_constant[rows] = bool((spread <= tolerance).all())
    return is_constant


def _spread_by_state(returns: torch.Tensor, mask: torch.Tensor, state_ids: torch.Tensor) -> torch.Tensor:
    """Return the largest less the smallest return at the start of each state, over all samples, [K].

    A sample that does not reach a state counts with its return in the last state before it, as in `extend_returns`.
    """
    first = _get_returns_at_state_starts(returns, mask, state_ids)
    states = torch.arange(first.counts.shape[1])
    last_reached = torch.where(first.counts > 0, states, 0).cummax(1).values
    extended = first.totals.gather(1, last_reached)
    return extended.amax(0) - extended.amin(0)
