import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from t2g.algo.kl import adapt_kl_coef, kl_k1, kl_k2, kl_k3, sequence_kl

logits3 = st.lists(st.floats(-3, 3), min_size=3, max_size=3).map(lambda x: torch.tensor(x, dtype=torch.float64))


@given(logits3, logits3)
def test_k1_and_k3_have_the_divergence_as_their_mean(policy: torch.Tensor, reference: torch.Tensor) -> None:
    """Full enumeration of a vocabulary of three."""
    p, q = policy.log_softmax(0), reference.log_softmax(0)
    divergence = sum(p[i].exp() * (p[i] - q[i]) for i in range(3))
    for estimator in (kl_k1, kl_k3):
        torch.testing.assert_close((p.exp() * estimator(p, q)).sum(), divergence)
    assert (kl_k3(p, q) >= -1e-12).all()


@given(logits3, logits3)
def test_the_mean_gradient_of_k2_is_that_of_the_divergence(policy: torch.Tensor, reference: torch.Tensor) -> None:
    weights, q = policy.clone().requires_grad_(), reference.log_softmax(0)
    p = weights.log_softmax(0)
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), weights, retain_graph=True)
    (estimated,) = torch.autograd.grad((p.detach().exp() * kl_k2(p, q)).sum(), weights)
    torch.testing.assert_close(estimated, exact)


def test_k2_worked_by_hand() -> None:
    assert kl_k2(torch.tensor(-1.0), torch.tensor(-4.0)).item() == 4.5


def test_sequence_kl_sums_tokens_and_averages_sequences() -> None:
    logprobs, reference = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, 0.0, 0.0]]), torch.tensor([[-2.0] * 3, [-5.0] * 3])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert sequence_kl(logprobs, reference, mask) == (2 + 3) / 2


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.05),  # on target
        (6.6, 0.05 * (1 + 0.1 * 64 / 10_000)),  # 10 % above
        (100.0, 0.05 * (1 + 0.2 * 64 / 10_000)),  # clipped above
        (-3.0, 0.05 * (1 - 0.2 * 64 / 10_000)),  # a negative estimate is clipped below
    ],
)
def test_adaptive_coefficient(kl: float, expected: float) -> None:
    assert adapt_kl_coef(0.05, kl=kl, target=6.0, num_samples=64, horizon=10_000) == pytest.approx(expected, rel=1e-12)
