"""Schema of jobs.evaluate --what policy: the policies, their sampling, and their judges."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from t2g.config import loading
from t2g.config.base_jobs import JobConfig
from t2g.config.common import DataConfig, ModelConfig, ProcessConfig, set_derived, with_overrides
from t2g.config.comparing import RunPart
from t2g.config.describe import format_count, format_sampling
from t2g.config.feedback import FeedbackConfig, RolloutConfig
from t2g.config.field_annotations import PathOrName, ResumeMutable
from t2g.config.job_models import JobModel, SectionEngine, policy_model
from t2g.config.language_model import LLMConfig
from t2g.config.learning import RewardRuleConfig
from t2g.config.validation_errors import errors_at, format_first_error
from t2g.sandbox import SandboxConfig

SAMPLING_KEYS = ("temperature", "max_new_tokens", "max_model_len")
RESPONSES = "responses"  # folder with the policies' answers
ADAPTER_FILE = "adapter_config.json"  # the file of a folder with adapters
RUN_DEPTH = 3  # folders from a run to its policy: run/checkpoints/step-00000010/policy


class SampledConfig(RolloutConfig):
    """Sampling of every policy; defaults come from training, see `training_sampling`."""

    samples_per_prompt: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0, description="0: greedy; default: that of the policies' training")


def training_sampling(policy: str) -> dict[str, Any]:
    """Return the values of SAMPLING_KEYS in the PPO run that trained a policy; {} for other folders."""
    files = [folder / loading.FILE_NAME for folder in Path(policy).parents][:RUN_DEPTH]
    runs = [loading.read_yaml(file)[0] for file in files if file.is_file()]
    rollout = next((run["rollout"] for run in runs if {"learner", "rollout"} <= run.keys()), {})
    return {key: rollout[key] for key in SAMPLING_KEYS if key in rollout}


class PolicyEvaluationJob(JobConfig):
    """jobs.evaluate --what policy: policies on the same prompts, with confidence intervals."""

    # Each journal line has a key of its inputs: after a change only the affected lines are computed again.
    task: ResumeMutable[str] = Field("prompts", description=JobConfig.model_fields["task"].description)
    policies: ResumeMutable[dict[RunPart, ModelConfig]] = Field(
        {}, description="name -> folder, hub name or adapter; each pair compares a later policy with an earlier one"
    )
    endpoints: ResumeMutable[dict[RunPart, LLMConfig]] = Field(
        {}, description="name -> a policy behind a server, sampled with the settings of rollout"
    )
    temperatures: ResumeMutable[dict[RunPart, Annotated[float, Field(ge=0)]]] = Field(
        {}, description="name of a policy -> its temperature, where it is not rollout.temperature"
    )
    data: ResumeMutable[DataConfig]
    rollout: SampledConfig = SampledConfig()
    sandbox: ResumeMutable[SandboxConfig] = SandboxConfig()
    feedback: ResumeMutable[FeedbackConfig | None] = Field(
        None, description="feedback source that scores each response by its spans, as eval/score of a run; none: the "
        "task's measure alone"
    )  # fmt: skip
    rewards: ResumeMutable[RewardRuleConfig] = RewardRuleConfig()  # values of these spans
    concurrency: ResumeMutable[int] = Field(2, ge=1, description="responses measured at once")
    bertscore: ResumeMutable[PathOrName[str | None]] = Field(
        None, description="folder of an encoder; needs the extra `eval`"
    )
    bertscore_layer: ResumeMutable[int] = Field(
        6, ge=1, description="layer of the encoder whose embeddings are compared"
    )
    pass_at: ResumeMutable[tuple[Annotated[int, Field(ge=1)], ...]] = Field(
        (1,), min_length=1, description="k of pass@k"
    )
    judges: ResumeMutable[dict[RunPart, LLMConfig]] = Field(
        {}, description="name -> model behind a server; it compares the first responses of each pair in both orders"
    )
    timeout_s: ResumeMutable[float] = Field(
        300, gt=0, description="deadline of one answer of a server, retries included"
    )

    def roles(self) -> dict[str, ProcessConfig]:
        sampling = {"rollout": self.rollout} if self.policies else {}  # one policy at a time
        return sampling | super().roles()

    @property
    def leftovers(self) -> tuple[str, ...]:
        return (RESPONSES,)

    def describe_work(self) -> list[str]:
        responses = f"{format_count(self.rollout.samples_per_prompt, 'response')} to each prompt of {self.data.name}"
        policies = f"policies: {', '.join(self.names)}; judges: {', '.join(self.judges) or 'none'}"
        feedback = [f"feedback: {self.feedback.describe()}"] if self.feedback else []
        return [policies, f"{responses}, {format_sampling(self.rollout)}", *feedback]

    def policy_models(self) -> Iterator[JobModel]:
        engine = SectionEngine(section="rollout", config=self.rollout)
        for name, model in self.policies.items():
            is_adapter = (Path(model.policy) / ADAPTER_FILE).exists()  # it is merged into its base before
            if not is_adapter:
                yield policy_model(model, engine, key=f"policies.{name}.policy")

    def servers(self) -> Iterator[LLMConfig]:
        yield from (*self.endpoints.values(), *self.judges.values())
        yield from super().servers()

    def measuring_sandbox(self) -> SandboxConfig | None:
        return self.sandbox if self.task == "code" else None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all policies in the order of pairs."""
        return *self.policies, *self.endpoints

    @model_validator(mode="after")
    def fill_training_sampling(self, info: ValidationInfo) -> Self:
        """Set keys of rollout that the user did not set as the policies' training runs have them.

        Only configs that are read from files have a context. The values are read once, and then count as set.
        """
        if info.context:
            with errors_at("rollout"):
                set_derived(self, "rollout", self._with_training_sampling())
        return self

    def _with_training_sampling(self) -> SampledConfig:
        runs = [training_sampling(model.policy) for model in self.policies.values()]
        changes: dict[str, float] = {}
        for key in set(SAMPLING_KEYS) - self.rollout.model_fields_set:
            values = {run[key] for run in runs if key in run}
            if len(values) > 1:
                raise ValueError(f"rollout.{key} is not set, and training sampled with {sorted(values)}: set one value")
            changes.update((key, value) for value in values)
        try:
            return with_overrides(self.rollout, changes)
        except ValidationError as error:
            raise ValueError(f"with {changes} of the policies' training: {format_first_error(error)}") from error

    @field_validator("endpoints", "judges")
    @classmethod
    def check_servers(cls, servers: dict[str, LLMConfig], info: ValidationInfo) -> dict[str, LLMConfig]:
        for name, llm in servers.items():
            if llm.url is None or llm.model is None:
                raise ValueError(f"{info.field_name}.{name} needs url and model: the server and the model name there")
        return servers

    @model_validator(mode="after")
    def check_evaluation(self) -> "PolicyEvaluationJob":
        if not self.names or len(self.names) < len(self.policies) + len(self.endpoints):
            raise ValueError("policies and endpoints need at least one name, and each name once")
        if unknown := self.temperatures.keys() - set(self.names):
            raise ValueError(f"temperatures names {min(unknown)}; the policies are {', '.join(self.names)}")
        if self.data.too_long == "skip":
            raise ValueError("data.too_long=skip can skip other prompts for each policy; set it to error or truncate")
        if max(self.pass_at) > self.rollout.samples_per_prompt:
            raise ValueError(
                f"pass_at={list(self.pass_at)} needs as many samples per prompt; rollout.samples_per_prompt is "
                f"{self.rollout.samples_per_prompt}"
            )
        if self.judges and len(self.names) == 1:
            raise ValueError("judges compare policies: at least two are needed, got one")
        return self
