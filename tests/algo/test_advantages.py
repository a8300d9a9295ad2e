import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from t2g.algo import gae
from t2g.algo.advantages import combine_rewards, group_advantages, punish_unlikely, whiten


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def double_loop(rewards: list[float], values: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Equation 16 of arXiv 1506.02438 as it stands."""
    n = len(rewards)
    following = [*values[1:], 0.0]
    errors = [rewards[t] + gamma * following[t] - values[t] for t in range(n)]
    advantages = []
    for t in range(n):
        terms = [(gamma * lam) ** (k - t) * errors[k] for k in range(t, n)]
        advantages.append(sum(terms))
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
    """V = 0, beta = 0: A_t = delta (gamma lambda)^(s - t) for t <= s, 0 after."""
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
        rewards[i, :n] = torch.tensor(r)
        values[i, :n] = torch.tensor(v)
        mask[i, :n] = 1
        r = rewards[i, :n].tolist()
        v = values[i, :n].tolist()
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


def test_step_rewards_mix_spans_end_and_k1() -> None:
    nan = float("nan")
    spans = torch.tensor([[1, 0, -1, 5], [0, 2, 0, 0]], dtype=torch.float64)
    outcomes = torch.tensor([1.5, -3.0], dtype=torch.float64)
    logprobs = torch.tensor([[-1, -2, -3, 0], [-1, -1, -1, -1]], dtype=torch.float64)
    ref_logprobs = torch.tensor([[-1.5, -1, -3, nan], [-1, -1, -1, -1]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    rewards = combine_rewards(spans, outcomes, logprobs, ref_logprobs, mask, span_coef=2.0, kl_coef=0.1)
    # the outcome reward goes to the last token that counts: 1.5 to the third, -3 to the fourth
    expected = torch.tensor([[2 - 0.05, 0.1, -2 + 1.5, 0], [0, 4, 0, -3]], dtype=torch.float64)
    torch.testing.assert_close(rewards, expected)


def test_an_empty_response_is_paid_nothing_at_its_end() -> None:
    ragged = torch.zeros(2, 3)
    mask = torch.tensor([[0.0, 0, 0], [1, 0, 0]])
    paid = combine_rewards(ragged, torch.ones(2), ragged, ragged, mask, span_coef=1.0, kl_coef=0.0)
    assert paid.tolist() == [[0, 0, 0], [1, 0, 0]]
    none = torch.zeros(2, 0)
    assert combine_rewards(none, torch.ones(2), none, none, none, span_coef=1.0, kl_coef=0.0).shape == (
        2,
        0,
    )


def ragged(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded [B, R] with numbers in the padding that must not matter, and the mask."""
    width = max(map(len, rows)) + 1
    padded = torch.tensor([[*r, *[77.0] * (width - len(r))] for r in rows], dtype=torch.float64)
    return padded, torch.tensor([[1.0] * len(r) + [0.0] * (width - len(r)) for r in rows])


def discounted(rewards: list[float], gamma: float) -> list[float]:
    returns = []
    for t in range(len(rewards)):
        terms = [gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))]
        returns.append(sum(terms))
    return returns


def group_by_loops(rewards: list[list[float]], groups: list[int], gamma: float, normalize: bool) -> list[list[float]]:
    """The formulas of `group_advantages` as they stand, one token at a time."""
    returns = [discounted(row, gamma) for row in rewards]

    def at(j: int, t: int) -> float:
        return returns[j][min(t, len(returns[j]) - 1)]

    result = []
    for i, row in enumerate(returns):
        everybody = [j for j in range(len(rewards)) if groups[j] == groups[i]]
        others = [j for j in everybody if j != i]
        line = []
        for t in range(len(row)):
            if normalize:
                gaps = []
                for u in range(max(len(returns[j]) for j in everybody)):
                    mean = np.mean([at(k, u) for k in everybody])
                    gaps += [at(j, u) - mean for j in everybody]
                scale = np.sqrt(np.mean(np.square(gaps))) + 1e-6
                line.append((row[t] - np.mean([at(j, t) for j in everybody])) / scale)
            else:
                line.append(row[t] - np.mean([at(j, t) for j in others]) if others else 0.0)
        result.append(line)
    return result


responses = st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=1, max_size=5), min_size=1, max_size=6)


@given(rewards=responses, data=st.data(), gamma=st.floats(0.5, 1), normalize=st.booleans())
def test_group_advantages_equal_loops(
    rewards: list[list[float]], data: st.DataObject, gamma: float, normalize: bool
) -> None:
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(rewards), max_size=len(rewards)))
    advantages, returns = group_advantages(*ragged(rewards), torch.tensor(groups), gamma, normalize=normalize)
    for i, expected in enumerate(group_by_loops(rewards, groups, gamma, normalize)):
        np.testing.assert_allclose(advantages[i, : len(expected)], expected, rtol=1e-6, atol=1e-6)
        assert not advantages[i, len(expected) :].any()
        assert not returns[i, len(expected) :].any()
        assert returns[i, 0].item() == pytest.approx(sum(gamma**t * r for t, r in enumerate(rewards[i])))


scalars = st.lists(st.tuples(st.floats(-3, 3), st.integers(1, 5)), min_size=2, max_size=6)


def scalar_group(scalars: list[tuple[float, int]], *, normalize: bool) -> list[list[float]]:
    """Advantages of one prompt's responses of these lengths, each paid its reward at its last token."""
    rewards, mask = ragged([[0.0] * (length - 1) + [reward] for reward, length in scalars])
    advantages, _ = group_advantages(rewards, mask, torch.zeros(len(scalars)), 1.0, normalize=normalize)
    return [row[:length].tolist() for row, (_, length) in zip(advantages, scalars, strict=True)]


@given(scalars)
def test_of_a_scalar_reward_it_is_leave_one_out(scalars: list[tuple[float, int]]) -> None:
    rewards = [reward for reward, _ in scalars]
    for i, tokens in enumerate(scalar_group(scalars, normalize=False)):
        others = rewards[:i] + rewards[i + 1 :]
        assert tokens == pytest.approx([rewards[i] - sum(others) / len(others)] * len(tokens))


@given(scalars)
def test_of_a_scalar_reward_normalized_it_is_the_standard_score(scalars: list[tuple[float, int]]) -> None:
    rewards = np.array([reward for reward, _ in scalars])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    for tokens, score in zip(scalar_group(scalars, normalize=True), expected, strict=True):
        assert tokens == pytest.approx([score] * len(tokens), rel=1e-6, abs=1e-6)


@given(rewards=responses, change=st.floats(-5, 5), data=st.data())
def test_the_baseline_does_not_depend_on_the_sample_it_is_for(
    rewards: list[list[float]], change: float, data: st.DataObject
) -> None:
    """What makes the estimate unbiased: a sample's own reward moves its return and its advantage alike."""
    if len(rewards) < 2:
        rewards = [*rewards, [1.0]]
    i = data.draw(st.integers(0, len(rewards) - 1))
    changed = [list(r) for r in rewards]
    changed[i][-1] += change
    baselines = []
    for rows in (rewards, changed):
        advantages, returns = group_advantages(*ragged(rows), torch.zeros(len(rows)), 0.9, normalize=False)
        baselines.append((returns - advantages)[i])
    torch.testing.assert_close(*baselines)


def test_equal_rewards_and_lone_samples_teach_nothing() -> None:
    for normalize in (False, True):
        same = group_advantages(*ragged([[0.1], [0.1, 0.0], [0.1]]), torch.tensor([4, 9, 4]), 1.0, normalize=normalize)
        assert same[0].abs().max() < 1e-9
        three = group_advantages(torch.full((3, 1), 0.1), torch.ones(3, 1), torch.zeros(3), 1.0, normalize=normalize)
        assert three[0].abs().max() < 1e-9


def test_spans_at_other_places_of_equal_totals_stay_in_scale() -> None:
    """The standard deviation of the totals is 0 here: dividing by it would give advantages of a million."""
    advantages, _ = group_advantages(*ragged([[1, 0, -1], [-1, 0, 1]]), torch.zeros(2), 1.0, normalize=True)
    # returns 0 -1 -1 and 0 1 1, mean 0, root mean square sqrt(4 / 6)
    scale = (4 / 6) ** 0.5 + 1e-6
    torch.testing.assert_close(advantages[:, :3] * scale, torch.tensor([[0, -1, -1], [0, 1, 1]], dtype=torch.float64))


def test_whiten_worked_by_hand() -> None:
    advantages = row(0, 0, 3, -1, 50)
    mask = row(1, 1, 1, 1, 0)
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


@given(st.lists(st.tuples(st.floats(-9, 0, width=32), st.booleans()), min_size=1, max_size=23))
def test_the_least_likely_fifth_of_the_trained_tokens_is_punished(tokens: list[tuple[float, bool]]) -> None:
    logprobs = torch.tensor([[logprob for logprob, _ in tokens]])
    mask = torch.tensor([[float(keep) for _, keep in tokens]])
    (advantages,) = punish_unlikely(logprobs, mask).tolist()
    trained = sorted((logprob, t) for t, (logprob, keep) in enumerate(tokens) if keep)
    punished = {t for _, t in trained[: -(-len(trained) // 5)]}
    assert advantages == [-1.0 if t in punished else 0.0 for t in range(len(tokens))]
