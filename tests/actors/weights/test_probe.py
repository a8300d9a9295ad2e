"""What the probe tells apart: rounding, and weights that are wrong. Two forwards of one model in two kernels stand for
engine and learner; faults are planted in the engine's copy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.weights.probe import Gap, compute_gap, explain_refusal, is_stuck, make_probe_ids

IDS = make_probe_ids([], 300, 64)
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=["float32", "bfloat16"])


def model(kernel: str, dtype: torch.dtype) -> Any:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=300, initializer_range=0.15, attn_implementation=kernel, **shape)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype).eval()


@torch.no_grad()
def scores(of: Any) -> np.ndarray:
    ids = torch.tensor(IDS, dtype=torch.long)
    logits = of(ids[None]).logits[0, :-1].float()
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].numpy()


@torch.no_grad()
def move(of: Any, step: float) -> None:
    """An update of every weight."""
    torch.manual_seed(7)
    for parameter in of.parameters():
        parameter += step * torch.randn_like(parameter) * parameter.abs().mean()


def wrong_tensor(engine: Any) -> None:
    engine.model.layers[1].mlp.up_proj.weight.data.copy_(engine.model.layers[2].mlp.up_proj.weight.data)


def wrong_layers(engine: Any) -> None:
    layers = engine.model.layers
    layers[1], layers[2] = layers[2], layers[1]


@DTYPES
@pytest.mark.parametrize("plant", [wrong_tensor, wrong_layers])
def test_rounding_passes_and_wrong_weights_do_not(dtype: torch.dtype, plant: Callable[[Any], None]) -> None:
    engine = model("eager", dtype)
    learner = model("sdpa", dtype)
    usual = compute_gap(scores(engine), scores(learner))
    assert 0 < usual.median <= usual.p95 <= usual.largest < TOLERANCES[dtype]
    for trained in (engine, learner):
        move(trained, 0.05)
    assert (
        explain_refusal(compute_gap(scores(engine), scores(learner)), tolerance=TOLERANCES[dtype], baseline_gap=usual)
        == ""
    )
    plant(engine)
    assert "nats, above" in explain_refusal(
        compute_gap(scores(engine), scores(learner)), tolerance=TOLERANCES[dtype], baseline_gap=usual
    )


@DTYPES
def test_an_engine_that_kept_its_old_weights_is_seen_where_the_gap_is_too_small(dtype: torch.dtype) -> None:
    engine = model("eager", dtype)
    learner = model("sdpa", dtype)
    before = scores(engine)
    expected = scores(learner)
    usual = compute_gap(before, expected)
    step = 1e-5 if dtype is torch.float32 else 0.006
    move(learner, step)
    moved = scores(learner)
    assert explain_refusal(compute_gap(before, moved), tolerance=TOLERANCES[dtype], baseline_gap=usual) == "", (
        "by its size alone"
    )
    assert is_stuck((before, scores(engine)), (expected, moved), usual)
    move(engine, step)
    assert not is_stuck((before, scores(engine)), (expected, moved), usual), "it has the new ones"
    assert not is_stuck((before, before), (expected, expected), usual), "nobody has moved"


def test_a_model_that_rounds_much_has_its_own_measure() -> None:
    """A mixture of experts: .4 at the most, where the floor is .25; but the median says that it is the same model."""
    gap = Gap(largest=0.9, p95=0.2, median=0.02)
    assert "largest" in explain_refusal(gap, tolerance=0.25, baseline_gap=None)
    assert explain_refusal(gap, tolerance=0.25, baseline_gap=Gap(largest=0.4, p95=0.1, median=0.01)) == ""
    shifted = Gap(largest=0.9, p95=0.5, median=0.1)
    assert "median" in explain_refusal(shifted, tolerance=0.25, baseline_gap=Gap(largest=0.4, p95=0.1, median=0.01))


def test_the_three_numbers_of_a_gap() -> None:
    gap = compute_gap(np.float32([-1, -2, -3]), np.float32([-1, -2.5, -3.25]))
    assert (gap.largest, gap.median) == (0.5, 0.25)
    assert gap.p95 == pytest.approx(0.475)
    for broken in ([-1, np.nan], [-1, -np.inf]):
        wrong = compute_gap(np.float32(broken), np.float32([-1, -2]))
        assert wrong.largest == wrong.median == np.inf
        assert explain_refusal(wrong, tolerance=9e9, baseline_gap=None)


def test_the_probe_is_made_of_prompts_and_filled_up() -> None:
    prompts = [np.arange(5, 9, dtype=np.int32), np.arange(20, 23, dtype=np.int32)]
    ids = make_probe_ids(prompts, 300, 64)
    assert ids[:7].tolist() == [5, 6, 7, 8, 20, 21, 22]
    assert ids.dtype == np.int32
    assert len(ids) == 64
    np.testing.assert_array_equal(ids, make_probe_ids(prompts, 300, 64))
    assert ids.min() >= 0
    assert ids.max() < 300
    assert len(set(ids.tolist())) > 40
    assert make_probe_ids(prompts, 300, 3).tolist() == [5, 6, 7]
