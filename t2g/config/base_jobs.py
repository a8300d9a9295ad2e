"""What every job has, and what it tells of itself: its processes, models, data and servers. `jobs` has the jobs.

Other packages ask a job by these methods, not by its type.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import Field, model_validator

from t2g.config.common import ClusterConfig, DataConfig, LogConfig, ModelConfig, ProcessConfig, RunConfig, Section
from t2g.config.describe import format_resources
from t2g.config.feedback import RolloutConfig, SourceConfig
from t2g.config.field_annotations import ResumeMutable
from t2g.config.gpus import check_gpus
from t2g.config.job_models import JobModel, PromptPreview, feedback_model
from t2g.config.language_model import LLMConfig
from t2g.config.learning import LearnerConfig
from t2g.config.resolve import resolve
from t2g.config.validation_errors import errors_at
from t2g.sandbox import SandboxConfig

ENGINE_SHARE = 0.6  # GPU share that Ray reserves for gpu_sharing=alternate; above half: one engine for each GPU
LONGEST_ANSWER_S = 300.0  # time for paid requests in flight to finish


class AnyJob(Section):
    """Base of every job."""

    run: RunConfig = RunConfig()
    cluster: ResumeMutable[ClusterConfig] = ClusterConfig()

    @model_validator(mode="after")
    def set_derived_defaults(self) -> Self:
        resolve(self)
        return self

    @property
    def feedback_sections(self) -> dict[str, SourceConfig]:
        """Return the sections of the feedback sources, by key: feedback, or feedback.sources.facts."""
        sections: dict[str, SourceConfig] = {}
        for key, section in self:
            if not isinstance(section, SourceConfig):
                continue
            for name, source in section.named_sources.items():
                source_key = f"{key}.sources.{name}" if name else key
                sections[source_key] = source
        return sections

    @property
    def data_sections(self) -> dict[str, DataConfig]:
        """Return the sections of the records that the job reads, by key: data, eval_data."""
        return {key: section for key, section in self if isinstance(section, DataConfig)}

    @property
    def log_options(self) -> LogConfig:
        """Return the dashboards of the job; the defaults have none that needs an account."""
        return LogConfig()

    @property
    def task_name(self) -> str | None:
        """Return the task of the records that the job reads, if it reads any."""
        return None

    @property
    def shares_gpus(self) -> bool:
        """Return whether engines run on the GPUs of ranks."""
        return False

    @property
    def responses_per_step(self) -> int | None:
        """Return the responses that the engines sample for a training step; None for a job without such steps."""
        return None

    @property
    def teacher_window(self) -> int | None:
        """Return the most tokens of a context of the teacher, which reads the critique; None without a teacher."""
        return None

    @property
    def takes_card_settings(self) -> bool:
        """Return whether the card of the reward model sets the task and the style of the job."""
        return False

    @property
    def stop_deadline_s(self) -> float:
        """Return the seconds that a run may need after a stop request to save its state."""
        return LONGEST_ANSWER_S

    @property
    def leftovers(self) -> tuple[str, ...]:
        """Return the files and folders of the run folder that bind the next start to the inputs of this one."""
        return ()

    @property
    def demo_file(self) -> Path | None:
        """Return the config of the demo whose artifacts the job uses, if it uses any."""
        return None

    def first_prompt(self, data: Any) -> PromptPreview | None:
        """Return the first prompt of the data that the job has read; None without prompts of its own policy."""
        return None

    def receiving_options(self, model: ModelConfig) -> dict[str, Any]:
        """Return how rollout engines of a model get weights, as arguments of `RolloutFleet`."""
        return {"transport": "store"}

    def roles(self) -> dict[str, ProcessConfig]:
        """Return the concurrent processes of the job by config section; {} if the job needs no Ray.

        A PolicyJob with separate ranks for the critic and its own reward engines: rollout, learner,
        learner.critic_ranks, feedback.engine.
        """
        sections = self.feedback_sections.items()
        return {f"{name}.engine": section.engine for name, section in sections if section.engine_model}

    def later_roles(self) -> dict[str, ProcessConfig]:
        """Return the processes that start after those of `roles` have ended."""
        return {}

    def models(self) -> Iterator[JobModel]:
        """Yield the models of the job, each with the engine that serves it."""
        yield from self.policy_models()
        for section, source in self.feedback_sections.items():
            if source.engine_model:
                yield feedback_model(section, source)

    def policy_models(self) -> Iterator[JobModel]:
        """Yield the models of the job that write no feedback."""
        yield from ()

    def servers(self) -> Iterator[LLMConfig]:
        """Yield the models behind external servers, which need an API key."""
        for source in self.feedback_sections.values():
            if "llm" in source.models and source.llm.url:
                yield source.llm

    def measuring_sandbox(self) -> SandboxConfig | None:
        """Return the sandbox in which the job itself, not its feedback, runs responses."""
        return None

    def identity_settings(self) -> dict[str, Any]:
        """Return values by key that decide the result in place of the fields of these keys, see `t2g.runs.identity`."""
        return {}

    def reward_functions(self) -> list[str]:
        """Return the import paths of the functions that give outcome rewards."""
        return []

    def describe(self) -> str:
        """Return the work of the job, the resources of its processes, and its run folder."""
        return "\n".join([*self.describe_work(), *format_resources(self.roles()), f"run folder: {self.run.folder}"])

    def describe_work(self) -> list[str]:
        """Return the work of the job and its amount, one item per line."""
        raise NotImplementedError


class JobConfig(AnyJob):
    """Base of the jobs with a task."""

    task: str = Field(
        "prompts",
        description="summarization, qa, code, prompts, tiny, tiny_code, tiny_tools, findings, finding_lines, "
        "checked_lines, or pkg.mod:Class",
    )

    @property
    def task_name(self) -> str:
        return self.task


class ReservedProcesses(NamedTuple):
    """The engines and ranks of a run with the GPU shares that Ray reserves for them."""

    rollout: RolloutConfig
    learner: LearnerConfig


class SyncedJob(AnyJob):
    """Base of the jobs that push weights from ranks to engines."""

    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()

    @property
    def shares_gpus(self) -> bool:
        return self.cluster.gpu_sharing != "none"

    @property
    def reserved(self) -> ReservedProcesses:
        """Return the rollout and learner sections with the GPU shares that Ray reserves."""
        if self.cluster.gpu_sharing != "alternate":
            return ReservedProcesses(self.rollout, self.learner)
        # Not validated: an engine may use more GPU memory than its reserved share while ranks sleep.
        rollout = self.rollout.model_copy(update={"gpus": ENGINE_SHARE})
        learner = self.learner.model_copy(update={"gpus": 1 - ENGINE_SHARE})
        return ReservedProcesses(rollout, learner)

    @model_validator(mode="after")
    def check_weight_transport(self) -> Self:
        if not self.shares_gpus:
            with errors_at("learner"):
                self.learner.check_rank_gpus()
        check_gpus(self.rollout, self.learner, self.cluster.gpu_sharing)
        if self.shares_gpus:
            self._check_no_other_fractions()
        return self

    def _check_no_other_fractions(self) -> None:
        """Refuse a fraction of a GPU for another role: Ray could put it where the rank of an engine has to be."""
        for section, role in self.roles().items():
            if section not in ("rollout", "learner") and 0 < role.gpus < 1:
                raise ValueError(
                    f"{section}.gpus is {role.gpus:g}, and cluster.gpu_sharing={self.cluster.gpu_sharing} fills each "
                    "GPU with an engine and its rank: take a whole number"
                )
