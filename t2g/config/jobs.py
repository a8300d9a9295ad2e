"""Schemas of the jobs, built from the sections of `t2g.config`. Imports no torch; `t2g.config.loading` reads files."""

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from t2g.config import loading
from t2g.config.base_jobs import JobConfig, SyncedJob
from t2g.config.common import (
    AlarmConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    ProcessConfig,
    RunConfig,
    WorldConfig,
)
from t2g.config.comparing import CompareConfig
from t2g.config.conversation_rules import check_conversations
from t2g.config.describe import (
    format_count,
    format_objective,
    format_process,
    format_sampling,
    format_sft,
    format_steps,
    format_turns,
    samples_per_step,
)
from t2g.config.feedback import AnnotateConfig, FeedbackConfig, RewardEngineConfig, RolloutConfig, StyleConfig
from t2g.config.field_annotations import PathOrName, ResumeMutable
from t2g.config.job_models import JobModel, PromptPreview, SectionEngine, policy_model
from t2g.config.learning import ObjectiveConfig, Placement, SFTOptions
from t2g.sandbox import SandboxConfig

# In run folders.
MODEL = "model"
JOURNAL_FILE = "journal.jsonl"
EVALUATION_FILE = "evaluation.json"

CALLS_TO_FINISH = 4  # long calls of the learner after a stop request: update, sync, export of the policy, checkpoint


class PolicyJob(SyncedJob, JobConfig):
    """jobs.train_policy: span-level PPO."""

    model: ModelConfig
    data: DataConfig
    eval_data: DataConfig | None = Field(None, description="held-out prompts; none: no evaluation")
    num_steps: ResumeMutable[int] = Field(100, ge=1)
    environment: str | None = Field(
        None, description="replies to the policy's turns: code_repair (what fails of the visible tests), python (a "
        "tool that runs programs), tiny_tools or pkg.mod:Class; none: responses of a single turn",
    )  # fmt: skip
    feedback: FeedbackConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: ResumeMutable[CheckpointConfig] = CheckpointConfig()
    alarms: ResumeMutable[AlarmConfig] = AlarmConfig()
    log: ResumeMutable[LogConfig] = LogConfig()
    # Resume compares the content of the artifacts.
    artifacts: ResumeMutable[PathOrName[Path | None]] = Field(
        None,
        description="a demo config whose artifacts are made first if missing; ${artifacts} in a path is their folder",
    )

    def roles(self) -> dict[str, ProcessConfig]:
        reserved = self.reserved
        return {"rollout": reserved.rollout, **reserved.learner.roles(self.objective), **super().roles()}

    @property
    def log_options(self) -> LogConfig:
        return self.log

    @property
    def responses_per_step(self) -> int:
        return samples_per_step(self.rollout)

    @property
    def stop_deadline_s(self) -> float:
        return CALLS_TO_FINISH * self.learner.step_timeout_s

    def policy_models(self) -> Iterator[JobModel]:
        engine = SectionEngine(section="rollout", config=self.rollout)
        yield policy_model(self.model, engine, is_trained=True)

    def measuring_sandbox(self) -> SandboxConfig | None:
        """Return the sandbox of evaluations and of the outcome reward `task`, if the task runs programs."""
        pays_outcome = any(entry.source == "task" for entry in self.objective.outcome_rewards)
        is_measured = self.eval_data is not None or pays_outcome
        return self.feedback.sandbox if self.task == "code" and is_measured else None

    def identity_settings(self) -> dict[str, Any]:
        return {"learner.schedule_steps": self.schedule_steps}

    @property
    def leftovers(self) -> tuple[str, ...]:
        return (loading.FILE_NAME,)

    @property
    def demo_file(self) -> Path | None:
        return self.artifacts

    def first_prompt(self, data: Any) -> PromptPreview | None:
        first = data.prompts[0]
        return PromptPreview(self.model, first.prompt_ids, f"prompt {first.prompt_id}")

    def receiving_options(self, model: ModelConfig) -> dict[str, Any]:
        options: dict[str, Any] = {"transport": self.learner.sync_transport}
        if self.learner.sends_adapters and model == self.model:
            options["lora"] = self.learner.lora
        if self.cluster.gpu_sharing == "alternate":
            options["can_sleep"] = True
        return options

    def reward_functions(self) -> list[str]:
        sources = [entry.source for entry in self.objective.outcome_rewards]
        return [source for source in sources if ":" in source and not source.startswith("metric:")]

    def describe_work(self) -> list[str]:
        evaluation = "none, there is no eval_data"
        if self.eval_data is not None:
            prompts = format_count(self.eval.num_prompts, "prompt")
            samples = format_count(self.eval.samples_per_prompt, "sample")
            interval = format_count(self.eval.every, "step")
            evaluation = f"every {interval}, {prompts} x {samples} of {self.eval_data.name}"
        steps = format_steps(self.rollout, self.learner, self.num_steps, self.cluster.gpu_sharing)
        steps += [*format_turns(self.environment, self.rollout), f"feedback: {self.feedback.describe()}"]
        return [*steps, format_objective(self.objective), f"evaluation: {evaluation}"]

    @property
    def schedule_steps(self) -> int | None:
        """Return the steps of the learning-rate schedules; None if every rate in use is constant."""
        used = [self.learner.policy]
        if self.objective.uses_critic:
            used.append(self.learner.critic)
        is_constant = all(optim.schedule == "constant" and not optim.warmup_ratio for optim in used)
        if is_constant:
            return None
        return self.learner.schedule_steps or self.num_steps

    @property
    def teacher_window(self) -> int | None:
        return None if self.objective.teacher is None else self.revision_window

    @property
    def revision_window(self) -> int:
        """Return the most tokens of a prompt, its response and a critique: the windows of both engines together."""
        return self.rollout.max_model_len + (self.feedback.engine_source or self.feedback).engine.max_model_len

    @model_validator(mode="after")
    def check_objective(self) -> Self:
        check_conversations(self.environment, self.feedback, self.objective)
        if self.objective.teacher is not None and not self.feedback.writes_critiques:
            raise ValueError(
                "objective.teacher shows the critique to the policy, and feedback.style.critique=false has none"
            )
        teacher = self.objective.teacher
        if teacher is not None and teacher.critique == "shuffled" and self.rollout.prompts_per_step == 1:
            raise ValueError(
                "objective.teacher.critique=shuffled reads the critique of another prompt of the step: "
                "rollout.prompts_per_step is 1 and needs to be 2 or more"
            )
        if not self.objective.trains_rewards and not self.objective.kl_in_loss:
            raise ValueError(
                "objective.kl_estimator=k1 is part of the rewards, and objective.teacher.weight=1 trains none: set k3"
            )
        if self.objective.trains_rewards and not self.objective.uses_critic and self.rollout.samples_per_prompt < 2:
            by_position = self.objective.values == "position"
            key = f"advantages={self.objective.advantages}" if by_position else f"values={self.objective.values}"
            raise ValueError(
                f"objective.{key} compares the samples of a prompt: rollout.samples_per_prompt is 1 and needs to be 2 "
                "or more"
            )
        return self

    @model_validator(mode="after")
    def check_resampling(self) -> Self:
        number = self.rollout.resample_zero_groups
        if number == 0:
            return self
        key = f"rollout.resample_zero_groups={number}"
        if self.rollout.samples_per_prompt < 2:
            raise ValueError(
                f"{key} replaces prompts whose samples all earn the same: rollout.samples_per_prompt is 1 and needs to "
                "be 2 or more"
            )
        advantages = self.objective.advantages
        if advantages not in ("group", "group_normalised"):
            raise ValueError(
                f"{key} replaces prompts whose samples all earn the same, and objective.advantages={advantages} does "
                "not compare samples: set advantages=group, or resample_zero_groups=0"
            )
        if self.objective.values != "position":
            raise ValueError(
                f"{key} replaces prompts whose samples earn the same at each position, and objective.values="
                f"{self.objective.values} compares other states: set values=position, or resample_zero_groups=0"
            )
        if not self.objective.trains_rewards:
            raise ValueError(
                f"{key} replaces prompts whose samples all earn the same, and objective.teacher.weight=1 trains no "
                "rewards: set resample_zero_groups=0"
            )
        return self


class SFTJob(JobConfig):
    """jobs.train_sft: fine-tune a policy on references."""

    model: ModelConfig
    data: DataConfig
    sft: SFTOptions = SFTOptions()
    log: ResumeMutable[LogConfig] = LogConfig()

    def roles(self) -> dict[str, ProcessConfig]:
        return {"sft": self.sft}

    @property
    def log_options(self) -> LogConfig:
        return self.log

    @property
    def stop_deadline_s(self) -> float:
        return self.sft.timeout_s

    @property
    def leftovers(self) -> tuple[str, ...]:
        return MODEL, f"{MODEL}.part"

    def first_prompt(self, data: Any) -> PromptPreview | None:
        return PromptPreview(self.model, data[0].prompt_ids, "the first example") if data else None

    def policy_models(self) -> Iterator[JobModel]:
        yield policy_model(self.model, None, is_trained=True)

    def describe_work(self) -> list[str]:
        return [f"supervised: {format_sft(self.sft)}"]


class AnnotateJob(JobConfig):
    """jobs.annotate: write annotated records for sampled or given responses."""

    model: ModelConfig | None = Field(
        None, description="policy whose responses are sampled; none with annotate.responses=data"
    )
    data: ResumeMutable[DataConfig]  # the journal identifies each record by its content
    rollout: RolloutConfig = RolloutConfig()
    annotate: AnnotateConfig = AnnotateConfig()

    def roles(self) -> dict[str, ProcessConfig]:
        sampling = {"rollout": self.rollout} if self.annotate.responses == "policy" else {}
        return sampling | super().roles()

    @property
    def leftovers(self) -> tuple[str, ...]:
        return (JOURNAL_FILE,)

    def policy_models(self) -> Iterator[JobModel]:
        if self.model is None:
            return
        samples = self.annotate.responses == "policy"
        engine = SectionEngine(section="rollout", config=self.rollout) if samples else None
        yield policy_model(self.model, engine)

    def describe_work(self) -> list[str]:
        options = self.annotate
        responses = f"the response of each record of {self.data.name}"
        if options.responses == "policy":
            number = format_count(self.rollout.samples_per_prompt, "response")
            responses = f"{number} to each prompt of {self.data.name}, {format_sampling(self.rollout)}"
        elif options.reads_conversations:
            responses = f"each of the assistant's turns with a reply in {self.data.name}"
        if options.planted:
            responses += f"; {options.planted:g} more for each prompt with planted faults"
        groups = "conversations" if options.reads_conversations else "prompts"
        heldout = f"records of {options.heldout_share:.0%} of the {groups} are held out"
        return [responses, f"feedback: {options.describe()}; {heldout}"]

    @model_validator(mode="before")
    @classmethod
    def fill_human_file(cls, values: Any) -> Any:
        """Set the human_file of a human source and its columns to those of data if they are not set."""

        def fill(source: Any) -> Any:
            match source:
                case {"sources": dict(sources)}:
                    return {**source, "sources": {name: fill(one) for name, one in sources.items()}}
                case {"source": "human"} if source.get("human_file") is None:
                    columns = source.get("human_columns") or data.get("columns", {})
                    return {**source, "human_file": data["path"], "human_columns": columns}
            return source

        match values:
            case {"data": {"path": _} as data, "annotate": annotate}:
                return {**values, "annotate": fill(annotate)}
        return values

    @model_validator(mode="after")
    def check_responses(self) -> "AnnotateJob":
        if self.annotate.responses == "policy" and self.model is None:
            raise ValueError("annotate.responses=policy needs model.policy")
        return self


class RewardJob(SFTJob):
    """jobs.train_reward: supervised training of the span reward model on annotated records."""

    eval_data: DataConfig
    style: StyleConfig = StyleConfig()
    engine: RewardEngineConfig = RewardEngineConfig()
    eval_records: int = Field(200, ge=1, description="held-out records in the report")
    criterion: str | None = Field(
        None, description="criterion that the model learns, of records that were judged by several"
    )

    def later_roles(self) -> dict[str, ProcessConfig]:
        return {"engine": self.engine}

    def first_prompt(self, data: Any) -> None:
        return None

    def policy_models(self) -> Iterator[JobModel]:
        engine = SectionEngine(section="engine", config=self.engine)
        yield policy_model(self.model, engine, is_trained=True)

    @field_validator("style")
    @classmethod
    def check_spans(cls, style: StyleConfig) -> StyleConfig:
        if not style.spans:
            raise ValueError("a span reward model writes spans; remove style.spans=false")
        return style

    def describe_work(self) -> list[str]:
        records = f"at most {format_count(self.eval_records, 'record')} of {self.eval_data.name}"
        engine = format_process("engine", self.engine)
        return [*super().describe_work(), f"evaluation: {records}, after the training, on {engine}"]


# For five facts: posts of 30 to 40 tokens, summaries of 15 to 25, reward-model answers of about 110.
WINDOWS = {
    "policy_sft": {"max_length": 192},
    "reward_sft": {"max_length": 320},
    "rollout": {"max_new_tokens": 48, "max_model_len": 128},
    "reward_engine": {"max_model_len": 384, "max_new_tokens": 256, "max_critique_chars": 600, "max_spans": 12},
}


class DemoJob(SyncedJob):
    """jobs.demo: the whole pipeline on the tiny world; three methods share annotation and reward model."""

    run: RunConfig = RunConfig(name="demo")
    task: Literal["tiny", "tiny_code", "tiny_tools"] = Field(
        "tiny",
        description="task of the pipeline; tiny_code, tiny_tools: world and base policy alone, for `artifacts` of "
        "other jobs",
    )
    world: WorldConfig = WorldConfig()
    policy_sft: SFTOptions = SFTOptions()
    annotate: int = Field(4000, ge=1, description="responses sampled and annotated")
    planted: float = Field(
        0.5, ge=0, description="annotate.planted of the annotation: additional responses with planted faults"
    )
    reward_sft: SFTOptions = SFTOptions()
    reward_engine: RewardEngineConfig = RewardEngineConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    eval: EvalConfig = EvalConfig()
    num_steps: ResumeMutable[int] = Field(20, ge=1)
    methods: tuple[Placement, ...] = Field(("span", "scalar", "shuffled"), min_length=1)

    def roles(self) -> dict[str, ProcessConfig]:
        reserved = self.reserved
        return {
            "rollout": reserved.rollout,
            **reserved.learner.roles(self.objective),
            "reward_engine": self.reward_engine,
        }

    def describe_work(self) -> list[str]:
        posts = format_count(self.world.num_train, "post")
        base_policy = format_sft(self.policy_sft)
        responses = format_count(self.annotate, "response")
        reward_model = format_sft(self.reward_sft)
        methods = format_count(len(self.methods), "method")
        names = ", ".join(self.methods)
        steps = format_steps(self.rollout, self.learner, self.num_steps, self.cluster.gpu_sharing)
        return [
            f"world: {posts} to train on, {self.world.num_heldout} held out",
            f"base policy: {base_policy}",
            f"phase 1: {responses} sampled, {self.planted:g} planted for each, then annotated",
            f"phase 2: reward model, {reward_model}",
            f"phase 3: {methods} ({names}), one by one, each",
            *steps,
        ]

    @model_validator(mode="before")
    @classmethod
    def fill_windows(cls, values: Any) -> Any:
        """Scale windows and lengths that are not set with the facts of a post."""
        match values:
            case {"world": {"num_facts": int(num_facts)}}:
                scale = max(1, num_facts / 5)
            case dict():
                scale = 1.0
            case _:
                return values
        for section, windows in WINDOWS.items():
            set_values = values.get(section, {})
            if isinstance(set_values, dict):
                defaults = {key: ceil(scale * window) for key, window in windows.items()}
                values = {**values, section: defaults | set_values}
        return values


class CompareJob(PolicyJob):
    """jobs.compare: methods on the same model, data, seeds, feedback and samples."""

    run: RunConfig = RunConfig(name="compare")
    compare: ResumeMutable[CompareConfig] = CompareConfig()  # each run has a checked config of its own

    def make_policy_job(self) -> PolicyJob:
        """Return the training of one policy with the settings that all methods share."""
        fields = {name: value for name, value in self if name in PolicyJob.model_fields}
        return PolicyJob(**fields)

    def policy_models(self) -> Iterator[JobModel]:
        yield from super().policy_models()
        if self.compare.reviser:
            yield JobModel(key="compare.reviser", name=self.compare.reviser)

    @model_validator(mode="after")
    def check_evaluation(self) -> "CompareJob":
        if self.eval_data is None:
            raise ValueError("eval_data is missing: methods are compared on held-out prompts")
        if self.run.smoke:
            raise ValueError(
                "run.smoke is an option of jobs.train_policy; try num_steps=2 with one seed and one rate in lr_grid"
            )
        if self.feedback.noise is not None:
            raise ValueError("feedback.noise would apply to every run; name it in compare.noise instead")
        if self.compare.reference_prompts > self.eval.num_prompts:
            raise ValueError(
                f"compare.reference_prompts={self.compare.reference_prompts} are held-out prompts, and "
                f"eval.num_prompts={self.eval.num_prompts} are read; lower the first or raise the second"
            )
        search_steps = self.compare.search_steps
        if search_steps is not None and search_steps > self.num_steps:
            raise ValueError(f"compare.search_steps={search_steps} is more than num_steps={self.num_steps}")
        if (self.compare.rewards is None) == (self.feedback.reward_model == "${rewards}"):
            raise ValueError(
                "compare.rewards trains what feedback.reward_model=${rewards} stands for: give both, or neither"
            )
        if self.compare.rewards and self.artifacts is None:
            raise ValueError("compare.rewards trains on the records of artifacts: set artifacts")
        return self


class ScoreJob(JobConfig):
    """jobs.score: get the feedback of a span reward model on one prompt and response."""

    feedback: FeedbackConfig  # task and feedback.style default to those of the model's training

    @property
    def takes_card_settings(self) -> bool:
        return True

    @model_validator(mode="after")
    def check_source(self) -> "ScoreJob":
        if self.feedback.sources or self.feedback.source != "reward_model":
            raise ValueError(
                f"feedback.source={self.feedback.describe()} cannot be evaluated; it needs to be reward_model"
            )
        if self.feedback.noise is not None:
            raise ValueError("feedback.noise is for policy training; remove it")
        return self


class EvaluateJob(ScoreJob):
    """jobs.evaluate --what reward: evaluate a span reward model on held-out annotated records."""

    data: DataConfig
    criterion: str | None = Field(None, description="criterion of the held-out records, as in jobs.train_reward")

    @property
    def leftovers(self) -> tuple[str, ...]:
        return (EVALUATION_FILE,)

    def describe_work(self) -> list[str]:
        records = f"{self.data.name}, each judged twice, with and without guided decoding"
        return [f"reward model: {self.feedback.reward_model}", f"held-out records: {records}"]
