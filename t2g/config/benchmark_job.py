"""Schema of jobs.benchmark."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from t2g.config.base_jobs import SyncedJob
from t2g.config.common import ProcessConfig, RunConfig, Section
from t2g.config.feedback import RewardEngineConfig
from t2g.config.field_annotations import ResumeMutable
from t2g.config.gpus import check_gpus


class ShapeConfig(Section):
    """Shape of a model with random weights; the default is that of Qwen2.5-0.5B."""

    architecture: Literal["qwen2", "llama"] = "qwen2"
    vocab_size: int = Field(151_936, ge=320)
    hidden_size: int = Field(896, ge=32)
    intermediate_size: int = Field(4864, ge=32)
    num_hidden_layers: int = Field(24, ge=1)
    num_attention_heads: int = Field(14, ge=1)
    num_key_value_heads: int = Field(2, ge=1)
    tie_word_embeddings: bool = True


PHASES = ("rollout", "reward", "learner", "sync", "start", "step", "teacher")


class BenchmarkJob(SyncedJob):
    """jobs.benchmark: each phase of a step, compared with the bare libraries and with TRL in the same run."""

    run: RunConfig = RunConfig(name="benchmark")
    phases: ResumeMutable[tuple[Literal[PHASES], ...]] = Field(
        (), description="phases to measure; none: those that benchmark.json in the run folder lacks"
    )
    shape: ShapeConfig = ShapeConfig()
    reward_engine: RewardEngineConfig = RewardEngineConfig()
    prompt_tokens: int = Field(16, ge=1, description="length of each prompt")
    workers: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1,),
        min_length=1,
        description="numbers of rollout engines that receive weights, in rising order",
    )
    repeats: ResumeMutable[int] = Field(5, ge=2, description="measured repetitions of each side, after a discarded one")
    max_busy: ResumeMutable[float] = Field(
        0.1, ge=0, le=1, description="most CPU share that other programs may use at the start; above it the job refuses"
    )
    variants: ResumeMutable[bool] = Field(
        True, description="whether phase step also measures max_staleness=1 and a value model"
    )
    deadline_s: ResumeMutable[float] = Field(300, gt=0, description="deadline of one repetition")

    def roles(self) -> dict[str, ProcessConfig]:
        return {"rollout": self.rollout, "learner": self.learner}

    def describe_work(self) -> list[str]:
        phases = ", ".join(self.phases) or "all that are not measured yet"
        return [f"phases: {phases}; {self.repeats} repetitions of each side, after a discarded one"]

    @model_validator(mode="after")
    def check_sharing(self) -> "BenchmarkJob":
        check_gpus(self.rollout, self.learner, self.cluster.gpu_sharing)
        if self.cluster.gpu_sharing == "alternate":
            raise ValueError("cluster.gpu_sharing=alternate: the benchmark measures none and split")
        return self

    @model_validator(mode="after")
    def check_workers(self) -> "BenchmarkJob":
        if list(self.workers) != sorted(set(self.workers)):
            raise ValueError(f"workers={list(self.workers)} needs to rise: engines are only added")
        if self.rollout.workers.initial != self.workers[0] or self.rollout.workers.max < self.workers[-1]:
            raise ValueError(
                f"rollout.workers needs initial={self.workers[0]} and max={self.workers[-1]}, the first and last of "
                f"workers, got {self.rollout.workers.initial} and {self.rollout.workers.max}"
            )
        return self
