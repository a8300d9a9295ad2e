import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from t2g.algo import gae
from t2g.algo.advantages import step_rewards, whiten


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def double_loop(rewards: list[float], values: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Equation 16 of arXiv 1506.02438 as it stands."""
    n = len(rewards)
    following = [*values[1:], 0.0]
    errors = [rewards[t] + gamma * following[t] - values[t] for t in range(n)]
    advantages = [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, n)) for t in range(n)]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def test_gae_worked_by_hand() -> None:
    # errors: 0 + .9 * 2 - 1 = .8;  1 + .9 * 3 - 2 = 1.7;  -1 + 0 - 3 = -4;  gamma * lam = .45
    # A_2 = -4;  A_1 = 1.7 - .45 * 4 = -.1;  A_0 = .8 - .45 * .1 = .755
    advantages, returns = gae(row(0, 1, -1), row(1, 2, 3), row(1, 1, 1), 0.9, 0.5)
    torch.testing.assert_close(advantages, row(0.755, -0.1, -4))
    torch.testing.assert_close(returns, row(1.755, 1.9, -1))


def test_lambda_one_returns_are_the_sums_of_what_follows() -> None:
    _, returns = gae(row(1, 2, 3), row(7, -5, 4), row(1, 1, 1), 1.0, 1.0)
    torch.testing.assert_close(returns, row(6, 5, 3))


def test_lambda_zero_puts_the_credit_on_the_label_alone() -> None:
    advantages, _ = gae(row(0, 0, -1, 0), row(0, 0, 0, 0), row(1, 1, 1, 1), 1.0, 0.0)
    assert advantages.tolist() == [[0, 0, -1, 0]]


@given(
    length=st.integers(1, 12),
    place=st.integers(0, 11),
    delta=st.sampled_from([-1.0, 1.0]),
    gamma=st.floats(0.5, 1),
    lam=st.floats(0, 1),
)
def test_one_labelled_token(length: int, place: int, delta: float, gamma: float, lam: float) -> None:
    """method.md: V = 0, beta = 0: A_t = delta (gamma lambda)^(s - t) for t <= s, 0 after."""
    s = place % length
    rewards = torch.zeros(1, length, dtype=torch.float64)
    rewards[0, s] = delta
    advantages, _ = gae(rewards, torch.zeros_like(rewards), torch.ones_like(rewards), gamma, lam)
    expected = [delta * (gamma * lam) ** (s - t) if t <= s else 0.0 for t in range(length)]
    np.testing.assert_allclose(advantages[0], expected, rtol=1e-12, atol=1e-12)


@given(data=st.data(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_equals_a_double_loop_on_ragged_batches(data: st.DataObject, gamma: float, lam: float) -> None:
    numbers = st.floats(-3, 3)
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    width = max(lengths) + 1
    rewards, values = (torch.full((len(lengths), width), 99.0, dtype=torch.float64) for _ in range(2))
    mask = torch.zeros_like(rewards)
    expected = torch.zeros(2, *rewards.shape, dtype=torch.float64)
    for i, n in enumerate(lengths):
        r, v = (data.draw(st.lists(numbers, min_size=n, max_size=n)) for _ in range(2))
        rewards[i, :n], values[i, :n], mask[i, :n] = torch.tensor(r), torch.tensor(v), 1
        r, v = rewards[i, :n].tolist(), values[i, :n].tolist()
        for k, line in enumerate(double_loop(r, v, gamma, lam)):
            expected[k, i, :n] = torch.tensor(line, dtype=torch.float64)
    torch.testing.assert_close(torch.stack(gae(rewards, values, mask, gamma, lam)), expected)


def test_masked_tokens_are_as_if_absent() -> None:
    short = gae(row(1, -1), row(0.5, 0.25), row(1, 1), 0.9, 0.8)
    holes = gae(row(7, 1, 7, -1, 7), row(9, 0.5, 9, 0.25, 9), row(0, 1, 0, 1, 0), 0.9, 0.8)
    for plain, with_holes in zip(short, holes, strict=True):
        torch.testing.assert_close(with_holes[:, [1, 3]], plain)
        assert with_holes[:, [0, 2, 4]].tolist() == [[0, 0, 0]]


def test_responses_without_a_token() -> None:
    empty = torch.zeros(2, 0)
    assert [x.shape for x in gae(empty, empty, empty, 1.0, 0.95)] == [(2, 0), (2, 0)]


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\], \[2, 3\], \[2, 4\]"):
        gae(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 4), 1.0, 0.95)


def test_step_rewards_pay_spans_and_charge_k1() -> None:
    rewards = step_rewards(
        row(1, 0, -1, 5), row(-1, -2, -3, 0), row(-1.5, -1, -3, float("nan")), row(1, 1, 1, 0), w_span=2.0, kl_coef=0.1
    )
    torch.testing.assert_close(rewards, row(2 - 0.05, 0.1, -2, 0))


def test_whiten_worked_by_hand() -> None:
    advantages, mask = row(0, 0, 3, -1, 50), row(1, 1, 1, 1, 0)
    # mean .5, deviations -.5 -.5 2.5 -1.5, variance (.25 + .25 + 6.25 + 2.25) / 4 = 2.25, standard deviation 1.5
    torch.testing.assert_close(whiten(advantages, mask, "full"), row(-1 / 3, -1 / 3, 5 / 3, -1, 0))
    # mean square (9 + 1) / 4 = 2.5
    torch.testing.assert_close(whiten(advantages, mask, "scale_only"), row(0, 0, 3 / 2.5**0.5, -1 / 2.5**0.5, 0))
    torch.testing.assert_close(whiten(advantages, mask, "none"), row(0, 0, 3, -1, 0))


def test_scale_only_keeps_unlabelled_tokens_at_exactly_zero() -> None:
    assert whiten(row(0, 2, 0), row(1, 1, 1), "scale_only")[0, [0, 2]].tolist() == [0, 0]


@pytest.mark.parametrize("mode", ["full", "scale_only", "none"])
def test_whiten_survives_equal_and_missing_tokens(mode: str) -> None:
    assert torch.isfinite(whiten(row(0, 0), row(1, 1), mode)).all()
    assert whiten(row(1, 2), row(0, 0), mode).tolist() == [[0, 0]]
