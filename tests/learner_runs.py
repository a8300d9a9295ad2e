"""Learner groups and their batches for tests: random rollouts on random models, with every number a learner uses.

A rank's process takes ten seconds of imports to start. So groups of one rank live in the test's own process
(`LocalRank`), and those of two share two processes (`HostedRank`); each group has models and optimizers of its own.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch

from actors.learner.learner import LearnerActor, LearnerGroup, LearnerWorker
from actors.learner.spec import LearnerSpec
from t2g.config import LearnerConfig, ModelConfig, ObjectiveConfig, OptimConfig, RoleConfig
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
        objective=objective or ObjectiveConfig(advantages="gae"),
        temperature=TEMPERATURE,
        num_updates=10,
        seed=1,
    )


class Host:
    """A process that is the same rank of several groups."""

    def __init__(self) -> None:
        self._ranks: dict[int, LearnerWorker] = {}

    def make(self, group: int, *args: Any) -> None:
        self._ranks[group] = LearnerWorker(*args)

    def call(self, group: int, name: str, *args: Any) -> Any:
        return getattr(self._ranks[group], name)(*args)

    def stream(self, group: int, *args: Any) -> Iterator[Any]:
        yield from self._ranks[group].stream_weights(*args)


def start_hosts() -> list[Any]:
    """Two, for groups of two ranks."""
    environ = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    actor = ray.remote(Host).options(num_cpus=0, runtime_env={"env_vars": environ})
    return [actor.remote() for _ in range(2)]


class HostedRank:
    """A handle on a rank in a `Host`."""

    def __init__(self, host: Any, group: int, *args: Any) -> None:
        self.host = host
        self._group = group
        host.make.remote(group, *args)

    @property
    def stream_weights(self) -> Any:
        stream = self.host.stream
        group = self._group
        return SimpleNamespace(options=lambda **o: SimpleNamespace(remote=partial(stream.options(**o).remote, group)))

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self.host.call.remote, self._group, name))


class LocalRank:
    """A handle on a rank in this process, whose calls are done when they are submitted."""

    def __init__(self, *args: Any) -> None:
        with as_a_rank():
            self.worker = LearnerWorker(*args)

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            values = [ray.get(arg) if isinstance(arg, ray.ObjectRef) else arg for arg in args]  # as Ray does
            with as_a_rank():
                return ray.put(getattr(self.worker, name)(*values))

        return SimpleNamespace(remote=remote)


RANK_ENVIRON: dict[str, str] = {}  # of this process, while it is a rank


@contextmanager
def as_a_rank() -> Iterator[None]:
    """What a rank leaves behind in its process, which is its own elsewhere, is there in its calls alone."""
    environ = dict(os.environ)
    threads = torch.get_num_threads()
    random_state = torch.get_rng_state()
    os.environ.update(RANK_ENVIRON)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        RANK_ENVIRON.update({name: value for name, value in os.environ.items() if environ.get(name) != value})
        os.environ.clear()
        os.environ.update(environ)
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)


class Processes:
    """Where a `SharedGroup` finds its ranks, in place of an actor class."""

    def __init__(self, hosts: Sequence[Any] = (), **options: Any) -> None:
        self._hosts = hosts
        self._options = options

    def options(self, **options: Any) -> "Processes":
        return Processes(self._hosts, **options)

    def remote(self, spec: LearnerSpec, names: Sequence[str], role: RoleConfig, rank: int) -> Any:
        if "policy" not in names:
            return LearnerActor.options(**self._options).remote(spec, names, role, rank)
        if role.workers == 1:
            return LocalRank(spec, names, role, rank)
        return HostedRank(self._hosts[rank], id(spec), spec, names, role, rank)


class SharedGroup(LearnerGroup):
    """A group of one rank lives in this process, one of two ranks in two processes that it shares with others. A critic
    on ranks of its own has real ones."""

    def __init__(self, spec: LearnerSpec, hosts: Sequence[Any] = (), *, placement_timeout_s: float = 30) -> None:
        self.actor = Processes(hosts)
        super().__init__(spec, placement_timeout_s=placement_timeout_s)
        self.wait_ready()

    def stream_weights(self, dtype: Any, *, full: bool = False, rendezvous: Any = None) -> Iterator[Any]:
        first = self.models["policy"].workers[0]
        if isinstance(first, LocalRank):
            yield from map(ray.put, first.worker.stream_weights(dtype, full, rendezvous))
        else:
            yield from super().stream_weights(dtype, full=full, rendezvous=rendezvous)

    def close(self) -> None:
        for ranks in self.groups:
            if ranks.workers and isinstance(ranks.workers[0], HostedRank | LocalRank):
                ranks.workers.clear()
        super().close()


def random_rollouts() -> list[Rollout]:
    """Seven, of 2 to 55 tokens; one has an empty response."""
    rng = np.random.default_rng(0)
    lengths = [(4, 9), (11, 3), (1, 1), (30, 25), (5, 0), (7, 12), (3, 18)]
    rollouts = []
    for index, (num_prompt, num_response) in enumerate(lengths):
        prompt_ids = rng.integers(0, VOCABULARY, num_prompt).astype(np.int32)
        response_ids = rng.integers(0, VOCABULARY, num_response).astype(np.int32)
        logprobs = rng.normal(-5, 1, num_response).astype(np.float32)
        rollout = Rollout(
            prompt_id=str(index),
            sample_index=0,
            response_text="",
            finish_reason="stop",
            policy_versions=((0, num_response, 0),),
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            rollout_logprobs=logprobs,
        )
        rollouts.append(rollout)
    return rollouts


def mask_as(loss_aggregation: str, mask: np.ndarray) -> np.ndarray:
    return mask.astype(np.float32) / (1 if loss_aggregation == "token" else max(1, mask.sum()))


def train_batch(group: LearnerGroup, rollouts: list[Rollout], seed: int = 5, kl_coef: float = 0.0) -> TrainBatch:
    """An update on random advantages and returns, with the group's own old logprobs and values."""
    rng = np.random.default_rng(seed)
    stats = group.forward(rollouts, ["old_logprobs", "ref_logprobs", "values"])  # its update would return the first
    samples = []
    for rollout, token_stats in zip(rollouts, stats, strict=True):
        length = len(rollout.response_ids)
        weights = mask_as(group.spec.objective.loss_aggregation, rng.random(length) < 0.9)
        advantages = rng.normal(0, 1, length).astype(np.float32)
        returns = rng.normal(0, 1, length).astype(np.float32)
        gap = rng.normal(0, 0.3, length).astype(np.float32)
        sample = TrainSample(
            prompt_ids=rollout.prompt_ids,
            response_ids=rollout.response_ids,
            weights=weights,
            advantages=advantages,
            returns=returns,
            values=token_stats.values,
            old_logprobs=token_stats.old_logprobs,
            rollout_logprobs=token_stats.old_logprobs + gap,
            ref_logprobs=token_stats.ref_logprobs,
        )
        samples.append(sample)
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
    shards = []
    steps = set()
    for file in sorted((folder / part).glob("*_optim_states.pt")):  # to ten ranks
        zero = torch.load(file, weights_only=False)["optimizer_state_dict"]
        (adam,) = zero["optimizer_state_dict"]["state"].values()
        (flat,) = zero["fp32_flat_groups"]
        shards.append({"weight": flat, "exp_avg": adam["exp_avg"], "exp_avg_sq": adam["exp_avg_sq"]})
        steps.add(float(adam["step"]))
    (shapes,) = torch.load(next((folder / part).glob("*_model_states.pt")), weights_only=False)["param_shapes"]
    whole = {}
    start = 0
    for name, shape in shapes.items():
        end = start + math.ceil(shape.numel() / len(shards))
        for kind in shards[0]:
            whole[name, kind] = torch.cat([shard[kind][start:end] for shard in shards])[: shape.numel()]
        start = end
    (step,) = steps
    return step, whole
