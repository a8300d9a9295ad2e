import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.algo.losses import kl_loss, policy_loss, value_loss, weighted_sum


def policy(rho: list[float], gains: list[float], **changes: object) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Loss, gradient with respect to logprobs, metrics; old -1, no correction, equal weights unless changed."""
    n = len(rho)
    logprobs = torch.tensor([-1.0 + math.log(x) for x in rho], dtype=torch.float64, requires_grad=True)
    ones = torch.ones(n, dtype=torch.float64)
    defaults = {
        "logprobs": logprobs,
        "old_logprobs": -ones,
        "importance_weights": ones,
        "advantages": torch.tensor(gains, dtype=torch.float64),
        "weights": ones / n,
        "clip_eps": 0.2,
    }
    arguments = defaults | changes
    loss, metrics = policy_loss(**arguments)
    (gradient,) = torch.autograd.grad(loss, arguments["logprobs"])
    return loss.detach(), gradient, metrics


@pytest.mark.parametrize(
    ("rho", "advantage", "loss", "gradient"),
    [
        # the gradient with respect to a logprob is -rho A where the clip is not the smaller one, else 0
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.4, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),
        (1.19, 1.0, -1.19, -1.19),
        (1.21, 1.0, -1.2, 0.0),
        (0.79, -1.0, 0.8, 0.0),
        (0.81, -1.0, 0.81, 0.81),
    ],
)
def test_edges_of_the_clip(rho: float, advantage: float, loss: float, gradient: float) -> None:
    got_loss, got_gradient, _ = policy([rho], [advantage])
    assert got_loss.item() == pytest.approx(loss)
    assert got_gradient.item() == pytest.approx(gradient)


def test_policy_metrics() -> None:
    _, _, metrics = policy([1.0, 1.5, 0.5, 1.1], [1.0, 0.0, -1.0, 1.0])
    assert metrics["policy/clip_share"] == 0.5
    assert metrics["policy/ratio_max"] == pytest.approx(1.5)
    kl = sum(r - 1 - math.log(r) for r in (1.0, 1.5, 0.5, 1.1)) / 4
    assert metrics["policy/approx_kl"] == pytest.approx(kl)


def test_importance_weights_scale_value_and_gradient() -> None:
    correction = torch.tensor([1.5, 2.0, 0.0], dtype=torch.float64)
    loss, gradient, _ = policy([1.0, 1.1, 1.0], [1.0, -1.0, 1.0], importance_weights=correction)
    assert loss.item() == pytest.approx((-1.5 + 2.0 * 1.1) / 3)
    torch.testing.assert_close(gradient, torch.tensor([-1.5, 2.0 * 1.1, 0.0], dtype=torch.float64) / 3)


def test_weights_say_how_much_a_token_counts() -> None:
    # a response of one token and one of two, each worth a half
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    loss, gradient, metrics = policy([1.0, 1.5, 1.0], [2.0, -1.0, 4.0], weights=weights)
    assert loss.item() == pytest.approx(-(0.5 * 2 - 0.25 * 1.5 + 0.25 * 4))
    torch.testing.assert_close(gradient, torch.tensor([-1.0, 0.375, -1.0], dtype=torch.float64))
    assert metrics["policy/clip_share"] == 0.25


def test_a_huge_log_ratio_stays_finite() -> None:
    loss, gradient, _ = policy([1.0], [-1.0], old_logprobs=torch.tensor([-2000.0], dtype=torch.float64))
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_masked_token_has_exactly_no_gradient(poison: float) -> None:
    bad = torch.tensor([-1.0, poison], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for logprobs in (torch.tensor([-1.0, -0.7], dtype=torch.float64), bad):
        loss, gradient, metrics = policy(
            [1.0] * 2, [1.0] * 2, logprobs=logprobs.clone().requires_grad_(), weights=weights, advantages=bad,
            old_logprobs=bad, importance_weights=-bad,
        )  # fmt: skip
        assert loss.item() == 1.0
        assert gradient.tolist() == [1.0, 0.0]
        assert metrics["policy/ratio_max"] == 1.0
        assert metrics["policy/approx_kl"] == 0.0

    values = torch.tensor([0.5, poison], requires_grad=True)
    loss, _ = value_loss(values=values, old_values=bad, returns=bad, weights=weights, value_clip=5.0)
    assert torch.autograd.grad(loss, values)[0].tolist() == [1.5, 0.0]

    logprobs = torch.tensor([-2.0, poison], dtype=torch.float64, requires_grad=True)
    loss, _ = kl_loss(logprobs=logprobs, ref_logprobs=bad, weights=weights)
    assert loss.item() == pytest.approx(math.e - 2)
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([1 - math.e, 0.0], rel=1e-12, abs=0)

    bonus = torch.tensor([0.5, poison], requires_grad=True)
    total = weighted_sum(bonus, weights)
    assert total.item() == 0.5
    assert torch.autograd.grad(total, bonus)[0].tolist() == [1.0, 0.0]


@settings(max_examples=30)
@given(cut=st.integers(1, 5), seed=st.integers(0, 1000))
def test_shares_of_microbatches_add_up(cut: int, seed: int) -> None:
    """The point of global weights: one microbatch of six tokens = two of any cut."""
    generator = torch.Generator().manual_seed(seed)
    fields = {
        name: torch.randn(6, generator=generator, dtype=torch.float64)
        for name in ("logprobs", "old_logprobs", "importance_weights", "advantages")
    } | {"weights": torch.tensor([0.25, 0.0, 0.25, 0.125, 0.0, 0.375])}

    def loss(part: slice) -> tuple[float, dict[str, float]]:
        value, metrics = policy_loss(**{k: v[part] for k, v in fields.items()}, clip_eps=0.2)
        return value.item(), metrics

    (whole, metrics), (left, metrics_l), (right, metrics_r) = map(loss, (slice(6), slice(cut), slice(cut, 6)))
    assert left + right == pytest.approx(whole)
    share = "policy/clip_share"
    assert metrics_l[share] + metrics_r[share] == pytest.approx(metrics[share])


@pytest.mark.parametrize(
    ("value", "old", "ret", "loss", "gradient"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0),  # inside the clip: (1 - 3)^2 / 2
        (2.0, 1.0, 3.0, 0.5 * 1.8**2, 0.0),  # clipped to 1.2, which is further from 3: the larger error, no gradient
        (2.0, 1.0, 0.0, 2.0, 2.0),  # clipped to 1.2, nearer to 0: the free error is the larger one
        (0.5, 1.0, 0.0, 0.5 * 0.8**2, 0.0),  # clipped to .8
    ],
)
def test_value_loss_worked_by_hand(value: float, old: float, ret: float, loss: float, gradient: float) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    got, metrics = value_loss(
        values=values,
        old_values=torch.tensor([old], dtype=torch.float64),
        returns=torch.tensor([ret], dtype=torch.float64),
        weights=torch.ones(1),
        value_clip=0.2,
    )
    assert got.item() == pytest.approx(loss)
    assert torch.autograd.grad(got, values)[0].item() == pytest.approx(gradient)
    assert metrics["critic/clip_share"] == (gradient == 0)


def test_value_loss_weighs_tokens() -> None:
    values = torch.tensor([1.0, 3.0], requires_grad=True)
    loss, _ = value_loss(
        values=values,
        old_values=values.detach(),
        returns=torch.zeros(2),
        weights=torch.tensor([0.75, 0.25]),
        value_clip=0.2,
    )
    assert loss.item() == (0.75 * 1 + 0.25 * 9) / 2
    assert torch.autograd.grad(loss, values)[0].tolist() == [0.75, 0.75]


def test_kl_loss_worked_by_hand() -> None:
    # p = .5, q = .25: .5 - 1 + log 2, gradient 1 - .5; p = .25, q = .5: 2 - 1 - log 2, gradient 1 - 2
    logprobs = torch.tensor([0.5, 0.25], dtype=torch.float64).log().requires_grad_()
    weights = torch.tensor([0.25, 0.75], dtype=torch.float64)
    loss, metrics = kl_loss(logprobs=logprobs, ref_logprobs=logprobs.detach().flip(0), weights=weights)
    assert loss.item() == metrics["policy/kl_loss"]
    assert loss.item() == pytest.approx(0.25 * (math.log(2) - 0.5) + 0.75 * (1 - math.log(2)))
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([0.25 * 0.5, -0.75])


def test_a_value_loss_without_a_clip_is_the_plain_squared_error() -> None:
    values = torch.tensor([1.0, -3.0])
    old = torch.tensor([0.0, 0.0])
    returns = torch.tensor([2.0, 1.0])
    weights = torch.tensor([0.25, 0.75])
    given = {"values": values, "old_values": old, "returns": returns, "weights": weights}
    loss, metrics = value_loss(**given, value_clip=math.inf)
    assert loss.item() == pytest.approx((0.25 * 1 + 0.75 * 16) / 2)
    assert metrics["critic/clip_share"] == 0
    assert value_loss(**given, value_clip=0.2)[0].item() > loss.item()
