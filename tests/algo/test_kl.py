import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from t2g.algo.kl import adapt_kl_coef, full_kl, kl_k1, kl_k3, sequence_kl

logits3 = st.lists(st.floats(-3, 3), min_size=3, max_size=3).map(lambda x: torch.tensor(x, dtype=torch.float64))


@given(logits3, logits3)
def test_k1_has_the_divergence_as_its_mean(policy: torch.Tensor, reference: torch.Tensor) -> None:
    """Full enumeration of a vocabulary of three."""
    p = policy.log_softmax(0)
    q = reference.log_softmax(0)
    divergence = sum(p[i].exp() * (p[i] - q[i]) for i in range(3))
    torch.testing.assert_close((p.exp() * kl_k1(p, q)).sum(), divergence)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL of two vectors of log-probabilities, term by term."""
    return sum((p[i].exp() * (p[i] - q[i]) for i in range(len(p))), torch.zeros((), dtype=p.dtype))


@given(logits3, logits3)
def test_k3_has_the_divergence_as_its_mean_and_no_negative_term(policy: torch.Tensor, reference: torch.Tensor) -> None:
    p = policy.log_softmax(0)
    q = reference.log_softmax(0)
    k3 = kl_k3(p, q)
    assert (k3 >= 0).all()
    torch.testing.assert_close((p.exp() * k3).sum(), divergence(p, q))


@given(st.floats(-10, 0), st.floats(-10, 0))
def test_the_gradient_of_k3_is_one_less_the_ratio(logprob: float, ref_logprob: float) -> None:
    p = torch.tensor(logprob, dtype=torch.float64, requires_grad=True)
    q = torch.tensor(ref_logprob, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(kl_k3(p, q), p)
    torch.testing.assert_close(gradient, 1 - (q - p.detach()).exp())


@given(logits3, logits3)
def test_as_a_loss_k3_moves_the_policy_along_the_other_divergence(
    policy: torch.Tensor, reference: torch.Tensor
) -> None:
    """Mean over the policy's own tokens of the gradient of k3 = gradient of KL(q || p), not of KL(p || q)."""
    policy = policy.clone().requires_grad_()
    p = policy.log_softmax(0)
    q = reference.log_softmax(0)
    (of_loss,) = torch.autograd.grad((p.detach().exp() * kl_k3(p, q)).sum(), policy, retain_graph=True)
    (expected,) = torch.autograd.grad(divergence(q, p), policy)
    torch.testing.assert_close(of_loss, expected, rtol=1e-6, atol=1e-9)


def test_k3_of_nearly_equal_policies_keeps_its_digits() -> None:
    # x - log(1 + x) is about x^2 / 2: in float32, exp(x) - 1 - x of x = 1e-4 would be noise
    assert kl_k3(torch.tensor(-1.0), torch.tensor(-1.0 + 2**-13)).item() == pytest.approx(2**-27, rel=1e-3)


def test_a_token_that_the_policy_all_but_excludes_stays_finite() -> None:
    p = torch.tensor([-2000.0], requires_grad=True)
    k3 = kl_k3(p, torch.tensor([-1.0]))
    assert torch.isfinite(k3).all()
    assert torch.autograd.grad(k3.sum(), p)[0].tolist() == [0.0]


@given(st.lists(logits3, min_size=4, max_size=4))
def test_full_kl_equals_a_loop_over_the_vocabulary(rows: list[torch.Tensor]) -> None:
    logits = torch.stack(rows[:2]).float().requires_grad_()
    ref_logits = torch.stack(rows[2:]).float()
    kl = full_kl(logits, ref_logits)
    expected = torch.stack(
        [divergence(a.log_softmax(0), b.log_softmax(0)) for a, b in zip(logits, ref_logits, strict=True)]
    )
    torch.testing.assert_close(kl, expected, rtol=1e-4, atol=1e-6)
    (gradient,), (expected_gradient,) = (
        torch.autograd.grad(x.sum(), logits, retain_graph=True) for x in (kl, expected)
    )
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def test_full_kl_worked_by_hand() -> None:
    # p = (.5, .5), q = (.25, .75): .5 log 2 + .5 log(2 / 3)
    kl = full_kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.25, 0.75]]).log())
    assert kl.item() == pytest.approx(0.5 * math.log(4 / 3), rel=1e-6)
    assert full_kl(torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bfloat16)).tolist() == [0, 0]


def test_full_kl_survives_tokens_of_probability_zero() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    kl = full_kl(logits, torch.tensor([[0.0, 0.0, -torch.inf]]))
    assert kl.tolist() == [0]
    assert torch.isfinite(torch.autograd.grad(kl.sum(), logits)[0]).all()


def test_sequence_kl_sums_tokens_and_averages_sequences() -> None:
    logprobs = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, 0.0, 0.0]])
    reference = torch.tensor([[-2.0] * 3, [-5.0] * 3])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert sequence_kl(logprobs, reference, mask) == (2 + 3) / 2


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.05),  # on target
        (6.6, 0.05 * math.exp(0.1 * 64 / 10_000)),  # 10 % above
        (100.0, 0.05 * math.exp(0.2 * 64 / 10_000)),  # clipped above
        (-3.0, 0.05 * math.exp(-0.2 * 64 / 10_000)),  # a negative estimate is clipped below
    ],
)
def test_adaptive_coefficient(kl: float, expected: float) -> None:
    assert adapt_kl_coef(0.05, kl=kl, target=6.0, num_samples=64, horizon=10_000) == pytest.approx(expected, rel=1e-12)


@given(st.floats(-100, 100), st.integers(1, 10_000), st.integers(10, 10_000))
def test_the_adaptive_coefficient_stays_positive_within_its_bounds(kl: float, num_samples: int, horizon: int) -> None:
    coef = adapt_kl_coef(0.05, kl=kl, target=6.0, num_samples=num_samples, horizon=horizon)
    assert coef > 0
    assert abs(math.log(coef / 0.05)) <= 0.2 * num_samples / horizon + 1e-9
