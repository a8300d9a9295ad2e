"""What every job has: where it runs, what it reads, what it keeps, and the resources of a process."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)

from t2g.config.marks import PathContext, PathOrName, ResumeMutable
from t2g.config.texts import SECRET_NAME
from t2g.config.validation_errors import dotted_key, format_value
from t2g.errors import UserError


class Section(BaseModel):
    """Unknown keys are refused; a config never changes after it was read, and one made of another is checked whole."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, revalidate_instances="always", allow_inf_nan=False,
        hide_input_in_errors=True,
    )  # fmt: skip


class FollowingSection(Section):
    """Defaults follow other keys: whoever is validated again, with another value of one, finds them anew."""

    @model_validator(mode="wrap")
    @classmethod
    def keep_set_fields(cls, values: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        """A section that is validated again, with another value of one key, finds anew the defaults that follow it."""
        if isinstance(values, cls):
            values = {name: getattr(values, name) for name in values.model_fields_set}
        return check(values)


Config = TypeVar("Config", bound=Section)


def with_overrides(config: Config, overrides: Mapping[str, Any], here: PathContext | None = None) -> Config:
    """A copy with other values at these dotted keys, {"learner.policy.lr": 1e-5, "artifacts": None}, validated whole.

    What was not given before and is not now stays not given (`model_fields_set`). here: of values that a user wrote,
    whose paths become absolute as in `loading.load`. Raises pydantic's ValidationError.
    """
    for key, value in overrides.items():
        config = with_value_at(config, key.split("."), value)
    return type(config).model_validate(config, context=here)


def with_derived(config: Config, changes: Mapping[str, Any]) -> Config:
    """`with_overrides` of what follows from other sections: it counts as not given."""
    changed = with_overrides(config, changes)
    return type(config).model_construct(config.model_fields_set, **dict(changed))


def with_value_at(section: Any, keys: Sequence[str], value: Any, depth: int = 0) -> Any:
    """A copy, unchecked, of a section, or of the mapping that will be one, with `value` at keys[depth:] of it.

    UserError where another value, such as the 3 of `workers: 3`, has the place of a section: it would be lost.
    """
    if depth == len(keys):
        return value
    name = keys[depth]
    if isinstance(section, Section):
        return section.model_copy(update={name: with_value_at(getattr(section, name, None), keys, value, depth + 1)})
    if not isinstance(section, dict | None):
        raise UserError(
            f"{dotted_key(keys)}={format_value(value)}: {dotted_key(keys[:depth])} is a value, not a section"
        )
    section = section or {}
    return {**section, name: with_value_at(section.get(name), keys, value, depth + 1)}


Dtype = Literal["float32", "bfloat16"]
GpuSharing = Literal["none", "split", "alternate"]
RESTART_WINDOW_S = 6 * 3600.0  # default of each restart_window_s


class RunConfig(Section):
    """Folder, name and seed of the run."""

    root: ResumeMutable[Path] = Field(
        Path("runs"), description="folder of all runs, perhaps on a shared mount; made absolute"
    )
    name: ResumeMutable[str] = Field(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,46}$", description="folder of this run under root"
    )
    seed: int = Field(1, ge=0)
    resume: ResumeMutable[Literal["auto", "never"]] = Field(
        "auto", description="auto: go on from the last checkpoint if there is one"
    )
    accept: ResumeMutable[tuple[Annotated[str, Field(pattern=r"^[a-z_]+:[0-9a-f]{16}$")], ...]] = Field(
        (), description="changed inputs with which the run goes on: [feedback:HASH], as the refusal prints it; each "
        "entry accepts one change"
    )  # fmt: skip
    smoke: bool = Field(False, description="preflight, three real steps, a report, samples/s and time left; then stop")

    @field_validator("root")
    @classmethod
    def make_root_absolute(cls, root: Path, info: ValidationInfo) -> Path:
        here: PathContext | None = info.context
        if here is None:
            return root
        root = root.expanduser()
        if not root.is_absolute() and here.is_ray_job:
            raise ValueError(
                f"run.root: got {str(root)!r}, but a Ray job needs an absolute path: its working directory is a "
                "temporary copy, and what is written there vanishes"
            )
        return Path(os.path.normpath(here.cwd / root))

    @property
    def folder(self) -> Path:
        """A smoke run has one of its own within the run's, and touches nothing else there."""
        return self.root / self.name / "smoke" if self.smoke else self.root / self.name


RESERVED_NAME = re.compile(r"^(CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|TOKENIZERS_PARALLELISM|RAY_\w*|T2G_\w*)$")


class ClusterConfig(Section):
    """The Ray cluster on which processes run."""

    address: str | None = Field(None, description="Ray address; none: the cluster of the job, else a new local one")
    env: dict[str, str] = Field(
        {}, description="environment of every engine and rank, {NCCL_SOCKET_IFNAME: eth0}; no secrets: runs keep it"
    )
    placement_timeout_s: float = Field(60, gt=0, description="how long actors may wait for CPUs, GPUs and memory")
    object_store_gib: float | None = Field(
        None,
        gt=0,
        description="object store of a new local cluster or a rendered pod, GiB; none: what the weights need that "
        "sync_transport=store keeps there, at least 1",
    )
    gpu_sharing: GpuSharing = Field(
        "none",
        description="one engine and one rank on each GPU. split: each has its share of the memory (rollout.gpus, "
        "learner.gpus); alternate: engines sleep while ranks train, and the ranks' optimizer state is offloaded while "
        "engines sample, with rollout.max_staleness=0 only; none: a GPU has one process",
    )

    @field_validator("env", mode="before")
    @classmethod
    def check_env(cls, env: Any) -> Any:
        """NCCL_DEBUG_SUBSYS: ALL and NCCL_IB_HCA: 1 are texts and numbers in YAML; all are texts in an environment."""
        if not isinstance(env, dict):
            return env
        for name in map(str, env):
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise ValueError(f"{name!r} is no name of an environment variable: letters, digits and _ are")
            if RESERVED_NAME.search(name.upper()) or SECRET_NAME.search(name.upper()):
                raise ValueError(f"{name} cannot be given: each process has its own, or it is a secret")
        return {name: str(value) if type(value) in (int, float) else value for name, value in env.items()}


class DataConfig(Section):
    """A file or a dataset on the hub, and how its records are read."""

    path: PathOrName[str] = Field(..., description="JSON, JSON lines, CSV or Parquet file, or a dataset on the hub")
    revision: str | None = Field(None, description="commit of the hub dataset; required for hub names")
    subset: str | None = Field(None, description="of the hub dataset: main of gsm8k")
    split: str = "train"
    too_long: Literal["error", "skip", "truncate"] = Field(
        "error",
        description="a prompt longer than its window: refuse the data, leave the record out, or cut the end of its "
        "longest message. A task that cuts its own input does so first",
    )
    columns: dict[str, str] = Field({}, description="our field -> the file's field, e.g. {prompt: question}")
    limit: int | None = Field(None, ge=1, description="use only the first so many records")


class ProcessConfig(FollowingSection):
    """Resources of one process."""

    cpus: ResumeMutable[float] = Field(
        0.5, gt=0, description="logical CPUs that Ray reserves for each; 0.5 shares a core"
    )
    gpus: ResumeMutable[float] = Field(
        0,
        ge=0,
        description="GPUs for each; auto: one where there is one, "
        "and then dtype, enforce_eager, threads, memory_gib and gpu_memory_utilization may be auto too",
    )
    threads: ResumeMutable[int] = Field(
        default_factory=lambda given: max(1, int(given.get("cpus", 1))) if given.get("gpus") else 1, ge=1,
        description="compute threads of each on a CPU; by default 1, beside a GPU, for offload=cpu, as many as cpus; "
        "auto: on CPUs its part of the cores",
    )  # fmt: skip
    memory_gib: ResumeMutable[float] = Field(1.5, gt=0, description="memory each will use; checked before the start")
    labels: ResumeMutable[dict[str, str]] = Field({}, description="Ray label selector of the nodes for this role")

    @field_validator("gpus")
    @classmethod
    def check_gpu_fraction(cls, gpus: float) -> float:
        if gpus > 1 and gpus != int(gpus):
            raise ValueError(f"got {gpus:g}, needs a part of one GPU or whole ones")
        return gpus

    @property
    def num_processes(self) -> int:
        """At the start."""
        raise NotImplementedError


class RoleConfig(ProcessConfig):
    """A gang of ranks: as many for the whole run."""

    workers: int = Field(1, ge=1, description="ranks of this role")

    @model_validator(mode="after")
    def check_one_rank_per_gpu(self) -> Self:
        """Refuse two ranks on one GPU."""
        if self.workers > 1 and 0 < self.gpus <= 0.5:
            raise ValueError(
                f"gpus={self.gpus:g} with workers={self.workers} puts two ranks on one GPU, and NCCL connects no such "
                "two (Duplicate GPU); take workers=1, or a GPU for each rank"
            )
        return self

    @property
    def num_processes(self) -> int:
        return self.workers


class EvalConfig(Section):
    """Evaluation on held-out prompts during the run."""

    every: ResumeMutable[int] = Field(5, ge=1, description="steps between evaluations on held-out prompts")
    num_prompts: int = Field(128, ge=1)
    samples_per_prompt: int = Field(1, ge=1)


class CheckpointConfig(Section):
    """Checkpoints from which the run resumes."""

    every: int = Field(10, ge=1)
    keep: int = Field(2, ge=1)


class LogConfig(Section):
    """Dashboards and logged samples."""

    tensorboard: bool = True
    wandb_project: str | None = Field(None, description="Weights & Biases project; needs the extra `wandb`")
    num_samples: int = Field(8, ge=0, description="samples per step written to samples.jsonl")


class AlarmConfig(Section):
    """Bounds whose violation is reported in alarms.jsonl."""

    max_kl: float = Field(40.0, gt=0, description="nats per sequence")
    min_entropy: float = Field(0.01, ge=0, description="nats per token")
    length_ratio: float = Field(2.0, gt=1, description="mean response length against the first step's, either way")
    max_truncated_share: float = Field(0.25, ge=0, le=1, description="of the responses, at rollout.max_new_tokens")
    max_failed_share: float = Field(0.1, ge=0, le=1)
    min_labelled_share: float = Field(0.01, ge=0, le=1, description="of a step's tokens, in spans that pay or cost")
    min_fault_recall: float = Field(
        0.5, ge=0, le=1, description="of each class of faults that the task knows, mean of three steps"
    )


class ModelConfig(Section):
    """The policy's model."""

    policy: PathOrName[str] = Field(..., description="folder or hub name of the policy")
    revision: str | None = None


class WorldConfig(Section):
    """The tiny worlds of t2g.tasks.tiny: posts (`world`) or rules for programs (`programs`)."""

    num_facts: int = Field(
        5, ge=1, le=20, description="of each post; windows and lengths that are not given are as long as they need"
    )
    num_train: int = Field(4000, ge=1)
    num_heldout: int = Field(256, ge=1)
    wrong: float = Field(0.3, ge=0, le=1)
    missing: float = Field(0.2, ge=0, le=1)
    invented: float = Field(0.15, ge=0, le=1)
    repeated: float = Field(0.1, ge=0, le=1)
    seed: int = Field(1, ge=0)
