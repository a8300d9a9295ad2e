"""What a learner writes and sends of models with buffers and experts, on real ZeRO-3."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_runs import SharedGroup, learner_spec, sent_weights, train_batch
from models import random_model
from safetensors.torch import load_file

from actors.learner.export import EXPORT_FILE
from actors.learner.full_weights import get_buffers
from actors.learner.learner import LearnerGroup, LearnerWorker
from t2g.config import LoRAConfig, ObjectiveConfig
from t2g.types import Rollout

LORA = {"lora": LoRAConfig(r=4, alpha=12), "sync_adapters": False}
OBJECTIVE = ObjectiveConfig(advantages="group")
CASES = {
    "gemma4_text": ("gemma4_text", {}),
    "glm4_moe": ("glm4_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "glm4_moe lora": ("glm4_moe", LORA),
}


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, random_model(tmp_path_factory.mktemp("model"), CASES[request.param][0])


@pytest.fixture(scope="module")
def group(model: tuple[str, Path], cluster: None) -> Iterator[LearnerGroup]:
    case, folder = model
    group = SharedGroup(learner_spec(folder, OBJECTIVE, **CASES[case][1]))
    yield group
    group.close()


def test_an_export_has_the_names_of_its_source_and_the_learners_logprobs(
    group: LearnerGroup, model: tuple[str, Path], rollouts: list[Rollout], tmp_path: Path
) -> None:
    group.update(train_batch(group, rollouts))
    group.export(tmp_path / "policy")
    before, after = (load_file(folder / "model.safetensors") for folder in (model[1], tmp_path / "policy"))
    assert after.keys() == before.keys()
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    experts = {name for name in after if ".experts." in name}
    assert moved
    assert (moved >= experts) == (group.spec.learner.lora is None)
    assert not [name for name in moved if "layer_scalar" in name or "e_score" in name]
    gap = json.loads((tmp_path / "policy" / EXPORT_FILE).read_text())["probe_gap"]
    assert gap["largest"] < 1e-4


@pytest.mark.parametrize("universal", [False, True])
def test_a_checkpoint_brings_buffers_back(group: LearnerGroup, universal: bool, tmp_path: Path) -> None:
    worker = policy_rank(group)
    buffers = get_buffers(worker.models["policy"].engine.module)
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    group.save(tmp_path)
    if universal:
        worker.convert("policy", tmp_path)
    for buffer in buffers.values():
        buffer += 1
    worker.load("policy", tmp_path, universal)
    assert all(torch.equal(buffer, before[name]) for name, buffer in buffers.items())


def policy_rank(group: LearnerGroup) -> LearnerWorker:
    return group.models["policy"].workers[0].worker


def test_names_of_the_files_are_sent_buffers_included(group: LearnerGroup, model: tuple[str, Path]) -> None:
    stored = load_file(model[1] / "model.safetensors")
    sent = sent_weights(group)
    assert sent.keys() == stored.keys() == group.get_manifest().keys()
    assert {name: t.shape for name, t in sent.items()} == {name: tuple(t.shape) for name, t in stored.items()}
    for name in get_buffers(policy_rank(group).models["policy"].engine.module):
        np.testing.assert_array_equal(sent[name], stored[name])
