import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from t2g.algo.kl import adapt_kl_coef, kl_k1, sequence_kl

logits3 = st.lists(st.floats(-3, 3), min_size=3, max_size=3).map(lambda x: torch.tensor(x, dtype=torch.float64))


@given(logits3, logits3)
def test_k1_has_the_divergence_as_its_mean(policy: torch.Tensor, reference: torch.Tensor) -> None:
    """Full enumeration of a vocabulary of three."""
    p, q = policy.log_softmax(0), reference.log_softmax(0)
    divergence = sum(p[i].exp() * (p[i] - q[i]) for i in range(3))
    torch.testing.assert_close((p.exp() * kl_k1(p, q)).sum(), divergence)


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
