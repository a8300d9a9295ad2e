"""A written model folder, read back: names, logprobs, generation config."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import random_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from actors.learner.export import EXPORT_FILE, GENERATION_FILE, check_folder, default_probe, score, write_model
from actors.learner.full_weights import get_buffers, to_file_layout
from actors.learner.models import load_for_training
from actors.weights.buckets import group_by_module
from t2g.config import ModelConfig
from t2g.errors import RunStopped

Weights = dict[str, torch.Tensor]
INVALID = {"temperature": 0.9, "top_p": 0.6, "eos_token_id": 2, "transformers_version": "4.28.1"}  # of Vicuna 7B
FROM_CONFIG = {"temperature": 0.9, "top_p": 0.6}


def load(folder: Path) -> tuple[Any, Any]:
    tokenizer, (model,) = load_for_training(
        ModelConfig(policy=str(folder)), "AutoModelForCausalLM", dtype="float32", on_gpu=False
    )
    return model.eval(), tokenizer


def write(source: Path, folder: Path) -> Any:
    model, tokenizer = load(source)
    write_model(model, tokenizer, load_file(source / "model.safetensors"), folder, ModelConfig(policy=str(source)))
    return model


def check(model: Any, folder: Path) -> Any:
    ids = default_probe(model)
    return check_folder(folder, ids, score(model, ids), like=model, dtype="float32", tolerance=1e-3)


def test_a_whole_folder_has_the_gap_of_its_probe(tmp_path: Path) -> None:
    model = write(random_model(tmp_path / "base"), tmp_path / "policy")
    gap = check(model, tmp_path / "policy")
    assert gap.largest < 1e-5
    written = json.loads((tmp_path / "policy" / EXPORT_FILE).read_text())
    assert written == {"probe_gap": vars(gap), "probe_tokens": 64}


def drop(weights: Weights) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]


def add(weights: Weights) -> None:
    weights["model.layers.1.mlp.base_layer.weight"] = torch.zeros(1)


def scale(weights: Weights) -> None:
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.5


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (drop, r"lacks 1 weights: model\.layers\.1\.mlp\.up_proj\.weight$"),
        (add, r"has unexpected 1 weights: model\.layers\.1\.mlp\.base_layer\.weight$"),
        (scale, r"is not the trained one: the median difference of 63 logprobs is 0\.\d+ nats, above 0\.0003; in PPO,"),
    ],
)
def test_a_folder_that_is_not_the_model_is_refused_and_removed(
    damage: Callable[[Weights], None], sentence: str, tmp_path: Path
) -> None:
    model = write(random_model(tmp_path / "base"), tmp_path / "policy")
    file = tmp_path / "policy" / "model.safetensors"
    weights = load_file(file)
    damage(weights)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(RunStopped, match=sentence):
        check(model, tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


@pytest.mark.parametrize(
    ("architecture", "buffer"),
    [
        ("gemma4_text", "model.layers.1.layer_scalar"),
        ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ],
)
def test_a_lost_buffer_is_refused(architecture: str, buffer: str, tmp_path: Path) -> None:
    random_model(tmp_path / "base", architecture)
    model = write(tmp_path / "base", tmp_path / "policy")
    assert buffer in get_buffers(model)
    file = tmp_path / "policy" / "model.safetensors"
    weights = load_file(file)
    del weights[buffer]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(RunStopped, match=f"lacks 1 weights: {buffer}"):
        check(model, tmp_path / "policy")


@pytest.mark.parametrize("architecture", ["llama", "gemma4_text", "qwen3_moe", "glm4_moe"])
def test_names_and_layout_of_a_model_are_those_of_its_files(architecture: str, tmp_path: Path) -> None:
    """transformers keeps experts in one tensor, where the files have a tensor for each."""
    model, _ = load(random_model(tmp_path, architecture))
    stored = load_file(tmp_path / "model.safetensors")
    weights = {name: weight.detach() for name, weight in model.named_parameters()} | get_buffers(model)
    exported: Weights = {}
    for names in group_by_module(weights):
        exported |= to_file_layout(model, {name: weights[name] for name in names})
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in stored)


def test_an_invalid_generation_config_is_copied_unchanged(tmp_path: Path) -> None:
    """As Vicuna's: temperature and top_p without do_sample."""
    base = random_model(tmp_path / "base")
    (base / GENERATION_FILE).write_text(json.dumps(INVALID))
    write(base, tmp_path / "policy")
    assert (tmp_path / "policy" / GENERATION_FILE).read_bytes() == (base / GENERATION_FILE).read_bytes()


def test_an_invalid_generation_config_in_the_models_config_is_written(tmp_path: Path) -> None:
    base = random_model(tmp_path / "base")
    (base / GENERATION_FILE).unlink()
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | FROM_CONFIG))
    model = write(base, tmp_path / "policy")
    written = json.loads((tmp_path / "policy" / GENERATION_FILE).read_text())
    assert written.items() >= FROM_CONFIG.items()
    assert model.generation_config.temperature == FROM_CONFIG["temperature"]
    assert np.isfinite(score(AutoModelForCausalLM.from_pretrained(tmp_path / "policy"), default_probe(model))).all()
