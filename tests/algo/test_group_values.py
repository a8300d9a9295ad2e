"""Values without a critic against double loops; local credit and groups that carry nothing, worked by hand."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.algo import gae
from t2g.algo.advantages import add_local_credit, boundary_lambdas, compare_samples, group_advantages
from t2g.algo.group_values import find_zero_variance_groups, position_values, state_values


def padded(rows: Sequence[Sequence[float]], filler: float) -> torch.Tensor:
    """Return the rows as [B, R + 1], right-padded with a number that must not matter."""
    width = 1 + max(len(row) for row in rows)
    lines = []
    for row in rows:
        missing = width - len(row)
        lines.append([*row, *[filler] * missing])
    return torch.tensor(lines, dtype=torch.float64)


def mask_of(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    return padded([[1.0] * len(row) for row in rows], 0.0)


def states_of(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the states; the padding repeats a state of the response, which must not count."""
    return padded(rows, 1.0).long()


def value_by_loops(
    returns: Sequence[Sequence[float]], states: Sequence[Sequence[int]], groups: Sequence[int], sample: int, state: int
) -> float:
    """Return the value of a state for a sample, by the formula as it stands."""
    others = []
    elsewhere = []
    for j, row in enumerate(returns):
        if j == sample or state not in states[j]:
            continue
        at_start = row[states[j].index(state)]
        if groups[j] == groups[sample]:
            others.append(at_start)
        else:
            elsewhere.append(at_start)
    if not others and not elsewhere:
        return 0.0
    if not elsewhere:
        return sum(others) / len(others)
    mean_elsewhere = sum(elsewhere) / len(elsewhere)
    return (sum(others) + 2 * mean_elsewhere) / (len(others) + 2)


def advantage_by_loops(
    rewards: Sequence[float], values: Sequence[float], lambdas: Sequence[float], gammas: Sequence[float]
) -> list[float]:
    """Return A_t = sum over k >= t of the product of gamma lambda from t to k - 1, times the TD error of k."""
    advantages = []
    num_tokens = len(rewards)
    for t in range(num_tokens):
        total = 0.0
        weight = 1.0
        for k in range(t, num_tokens):
            next_value = values[k + 1] if k + 1 < num_tokens else 0.0
            total += weight * (rewards[k] + gammas[k] * next_value - values[k])
            weight *= gammas[k] * lambdas[k]
        advantages.append(total)
    return advantages


numbers = st.sampled_from([-1.0, 0.0, 0.5, 2.0])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]], list[int]]:
    """Return rewards, states and groups of one to six responses."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    rewards = [draw(st.lists(numbers, min_size=n, max_size=n)) for n in lengths]
    states = []
    for n in lengths:
        rises = draw(st.lists(st.integers(0, 2), min_size=n - 1, max_size=n - 1))
        row = [0]
        for rise in rises:
            row.append(row[-1] + rise)
        states.append(row)
    groups = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    return rewards, states, groups


@settings(max_examples=150, deadline=None)
@given(batch=batches(), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_advantages_over_states_equal_double_loops(
    batch: tuple[list[list[float]], list[list[int]], list[int]], gamma: float, lam: float
) -> None:
    rewards, states, groups = batch
    padded_rewards = padded(rewards, 77.0)
    mask = mask_of(rewards)
    state_ids = states_of(states)
    returns, _ = gae(padded_rewards, torch.zeros_like(mask), mask, gamma, 1.0)
    values = state_values(returns, mask, state_ids, torch.tensor(groups))
    advantages, _ = gae(padded_rewards, values, mask, gamma, boundary_lambdas(state_ids, lam))

    plain_returns = [row[: len(rewards[i])] for i, row in enumerate(returns.tolist())]
    for i, row in enumerate(rewards):
        expected_values = [value_by_loops(plain_returns, states, groups, i, state) for state in states[i]]
        lambdas = []
        for state, following in zip(states[i], [*states[i][1:], -1], strict=True):
            lambdas.append(1.0 if state == following else lam)
        expected = advantage_by_loops(row, expected_values, lambdas, [gamma] * len(row))
        num_tokens = len(row)
        assert values[i, :num_tokens].tolist() == pytest.approx(expected_values, abs=1e-12)
        assert advantages[i, :num_tokens].tolist() == pytest.approx(expected, abs=1e-12)
        assert advantages[i, num_tokens:].abs().sum() == 0


@settings(max_examples=60, deadline=None)
@given(batch=batches(), gamma=st.sampled_from([1.0, 0.9]))
def test_values_by_position_with_lambda_one_are_the_group_advantages(
    batch: tuple[list[list[float]], list[list[int]], list[int]], gamma: float
) -> None:
    rewards, _, groups = batch
    padded_rewards = padded(rewards, 0.0)
    mask = mask_of(rewards)
    returns, _ = gae(padded_rewards, torch.zeros_like(mask), mask, gamma, 1.0)
    values = position_values(returns, mask, torch.tensor(groups))
    advantages, _ = gae(padded_rewards, values, mask, gamma, 1.0)
    expected, _ = group_advantages(padded_rewards, mask, torch.tensor(groups), gamma, normalize=False)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)


def test_values_over_spans_worked_by_hand() -> None:
    """Two prompts, two samples each; a state is the number of finished spans, and a span pays at its last token."""
    rewards = [[0.0, 1.0, 0.0, -1.0], [0.0, 1.0], [-1.0, 0.0], [1.0, 1.0, 0.0]]
    states = [[0, 0, 1, 1], [0, 0], [0, 1], [0, 1, 2]]
    mask = mask_of(rewards)
    returns, _ = gae(padded(rewards, 0.0), torch.zeros_like(mask), mask, 1.0, 1.0)
    values = state_values(returns, mask, states_of(states), torch.tensor([0, 0, 1, 1]))
    # k = 0: G is 0, 1 for prompt 0 and -1, 2 for prompt 1. k = 1: -1 for prompt 0 and 0, 1 for prompt 1. k = 2: 0.
    v0 = (1 + 2 * 0.5) / 3  # the other sample and twice the mean of prompt 1
    v1 = 0.5  # no other sample, the mean of prompt 1
    assert values[0, :4].tolist() == pytest.approx([v0, v0, v1, v1])
    assert values[1, :2].tolist() == pytest.approx([1 / 3, 1 / 3])  # (0 + 2 * .5) / 3
    assert values[3, :3].tolist() == pytest.approx([0.0, (0 - 2) / 3, 0.0])  # (-1 + 2 * .5) / 3

    advantages, _ = gae(padded(rewards, 0.0), values, mask, 1.0, boundary_lambdas(states_of(states), 0.5))
    second = -1 - v1  # of the second span
    first = 1 + v1 - v0 + 0.5 * second
    assert advantages[0, :4].tolist() == pytest.approx([first, first, second, second])


def test_a_value_does_not_depend_on_its_own_sample() -> None:
    states = states_of([[0, 1, 2], [0, 1, 1], [0, 0, 1]])
    mask = mask_of([[1.0] * 3] * 3)
    groups = torch.tensor([0, 0, 1])
    returns = padded([[1.0, 2.0, 3.0], [0.0, -1.0, 5.0], [4.0, 4.0, 2.0]], 0.0)
    before = state_values(returns, mask, states, groups)
    returns[0] += 100
    after = state_values(returns, mask, states, groups)
    assert after[0].tolist() == before[0].tolist()
    assert not torch.equal(after[1], before[1])


def test_no_responses_have_no_values() -> None:
    empty = torch.zeros(2, 0)
    values = state_values(empty, empty, empty.long(), torch.tensor([0, 0]))
    assert values.shape == (2, 0)
    assert boundary_lambdas(empty.long(), 0.5).shape == (2, 0)


def local(advantages: list[float], spans: list[float], **options: float | bool) -> list[float]:
    settings_ = {"coef": 1.0, "cap": 100.0, "keep_sign": False} | options
    row = torch.tensor([advantages], dtype=torch.float64)
    combined = add_local_credit(row, torch.tensor([spans], dtype=torch.float64), torch.ones_like(row), **settings_)
    return combined[0].tolist()


def test_local_credit_has_unit_scale() -> None:
    # rms of 0, 3, -3, 0 is 3 / sqrt 2: the spans' tokens get +-sqrt 2
    assert local([0.0] * 4, [0.0, 3.0, -3.0, 0.0]) == pytest.approx([0, 2**0.5, -(2**0.5), 0])
    assert local([0.0] * 4, [0.0, 3.0, -3.0, 0.0], cap=1.0, coef=0.3) == pytest.approx([0, 0.3, -0.3, 0])
    assert local([1.0, -1.0], [0.0, 0.0]) == [1.0, -1.0]


def test_the_bound_of_local_credit_keeps_the_ratios_of_spans() -> None:
    sparse = [-2.0, 0.5] + 98 * [0.0]
    assert local([0.0] * 100, sparse, cap=3.0)[:2] == pytest.approx([-3.0, 0.75])
    dense = [-2.0, 0.5, 1.0]  # rms sqrt(1.75): nothing is above the bound
    assert local([0.0] * 3, dense, cap=3.0) == pytest.approx([value / 1.75**0.5 for value in dense])
    empty = torch.zeros(2, 0)
    assert add_local_credit(empty, empty, empty, coef=0.3, cap=3.0, keep_sign=False).shape == (2, 0)


def test_local_credit_has_the_form_of_published_methods() -> None:
    """The response's advantage on every token, and a smaller term on the span's own tokens.

    Coefficients and bounds are examples: each paper scales its terms in its own way.
    """
    response = [0.8] * 4
    spans = [0.0, -1.0, -1.0, 0.0]
    rms = 0.5**0.5
    # RTT (2604.02795): A_response + .5 A_token, A_token at unit scale
    assert local(response, spans, coef=0.5) == pytest.approx([0.8, 0.8 - 0.5 / rms, 0.8 - 0.5 / rms, 0.8])
    # CorVer (2605.29648): the local term is at most .3 where the response's advantages span 3
    assert local(response, spans, coef=0.3, cap=1.0) == pytest.approx([0.8, 0.5, 0.5, 0.8])
    # CAPO (2508.02298): a wrong step costs less than the outcome is worth, here half
    assert local([1.0] * 4, spans, coef=0.5, cap=1.0) == pytest.approx([1.0, 0.5, 0.5, 1.0])
    # with the sign kept, as in FARCA's soft flip with weight 1/2 or less
    assert local(response, spans, coef=2.0, cap=1.0, keep_sign=True) == pytest.approx([0.8, 0.0, 0.0, 0.8])
    assert local([-0.8] * 4, spans, coef=2.0, cap=1.0, keep_sign=True) == pytest.approx([-0.8, -2.8, -2.8, -0.8])


def test_groups_whose_samples_earn_the_same() -> None:
    rewards = [[0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [3.0], [0.0], [0.0, 0.0]]
    mask = mask_of(rewards)
    groups = torch.tensor([0, 0, 1, 1, 2, 3, 3])
    returns, _ = gae(padded(rewards, 0.0), torch.zeros_like(mask), mask, 1.0, 1.0)
    # group 1 earns the same in total, but at other tokens; group 2 is a single sample
    assert find_zero_variance_groups(returns, mask, groups).tolist() == [True, True, False, False, True, True, True]
    # by state, one state for the whole response, the totals count alone
    states = torch.zeros_like(mask, dtype=torch.long)
    assert find_zero_variance_groups(returns, mask, groups, states).all()


def test_a_sample_that_does_not_reach_a_state_counts_there_with_its_last_return() -> None:
    """A good and a poor span against no span: equal totals, and the poor span alone in its state."""
    returns = torch.tensor([[0.0, -1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    states = torch.tensor([[0, 1], [0, 0], [0, 1], [0, 0]])
    groups = torch.tensor([0, 0, 1, 1])
    assert find_zero_variance_groups(returns, torch.ones(4, 2), groups, states).tolist() == [False, False, True, True]


@pytest.mark.parametrize("whitening", ["full", "none"])
def test_a_group_that_is_equal_in_its_states_has_no_advantage(whitening: str) -> None:
    """One good span each, at other tokens; and a lone sample. The other prompt earns more, which moves their values."""
    rewards = padded([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [3.0, 0.0, 0.0], [0.0, 0.0, 2.0], [1.0, 1.0, 1.0]], 0.0)[:, :3]
    states = torch.tensor([[0, 0, 1], [0, 1, 1], [0, 1, 1], [0, 0, 0], [0, 1, 2]])
    mask = torch.ones_like(rewards)
    groups = torch.tensor([0, 0, 1, 1, 2])
    advantages, _ = compare_samples(
        rewards, mask, groups, 1.0, state_ids=states, lam=0.9, normalize=False, whitening=whitening, is_trained=mask
    )
    is_zero = (advantages == 0).all(1)
    assert is_zero.tolist() == [True, True, False, False, True]


def test_a_group_that_is_equal_does_not_move_the_mean_of_the_others() -> None:
    """Returns of 3 against a prior of other prompts are advantages above 0; without them 1 is as good as -1 is poor."""
    rewards = torch.tensor([[1.0], [1.0], [-1.0], [-1.0], [3.0], [3.0], [3.0], [3.0]])
    ones = torch.ones_like(rewards)
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    states = torch.zeros_like(rewards, dtype=torch.long)
    advantages, _ = compare_samples(
        rewards, ones, groups, 1.0, state_ids=states, lam=1.0, normalize=False, whitening="full", is_trained=ones
    )
    column = advantages[:, 0].tolist()
    assert min(column[:2]) > 0.3 and max(column[2:4]) < -1 and column[4:] == [0.0] * 4
