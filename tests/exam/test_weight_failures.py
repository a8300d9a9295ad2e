"""Exam of silent failures: weights that do not reach the engines, or reach them wrong."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exam_engines import SyncedPair

from actors.weights.gpu_time_sharing import FleetGpuTimeSharing
from t2g.errors import RunStopped

Tensors = dict[str, torch.Tensor]
LARGE = 0.02  # a step of the weights that the size of the gap shows
SMALL = 3e-6  # one that it does not
FIRST = "model.layers.0.mlp.up_proj.weight"
SECOND = "model.layers.1.mlp.up_proj.weight"
NOTHING_LOADED = (
    r"w0 (has other logprobs than the learner|did not apply the new weights: .* bitwise those of version 0)"
)


def load_nothing(tensors: Tensors) -> Tensors:
    return {}


def lose_one(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != FIRST}


def swap_two(tensors: Tensors) -> Tensors:
    return tensors | {FIRST: tensors[SECOND], SECOND: tensors[FIRST]}


@pytest.mark.parametrize("with_adapters", [False, True])
def test_an_engine_with_every_weight_is_verified(with_adapters: bool, tmp_path: Path) -> None:
    pair = SyncedPair(tmp_path, with_adapters=with_adapters)
    for scale in (SMALL, LARGE):
        pair.learner.move(scale)
        assert pair.push().probe_gap < 1e-3
    assert pair.engine.version == pair.learner.policy_version == 2


@pytest.mark.parametrize("scale", [SMALL, LARGE])
def test_adapters_that_never_reach_the_engine_stop_the_run(scale: float, tmp_path: Path) -> None:
    pair = SyncedPair(tmp_path, with_adapters=True)
    pair.learner.move(scale)
    pair.engine.fault = load_nothing
    with pytest.raises(RunStopped, match=rf"no rollout worker got version 1 of the weights, .*{NOTHING_LOADED}"):
        pair.push()


def test_base_weights_in_place_of_adapters_are_refused_by_name(tmp_path: Path) -> None:
    pair = SyncedPair(tmp_path, with_adapters=True)
    pair.learner.move(LARGE)
    base = pair.learner.model.state_dict()
    pair.learner.sent = {name: tensor for name, tensor in base.items() if ".base_layer." in name}
    with pytest.raises(RunStopped, match=r"adapters of version 1 are refused: \d+ tensors are missing, or not in the"):
        pair.push()


@pytest.mark.parametrize("fault", [lose_one, swap_two])
def test_a_tensor_that_is_lost_or_swapped_stops_the_run(fault: Callable[..., Any], tmp_path: Path) -> None:
    pair = SyncedPair(tmp_path)
    pair.learner.move(LARGE)
    pair.engine.fault = fault
    with pytest.raises(RunStopped, match=r"w0 has other logprobs than the learner: .* nats, above"):
        pair.push()


@pytest.mark.parametrize("scale", [SMALL, LARGE])
def test_an_engine_that_wakes_with_stale_weights_stops_the_run(scale: float, tmp_path: Path) -> None:
    """The learner has the GPUs for an update, so that the engine sleeps before the push."""
    pair = SyncedPair(tmp_path)
    sharing = FleetGpuTimeSharing(pair.fleet, timeout_s=60)
    sharing.attach_learner(pair.learner, pair.sync.sending)

    async def update() -> None:
        await sharing.switch_to("learner")
        pair.learner.move(scale)
        await sharing.switch_to("engines")
        await pair.sync.push(pair.learner.policy_version)

    async def update_twice() -> None:
        await update()
        assert np.array_equal(pair.engine.model.state_dict()[FIRST], pair.learner.weights[FIRST])
        pair.engine.wakes_with_old_tensors = True
        await update()

    with pytest.raises(RunStopped, match=r"version 2 .*: w0 (has other logprobs|did not apply the new weights)"):
        asyncio.run(update_twice())
