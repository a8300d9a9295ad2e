import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.algo.corrections import importance_weights
from t2g.algo.losses import KL_RATIO_CAP, kl_loss, policy_loss, value_loss, weighted_sum


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
        "sequence_ids": torch.zeros(n, dtype=torch.long),
        "clip_eps": 0.2,
        "clip_eps_high": 0.2,
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


@pytest.mark.parametrize(
    ("rho", "advantage", "loss", "gradient"),
    [
        (1.25, 1.0, -1.25, -1.25),  # above 1 + eps, below 1 + eps_high
        (1.4, 1.0, -1.28, 0.0),
        (0.75, -1.0, 0.8, 0.0),  # eps stays the bound from below
        (0.75, 1.0, -0.75, -0.75),
    ],
)
def test_a_higher_upper_clip(rho: float, advantage: float, loss: float, gradient: float) -> None:
    got_loss, got_gradient, _ = policy([rho], [advantage], clip_eps_high=0.28)
    assert got_loss.item() == pytest.approx(loss)
    assert got_gradient.item() == pytest.approx(gradient)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    # -min(rho, 1.2) A log p at log p = -1 + log rho; the gradient is -min(rho, 1.2) A / 3
    rho = [1.5, 0.1, 1.0]
    gains = [2.0, -1.0, 1.0]
    loss, gradient, metrics = policy(rho, gains, surrogate="cispo")
    bounded = [1.2, 0.1, 1.0]
    terms = [-w * a * (-1 + math.log(r)) for w, a, r in zip(bounded, gains, rho, strict=True)]
    assert loss.item() == pytest.approx(sum(terms) / 3)
    assert gradient.tolist() == pytest.approx([-2.4 / 3, 0.1 / 3, -1 / 3])
    assert metrics["policy/clip_share"] == pytest.approx(1 / 3)


def test_gspo_clips_whole_responses() -> None:
    """Two responses of two tokens: ratios 1.5 and 1 / 1.5, geometric mean 1, and 1.5 twice."""
    ids = torch.tensor([0, 0, 1, 1])
    loss, gradient, metrics = policy([1.5, 1 / 1.5, 1.5, 1.5], [1.0] * 4, surrogate="gspo", sequence_ids=ids)
    assert loss.item() == pytest.approx(-(1 + 1 + 1.2 + 1.2) / 4)
    assert gradient.tolist() == pytest.approx([-0.25, -0.25, 0, 0])
    assert metrics["policy/clip_share"] == 0.5
    assert metrics["policy/ratio_max"] == pytest.approx(1.5)


def test_a_token_without_a_weight_is_no_part_of_its_response_s_ratio() -> None:
    ids = torch.tensor([0, 0])
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64)
    loss, gradient, _ = policy([1.1, 7.0], [1.0, 1.0], surrogate="gspo", sequence_ids=ids, weights=weights)
    assert loss.item() == pytest.approx(-1.1)
    assert gradient.tolist() == pytest.approx([-1.1, 0.0])


def test_policy_metrics() -> None:
    _, _, metrics = policy([1.0, 1.5, 0.5, 1.1], [1.0, 0.0, -1.0, 1.0])
    assert metrics["policy/clip_share"] == 0.25  # of 1.5 and .5, which are outside, the first has no advantage
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
    assert metrics["policy/clip_share"] == 0  # 1.5 is outside, and a negative advantage is not clipped there


@pytest.mark.parametrize("surrogate", ["ppo", "gspo"])
@pytest.mark.parametrize("rho", [0.5, 0.9, 1.1, 1.5])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_clipped_tokens_are_those_without_a_gradient(surrogate: str, rho: float, advantage: float) -> None:
    _, gradient, metrics = policy([rho], [advantage], surrogate=surrogate, sequence_ids=torch.tensor([0]))
    assert metrics["policy/clip_share"] == (gradient.item() == 0)


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
    loss, _ = kl_loss(
        logprobs=logprobs, old_logprobs=bad - 1, ref_logprobs=bad, importance_weights=bad + 2, weights=weights
    )
    # p = e^-2 is that of the old policy, q = e^-1: k3 = e - 2, gradient log(p / q) = -1
    assert loss.item() == pytest.approx(math.e - 2)
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([-1.0, 0.0], rel=1e-12, abs=0)

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
        columns = {name: column[part] for name, column in fields.items()}
        sequence_ids = torch.zeros(len(columns["weights"]), dtype=torch.long)
        value, metrics = policy_loss(**columns, sequence_ids=sequence_ids, clip_eps=0.2, clip_eps_high=0.2)
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
    loss_value, metrics = value_loss(
        values=values,
        old_values=torch.tensor([old], dtype=torch.float64),
        returns=torch.tensor([ret], dtype=torch.float64),
        weights=torch.ones(1),
        value_clip=0.2,
    )
    assert loss_value.item() == pytest.approx(loss)
    assert torch.autograd.grad(loss_value, values)[0].item() == pytest.approx(gradient)
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


def kl_term(
    policy: torch.Tensor, old: torch.Tensor, reference: torch.Tensor, engine: torch.Tensor, *, cap: float = math.inf
) -> torch.Tensor:
    """Return the loss over every token of a vocabulary, each as often as the engine samples it; all [V] logprobs."""
    corrections = importance_weights(
        old, engine, torch.zeros(len(old), dtype=torch.long), torch.ones_like(old), "token", cap
    )
    loss, metrics = kl_loss(
        logprobs=policy, old_logprobs=old, ref_logprobs=reference, importance_weights=corrections, weights=engine.exp()
    )
    assert metrics["policy/kl_loss"] == loss.item()
    return loss


@pytest.mark.parametrize("update", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("engine_gap", [0.0, 0.5])
def test_the_kl_term_and_its_gradient_are_those_of_the_exact_kl(update: float, engine_gap: float) -> None:
    """Also after an update, and with an engine that samples from another policy than the learner's."""
    generator = torch.Generator().manual_seed(7)

    def draw() -> torch.Tensor:
        return torch.randn(6, generator=generator, dtype=torch.float64)

    old_logits = draw()
    reference = draw().log_softmax(-1)
    engine = (old_logits + engine_gap * draw()).log_softmax(-1)
    logits = (old_logits + update * draw()).requires_grad_()
    policy = logits.log_softmax(-1)
    old = old_logits.log_softmax(-1)
    assert (policy - old).exp().max() < KL_RATIO_CAP

    loss = kl_term(policy, old, reference, engine)
    exact = (policy.exp() * (policy - reference)).sum()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-12)
    gradient = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    expected = torch.autograd.grad(exact, logits)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def kl_of_token(policy: float, old: float, reference: float) -> tuple[float, float]:
    """Return loss and gradient of one token from its three logprobs."""
    logprobs = torch.tensor([policy], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    loss, _ = kl_loss(
        logprobs=logprobs,
        old_logprobs=one * old,
        ref_logprobs=one * reference,
        importance_weights=one,
        weights=one,
    )
    return loss.item(), torch.autograd.grad(loss, logprobs)[0].item()


def test_kl_loss_worked_by_hand() -> None:
    # old = q = .5, p = .25: rho = .5, k3 = 2 - 1 - log 2; gradient rho log(p / q) = -.5 log 2
    loss, gradient = kl_of_token(math.log(0.25), math.log(0.5), math.log(0.5))
    assert loss == pytest.approx(0.5 * (1 - math.log(2)))
    assert gradient == pytest.approx(-0.5 * math.log(2))


def test_a_suppressed_token_adds_a_bounded_amount_to_the_kl() -> None:
    # the policy was the reference, and its probability fell by e^9: k3 alone is e^9 - 10 = 8,093 with gradient -8,102
    loss, gradient = kl_of_token(-10.0, -1.0, -1.0)
    assert loss == pytest.approx(1 - 10 * math.exp(-9))
    assert gradient == pytest.approx(-9 * math.exp(-9))
    for fall in (1.0, 20.0, 60.0, 500.0):
        assert 0 <= kl_of_token(-1 - fall, -1.0, -1.0)[0] <= 1


def test_the_ratio_of_a_token_that_became_likelier_is_capped() -> None:
    # p / old = e^9, above the cap of 5: k3 = e^-9 - 1 + 9 has the weight 5, and the gradient that of 5 k3
    loss, gradient = kl_of_token(-1.0, -10.0, -10.0)
    assert loss == pytest.approx(5 * (math.exp(-9) + 8))
    assert gradient == pytest.approx(5 * (1 - math.exp(-9)))


def test_a_value_loss_without_a_clip_is_the_plain_squared_error() -> None:
    values = torch.tensor([1.0, -3.0])
    old = torch.tensor([0.0, 0.0])
    returns = torch.tensor([2.0, 1.0])
    weights = torch.tensor([0.25, 0.75])
    inputs = {"values": values, "old_values": old, "returns": returns, "weights": weights}
    loss, metrics = value_loss(**inputs, value_clip=math.inf)
    assert loss.item() == pytest.approx((0.25 * 1 + 0.75 * 16) / 2)
    assert metrics["critic/clip_share"] == 0
    assert value_loss(**inputs, value_clip=0.2)[0].item() > loss.item()
