import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from t2g.algo.corrections import importance_metrics, importance_weights
from t2g.config.learning import RolloutCorrection

MODES: list[RolloutCorrection] = ["token", "sequence", "masked", "none"]


def weights_of(
    ratios: list[float],
    mode: RolloutCorrection,
    cap: float = 2.0,
    sequences: list[int] | None = None,
    **changes: object,
) -> list[float]:
    """Return the weights of tokens with these ratios; by default all are in one response."""
    old = torch.tensor(ratios, dtype=torch.float64).log()
    arguments = {
        "old_logprobs": old,
        "rollout_logprobs": torch.zeros_like(old),
        "sequence_ids": torch.tensor(sequences or [0] * len(ratios)),
        "weights": torch.ones(len(ratios)),
    } | changes
    return importance_weights(**arguments, mode=mode, cap=cap).tolist()  # type: ignore[arg-type]


def test_modes_worked_by_hand() -> None:
    ratios = [4.0, 0.25, 1.0, 3.0, 1.5]
    sequences = [0, 0, 0, 1, 1]
    assert weights_of(ratios, "token", sequences=sequences) == pytest.approx([2, 0.25, 1, 2, 1.5])
    assert weights_of(ratios, "sequence", sequences=sequences) == pytest.approx([1, 1, 1, 2, 2])  # 1, and 4.5 cut to 2
    assert weights_of(ratios, "masked", sequences=sequences) == pytest.approx([0, 0, 1, 0, 1.5])
    assert weights_of(ratios, "none", sequences=sequences) == [1] * 5


EDGE = math.log(2)  # in float64 exp gives 2 and .5 exactly


@pytest.mark.parametrize(
    ("mode", "log_ratio", "weight"),
    [
        ("token", EDGE, 2.0),
        ("token", EDGE + 1e-12, 2.0),
        ("token", EDGE - 1e-6, 2 * math.exp(-1e-6)),
        ("token", -9.0, math.exp(-9)),  # not bounded below
        ("masked", EDGE, 2.0),  # the bounds belong to what is kept
        ("masked", EDGE + 1e-12, 0.0),
        ("masked", -EDGE, 0.5),
        ("masked", -EDGE - 1e-12, 0.0),
        ("sequence", EDGE / 2, 2.0),  # of two such tokens
        ("sequence", EDGE / 2 + 1e-12, 2.0),
        ("sequence", EDGE / 2 - 1e-6, 2 * math.exp(-2e-6)),
    ],
)
def test_the_bound_holds_exactly_at_its_edge(mode: RolloutCorrection, log_ratio: float, weight: float) -> None:
    old = torch.full((2,), log_ratio, dtype=torch.float64)
    weights = weights_of([1.0, 1.0], mode, old_logprobs=old)
    assert weights == pytest.approx([weight] * 2, rel=1e-14, abs=0)
    assert max(weights) <= 2.0


def test_a_cap_of_one_masks_all_but_agreement() -> None:
    assert weights_of([1.0, 1.0001, 0.9999], "masked", cap=1.0) == [1, 0, 0]
    assert weights_of([1.0, 1.0001, 0.5], "token", cap=1.0) == pytest.approx([1, 1, 0.5])


@given(
    log_ratios=st.lists(st.floats(-30, 30), min_size=1, max_size=8),
    cap=st.floats(1, 10),
    mode=st.sampled_from(MODES),
    data=st.data(),
)
def test_weights_equal_a_loop_and_never_pass_the_cap(
    log_ratios: list[float], cap: float, mode: RolloutCorrection, data: st.DataObject
) -> None:
    n = len(log_ratios)
    sequences = sorted(data.draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n)))
    counted = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    weights = weights_of(
        [1.0] * n,
        mode,
        cap,
        sequences,
        old_logprobs=torch.tensor(log_ratios, dtype=torch.float64),
        weights=torch.tensor(counted).double() / 7,
    )

    def bounded_exp(x: float) -> float:
        return math.exp(min(max(x, -20.0), 20.0))

    for t in range(n):
        one = bounded_exp(log_ratios[t])
        whole = bounded_exp(sum(log_ratios[k] for k in range(n) if sequences[k] == sequences[t] and counted[k]))
        masked = one if 1 / cap <= one <= cap else 0.0
        expected = {"token": min(one, cap), "sequence": min(whole, cap), "masked": masked, "none": 1.0}[mode]
        assert weights[t] == pytest.approx(expected if counted[t] else 0.0, rel=1e-9)
        assert weights[t] <= cap


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_token_that_does_not_count_spoils_no_other(mode: RolloutCorrection, poison: float) -> None:
    old = torch.tensor([0.5, poison, 0.125], requires_grad=True)
    weights = importance_weights(old, torch.zeros(3), torch.zeros(3).long(), torch.tensor([0.5, 0.0, 0.5]), mode, 3.0)
    one, two = {"sequence": (math.exp(0.625),) * 2, "none": (1, 1)}.get(mode, (math.exp(0.5), math.exp(0.125)))
    assert weights.tolist() == pytest.approx([one, 0, two])
    assert not weights.requires_grad


RATIOS = [1.0, 1.05, 1.2, 0.4, 4.0]


@pytest.mark.parametrize(
    ("mode", "changed"),
    [
        ("token", 1 / 5),  # 4
        ("masked", 2 / 5),  # 4 and .4
        ("sequence", 2 / 5),  # .4 * 4 = 1.6 is within; sequences below: {1, 1.05, 1.2} and {.4, 4}
        ("none", 0.0),
    ],
)
def test_metrics_are_of_the_ratios_and_of_what_the_bound_changed(mode: RolloutCorrection, changed: float) -> None:
    sequences = torch.tensor([0, 0, 0, 1, 1])
    cap = 1.5 if mode == "sequence" else 2.0
    metrics = importance_metrics(torch.tensor(RATIOS).log(), torch.zeros(5), sequences, mode, cap)
    assert metrics["importance/mean"] == pytest.approx(sum(RATIOS) / 5)
    assert metrics["importance/outside_share"] == pytest.approx(3 / 5)
    assert metrics["importance/p95"] == pytest.approx(1.2 + 0.8 * 2.8)  # 95 % of the way along 5 sorted: rank 3.8
    assert metrics["importance/truncated_share"] == pytest.approx(changed)


def test_a_step_may_have_more_tokens_than_torchs_quantile_takes() -> None:
    old = torch.zeros(2**24 + 1)
    old[::10] = 1.0  # every tenth log-ratio, the first and the last too
    metrics = importance_metrics(old, old.new_zeros(1).expand(len(old)), torch.zeros(1).long(), "none", 2.0)
    assert metrics["importance/p95"] == pytest.approx(math.e)
    assert metrics["importance/mean"] == pytest.approx(0.9 + math.e / 10, rel=1e-6)
