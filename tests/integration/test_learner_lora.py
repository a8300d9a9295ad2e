"""A learner with adapters and without a critic, on real Ray and ZeRO-3: one model, which is its own reference."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_runs import (
    TEMPERATURE,
    SharedGroup,
    learner_spec,
    saved_state,
    sent_weights,
    train_batch,
)
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.learner.full_weights import FullWeights, get_shapes
from actors.learner.learner import LearnerGroup
from actors.learner.trainers import load_policy
from t2g.algo.logprobs import Rows
from t2g.config import LoRAConfig, ObjectiveConfig
from t2g.data.batching import plan_microbatches
from t2g.types import Rollout, TrainBatch

SCALING = 3.0  # alpha / r
KL_COEF = 0.3
CAP = 1.5
OBJECTIVE = ObjectiveConfig(
    advantages="group", kl_estimator="full", entropy_coef=0.1, loss_aggregation="sequence",
    rollout_correction="sequence", rollout_correction_cap=CAP,
)  # fmt: skip
CHANGES: dict[str, Any] = {
    "lora": LoRAConfig(r=4, alpha=4 * SCALING),
    "sync_adapters": False,
    "gradient_checkpointing": True,
    "num_epochs": 1,
    "minibatches_per_epoch": 1,
    "tokens_per_microbatch": 40,
}


@pytest.fixture(scope="module")
def group(base: Path, cluster: None) -> Iterator[LearnerGroup]:
    group = SharedGroup(learner_spec(base, OBJECTIVE, **CHANGES))
    yield group
    group.close()


@pytest.fixture(scope="module")
def trained(group: LearnerGroup, rollouts: list[Rollout], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported policy after two updates."""
    for _ in range(2):
        group.update(train_batch(group, rollouts, kl_coef=KL_COEF))
    folder = tmp_path_factory.mktemp("trained") / "policy"
    group.export(folder)
    return folder


def adapter_of(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A [r, in] and B [out, r] by the checkpoint's name of the weight that they are added to."""
    file = load_file(folder / "adapter" / "adapter_model.safetensors")
    modules = sorted({name.removeprefix("base_model.model.").split(".lora_")[0] for name in file})
    factors = {}
    for module in modules:
        prefix = f"base_model.model.{module}"
        factors[f"{module}.weight"] = (file[f"{prefix}.lora_A.weight"], file[f"{prefix}.lora_B.weight"])
    return factors


def plain_logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[L - 1, V]: row t is about ids[t + 1]."""
    return (model(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)


def objective_by_hand(model: Any, reference: Any, batch: TrainBatch) -> torch.Tensor:
    """The whole loss of the only minibatch, one sequence after the other."""
    (minibatch,) = batch.minibatches
    counted = [(s, torch.from_numpy(s.weights).bool()) for s in minibatch if s.weights.any()]
    losses = []
    for sample, keep in counted:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
        response = slice(len(sample.prompt_ids) - 1, None)
        logprobs = plain_logprobs(model, ids)[response]
        with torch.no_grad():
            ref_logprobs = plain_logprobs(reference, ids)[response]
        taken = logprobs.gather(-1, torch.from_numpy(sample.response_ids).long()[:, None])[:, 0]
        old = torch.tensor(sample.old_logprobs)
        rollout = torch.tensor(sample.rollout_logprobs)
        importance = min(math.exp(float((old - rollout)[keep].sum())), CAP)
        gain = importance * (taken - old).exp() * torch.from_numpy(sample.advantages)  # nothing is clipped at ratio 1
        kl = (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        losses.append((-gain + KL_COEF * kl - OBJECTIVE.entropy_coef * entropy)[keep].mean())
    return torch.stack(losses).mean()


def test_there_is_no_critic_and_the_policy_moves_at_once(group: LearnerGroup, rollouts: list[Rollout]) -> None:
    """critic_warmup_steps is 1 here, and nobody warms up."""
    assert group.models.keys() == {"policy"}
    assert all(
        s.values.tolist() == [0] * len(r.response_ids) for s, r in zip(group.forward(rollouts), rollouts, strict=True)
    )
    metrics = group.update(train_batch(group, rollouts, kl_coef=KL_COEF)).metrics
    assert metrics["policy/grad_norm"] > 0
    assert metrics["policy/kl_loss"] == pytest.approx(0, abs=1e-7)  # B starts at 0
    assert not [name for name in metrics if name.startswith("critic/")]


def test_the_reference_is_the_base_to_the_bit(
    group: LearnerGroup, trained: Path, rollouts: list[Rollout], base: Path
) -> None:
    """A second copy that never trained, given the same rows: the reference of a full fine-tuning."""
    _, frozen, _ = load_policy(learner_spec(base), on_gpu=False)
    stats = group.forward(rollouts, ["old_logprobs", "ref_logprobs"])
    for members in plan_microbatches(rollouts, num_ranks=1, token_budget=group.spec.learner.tokens_per_microbatch)[0]:
        rows = Rows([rollouts[i] for i in members], torch.device("cpu"))
        with torch.no_grad():
            expected = rows.token_outputs(frozen, TEMPERATURE).logprobs.numpy()
        ends = np.cumsum([len(rollouts[i].response_ids) for i in members])
        for i, mine in zip(members, np.split(expected, ends[:-1]), strict=True):
            np.testing.assert_array_equal(stats[i].ref_logprobs, mine)
    assert max(np.abs(s.old_logprobs - s.ref_logprobs).max(initial=0) for s in stats) > 1e-3
    group.update(train_batch(group, rollouts, kl_coef=KL_COEF))
    for before, after in zip(stats, group.forward(rollouts), strict=True):
        np.testing.assert_array_equal(before.ref_logprobs, after.ref_logprobs)


def test_frozen_weights_never_move_and_the_others_are_merged_as_peft_does(
    group: LearnerGroup, trained: Path, base: Path, tmp_path: Path
) -> None:
    group.export(tmp_path / "policy")
    sent = {name: torch.from_numpy(weight) for name, weight in sent_weights(group).items()}
    merged = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "policy" / "adapter"
    ).merge_and_unload()
    expected = dict(merged.named_parameters())
    start = load_file(base / "model.safetensors")
    exported = load_file(tmp_path / "policy" / "model.safetensors")
    adapted = adapter_of(tmp_path / "policy")
    assert len(adapted) == 2 * 7
    assert sent.keys() == expected.keys() == start.keys() == exported.keys()
    assert [*group.get_manifest().items()] == [(name, w.shape) for name, w in sent.items()]
    engine = group.models["policy"].workers[0].worker.models["policy"].engine
    factors = {n: t.clone() for b in FullWeights(engine, adapters=True).buckets(2**12, "float32") for n, t in b}
    alone = load_file(tmp_path / "policy" / "adapter" / "adapter_model.safetensors")
    assert factors.keys() == alone.keys() == get_shapes(engine, adapters=True).keys()
    assert all(torch.equal(factors[name], weight) for name, weight in alone.items())
    for name, weight in sent.items():
        assert torch.equal(weight, exported[name])
        torch.testing.assert_close(weight, expected[name].detach(), atol=1e-6, rtol=0)
        assert torch.equal(weight, start[name]) == (name not in adapted), name


def test_the_merged_weights_compute_what_the_probe_says(group: LearnerGroup, trained: Path, tmp_path: Path) -> None:
    """An engine is given the merged weights; the learner answers with its adapters beside them."""
    group.export(tmp_path / "policy")
    assert (tmp_path / "policy" / "adapter" / "tokenizer.json").is_file()  # an adapter alone can be evaluated
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    ids = np.arange(64)
    with torch.no_grad():
        logprobs = model(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, torch.from_numpy(ids[1:, None]))[:, 0].numpy()
    np.testing.assert_allclose(group.compute_probe_logprobs(ids), expected, rtol=1e-5, atol=1e-5)


def test_the_gradient_is_that_of_the_objective_written_out(
    group: LearnerGroup, trained: Path, rollouts: list[Rollout], base: Path, tmp_path: Path
) -> None:
    """With W = W0 + s B A: dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW."""
    group.export(tmp_path / "policy")
    model, reference = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (tmp_path / "policy", base)
    )
    batch = train_batch(group, rollouts, kl_coef=KL_COEF)
    metrics = group.update(batch).metrics
    objective_by_hand(model, reference, batch).backward()
    weights = dict(model.named_parameters())
    squares = 0.0
    for name, (a, b) in adapter_of(tmp_path / "policy").items():
        gradient = weights[name].grad
        squares += float((SCALING * gradient @ a.T).square().sum() + (SCALING * b.T @ gradient).square().sum())
    assert metrics["policy/grad_norm"] == pytest.approx(math.sqrt(squares), rel=1e-4)
    assert metrics["policy/kl_loss"] > 1e-4


def test_a_restored_learner_makes_the_same_next_update(
    group: LearnerGroup, trained: Path, rollouts: list[Rollout], tmp_path: Path
) -> None:
    group.save(tmp_path)
    (states,) = (tmp_path / "policy").glob("*model_states.pt")
    saved = torch.load(states, weights_only=False)["module"]
    assert len(saved) == 2 * 2 * 7
    assert all(".lora_" in name for name in saved)
    batch = train_batch(group, rollouts, seed=7, kl_coef=KL_COEF)
    first = group.update(batch)
    after = sent_weights(group)
    group.update(batch)
    group.load(tmp_path)
    second = group.update(batch)
    again = sent_weights(group)
    timing = {"learner/tokens_per_s": 0.0, "learner/peak_memory_gib": 0.0}
    assert second.policy_version == first.policy_version
    assert second.metrics | timing == first.metrics | timing
    assert all(np.array_equal(after[name], again[name]) for name in after)


def test_two_ranks_go_on_from_one(
    group: LearnerGroup, trained: Path, rollouts: list[Rollout], base: Path, hosts: list[Any], tmp_path: Path
) -> None:
    """The adapters and their moments are converted; the frozen weights come from the base."""
    group.save(tmp_path)
    two = SharedGroup(learner_spec(base, OBJECTIVE, **CHANGES, workers=2), hosts)
    try:
        two.load(tmp_path)
        (tmp_path / "again").mkdir()
        two.save(tmp_path / "again")
        (step, before), (step_again, after) = (saved_state(f, "policy") for f in (tmp_path, tmp_path / "again"))
        assert step == step_again >= 2
        assert len(before) == len(after) == 3 * 2 * 2 * 7
        assert all(torch.equal(after[key], value) for key, value in before.items())
        batch = train_batch(group, rollouts, seed=7, kl_coef=KL_COEF)
        expected = group.update(batch).metrics
        result = two.update(batch).metrics
        assert result["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=1e-5)
        moved = sent_weights(two)
        for key, value in sent_weights(group).items():
            assert np.linalg.norm(moved[key] - value) < 1e-5 * np.linalg.norm(value), key
    finally:
        two.close()
