"""Sections of the jobs' configs: all fields, defaults and bounds. Imports no torch; `t2g.configio` reads the files.

A default that depends on another field is resolved by a validator, so that the resolved config has no holes.
"""

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator


class Section(BaseModel):
    """Unknown keys are refused; a config never changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


Dtype = Literal["float32", "bfloat16"]
Schedule = Literal["constant", "linear", "cosine"]
Placement = Literal["span", "scalar", "shuffled"]

FLOAT32_PROBE_TOLERANCE = 1e-3
BFLOAT16_PROBE_TOLERANCE = 0.25


class RunConfig(Section):
    root: Path = Field(Path("runs"), description="folder of all runs; may be a shared mount; made absolute at once")
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,46}$", description="folder of this run under root")
    seed: int = Field(1, ge=0)
    resume: Literal["auto", "never"] = Field("auto", description="auto: go on from the last checkpoint if there is one")
    smoke: bool = Field(False, description="preflight, three real steps, a report, samples/s and time left; then stop")

    @property
    def folder(self) -> Path:
        return self.root / self.name


class ClusterConfig(Section):
    address: str | None = Field(None, description="Ray address; none: the cluster of the job, else a new local one")
    placement_timeout_s: float = Field(60, gt=0, description="how long actors may wait for CPUs, GPUs and memory")
    object_store_gib: float = Field(1.0, gt=0, description="object store of a new local cluster, GiB")


class DataConfig(Section):
    path: str = Field(..., description="JSON, JSON lines, CSV or Parquet file, or a dataset name on the hub")
    revision: str | None = Field(None, description="commit of the hub dataset; required for hub names")
    split: str = "train"
    columns: dict[str, str] = Field({}, description="our field -> the file's field, e.g. {prompt: question}")
    limit: int | None = Field(None, ge=1, description="use only the first so many records")


class OptimConfig(Section):
    lr: float = Field(1e-6, gt=0)
    schedule: Schedule = "linear"
    final_lr_ratio: float = Field(0.0, ge=0, le=1, description="lr at the end, as a share of lr")
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="share of the steps with rising lr")
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class RoleConfig(Section):
    """Resources of one process of a role."""

    workers: int = Field(1, ge=1, description="processes of this role (rollout engines, reward engines, ranks)")
    cpus: float = Field(0.5, gt=0, description="logical CPUs that Ray reserves for each; 0.5 shares a core")
    gpus: float = Field(0, ge=0, description="GPUs for each")
    threads: int = Field(1, ge=1, description="compute threads of each on a CPU")
    memory_gib: float = Field(1.5, gt=0, description="memory each is expected to use; checked before the start")
    labels: dict[str, str] = Field({}, description="Ray label selector of the nodes for this role")


class EngineConfig(RoleConfig):
    """A vLLM engine and its process."""

    dtype: Dtype = "float32"
    max_model_len: int = Field(1024, ge=16, description="longest prompt plus response, tokens")
    max_num_seqs: int = Field(64, ge=1, description="sequences decoded together")
    kv_cache_gib: float = Field(0.25, gt=0, description="KV cache of a CPU engine, GiB")
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    enforce_eager: bool = True
    start_timeout_s: float = Field(240, gt=0)
    request_timeout_s: float = Field(180, gt=0, description="one request; past it the worker counts as late")


def _refuse_without_room(config: "RolloutConfig | RewardEngineConfig") -> None:
    if config.max_new_tokens >= config.max_model_len:
        raise ValueError(
            f"max_new_tokens={config.max_new_tokens} leaves no room for a prompt in "
            f"max_model_len={config.max_model_len}; it needs to be smaller"
        )


class RolloutConfig(EngineConfig):
    prompts_per_step: int = Field(16, ge=1)
    samples_per_prompt: int = Field(4, ge=1)
    temperature: float = Field(1.0, gt=0)
    max_new_tokens: int = Field(128, ge=1)

    @model_validator(mode="after")
    def _has_room(self) -> "RolloutConfig":
        _refuse_without_room(self)
        return self


class RewardEngineConfig(EngineConfig):
    max_model_len: int = Field(4096, ge=16, description="longest prompt (instructions, input, response) plus answer")
    max_critique_chars: int = Field(1200, ge=1, description="bound of the critique in guided decoding")
    max_spans: int = Field(16, ge=0, description="bound of good and of poor quotes each")
    max_quote_chars: int = Field(160, ge=1)
    max_new_tokens: int = Field(1024, ge=1, description="must hold the longest answer: a cut one is unparsable")

    @model_validator(mode="after")
    def _has_room(self) -> "RewardEngineConfig":
        _refuse_without_room(self)
        return self


class StyleConfig(Section):
    """What feedback is made of: the same in annotation, training and serving of a reward model."""

    critique: bool = Field(True, description="a critique is written before the spans; off: the paper's ablation")
    labels: Literal["sparse", "dense"] = Field(
        "sparse", description="sparse: the few pieces that decide; dense: every piece of the response is good or poor"
    )


class LLMConfig(Section):
    """A language model that annotates: behind an OpenAI-compatible server, or served by engines of our own."""

    url: str | None = Field(
        None, description="base URL of an OpenAI-compatible server, no key in it; none: own engines"
    )
    model: str | None = Field(None, description="name that the server knows; of own engines: folder or hub name")
    revision: str | None = Field(None, description="commit of a hub model that own engines serve")
    key_env: str = Field("OPENAI_API_KEY", description="environment variable that holds the key")
    concurrency: int = Field(8, ge=1, description="open requests")
    requests_per_minute: float | None = Field(None, gt=0, description="none: as fast as `concurrency` allows")
    request_timeout_s: float = Field(120, gt=0, description="one request; past it the request is made again")
    max_tries: int = Field(
        3, ge=1, description="requests for one answer; each is told what was wrong before"
    )
    num_annotators: int = Field(1, ge=1, description="independent answers; a label needs more than half of them")
    temperature: float = Field(
        0.0, ge=0, description="above 0 for several annotators, who would say the same at 0"
    )
    max_output_tokens: int = Field(2048, ge=16, description="of one answer, reasoning included")
    max_total_tokens: int | None = Field(
        None,
        ge=1,
        description="cap of one start of an annotation; refused before the first request when the estimate, which is "
        "without second tries, is above",
    )

    @field_validator("url")
    @classmethod
    def _no_key_in_the_url(cls, url: str | None) -> str | None:
        if url is not None and "@" in urlsplit(url).netloc:
            raise ValueError(
                "llm.url has a name or password before its host, and config.yaml would keep it; "
                "put the key into the environment variable that llm.key_env names"
            )
        return url

    @model_validator(mode="after")
    def _annotators_differ(self) -> "LLMConfig":
        if self.num_annotators > 1 and self.temperature == 0:
            raise ValueError(
                f"llm.num_annotators={self.num_annotators} with llm.temperature=0 would ask the same question for the "
                "same answer; set a temperature, 0.7 for example"
            )
        return self


class SandboxConfig(Section):
    """Limits of one run of generated code with its tests."""

    timeout_s: float = Field(10, gt=0, description="wall clock")
    cpu_s: int = Field(10, ge=1, description="processor time of each process")
    memory_mib: int = Field(512, ge=64, description="address space of each process")
    max_processes: int = Field(16, ge=1)
    max_file_mib: int = Field(8, ge=1, description="each file that is written")
    max_output_kib: int = Field(64, ge=1, description="kept of what is printed")


SOURCES = ("reward_model", "llm", "human", "program")


class FeedbackConfig(Section):
    source: str = Field("reward_model", description=f"{', '.join(SOURCES)} (the task's own), or pkg.mod:function")
    style: StyleConfig = StyleConfig()
    reward_model: str | None = Field(None, description="folder or hub name of the span reward model")
    reward_revision: str | None = None
    engine: RewardEngineConfig = RewardEngineConfig()
    llm: LLMConfig = LLMConfig()
    human_file: str | None = Field(
        None, description="JSON lines or CSV: prompt_id and/or prompt, response, critique, quotes or offsets"
    )
    human_columns: dict[str, str] = Field({}, description="our field -> the human file's, e.g. {critique: comment}")
    sandbox: SandboxConfig = SandboxConfig()
    concurrency: int = Field(2, ge=1, description="sandboxes at once, in evaluation as well")
    timeout_s: float = Field(120, gt=0, description="one judgement, all tries")
    max_failed_share: float = Field(0.5, ge=0, le=1, description="a step with more failed feedback stops the run")

    @model_validator(mode="after")
    def _source_is_complete(self) -> "FeedbackConfig":
        need = {"reward_model": "reward_model", "human": "human_file"}
        if self.source in need and getattr(self, need[self.source]) is None:
            raise ValueError(f"source={self.source} needs {need[self.source]}")
        if self.source == "llm" and self.llm.model is None:
            raise ValueError("source=llm needs llm.model: a name that the server at llm.url knows, or a model to serve")
        if self.source not in SOURCES and ":" not in self.source:
            raise ValueError(
                f"source={self.source!r} is none of {', '.join(SOURCES)}, and no import path pkg.mod:function"
            )
        return self

    @property
    def model_asked(self) -> Literal["reward_model", "llm"] | None:
        """Which model has a part in the feedback."""
        return self.source if self.source in ("reward_model", "llm") else None

    @property
    def own_engines(self) -> bool:
        """Whether that model is served by engines of ours."""
        return self.model_asked == "reward_model" or (self.model_asked == "llm" and self.llm.url is None)


class AnnotateConfig(FeedbackConfig):
    """Stage 1's feedback source, and whose responses it judges."""

    source: str = Field("program", description=f"{', '.join(SOURCES)} (the task's own), or pkg.mod:function")
    responses: Literal["data", "policy"] = Field(
        "data", description="data: the response that each record holds; policy: sampled from model.policy"
    )
    align: Literal["llm", "reward_model"] | None = Field(
        None, description="who finds the spans of human critiques that have none; none: such critiques are refused"
    )
    heldout_share: float = Field(0.1, gt=0, lt=1, description="share of prompts whose records go to heldout.jsonl")

    @model_validator(mode="after")
    def _aligner_is_complete(self) -> "AnnotateConfig":
        if self.align == "llm" and self.llm.model is None:
            raise ValueError("align=llm needs llm.model")
        if self.align == "reward_model" and self.reward_model is None:
            raise ValueError("align=reward_model needs reward_model")
        return self

    @property
    def model_asked(self) -> Literal["reward_model", "llm"] | None:
        """The source, or the aligner of human critiques."""
        return self.align if self.source == "human" else super().model_asked


class RewardRuleConfig(Section):
    """How spans become token rewards (the paper's delta)."""

    placement: Placement = Field("span", description="span: on its tokens; scalar: summed at the last token; shuffled")
    good: float = 1.0
    poor: tuple[float, float, float] = Field(
        (-1.0, -1.0, -1.0), description="by severity 1, 2, 3; by default severity 1 is worth 0 in the task code"
    )
    cover: Literal["any", "half", "all"] = Field("any", description="non-blank characters of a token in a span")
    overlap: Literal["poor", "good", "sum"] = Field("poor", description="which label wins where good and poor overlap")


class ObjectiveConfig(Section):
    rewards: RewardRuleConfig = RewardRuleConfig()
    w_span: float = Field(1.0, ge=0)
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    whiten: Literal["full", "scale_only", "none"] = "full"
    clip_eps: float = Field(0.2, gt=0, lt=1)
    value_clip: float = Field(0.2, gt=0)
    vf_coef: float = Field(
        0.1,
        gt=0,
        description="factor of the critic's loss; the critic has an AdamW of its own, so it only says how soon "
        "learner.critic.max_grad_norm clips",
    )
    kl_coef: float = Field(0.05, ge=0, description="initial coefficient of the k1 penalty in the reward")
    kl_target: float | None = Field(6.0, gt=0, description="nats per sequence; none keeps the coefficient fixed")
    kl_horizon: int = Field(10_000, ge=1, description="samples over which the coefficient adapts")
    importance_cap: float = Field(2.0, ge=1, description="C of min(exp(old - rollout), C)")


def _own_probe_tolerance(learner: dict[str, Any]) -> float:
    return BFLOAT16_PROBE_TOLERANCE if learner.get("dtype") == "bfloat16" else FLOAT32_PROBE_TOLERANCE


class LearnerConfig(RoleConfig):
    policy: OptimConfig = OptimConfig()
    critic: OptimConfig = OptimConfig(lr=1e-5)
    num_epochs: int = Field(4, ge=1, description="passes over a step's samples")
    minibatches_per_epoch: int = Field(1, ge=1, description="optimizer steps per pass")
    tokens_per_microbatch: int = Field(4096, ge=16, description="token budget of one packed forward and backward")
    dtype: Dtype = "float32"
    critic_warmup_steps: int = Field(0, ge=0, description="first steps in which only the critic learns")
    sync_bucket_mib: float = Field(64, gt=0, description="weights gathered and sent at once")
    probe_tolerance: float = Field(
        default_factory=_own_probe_tolerance,
        gt=0,
        description="largest |engine - learner| logprob on the probe, nats; by default 0.001, and 0.25 where engine or "
        "learner is bfloat16, whose rounding alone puts them 0.06 apart in the mean",
    )
    step_timeout_s: float = Field(600, gt=0, description="one forward, update, sync or checkpoint")


def _with_probe_tolerance(learner: LearnerConfig, info: ValidationInfo) -> LearnerConfig:
    """The learner's default tolerance knows its own dtype only; the engine's counts as well."""
    rollout = info.data.get("rollout")  # none where that section is wrong
    if rollout is None or rollout.dtype == "float32" or "probe_tolerance" in learner.model_fields_set:
        return learner
    return learner.model_copy(update={"probe_tolerance": BFLOAT16_PROBE_TOLERANCE})


class EvalConfig(Section):
    every: int = Field(5, ge=1, description="steps between evaluations on held-out prompts")
    num_prompts: int = Field(128, ge=1)
    samples_per_prompt: int = Field(1, ge=1)


class CheckpointConfig(Section):
    every: int = Field(10, ge=1)
    keep: int = Field(2, ge=1)


class LogConfig(Section):
    tensorboard: bool = True
    wandb_project: str | None = Field(None, description="Weights & Biases project; needs the extra `wandb`")
    num_samples: int = Field(8, ge=0, description="samples per step written to samples.jsonl")


class AlarmConfig(Section):
    max_kl: float = Field(40.0, gt=0, description="nats per sequence")
    min_entropy: float = Field(0.01, ge=0, description="nats per token")
    length_ratio: float = Field(2.0, gt=1, description="mean response length against the first step's, either way")
    max_failed_share: float = Field(0.1, ge=0, le=1)


class ModelConfig(Section):
    policy: str = Field(..., description="folder or hub name of the policy")
    revision: str | None = None


class LoRAConfig(Section):
    """Low-rank adapters (Hu et al., arXiv 2106.09685) on every linear layer but the head; defaults are the paper's."""

    r: int = Field(16, ge=1)
    alpha: float = Field(32, gt=0)
    dropout: float = Field(0.05, ge=0, lt=1)


class SFTOptions(RoleConfig):
    """Supervised training under Ray Train and ZeRO-3; `workers` are ranks."""

    optim: OptimConfig = OptimConfig(lr=1e-5)
    dtype: Dtype = "float32"
    num_epochs: float = Field(3, gt=0)
    batch_size: int = Field(64, ge=1, description="examples per optimizer step, over all ranks")
    tokens_per_microbatch: int = Field(4096, ge=16)
    max_length: int = Field(1024, ge=16, description="prompt plus target; a longer prompt loses input text")
    span_weight: float = Field(1.0, ge=1, description="loss weight of the target's decisive characters")
    lora: LoRAConfig | None = Field(None, description="train adapters, export the merged model; none: all weights")
    packing: bool = Field(False, description="sequences one after the other in one row; slower on a CPU")
    gradient_checkpointing: bool = False
    offload: Literal["none", "cpu"] = Field("none", description="cpu: optimizer state and parameters in host memory")
    checkpoint_every: int | None = Field(500, ge=1, description="optimizer steps between checkpoints; none: never")
    timeout_s: float = Field(1800, gt=0, description="one optimizer step with its checkpoint, and the start-up")


class WorldConfig(Section):
    """The tiny world of t2g.tasks.tiny."""

    num_train: int = Field(4000, ge=1)
    num_heldout: int = Field(256, ge=1)
    wrong: float = Field(0.3, ge=0, le=1)
    missing: float = Field(0.2, ge=0, le=1)
    invented: float = Field(0.15, ge=0, le=1)
    repeated: float = Field(0.1, ge=0, le=1)
    seed: int = Field(1, ge=0)
