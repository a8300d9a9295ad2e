"""Sections of every job: cluster, data, checkpoints, logs, and the resources of a process."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)

from t2g.config.field_annotations import PathContext, PathOrName, ResumeMutable
from t2g.config.secrets import SECRET_NAME
from t2g.config.validation_errors import dotted_key, format_value
from t2g.errors import UserError


class Section(BaseModel):
    """Refuse unknown keys. A config is frozen, and a changed copy is validated as a whole."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, revalidate_instances="always", allow_inf_nan=False,
        hide_input_in_errors=True,
    )  # fmt: skip


class FollowingSection(Section):
    """A section whose defaults depend on other keys; validating a changed copy computes them again."""

    @model_validator(mode="wrap")
    @classmethod
    def keep_set_fields(cls, values: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        """Keep only the fields that were set, so that the defaults are computed again."""
        if isinstance(values, cls):
            values = {name: getattr(values, name) for name in values.model_fields_set}
        return check(values)


Config = TypeVar("Config", bound=Section)


def with_overrides(config: Config, overrides: Mapping[str, Any], context: PathContext | None = None) -> Config:
    """Return a validated copy with other values at dotted keys: {"learner.policy.lr": 1e-5, "artifacts": None}.

    `model_fields_set` gains only the overridden fields.

    Args:
        context: The base of relative paths in values that a user wrote, as in `loading.load`.

    Raises:
        ValidationError: A value, or the config as a whole, is invalid.
    """
    for key, value in overrides.items():
        config = with_value_at(config, key.split("."), value)
    return type(config).model_validate(config, context=context)


def set_derived(config: Section, name: str, value: Any) -> None:
    """Set a field of a frozen config during its validation; the field does not count as set by the user."""
    config.__dict__[name] = value


def with_value_at(section: Any, keys: Sequence[str], value: Any, depth: int = 0) -> Any:
    """Return an unvalidated copy of a section, or of its mapping, with `value` at keys[depth:].

    Raises:
        UserError: A key on the way holds a value, such as `workers: 3`, which would be lost.
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
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
GpuSharing = Literal["none", "split", "alternate"]
TEMPLATE_INPUTS = {"messages", "add_generation_prompt", "continue_final_message", "tools", "documents"}
MIRROR_END_S = 600.0  # deadline of the last copy to run.mirror, at the end of a job
RESTART_WINDOW_S = 6 * 3600.0  # default of each restart_window_s


class RunConfig(Section):
    """Folder, name and seed of the run."""

    root: ResumeMutable[Path] = Field(
        Path("runs"), description="folder of all runs; made absolute. Several nodes need a shared mount"
    )
    name: ResumeMutable[str] = Field(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,46}$", description="folder of this run under root"
    )
    seed: int = Field(1, ge=0)
    resume: ResumeMutable[Literal["auto", "readable", "never"]] = Field(
        "auto", description="auto: continue from the last checkpoint if there is one, and refuse the start if none can "
        "be read; readable: skip checkpoints that cannot be read, and start again if no other is left"
    )  # fmt: skip
    accept: ResumeMutable[tuple[Annotated[str, Field(pattern=r"^[a-z_]+:[0-9a-f]{16}$")], ...]] = Field(
        (), description="changed inputs with which the run may continue: [feedback:HASH], as the refusal prints it; "
        "each entry accepts one change"
    )  # fmt: skip
    mirror: ResumeMutable[str | None] = Field(
        None, description="URL of a folder, such as s3://BUCKET/runs, gs://BUCKET/runs or file:///mnt/runs; the run "
        "folder is copied there during the run, and restored from there when it is empty"
    )  # fmt: skip
    smoke: bool = Field(
        False, description="a short run in a folder of its own: three steps of a training, or a few records"
    )

    @field_validator("root")
    @classmethod
    def make_root_absolute(cls, root: Path, info: ValidationInfo) -> Path:
        context: PathContext | None = info.context
        if context is None:
            return root
        root = root.expanduser()
        if not root.is_absolute() and context.is_ray_job:
            raise ValueError(
                f"run.root: got {str(root)!r}, but a Ray job needs an absolute path: its working directory is a "
                "temporary copy, and what is written there vanishes"
            )
        return Path(os.path.normpath(context.cwd / root))

    @field_validator("mirror")
    @classmethod
    def check_mirror(cls, mirror: str | None) -> str | None:
        """Check that it is a URL; `preflight` checks that there is a package for its kind."""
        if mirror is not None and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s?#]+", mirror):
            raise ValueError(f"got {mirror!r}, needs a URL such as s3://BUCKET/runs or file:///mnt/runs")
        return mirror and mirror.rstrip("/")

    def make_part(self, *, root: Path, name: str, seed: int) -> Self:
        """Return the settings of a part of this job, such as a method: it has a folder of its own, and may go on."""
        resume = "readable" if self.resume == "readable" else "auto"
        return type(self)(root=root, name=name, seed=seed, accept=self.accept, resume=resume)

    @property
    def mirror_url(self) -> str | None:
        """Return the URL of this run's folder in the mirror; a smoke run, which never continues, has none."""
        if self.mirror is None or self.smoke:
            return None
        return f"{self.mirror}/{self.name}"

    @property
    def folder(self) -> Path:
        """Return the run folder; a smoke run has a folder of its own inside it."""
        folder = self.root / self.name
        if self.smoke:
            return folder / "smoke"
        return folder


RESERVED_NAME = re.compile(r"^(CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|TOKENIZERS_PARALLELISM|RAY_\w*|T2G_\w*)$")


class ClusterConfig(Section):
    """The Ray cluster on which processes run."""

    address: str | None = Field(None, description="Ray address; none: the cluster of the job, else a new local one")
    env: dict[str, str] = Field(
        {}, description="environment of every engine and rank, {NCCL_SOCKET_IFNAME: eth0}; no secrets: runs keep it"
    )
    placement_timeout_s: float = Field(
        60, gt=0, description="deadline for the placement of an actor that waits for CPUs, GPUs or memory"
    )
    object_store_gib: float | None = Field(
        None,
        gt=0,
        description="object store of a new local cluster or a rendered pod, GiB; none: as much as the weights of "
        "sync_transport=store need, at least 1",
    )
    gpu_sharing: GpuSharing = Field(
        "none",
        description="split and alternate put one engine and one rank on each GPU. split: each has its share of the "
        "memory (rollout.gpus, learner.gpus); alternate: engines sleep while ranks train, and the ranks' optimizer "
        "state is offloaded while engines sample, with rollout.max_staleness=0 only; none: engines and ranks are "
        "placed by their gpus alone",
    )

    @field_validator("env", mode="before")
    @classmethod
    def check_env(cls, env: Any) -> Any:
        """Check the names, and return numbers as text: `NCCL_IB_HCA: 1` is a number in YAML."""
        if not isinstance(env, dict):
            return env
        for name in map(str, env):
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise ValueError(f"{name!r} is not a name of an environment variable; it needs letters, digits and _")
            if RESERVED_NAME.search(name.upper()) or SECRET_NAME.search(name.upper()):
                raise ValueError(f"{name} cannot be set here: each process has its own value, or it is a secret")
        texts = dict(env)
        for name, value in env.items():
            if type(value) in (int, float):
                texts[name] = str(value)
        return texts


class DataConfig(Section):
    """A file or a hub dataset, and how its records are read."""

    path: PathOrName[str | tuple[str, ...]] = Field(
        ..., description="JSON, JSON lines, CSV or Parquet file, a folder of them, a list of these, or a hub dataset"
    )
    revision: str | None = Field(None, description="commit of the hub dataset; required for hub names")
    subset: str | None = Field(None, description="config of the hub dataset, such as main of gsm8k")
    split: str = "train"
    too_long: Literal["error", "skip", "truncate"] = Field(
        "error",
        description="a prompt longer than its window: refuse the data, skip the record, or truncate the end of its "
        "longest message. A task that truncates its own input does so first",
    )
    columns: dict[str, str] = Field({}, description="field of t2g -> field of the file, such as {prompt: question}")
    limit: int | None = Field(None, ge=1, description="read only this many records")

    @field_validator("path", mode="before")
    @classmethod
    def check_paths(cls, value: Any) -> Any:
        """Refuse what is no text and no list of texts, in one sentence for both."""
        values = value if isinstance(value, list | tuple) else [value]
        if not (values and all(isinstance(path, str) for path in values)):
            raise ValueError(f"got {format_value(value)}, needs a file, a folder, a list of these, or a hub dataset")
        return value

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def name(self) -> str:
        """Return the path, or the first of several, for a message."""
        first, *others = self.paths
        if others:
            return f"{first} and {len(others)} more"
        return first


class ProcessConfig(FollowingSection):
    """Resources of one process."""

    cpus: ResumeMutable[float] = Field(
        0.5, gt=0, description="logical CPUs that Ray reserves for each process; 0.5 shares a core"
    )
    gpus: ResumeMutable[float] = Field(
        0,
        ge=0,
        description="GPUs for each process; auto: one if the machine has one. dtype, enforce_eager, threads, "
        "memory_gib and gpu_memory_utilization may be auto, too",
    )
    threads: ResumeMutable[int] = Field(
        default_factory=lambda data: max(1, int(data.get("cpus", 1))) if data.get("gpus") else 1, ge=1,
        description="CPU compute threads of each process; default 1, with a GPU (for offload=cpu) the value of cpus; "
        "auto: its share of the cores",
    )  # fmt: skip
    memory_gib: ResumeMutable[float] = Field(
        1.5,
        gt=0,
        description="host memory of each process; checked before the start. Default on CPUs: an estimate "
        "from the model's shape, 1.5 where that is not known",
    )
    labels: ResumeMutable[dict[str, str]] = Field({}, description="Ray label selector of the nodes for this role")

    @field_validator("gpus")
    @classmethod
    def check_gpu_fraction(cls, gpus: float) -> float:
        if gpus > 1 and gpus != int(gpus):
            raise ValueError(f"got {gpus:g}, needs a part of one GPU or whole ones")
        return gpus

    @property
    def num_processes(self) -> int:
        """Return the number of processes at the start."""
        raise NotImplementedError

    @property
    def group_size(self) -> int:
        """Return the processes that are placed together: each engine is placed alone."""
        return 1


class RoleConfig(ProcessConfig):
    """A group of ranks; their number is fixed for the run."""

    workers: int = Field(1, ge=1, description="ranks of this role")

    def check_rank_gpus(self) -> None:
        """Raise ValueError if a rank has several GPUs, or if two ranks share one."""
        if self.gpus > 1:
            raise ValueError(f"got gpus={self.gpus:g}, and a rank uses one GPU; take gpus=1 and more workers")
        if self.workers > 1 and 0 < self.gpus <= 0.5:
            raise ValueError(
                f"gpus={self.gpus:g} with workers={self.workers} puts two ranks on one GPU, which NCCL refuses "
                "(Duplicate GPU); take workers=1, or a GPU for each rank"
            )

    @property
    def num_processes(self) -> int:
        return self.workers

    @property
    def group_size(self) -> int:
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
    export: bool = Field(False, description="a checkpoint also holds the policy as a model folder, policy")


class LogConfig(Section):
    """Trackers and logged samples."""

    trackers: tuple[TrackerName, ...] = Field(
        ("tensorboard",), description="each gets metrics, config, samples and the report; all but "
        "tensorboard need the extra of their name"
    )  # fmt: skip
    project: str = Field(
        "t2g",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="project of wandb and trackio, experiment of mlflow",
    )
    num_samples: int = Field(8, ge=0, description="samples per step written to samples.jsonl")


class AlarmConfig(Section):
    """Bounds whose violation is reported in alarms.jsonl."""

    max_kl: float = Field(
        40.0, gt=0, description="nats per sequence; above a quarter of it, a KL that doubles in a step is reported too"
    )
    max_kl_per_token: float | None = Field(
        None, gt=0, description="nats per token, for responses whose length makes max_kl useless; none: no bound"
    )
    max_zero_variance_share: float = Field(
        0.9, ge=0, le=1, description="share of prompts whose samples all earn the same at every token"
    )
    min_entropy: float = Field(0.01, ge=0, description="nats per token")
    length_ratio: float = Field(
        2.0, gt=1, description="mean response length relative to the first step, in either direction"
    )
    max_truncated_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="share of responses truncated at rollout.max_new_tokens, or without an answer after their thinking",
    )
    max_failed_share: float = Field(0.1, ge=0, le=1)
    min_located_rate: float = Field(
        0.75, ge=0, le=1, description="share of the feedback's quotes that occur in their response"
    )
    min_labelled_share: float = Field(0.01, ge=0, le=1, description="share of a step's tokens in good or poor spans")
    min_fault_recall: float = Field(
        0.5, ge=0, le=1, description="recall of each fault class of the task, mean of three steps"
    )
    hacking_evaluations: int = Field(
        3,
        ge=1,
        description="falls in a row of the task's held-out measure, each with a higher training reward; "
        "together they exceed 2 standard errors",
    )


class ModelConfig(Section):
    """The policy's model."""

    policy: PathOrName[str] = Field(..., description="folder or hub name of the policy")
    revision: str | None = None
    system_prompt: str | None = Field(
        None, min_length=1, description="system message of each prompt that has none of its own"
    )
    chat_template_kwargs: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], JsonValue] | None = Field(
        None, description="variables of the chat template, such as {enable_thinking: false}. A model trained with them "
        "and with system_prompt has both as defaults of its template"
    )  # fmt: skip
    thinking_tags: tuple[str, ...] | None = Field(
        None, description="tags around the model's thinking, [<think>, </think>]; what follows is the answer, which "
        "alone is judged and measured. none: a known pair among the tokenizer's added tokens; []: no thinking"
    )  # fmt: skip

    @field_validator("thinking_tags")
    @classmethod
    def check_two_tags(cls, tags: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if tags and (len(tags) != 2 or not all(tag.strip() for tag in tags) or len(set(tags)) < 2):
            raise ValueError(f"got {list(tags)}, needs an opening and a closing tag, or [] for a model without")
        return tags

    @field_validator("chat_template_kwargs")
    @classmethod
    def check_template_variables(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := TEMPLATE_INPUTS & (variables or {}).keys():
            raise ValueError(f"{min(taken)} is set for each prompt by t2g; remove it")
        return variables or None


class WorldConfig(Section):
    """The tiny worlds of t2g.tasks.tiny: posts (`world`), rules for programs (`programs`), tables (`lookups`)."""

    num_facts: int = Field(
        5, ge=1, le=20, description="facts of each post; windows and lengths that are not set grow with it"
    )
    num_train: int = Field(4000, ge=1)
    num_heldout: int = Field(256, ge=1)
    num_repairs: int = Field(
        0,
        ge=0,
        description="examples of later turns for the base policy: programs after a message (tiny_code), turns after "
        "results of tools (tiny_tools)",
    )
    wrong: float = Field(0.3, ge=0, le=1)
    missing: float = Field(0.2, ge=0, le=1)
    invented: float = Field(0.15, ge=0, le=1)
    repeated: float = Field(0.1, ge=0, le=1)
    seed: int = Field(1, ge=0)
