"""Sections of engines and feedback sources: how responses are sampled and judged."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from t2g.config.common import RESTART_WINDOW_S, Dtype, ProcessConfig, Section, set_derived
from t2g.config.field_annotations import PathOrName, ResumeMutable
from t2g.config.language_model import LLMConfig
from t2g.sandbox import SandboxConfig


class WorkersConfig(Section):
    """Number of engines of a fleet. A plain number N means {initial: N, min: 1, max: N}."""

    initial: int = Field(1, ge=1, description="engines at the start")
    min: int = Field(1, ge=1, description="the run stops when fewer serve for longer than a start takes")
    max: int = Field(default_factory=lambda data: data.get("initial", 1), ge=1, description="upper bound of scaling")

    @model_validator(mode="before")
    @classmethod
    def expand_worker_count(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return {"initial": value}
        if isinstance(value, dict) and "initial" not in value:
            return {**value, "initial": value.get("min", 1)}
        return value

    @model_validator(mode="after")
    def check_worker_order(self) -> "WorkersConfig":
        if not self.min <= self.initial <= self.max:
            raise ValueError(f"workers needs min <= initial <= max, got {self.min}, {self.initial}, {self.max}")
        return self


class HealthConfig(Section):
    """When a worker counts as unhealthy, and how often it is replaced; see `actors.fleet.health`."""

    check_interval_s: float = Field(10, gt=0, description="interval between health checks of a worker")
    check_timeout_s: float = Field(30, gt=0, description="deadline of a health check")
    max_failures: int = Field(3, ge=1, description="consecutive failed checks, requests or syncs before a replacement")
    max_restarts: int = Field(3, ge=0, description="replacements of one worker within restart_window_s")
    restart_window_s: float = Field(RESTART_WINDOW_S, gt=0, description="older replacements do not count")


# Engine arguments of vLLM that a config may not set, by reason; a star matches any ending.
SAMPLING_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "*_penalty", "stop")
RESERVED_ARGUMENTS = {
    "it has a key of its own": (
        "model", "revision", "tokenizer*", "dtype", "max_model_len", "max_num_seqs", "enforce_eager", "seed",
        "gpu_memory_utilization", "kv_cache_memory_bytes", "tensor_parallel_size",
    ),
    "samples and their logprobs would differ from what is trained": (
        "logprobs_mode", "generation_config", "override_generation_config", "logits_processors", "spec*",
        "watermark_config", "diffusion_config", "runner", "convert",
    ),
    "the engine would not serve the learner's weights": (
        "weight_transfer_config", "load_format", "hf_overrides", "hf_config_path", "model_weights", "enable_lora",
        "model_class_overrides", "enable_sleep_mode",
    ),
    "each engine is one process on one node; rollout.workers sets their number": (
        "data_parallel*", "pipeline_parallel_size", "nnodes", "node_rank", "master_*", "distributed_executor_backend",
        "device_ids",
    ),
    "t2g sets it": (
        "trust_remote_code", "skip_tokenizer_init", "structured_outputs_config", "disable_log_stats",
        "enable_chunked_prefill", "worker_*", "scheduler_cls",
    ),
}  # fmt: skip
ANSWER_TOKENS = 256  # response length for which request_timeout_s is meant


class EngineConfig(ProcessConfig):
    """A vLLM engine and its process."""

    workers: ResumeMutable[WorkersConfig] = WorkersConfig()
    health: ResumeMutable[HealthConfig] = HealthConfig()
    dtype: Dtype = "float32"
    max_model_len: int = Field(1024, ge=16, description="most tokens of a prompt plus its response")
    max_num_seqs: int = Field(
        default_factory=lambda data: 512 if data.get("gpus") else 64, ge=1,
        description="sequences decoded together; default 64, on GPUs 512",
    )  # fmt: skip
    kv_cache_gib: ResumeMutable[float] = Field(0.25, gt=0, description="KV cache of a CPU engine, GiB")
    gpu_memory_utilization: ResumeMutable[float] = Field(
        0.85, gt=0, le=1, description="share of a GPU's memory; at most the share of the GPU in gpus"
    )
    enforce_eager: bool = True
    engine_args: dict[str, Any] = Field(
        {},
        description="more engine arguments of vLLM, such as {quantization: fp8}; those that t2g relies on are refused",
    )
    join_outputs: ResumeMutable[bool] = Field(
        True, description="send up to 64 tokens of a response in one message from the engine core"
    )
    start_timeout_s: ResumeMutable[float] = Field(
        default_factory=lambda data: 1200 if data.get("gpus") else 240, gt=0,
        description="default 240, on GPUs 1200, where a first start compiles",
    )  # fmt: skip
    request_timeout_s: ResumeMutable[float] = Field(
        180, gt=0, description="deadline of one request of up to 256 new tokens; longer ones have proportionally more",
    )  # fmt: skip

    @field_validator("engine_args")
    @classmethod
    def check_engine_args(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for name in arguments:
            if any(fnmatchcase(name, pattern) for pattern in SAMPLING_SETTINGS):
                raise ValueError(
                    f"{name} is a setting of sampling and not of an engine: of these there are temperature and "
                    "max_new_tokens in the same section; remove it"
                )
        for why, patterns in RESERVED_ARGUMENTS.items():
            for name in arguments:
                is_reserved = any(fnmatchcase(name, pattern) for pattern in patterns)
                if is_reserved:
                    raise ValueError(f"{name} cannot be set: {why}; remove it")
        return arguments

    @model_validator(mode="after")
    def limit_memory_share(self) -> Self:
        """Limit the share to `gpus`: an engine that starts beside others on its GPU finds no more memory."""
        if 0 < self.gpus < 1:
            share = min(self.gpu_memory_utilization, self.gpus)
            set_derived(self, "gpu_memory_utilization", share)
        return self

    @property
    def num_processes(self) -> int:
        return self.workers.initial

    @property
    def tensor_parallel(self) -> int:
        """Return the number of GPUs of one engine."""
        return max(1, int(self.gpus))

    @property
    def timeout_scale(self) -> float:
        """Return the factor of a request's deadline."""
        return 1.0

    def compute_deadline_s(self, max_new_tokens: int) -> float:
        """Return the deadline of a request for a number of new tokens."""
        return max(1.0, max_new_tokens / ANSWER_TOKENS) * self.request_timeout_s

    @property
    def deadline_s(self) -> float:
        """Return the deadline of a request."""
        return self.timeout_scale * self.request_timeout_s


class _GeneratingConfig(EngineConfig):
    """An engine with a field `max_new_tokens`; a prompt may use the remaining window."""

    @property
    def max_prompt_tokens(self) -> int:
        return self.max_model_len - self.max_new_tokens

    @property
    def timeout_scale(self) -> float:
        return self.compute_deadline_s(self.max_new_tokens) / self.request_timeout_s

    @model_validator(mode="after")
    def check_prompt_room(self) -> Self:
        if self.max_prompt_tokens <= 0:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens} leaves no room for a prompt in "
                f"max_model_len={self.max_model_len}; it needs to be smaller"
            )
        return self


class RolloutConfig(_GeneratingConfig):
    """vLLM engines that sample responses."""

    prompts_per_step: int = Field(16, ge=1)
    samples_per_prompt: int = Field(4, ge=1)
    temperature: float = Field(1.0, gt=0)
    max_new_tokens: int = Field(128, ge=1)
    max_turns: int = Field(2, ge=1, description="with environment: most turns of the policy, each of max_new_tokens")
    max_calls: int = Field(8, ge=1, description="with tools: most calls of a turn; further ones get an error")
    tool_parser: str | None = Field(
        None, description="what reads the calls of tools: hermes, llama3_json, response_template (transformers) or a "
        "parser of vLLM; default: the tokenizer's response template, without one hermes"
    )  # fmt: skip
    max_staleness: int = Field(
        0, ge=0, le=2, description="most steps between the weights that sampled a response and those it trains. 0: "
        "synchronous; 1 or 2: generation, feedback and learning overlap"
    )  # fmt: skip
    resample_zero_groups: int = Field(
        0,
        ge=0,
        exclude_if=lambda number: number == 0,
        description="most further prompts of a step, drawn to replace prompts whose samples all earn the same "
        "(DAPO's dynamic sampling); prompts without a replacement stay. 0: none",
    )
    autoscale: ResumeMutable[bool] = Field(False, description="adapt the number of engines to the load, within workers")


class RewardEngineConfig(_GeneratingConfig):
    """vLLM engines of the reward model."""

    max_model_len: int = Field(
        4096, ge=16, description="most tokens of a prompt (instructions, input, response) plus the answer"
    )
    max_critique_chars: int = Field(1200, ge=1, description="most characters of the critique in guided decoding")
    max_spans: int = Field(16, ge=0, description="most good quotes, and most poor quotes")
    max_quote_chars: int = Field(160, ge=1)
    max_new_tokens: int = Field(
        1024, ge=1, description="must hold the longest answer: of a truncated one only the complete quotes are kept"
    )


class StyleConfig(Section):
    """Form of the feedback: the same for annotation, training and serving of a reward model."""

    critique: bool = Field(True, description="write a critique before the spans; false: the paper's ablation")
    labels: Literal["sparse", "dense"] = Field(
        "sparse",
        description="sparse: only the decisive spans; dense: every part of the response is in a good or poor span",
    )
    spans: bool = Field(
        True, description="write spans; false: an LLM source writes a critique alone, and `align` finds its spans"
    )


class NoiseConfig(Section):
    """Errors injected into training feedback for studies; each field is a probability per span."""

    flip: float = Field(0.0, ge=0, le=1, description="swap good and poor")
    drop: float = Field(0.0, ge=0, le=1, description="drop the span")
    drop_poor: float = Field(0.0, ge=0, le=1, description="drop a poor span, if above drop; 0.6 means a recall of 40 %")
    move: float = Field(0.0, ge=0, le=1, description="move the span elsewhere in the response")
    confidence: bool = Field(
        False,
        exclude_if=lambda is_given: not is_given,
        description="give each span its confidence: the probability that it was neither flipped nor moved, by a signal "
        "that ranks 5 of 6 pairs of an intact and a changed span correctly",
    )


OffsetUnit = Literal["characters", "utf16", "bytes"]
SOURCES = ("reward_model", "llm", "human", "next_message", "program")
FeedbackModel = Literal["reward_model", "llm"]
MODELS: tuple[FeedbackModel, ...] = get_args(FeedbackModel)


Files = PathOrName[str | tuple[str, ...] | None]


class SourceConfig(Section):
    """A feedback source, which judges responses."""

    section: ClassVar[str] = "feedback"  # section of a job, for messages
    source: str = Field("reward_model", description=f"{', '.join(SOURCES)} (the task's own), or pkg.mod:function")
    style: StyleConfig = StyleConfig()
    reward_model: PathOrName[str | None] = Field(None, description="folder or hub name of the span reward model")
    reward_revision: str | None = None
    engine: RewardEngineConfig = RewardEngineConfig()
    llm: LLMConfig = LLMConfig()
    human_file: Files = Field(
        None, description="JSON lines or CSV: prompt_id and/or prompt, response, critique, quotes or offsets; or a list"
    )
    human_columns: dict[str, str] = Field(
        {}, description="field of t2g -> field of the human file, such as {critique: comment}"
    )
    human_labels: dict[str, Literal["good", "poor"]] = Field(
        {}, description="label of spans in the human file -> good or poor, such as {Hallucination: poor}"
    )
    offsets: OffsetUnit = Field(
        "characters", description="what start and end of spans without a text count in the human file; JavaScript, so "
        "Label Studio and Argilla, counts utf16. A span with a text is where its text is"
    )  # fmt: skip
    align: str | None = Field(
        None,
        description="what finds the spans of critiques without spans, of people, of a function that returns a text "
        "alone, of an LLM with style.spans=false, or of next messages: llm, reward_model, program (the task's own) or "
        "pkg.mod:function; none: such critiques are refused, and of next messages only errors of tools have spans",
    )
    sandbox: SandboxConfig = SandboxConfig()
    concurrency: ResumeMutable[int] = Field(
        16,
        ge=1,
        description="calls of a function at once, also of each reward function and of an environment; "
        "1 for one that keeps state",
    )
    retries: ResumeMutable[int] = Field(
        0,
        ge=0,
        le=20,
        description="further calls of a feedback or reward function that raised, after about 1, 2, 4 ... s, as for a "
        "server that answers HTTP 429; each has timeout_s",
    )
    timeout_s: float = Field(
        120, gt=0, description="deadline of the feedback on one response, an LLM's retries included; of each call of a "
        "function; and of the answer of an environment. A reward model with engine.max_new_tokens above 256 has "
        "proportionally more",
    )  # fmt: skip

    @field_validator("human_labels", mode="before")
    @classmethod
    def check_human_labels(cls, labels: Any) -> Any:
        """Name class ids as texts: YAML reads {1: poor} with a number."""
        if not isinstance(labels, dict):
            return labels
        return {str(label) if type(label) is int else label: meaning for label, meaning in labels.items()}

    @model_validator(mode="after")
    def check_source(self) -> Self:
        if "" not in self.named_sources:
            return self
        for field, value, names in (("source", self.source, SOURCES), ("align", self.align, (*MODELS, "program"))):
            if value is not None and value not in names and ":" not in value:
                raise ValueError(
                    f"{field}={value!r} is neither one of {', '.join(names)} nor an import path pkg.mod:function, "
                    "as feedback:judge is of the function judge in feedback.py"
                )
        required = {
            "reward_model": ("reward_model", self.reward_model),
            "llm": ("llm.model, a name at the server of llm.url or a model for own engines", self.llm.model),
            "human": ("human_file", self.human_file or None),
        }
        for field, model in (("source", self.source), ("align", self.aligner)):
            if model in required and required[model][1] is None:
                raise ValueError(f"{field}={model} needs {required[model][0]}")
        return self

    @model_validator(mode="after")
    def check_text_alone(self) -> Self:
        if not self.style.spans and self.source != "llm":
            raise ValueError(f"style.spans=false is for source=llm, and source is {self.source}; remove it")
        if not self.style.spans and (self.align not in MODELS or not self.style.critique):
            raise ValueError(
                "style.spans=false writes a critique alone: align needs to be llm or reward_model, and "
                "style.critique true"
            )
        if self.source == "llm" and self.llm.url is None and self.aligner == "reward_model":
            raise ValueError(
                "source=llm and align=reward_model both need engines of our own; set llm.url, or align=llm"
            )
        return self

    @property
    def named_sources(self) -> Mapping[str, "SourceConfig"]:
        """Return the sources by criterion; this one alone has the name ""."""
        return {"": self}

    @property
    def aligner(self) -> str | None:
        """Return what finds the spans of critiques, if the source can write critiques without spans."""
        has_spans = self.source == "reward_model" or (self.source == "llm" and self.style.spans)
        return None if has_spans else self.align

    @property
    def models(self) -> tuple[FeedbackModel, ...]:
        """Return the models that write the feedback or find its spans."""
        return tuple(dict.fromkeys(model for name in (self.source, self.aligner) for model in MODELS if model == name))

    @property
    def engine_model(self) -> FeedbackModel | None:
        """Return the model that our own engines serve, if any."""
        return next((model for model in self.models if model == "reward_model" or self.llm.url is None), None)

    def describe(self) -> str:
        """Return the source and its aligner."""
        if self.aligner is None:
            return self.source
        return f"{self.source}, aligned by {self.aligner}"


class CriterionConfig(SourceConfig):
    """One of several feedback sources that judge each response."""

    weight: float = Field(1.0, gt=0, description="factor of the rewards of this criterion")
    required: bool = Field(
        True, description="without usable feedback of this criterion a response is not trained on; false: the other "
        "criteria suffice, and it earns 0 for this one unless objective.normalize_criteria is set"
    )  # fmt: skip


# In annotation these fields only decide which records are missing; a resume annotates those again.
ANNOTATE_FILES = Field(None, description="as in feedback; by default data.path")
ANNOTATE_TIMEOUT = Field(
    120,
    gt=0,
    description="deadline of the feedback on one response, an LLM's retries included; of each call of a function",
)


class AnnotateCriterionConfig(CriterionConfig):
    """One of several feedback sources of annotation."""

    human_file: ResumeMutable[Files] = ANNOTATE_FILES
    timeout_s: ResumeMutable[float] = ANNOTATE_TIMEOUT


CriterionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,19}$")]


class FeedbackConfig(SourceConfig):
    """The feedback source, which judges responses, or several sources, one for each criterion."""

    sources: dict[CriterionName, CriterionConfig] | None = Field(
        None, min_length=1, description="criterion -> its feedback source, in place of `source` and its settings; the "
        "rewards of all criteria add up",
    )  # fmt: skip
    max_failed_share: float = Field(
        0.5, ge=0, le=1, description="largest share of failed feedback in a step; above it the run stops"
    )
    noise: NoiseConfig | None = Field(None, description="errors injected into training feedback, not into evaluation")

    @model_validator(mode="after")
    def check_sources(self) -> Self:
        if self.sources is None:
            return self
        fields = type(self).model_fields
        for name in SourceConfig.model_fields.keys() - {"sandbox"}:
            if getattr(self, name) != fields[name].get_default():
                raise ValueError(
                    f"sources and {name} are both set; {name} belongs to a source, as in sources.NAME.{name}"
                )
        served = [name for name, source in self.sources.items() if source.engine_model]
        if len(served) > 1:
            raise ValueError(
                f"sources: {' and '.join(served)} need engines of our own, and at most one source may have them; set "
                "llm.url for the others"
            )
        return self

    @property
    def named_sources(self) -> Mapping[str, SourceConfig]:
        return self.sources or super().named_sources

    @property
    def weights(self) -> dict[str | None, float]:
        """Return the weight of each criterion; {} without criteria."""
        return {name: source.weight for name, source in (self.sources or {}).items()}

    @property
    def models(self) -> tuple[FeedbackModel, ...]:
        if self.sources is None:
            return super().models
        return tuple(dict.fromkeys(model for source in self.sources.values() for model in source.models))

    @property
    def engine_source(self) -> SourceConfig | None:
        """Return the source whose model our own engines serve, if any."""
        return next((source for source in self.named_sources.values() if source.engine_model), None)

    @property
    def reads_conversations(self) -> bool:
        """Return whether a critique is the message that follows a response in a conversation."""
        return any(source.source == "next_message" for source in self.named_sources.values())

    @property
    def writes_critiques(self) -> bool:
        return any(source.style.critique for source in self.named_sources.values())

    def describe(self) -> str:
        sources = (self.sources or {}).items()
        return ", ".join(f"{name} ({source.describe()})" for name, source in sources) or super().describe()


class AnnotateConfig(FeedbackConfig):
    """The feedback source of annotation, and the responses that it judges."""

    section: ClassVar[str] = "annotate"
    human_file: ResumeMutable[Files] = ANNOTATE_FILES
    timeout_s: ResumeMutable[float] = ANNOTATE_TIMEOUT
    source: str = Field("program", description=f"{', '.join(SOURCES)} (the task's own), or pkg.mod:function")
    sources: dict[CriterionName, AnnotateCriterionConfig] | None = Field(
        None, min_length=1, description=FeedbackConfig.model_fields["sources"].description
    )
    responses: Literal["data", "policy"] = Field(
        "data", description="data: the response that each record holds; policy: sampled from model.policy"
    )
    planted: float = Field(
        0.0, ge=0, le=100, description="additional responses with planted faults per prompt; 0.5: one for every second "
        "prompt; the task needs a method plant_faults",
    )  # fmt: skip
    heldout_share: ResumeMutable[float] = Field(
        0.1, gt=0, lt=1, description="share of prompts whose records go to heldout.jsonl"
    )
    max_failed_share: ResumeMutable[float] = Field(
        0.5, ge=0, le=1, description="largest share of records with failed feedback; above it the job fails"
    )

    @model_validator(mode="after")
    def check_given_judgements(self) -> Self:
        sources = {source.source for source in self.named_sources.values()} & {"human", "next_message"}
        if self.planted and sources:
            raise ValueError(f"planted={self.planted:g} adds responses that source={min(sources)} lacks; set it to 0")
        if self.responses == "policy" and self.reads_conversations:
            raise ValueError("responses=policy samples responses that have no next message; set it to data")
        return self

    @field_validator("noise")
    @classmethod
    def check_no_noise(cls, noise: NoiseConfig | None) -> None:
        if noise is not None:
            raise ValueError("noise is for policy training, not for annotation: remove it")
