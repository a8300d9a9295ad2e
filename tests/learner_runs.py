"""Learner groups and their batches for tests: random rollouts on random models, with every number a learner uses."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from actors.learner.learner import LearnerGroup
from actors.learner.parts import LearnerSpec
from t2g.config import LearnerConfig, ModelConfig, ObjectiveConfig, OptimConfig
from t2g.data.batching import make_train_batch
from t2g.types import Rollout, TrainBatch, TrainSample

VOCABULARY = 300
TEMPERATURE = 0.7
LEARNER = LearnerConfig(
    policy=OptimConfig(lr=1e-3, max_grad_norm=0.1, weight_decay=0.01),
    critic=OptimConfig(lr=2e-3),
    critic_warmup_steps=1,
    num_epochs=2,
    minibatches_per_epoch=2,
    tokens_per_microbatch=1000,
    cpus=0.25,
    memory_gib=0.25,
    sync_bucket_mib=0.1,
    step_timeout_s=180,
)


def learner_spec(model: Path, objective: ObjectiveConfig | None = None, **changes: Any) -> LearnerSpec:
    """LEARNER with `changes`, on the model of a folder."""
    return LearnerSpec(
        model=ModelConfig(policy=str(model)),
        learner=LEARNER.model_copy(update=changes),
        objective=objective or ObjectiveConfig(),
        temperature=TEMPERATURE,
        num_updates=10,
        seed=1,
    )


@contextmanager
def small_cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
    try:
        yield
    finally:
        ray.shutdown()


def random_rollouts() -> list[Rollout]:
    """Seven, of 2 to 55 tokens; one has an empty response."""
    rng = np.random.default_rng(0)
    return [
        Rollout(
            prompt_id=str(i), sample_index=0, response_text="", finish_reason="stop", policy_versions=((0, r, 0),),
            prompt_ids=rng.integers(0, VOCABULARY, p).astype(np.int32),
            response_ids=rng.integers(0, VOCABULARY, r).astype(np.int32),
            rollout_logprobs=rng.normal(-5, 1, r).astype(np.float32),
        )
        for i, (p, r) in enumerate([(4, 9), (11, 3), (1, 1), (30, 25), (5, 0), (7, 12), (3, 18)])
    ]  # fmt: skip


def mask_as(loss_mean: str, mask: np.ndarray) -> np.ndarray:
    return mask.astype(np.float32) / (1 if loss_mean == "token" else max(1, mask.sum()))


def train_batch(group: LearnerGroup, rollouts: list[Rollout], seed: int = 5, kl_coef: float = 0.0) -> TrainBatch:
    """An update on random advantages and returns, with the group's own old logprobs and values."""
    rng = np.random.default_rng(seed)
    stats = group.forward(rollouts)
    samples = [
        TrainSample(
            prompt_ids=r.prompt_ids,
            response_ids=r.response_ids,
            weights=mask_as(group.spec.objective.loss_mean, rng.random(len(r.response_ids)) < 0.9),
            advantages=rng.normal(0, 1, len(r.response_ids)).astype(np.float32),
            returns=rng.normal(0, 1, len(r.response_ids)).astype(np.float32),
            values=s.values,
            old_logprobs=s.old_logprobs,
            rollout_logprobs=s.old_logprobs + rng.normal(0, 0.3, len(r.response_ids)).astype(np.float32),
            ref_logprobs=s.ref_logprobs,
        )
        for r, s in zip(rollouts, stats, strict=True)
    ]
    config = group.spec.learner
    return make_train_batch(
        samples, num_epochs=config.num_epochs, minibatches_per_epoch=config.minibatches_per_epoch,
        kl_coef=kl_coef, seed=seed,
    )  # fmt: skip


def sent_weights(group: LearnerGroup, dtype: str = "float32") -> dict[str, np.ndarray]:
    """What the weight stream carries, by name."""
    buckets = [ray.get(ref) for ref in group.stream_weights(dtype)]
    assert [b.index for b in buckets] == list(range(len(buckets)))
    return {name: t.copy() for b in buckets for name, t in zip(b.names, b.tensors, strict=True)}


def saved_state(folder: Path, part: str) -> tuple[float, dict[tuple[str, str], torch.Tensor]]:
    """Adam's step count, and by parameter and kind what all ranks wrote of it in a checkpoint, put together.

    A rank writes ceil(n / ranks) elements of each parameter, one parameter after the other; the last ranks' are padded.
    """
    shards, steps = [], set()
    for file in sorted((folder / part).glob("*_optim_states.pt")):  # to ten ranks
        zero = torch.load(file, weights_only=False)["optimizer_state_dict"]
        (adam,), (flat,) = zero["optimizer_state_dict"]["state"].values(), zero["fp32_flat_groups"]
        shards.append({"weight": flat, "exp_avg": adam["exp_avg"], "exp_avg_sq": adam["exp_avg_sq"]})
        steps.add(float(adam["step"]))
    (shapes,) = torch.load(next((folder / part).glob("*_model_states.pt")), weights_only=False)["param_shapes"]
    whole, start = {}, 0
    for name, shape in shapes.items():
        end = start + math.ceil(shape.numel() / len(shards))
        for kind in shards[0]:
            whole[name, kind] = torch.cat([shard[kind][start:end] for shard in shards])[: shape.numel()]
        start = end
    (step,) = steps
    return step, whole
