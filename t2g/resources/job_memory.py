"""Memory of a job's processes, from the shape of its models and the config.

What differs between PPO and supervised training are the methods of `JobRanks`, which `find_ranks` returns for a job.
The formulas are in `memory` (GPUs) and `host_memory` (CPUs).
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from t2g.config import (
    AnyJob,
    EngineConfig,
    LearnerConfig,
    ModelConfig,
    PolicyJob,
    ProcessConfig,
    SFTJob,
    SFTOptions,
    with_overrides,
)
from t2g.config.artifacts import find_artifacts, is_made_later
from t2g.resources.host_memory import MAX_EAGER_TOKENS, advise, engine_bytes, learner_parts, rank_bytes
from t2g.resources.memory import (
    BYTES,
    GIB,
    Estimate,
    critic_models,
    estimate_rank,
    host_bytes,
    ipc_buffer_bytes,
    learner_models,
    logits_bytes,
    sft_models,
    shared_keys_bytes,
    store_bytes,
)
from t2g.resources.model_shape import ModelShape, find_shape

MIN_GIB = 0.5
CRITIC_RANKS = "learner.critic_ranks"

logger = logging.getLogger(__name__)


class JobRanks(ABC):
    """The ranks of a job, and the memory that each of them needs."""

    section: str  # section of the config
    options: LearnerConfig | SFTOptions
    model: ModelConfig  # which they train

    @abstractmethod
    def count_load_bytes(self, shape: ModelShape) -> float:
        """Return the host memory of a rank that loads its models."""

    @abstractmethod
    def count_host_bytes(self, shape: ModelShape, section: str) -> float:
        """Return the peak memory of a rank of a section on a CPU."""

    @abstractmethod
    def estimate_gpu(self, shape: ModelShape, section: str, workers: int) -> Estimate:
        """Return the memory on its GPU of one of `workers` ranks of a section."""

    def count_stored_bytes(self, shape: ModelShape) -> float:
        """Return the bytes of weights in Ray's object store, see `store_bytes`."""
        return 0.0


class PolicyRanks(JobRanks):
    """The ranks of PPO."""

    section = "learner"

    def __init__(self, job: PolicyJob) -> None:
        self.options: LearnerConfig = job.learner
        self.model = job.model
        self.job = job

    def count_load_bytes(self, shape: ModelShape) -> float:
        return host_bytes(shape, self.options, self.job.objective, sharing=self.job.cluster.gpu_sharing)

    def count_host_bytes(self, shape: ModelShape, section: str) -> float:
        longest = self.job.rollout.max_model_len
        shared_keys = self._count_shared_keys(shape)
        critic_ranks = self.options.critic_ranks
        if section != CRITIC_RANKS or critic_ranks is None:
            parts = learner_parts(shape, self.options, self.job.objective, longest, shared_keys=shared_keys)
            return sum(parts.values())
        row = 0 if self.options.share_prompts else longest
        parts = rank_bytes(
            shape, critic_models(shape), self.options,
            tokens=self._microbatch_tokens, row=row, logits=0.0, shared_keys=shared_keys, ranks=critic_ranks.workers,
        )  # fmt: skip
        return sum(parts.values())

    def _count_shared_keys(self, shape: ModelShape) -> float:
        itemsize = BYTES[self.options.dtype]
        return shared_keys_bytes(
            shape, self.options, self.job.rollout, tokens=self._microbatch_tokens, itemsize=itemsize
        )

    @property
    def _microbatch_tokens(self) -> int:
        """Return the most tokens of a microbatch: a longer sequence than its budget is one of its own."""
        return max(self.options.tokens_per_microbatch, self.job.rollout.max_model_len)

    def estimate_gpu(self, shape: ModelShape, section: str, workers: int) -> Estimate:
        learner = self.options
        objective = self.job.objective
        tokens = self._microbatch_tokens
        shared_keys = self._count_shared_keys(shape)
        if section == CRITIC_RANKS:
            return estimate_rank(
                shape, critic_models(shape), learner, ranks=workers, tokens=tokens, shared_keys=shared_keys
            )
        logits = logits_bytes(shape, learner, tokens=tokens, objective=objective)
        models = learner_models(shape, learner, objective)
        ipc_buffers = ipc_buffer_bytes(shape, learner, itemsize=self._engine_itemsize)
        return estimate_rank(
            shape, models, learner, ranks=workers, tokens=tokens, logits=logits, shared_keys=shared_keys,
            ipc_buffers=ipc_buffers,
        )  # fmt: skip

    def count_stored_bytes(self, shape: ModelShape) -> float:
        if not self.options.is_replayable:
            return 0.0
        return store_bytes(shape, self.options, itemsize=self._engine_itemsize)

    @property
    def _engine_itemsize(self) -> int:
        return BYTES[self.job.rollout.dtype]


class SupervisedRanks(JobRanks):
    """The ranks of supervised training."""

    section = "sft"

    def __init__(self, job: SFTJob) -> None:
        self.options: SFTOptions = job.sft
        self.model = job.model

    def count_load_bytes(self, shape: ModelShape) -> float:
        return BYTES[self.options.dtype] * shape.numel

    def count_host_bytes(self, shape: ModelShape, section: str) -> float:
        sft = self.options
        tokens = self._microbatch_tokens
        logits = logits_bytes(shape, sft, tokens=tokens)
        row = sft.max_length if sft.max_length <= MAX_EAGER_TOKENS else 0
        parts = rank_bytes(shape, sft_models(shape, sft), sft, tokens=tokens, row=row, logits=logits)
        return sum(parts.values())

    def estimate_gpu(self, shape: ModelShape, section: str, workers: int) -> Estimate:
        sft = self.options
        tokens = self._microbatch_tokens
        logits = logits_bytes(shape, sft, tokens=tokens)
        return estimate_rank(shape, sft_models(shape, sft), sft, ranks=workers, tokens=tokens, logits=logits)

    @property
    def _microbatch_tokens(self) -> int:
        return max(self.options.tokens_per_microbatch, self.options.max_length)


def find_ranks(job: AnyJob) -> JobRanks | None:
    """Return the ranks that train the model of a job; None for a job that trains none."""
    match job:
        case PolicyJob():
            return PolicyRanks(job)
        case SFTJob():
            return SupervisedRanks(job)
    return None


def estimate_roles(job: AnyJob) -> dict[str, float]:
    """Return the bytes of each process on a CPU, by the section of its role, where the model's shape is known."""
    shapes: dict[str, ModelShape | None] = {}
    artifacts = find_artifacts(job)
    for model in job.models():
        if not is_made_later(model.name, artifacts):
            section = model.engine.section if model.engine else "engine"
            shapes[section] = find_shape(model.name, model.revision)
            if model.key == "model.policy":
                shapes["policy"] = shapes[section]
    sizes: dict[str, float] = {}
    for name, role in job.roles().items():
        if role.gpus:
            continue
        size = _role_bytes(job, name, role, shapes)
        if size is not None:
            sizes[name] = size
    return sizes


def _role_bytes(job: AnyJob, name: str, role: ProcessConfig, shapes: Mapping[str, ModelShape | None]) -> float | None:
    if isinstance(role, EngineConfig):
        shape = shapes.get(name)
        return None if shape is None else engine_bytes(shape, role)
    ranks = find_ranks(job)
    policy = shapes.get("policy")
    if ranks is None or policy is None:
        return None
    return ranks.count_host_bytes(policy, name)


def with_estimated_memory(job: Any) -> Any:
    """Return the job with `estimate_roles` as the memory_gib of processes on CPUs that the config does not set.

    A warning names a memory_gib below the estimate.
    """
    changes: dict[str, float] = {}
    for name, size in estimate_roles(job).items():
        role = job.roles()[name]
        gib = max(MIN_GIB, round(size / GIB, 1))
        if "memory_gib" not in role.model_fields_set:
            changes[f"{name}.memory_gib"] = gib
        elif role.memory_gib < gib:
            ranks = None if isinstance(role, EngineConfig) else find_ranks(job)
            advice = "raise it" if ranks is None else f"raise it, {advise(ranks.section, ranks.options)}"
            logger.warning("%s.memory_gib is %g, and a process needs about %g; %s", name, role.memory_gib, gib, advice)
    return with_overrides(job, changes)


def store_gib(job: AnyJob) -> float:
    """Return cluster.object_store_gib, or else 1.2 x the bytes of stored weights, at least 1 GiB."""
    if job.cluster.object_store_gib is not None:
        return job.cluster.object_store_gib
    ranks = find_ranks(job)
    if ranks is None:
        return 1.0
    shape = find_shape(ranks.model.policy, ranks.model.revision)
    if shape is None:
        return 1.0
    return max(1.0, 1.2 * ranks.count_stored_bytes(shape) / GIB)
