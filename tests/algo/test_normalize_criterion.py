"""A criterion on the scale of its prompt: by hand, against loops, and what must not change."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from t2g.algo.advantages import gae, group_advantages
from t2g.algo.criteria import normalize_criterion, normalize_outcome

GROUPS = torch.tensor([0, 0, 0, 1, 1])
ALL = torch.ones(5, dtype=torch.bool)


def slow_deviation(rewards: list[list[float]], gamma: float) -> float:
    """Return the root mean square of the samples' returns less their mean at each position."""
    longest = max(map(len, rewards))
    returns: list[list[float]] = []
    for row in rewards:
        sample_returns = []
        for t in range(longest):
            start = min(t, len(row) - 1)
            sample_returns.append(sum(gamma ** (late - start) * row[late] for late in range(start, len(row))))
        returns.append(sample_returns)
    squares = []
    for t in range(longest):
        mean = sum(sample_returns[t] for sample_returns in returns) / len(returns)
        squares += [(sample_returns[t] - mean) ** 2 for sample_returns in returns]
    return math.sqrt(sum(squares) / len(squares))


def pad(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and their mask, right-padded."""
    rewards = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
    return rewards, mask


quarters = st.integers(-8, 8).map(lambda number: number / 4)
rows_of = st.lists(quarters, min_size=1, max_size=6)
batches = st.lists(rows_of, min_size=5, max_size=5)


@given(rows=batches, gamma=st.sampled_from([1.0, 0.5]))
def test_the_scale_agrees_with_a_double_loop(rows: list[list[float]], gamma: float) -> None:
    rewards, mask = pad(rows)
    normalized = normalize_criterion(rewards, mask, GROUPS, gamma, ALL)
    for members in ([0, 1, 2], [3, 4]):
        deviation = slow_deviation([rows[member] for member in members], gamma)
        for member in members:
            length = len(rows[member])
            expected = [reward / deviation if deviation > 1e-9 else 0.0 for reward in rows[member]]
            assert normalized.rewards[member, :length].tolist() == pytest.approx(expected)
            assert normalized.scales[member] == pytest.approx(1 / deviation if deviation > 1e-9 else 0.0)


@given(rows=batches, factor=st.sampled_from([1e-3, 0.25, 7.0, 1e4]))
def test_a_positive_factor_changes_nothing(rows: list[list[float]], factor: float) -> None:
    rewards, mask = pad(rows)
    plain = normalize_criterion(rewards, mask, GROUPS, 1.0, ALL)
    scaled = normalize_criterion(rewards.double() * factor, mask, GROUPS, 1.0, ALL)
    torch.testing.assert_close(scaled.rewards, plain.rewards)
    torch.testing.assert_close(scaled.scales * factor, plain.scales)


def test_at_the_last_token_the_scale_is_the_standard_deviation() -> None:
    rewards, mask = pad([[0, 100], [0, 0, 300], [200], [5], [5.0]])
    normalized = normalize_criterion(rewards, mask, GROUPS, 1.0, ALL)
    deviation = np.std([100, 300, 200])
    assert normalized.scales.tolist() == pytest.approx([1 / deviation] * 3 + [0, 0])
    assert normalized.rewards.sum(1).tolist() == pytest.approx(
        [100 / deviation, 300 / deviation, 200 / deviation, 0, 0]
    )


def test_equal_sums_at_other_positions_have_a_scale() -> None:
    rewards, mask = pad([[1, 0], [0, 1], [0, 1], [0, 0], [0, 0]])
    normalized = normalize_criterion(rewards, mask, GROUPS, 1.0, ALL)
    assert normalized.scales[0] == pytest.approx(1 / slow_deviation([[1, 0], [0, 1], [0, 1]], 1.0))


@given(rows=batches, gamma=st.sampled_from([1.0, 0.5]), missing=st.sets(st.integers(0, 4), min_size=1, max_size=4))
def test_a_missing_criterion_is_neutral_and_no_part_of_the_scale(
    rows: list[list[float]], gamma: float, missing: set[int]
) -> None:
    rewards, mask = pad(rows)
    is_judged = torch.tensor([number not in missing for number in range(5)])
    normalized = normalize_criterion(rewards, mask, GROUPS, gamma, is_judged)
    judged = normalize_criterion(rewards[is_judged], mask[is_judged], GROUPS[is_judged], gamma, ALL[is_judged])
    torch.testing.assert_close(normalized.rewards[is_judged], judged.rewards)
    advantages, _ = group_advantages(normalized.rewards, mask, GROUPS, gamma, normalize=False)
    longest = int(mask[is_judged].sum(1).max())  # later positions have no mean of judged samples
    assert advantages[~is_judged][:, :longest].abs().max() < 1e-9 or longest < mask.shape[1]


def test_the_returns_of_a_missing_criterion_are_the_mean() -> None:
    rewards, mask = pad([[0, 4], [0, 0], [9, 9, 9], [1], [0.0]])
    is_judged = torch.tensor([True, True, False, True, True])
    normalized = normalize_criterion(rewards, mask, GROUPS, 0.5, is_judged)
    returns, _ = gae(normalized.rewards, torch.zeros_like(normalized.rewards), mask, 0.5, 1.0)
    mean = returns[:2].mean(0)
    assert returns[2].tolist() == pytest.approx([float(mean[0]), float(mean[1]), float(mean[1])])


@pytest.mark.parametrize("rows", [[[1, 0, 2], [1, 0, 2], [1, 0, 2]], [[0.1, 0.2], [0.1, 0.2], [0.1, 0.2]]])
def test_a_constant_criterion_gives_nothing(rows: list[list[float]]) -> None:
    rewards, mask = pad(rows)
    normalized = normalize_criterion(rewards * 3, mask, torch.zeros(3), 1.0, ALL[:3])
    assert not normalized.rewards.any()
    assert not normalized.scales.any()


def test_a_prompt_without_the_criterion_leaves_the_others_as_they_are() -> None:
    rewards, mask = pad([[1, 0], [0, 0], [0, 2], [3], [0.0]])
    judged = torch.tensor([True, True, True, False, False])
    some = normalize_criterion(rewards, mask, GROUPS, 1.0, judged)
    every = normalize_criterion(rewards, mask, GROUPS, 1.0, ALL)
    torch.testing.assert_close(some.rewards[:3], every.rewards[:3])
    assert not some.rewards[3:].any()


numbers = st.lists(st.one_of(st.none(), st.floats(-100, 100)), min_size=5, max_size=5)


@given(numbers=numbers)
def test_outcomes_agree_with_a_loop(numbers: list[Any]) -> None:
    values = [math.nan if number is None else number for number in numbers]
    normalized = normalize_outcome(torch.tensor(values, dtype=torch.float64), GROUPS)
    for members in ([0, 1, 2], [3, 4]):
        applicable = [numbers[member] for member in members if numbers[member] is not None]
        for member in members:
            expected = 0.0
            if numbers[member] is not None and np.std(applicable) > 1e-6 * np.abs(applicable).max():
                expected = (numbers[member] - np.mean(applicable)) / np.std(applicable)
            assert float(normalized[member]) == pytest.approx(expected, abs=1e-6)
