"""Schema of jobs.evaluate --what policy: who is evaluated, how they are sampled, and who judges them."""

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator, model_validator

from t2g.config.common import DataConfig, ModelConfig
from t2g.config.feedback import LLMConfig, RolloutConfig
from t2g.config.jobs import JobConfig, RunPart
from t2g.config.marks import MayDiffer, PathOrName
from t2g.sandbox import SandboxConfig


class SampledConfig(RolloutConfig):
    """How every policy is sampled."""

    samples_per_prompt: int = Field(1, ge=1)
    temperature: float = Field(0.0, ge=0, description="0: greedy")


class PolicyEvaluationJob(JobConfig):
    """jobs.evaluate --what policy: policies side by side on the same prompts, with intervals."""

    # The key of each journaled line says what it was made of: what changes here is sampled, measured or judged anew.
    policies: MayDiffer[dict[RunPart, ModelConfig]] = Field(
        {}, description="name -> folder, hub name or adapter; a pair is the later one against the earlier"
    )
    reflections: MayDiffer[dict[RunPart, ModelConfig]] = Field(
        {},
        description="name -> model as in policies, after them: it answers, criticises its answer and answers again, "
        "in rollout.max_model_len, which needs room for answer and critique beside the prompt",
    )
    endpoints: MayDiffer[dict[RunPart, LLMConfig]] = Field(
        {}, description="name -> a policy behind a server, after the others; rollout says how it is sampled"
    )
    data: MayDiffer[DataConfig]
    rollout: SampledConfig = SampledConfig()
    sandbox: MayDiffer[SandboxConfig] = SandboxConfig()
    concurrency: MayDiffer[int] = Field(2, ge=1, description="responses measured at once")
    bertscore: MayDiffer[PathOrName[str | None]] = Field(
        None, description="folder of an encoder; needs the extra `eval`"
    )
    bertscore_layer: MayDiffer[int] = Field(6, ge=1, description="of the encoder, whose embeddings are compared")
    pass_at: MayDiffer[tuple[Annotated[int, Field(ge=1)], ...]] = Field((1,), min_length=1, description="k of pass@k")
    judges: MayDiffer[dict[RunPart, LLMConfig]] = Field(
        {}, description="name -> model behind a server that compares the first responses of every pair, in both orders"
    )
    timeout_s: MayDiffer[float] = Field(300, gt=0, description="one answer of a server, all tries")

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that are evaluated, in the order of pairs."""
        return *self.served, *self.endpoints

    @property
    def served(self) -> dict[str, ModelConfig]:
        """Those that our engines serve."""
        return self.policies | self.reflections

    @field_validator("endpoints", "judges")
    @classmethod
    def _are_somewhere(cls, servers: dict[str, LLMConfig], info: ValidationInfo) -> dict[str, LLMConfig]:
        for name, llm in servers.items():
            if llm.url is None or llm.model is None:
                raise ValueError(f"{info.field_name}.{name} needs url and model: a server, and its name for the model")
        return servers

    @model_validator(mode="after")
    def _can_be_measured(self) -> "PolicyEvaluationJob":
        if not self.names or len(self.names) < len(self.policies) + len(self.reflections) + len(self.endpoints):
            raise ValueError("policies, reflections and endpoints need one name or more, and none of them twice")
        if max(self.pass_at) > self.rollout.samples_per_prompt:
            raise ValueError(
                f"pass_at={list(self.pass_at)} needs as many samples of a prompt, and rollout.samples_per_prompt="
                f"{self.rollout.samples_per_prompt}"
            )
        if self.judges and len(self.names) == 1:
            raise ValueError("judges compare two policies, and there is one")
        return self
