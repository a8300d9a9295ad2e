"""Adapters of one version until they are a file; engines that take it are in the integration tests."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from models import random_model
from safetensors.torch import load_file

from actors.weights.adapters import Adapters, engine_arguments
from actors.weights.buckets import Bucket, make_bucket
from t2g.config import LoRAConfig

LORA = LoRAConfig(r=2, alpha=6)
SHAPES = {"a.lora_A.weight": (2, 4), "a.lora_B.weight": (3, 2), "b.lora_A.weight": (2, 4)}


def bucket(index: int, *names: str) -> Bucket:
    rng = np.random.default_rng(index)
    tensors = [rng.integers(0, 2**16, SHAPES[name]).astype(np.uint16) for name in names]
    return make_bucket(index, names, tensors, full=False, started=0.0)


def version() -> Adapters:
    return Adapters(LORA, SHAPES, "bfloat16", 7)


def test_all_buckets_in_any_order_are_a_file_with_the_learners_bits(tmp_path: Path) -> None:
    adapters = version()
    first = bucket(0, *[*SHAPES][:2])
    second = bucket(1, "b.lora_A.weight")
    adapters.add(second)
    adapters.add(first)
    adapters.write(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    sent = dict(zip((*first.names, *second.names), (*first.tensors, *second.tensors), strict=True))
    assert {name: tensor.dtype for name, tensor in stored.items()} == dict.fromkeys(SHAPES, torch.bfloat16)
    assert all(np.array_equal(stored[name].view(torch.uint16).numpy(), sent[name]) for name in SHAPES)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 6)


def test_what_is_not_the_version_of_the_manifest_is_refused(tmp_path: Path) -> None:
    adapters = version()
    refused = r"^adapters of version 7 are refused: {} tensors are missing, or not in the manifest .*{}"
    adapters.add(bucket(0, "a.lora_A.weight"))
    with pytest.raises(ValueError, match=refused.format(2, r"\(a\.lora_B\.weight\)")):
        adapters.write(tmp_path)
    broken = bucket(2, "a.lora_B.weight", "b.lora_A.weight")
    broken.tensors[1][0, 0] ^= 1
    adapters.add(broken)
    with pytest.raises(ValueError, match=r"^xxh3 mismatch: bucket 2 of version 7 changed in transfer$"):
        adapters.write(tmp_path)
    adapters.add(make_bucket(3, ["c.lora_A.weight"], [np.zeros((1, 1), np.uint16)], full=False, started=0.0))
    with pytest.raises(ValueError, match=refused.format(1, r"\(c\.lora_A\.weight\)")):
        adapters.write(tmp_path)


@pytest.mark.parametrize(("r", "room"), [(1, 1), (4, 8), (16, 16), (65, 128), (512, 512), (600, 600)])
def test_an_engine_has_room_for_the_rank_and_none_on_the_head(tmp_path: Path, r: int, room: int) -> None:
    arguments = engine_arguments(LoRAConfig(r=r), str(random_model(tmp_path)), None)
    layers = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (arguments["max_lora_rank"], arguments["lora_target_modules"]) == (room, layers)
