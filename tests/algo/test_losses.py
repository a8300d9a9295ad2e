import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.algo.losses import policy_loss, value_loss


def policy(rho: list[float], gains: list[float], **changes: object) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Loss, gradient with respect to logprobs, metrics; old = rollout = -1 and every token counts unless changed."""
    n = len(rho)
    logprobs = torch.tensor([-1.0 + math.log(x) for x in rho], dtype=torch.float64, requires_grad=True)
    arguments = {
        "logprobs": logprobs,
        "old_logprobs": torch.full((n,), -1.0, dtype=torch.float64),
        "rollout_logprobs": torch.full((n,), -1.0, dtype=torch.float64),
        "advantages": torch.tensor(gains, dtype=torch.float64),
        "mask": torch.ones(n),
        "num_tokens": n,
        "clip_eps": 0.2,
        "importance_cap": 2.0,
    } | changes
    loss, metrics = policy_loss(**arguments)
    (gradient,) = torch.autograd.grad(loss, logprobs)
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
    # exp(old - rollout) = exp(-1 + 1.5) = 1.6487; exp(-1 + 3) = 7.4, capped at 2; exp(-1 + .5) = .6065
    rollout = torch.tensor([-1.5, -3.0, -0.5], dtype=torch.float64)
    loss, gradient, _ = policy([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], rollout_logprobs=rollout)
    weights = [math.exp(0.5), 2.0, math.exp(-0.5)]
    assert loss.item() == pytest.approx(-sum(weights) / 3)
    torch.testing.assert_close(gradient, -torch.tensor(weights, dtype=torch.float64) / 3)


def test_a_huge_log_ratio_stays_finite() -> None:
    loss, gradient, _ = policy([1.0], [-1.0], old_logprobs=torch.tensor([-2000.0], dtype=torch.float64))
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_masked_token_has_exactly_no_gradient(poison: float) -> None:
    bad = torch.tensor([-1.0, poison], dtype=torch.float64)
    mask = torch.tensor([1.0, 0.0])
    loss, gradient, metrics = policy(
        [1.0, 1.3], [2.0, 1.0], mask=mask, num_tokens=1, advantages=bad, old_logprobs=bad, rollout_logprobs=bad
    )
    assert loss.item() == 1.0
    assert gradient.tolist() == [1.0, 0.0]
    assert metrics["policy/ratio_max"] == 1.0

    values = torch.tensor([0.5, 0.25], requires_grad=True)
    loss, _ = value_loss(values=values, old_values=bad, returns=bad, mask=mask, num_tokens=1, value_clip=5.0)
    assert torch.autograd.grad(loss, values)[0].tolist() == [1.5, 0.0]


@settings(max_examples=30)
@given(cut=st.integers(1, 5), seed=st.integers(0, 1000))
def test_shares_of_microbatches_add_up(cut: int, seed: int) -> None:
    """The point of the global denominator: one microbatch of six tokens = two of any cut."""
    generator = torch.Generator().manual_seed(seed)
    fields = {
        name: torch.randn(6, generator=generator, dtype=torch.float64)
        for name in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
    } | {"mask": torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])}

    def loss(part: slice) -> tuple[float, dict[str, float]]:
        value, metrics = policy_loss(
            **{k: v[part] for k, v in fields.items()}, num_tokens=4, clip_eps=0.2, importance_cap=2.0
        )
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
        mask=torch.ones(1),
        num_tokens=1,
        value_clip=0.2,
    )
    assert got.item() == pytest.approx(loss)
    assert torch.autograd.grad(got, values)[0].item() == pytest.approx(gradient)
    assert metrics["critic/clip_share"] == (gradient == 0)
