"""Engines and sources: how responses are sampled, and who judges them."""

import re
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from t2g.config.common import RESTART_WINDOW_S, Dtype, ProcessConfig, Section
from t2g.config.marks import PathOrName, ResumeMutable
from t2g.sandbox import SandboxConfig


class WorkersConfig(Section):
    """How many engines a fleet has. A plain number N stands for {initial: N, min: 1, max: N}."""

    initial: int = Field(1, ge=1, description="engines at the start")
    min: int = Field(1, ge=1, description="floor: with fewer for longer than a start takes, the run stops")
    max: int = Field(
        default_factory=lambda given: given.get("initial", 1), ge=1, description="most engines that scaling may ask for"
    )

    @model_validator(mode="before")
    @classmethod
    def expand_worker_count(cls, given: Any) -> Any:
        if isinstance(given, int) and not isinstance(given, bool):
            return {"initial": given}
        if isinstance(given, dict) and "initial" not in given:
            return {**given, "initial": given.get("min", 1)}
        return given

    @model_validator(mode="after")
    def check_worker_order(self) -> "WorkersConfig":
        if not self.min <= self.initial <= self.max:
            raise ValueError(f"workers needs min <= initial <= max, got {self.min}, {self.initial}, {self.max}")
        return self


class HealthConfig(Section):
    """When a worker counts as sick, and how often it is replaced; see `actors.fleet.health`."""

    probe_every_s: float = Field(10, gt=0, description="between two probes of a worker")
    probe_timeout_s: float = Field(30, gt=0, description="a probe that takes longer has failed")
    max_failures: int = Field(3, ge=1, description="probes, requests or syncs in a row that fail before a replacement")
    max_restarts: int = Field(3, ge=0, description="replacements of one worker within restart_window_s")
    restart_window_s: float = Field(RESTART_WINDOW_S, gt=0, description="older replacements do not count")


# Arguments of vLLM's engine that a config may not give, and why; a star stands for any ending.
RESERVED_ARGUMENTS = {
    "it has a key of its own": (
        "model", "revision", "tokenizer*", "dtype", "max_model_len", "max_num_seqs", "enforce_eager", "seed",
        "gpu_memory_utilization", "kv_cache_memory_bytes", "tensor_parallel_size",
    ),
    "what is sampled, and its logprobs, would not be what is trained": (
        "logprobs_mode", "generation_config", "override_generation_config", "logits_processors", "spec*",
        "watermark_config", "diffusion_config", "runner", "convert",
    ),
    "weights of the learner would not be what is served": (
        "weight_transfer_config", "load_format", "hf_overrides", "hf_config_path", "model_weights", "enable_lora",
        "model_class_overrides", "enable_sleep_mode",
    ),
    "each engine is one process on one node, and rollout.workers are many": (
        "data_parallel*", "pipeline_parallel_size", "nnodes", "node_rank", "master_*", "distributed_executor_backend",
        "device_ids",
    ),
    "this program sees to it": (
        "trust_remote_code", "skip_tokenizer_init", "structured_outputs_config", "disable_log_stats",
        "enable_chunked_prefill", "worker_*", "scheduler_cls",
    ),
}  # fmt: skip
ANSWER_TOKENS = 256  # that a deadline is meant for


class EngineConfig(ProcessConfig):
    """A vLLM engine and its process."""

    workers: ResumeMutable[WorkersConfig] = WorkersConfig()
    health: ResumeMutable[HealthConfig] = HealthConfig()
    dtype: Dtype = "float32"
    max_model_len: int = Field(1024, ge=16, description="longest prompt plus response, tokens")
    max_num_seqs: int = Field(
        default_factory=lambda given: 512 if given.get("gpus") else 64, ge=1,
        description="sequences decoded together; by default 64, and 512 on GPUs",
    )  # fmt: skip
    kv_cache_gib: ResumeMutable[float] = Field(0.25, gt=0, description="KV cache of a CPU engine, GiB")
    gpu_memory_utilization: ResumeMutable[float] = Field(
        0.85, gt=0, le=1, description="share of a GPU's memory; at most that share of the GPU which gpus asks for"
    )
    enforce_eager: bool = True
    engine_args: dict[str, Any] = Field(
        {},
        description="more arguments of vLLM's engine, {quantization: fp8}; refused are those that the loop relies on",
    )
    join_outputs: ResumeMutable[bool] = Field(
        True, description="a response leaves the core in messages of up to 64 tokens"
    )
    start_timeout_s: ResumeMutable[float] = Field(
        default_factory=lambda given: 1200 if given.get("gpus") else 240, gt=0,
        description="by default 240, and 1200 on GPUs, where a first start compiles",
    )  # fmt: skip
    request_timeout_s: ResumeMutable[float] = Field(
        180, gt=0, description="one request; past it the worker counts as late. For answers of up to 256 tokens, of "
        "longer ones in proportion",
    )  # fmt: skip

    @field_validator("engine_args")
    @classmethod
    def check_engine_args(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for why, patterns in RESERVED_ARGUMENTS.items():
            if taken := [name for name in arguments if any(fnmatchcase(name, pattern) for pattern in patterns)]:
                raise ValueError(f"{taken[0]} cannot be given: {why}; leave it out")
        return arguments

    @field_validator("gpu_memory_utilization")
    @classmethod
    def limit_memory_share(cls, share: float, info: ValidationInfo) -> float:
        """An engine that starts beside others on its GPU, as a successor does, finds no more free."""
        gpus = info.data.get("gpus", 0)
        return min(share, gpus) if 0 < gpus < 1 else share

    @property
    def num_processes(self) -> int:
        return self.workers.initial

    @property
    def tensor_parallel(self) -> int:
        """GPUs that one engine spreads its model over."""
        return max(1, int(self.gpus))

    @property
    def timeout_scale(self) -> float:
        """Factor of a request's deadline."""
        return 1.0

    @property
    def deadline_s(self) -> float:
        """Of a request."""
        return self.timeout_scale * self.request_timeout_s


class _GeneratingConfig(EngineConfig):
    """An engine with a field `max_new_tokens`: a prompt may have the rest of the window."""

    @property
    def max_prompt_tokens(self) -> int:
        return self.max_model_len - self.max_new_tokens

    @property
    def timeout_scale(self) -> float:
        return max(1.0, self.max_new_tokens / ANSWER_TOKENS)

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
    max_staleness: int = Field(
        0, ge=0, le=2, description="steps by which a sample's weights may be older than those it trains; 0: one after "
        "the other; 1 or 2: generation, feedback and learning overlap"
    )  # fmt: skip
    autoscale: ResumeMutable[bool] = Field(
        False, description="the run chooses the number of engines itself, within workers"
    )


class RewardEngineConfig(_GeneratingConfig):
    """vLLM engines of the reward model."""

    max_model_len: int = Field(4096, ge=16, description="longest prompt (instructions, input, response) plus answer")
    max_critique_chars: int = Field(1200, ge=1, description="bound of the critique in guided decoding")
    max_spans: int = Field(16, ge=0, description="bound of good and of poor quotes each")
    max_quote_chars: int = Field(160, ge=1)
    max_new_tokens: int = Field(1024, ge=1, description="must hold the longest answer: a cut one is unparsable")


class StyleConfig(Section):
    """What feedback is made of: the same in annotation, training and serving of a reward model."""

    critique: bool = Field(True, description="a critique is written before the spans; off: the paper's ablation")
    labels: Literal["sparse", "dense"] = Field(
        "sparse", description="sparse: the few pieces that decide; dense: every piece of the response is good or poor"
    )


# Fields into which a key is pasted by mistake: the pattern and the description of a right value.
LLM_FORMS = {
    "url": (
        r"https?://(\[[\da-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?(/[^\s?#]*)?",
        "the form https://host/path, without a user, a password or a query",
    ),
    "model": (r"(?![A-Za-z0-9]{32,}$).+", "the name of a model"),
    "key_env": (r"[A-Z_][A-Z0-9_]{0,99}", "the name of an environment variable, in capitals"),
}


class LLMConfig(Section):
    """A language model that annotates: behind an OpenAI-compatible server, or served by engines of our own."""

    url: ResumeMutable[str | None] = Field(
        None, description="base URL of an OpenAI-compatible server, no key in it; none: own engines"
    )
    model: PathOrName[str | None] = Field(
        None, description="name that the server knows; own engines: folder or hub name"
    )
    revision: str | None = Field(None, description="commit of a hub model that own engines serve")
    key_env: ResumeMutable[str] = Field("OPENAI_API_KEY", description="environment variable that holds the key")
    concurrency: ResumeMutable[int] = Field(8, ge=1, description="open requests")
    requests_per_minute: ResumeMutable[float | None] = Field(None, gt=0, description="none: as `concurrency` allows")
    request_timeout_s: ResumeMutable[float] = Field(120, gt=0, description="a server silent for longer is asked again")
    max_tries: int = Field(3, ge=1, description="requests for one answer; each is told what was wrong before")
    num_annotators: int = Field(1, ge=1, description="independent answers; a label needs more than half of them")
    temperature: float = Field(0.0, ge=0, description="above 0 for several annotators, who would say the same at 0")
    max_output_tokens: int = Field(2048, ge=16, description="of one answer, reasoning included")
    max_total_tokens: ResumeMutable[int | None] = Field(
        None,
        ge=1,
        description="cap of one start of an annotation; refused before the first request when the estimate, which is "
        "without second tries, is above",
    )

    @field_validator("url", "model", "key_env")
    @classmethod
    def check_no_secret(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Refuse, without printing it, a value that may be or hold a key: config.yaml would keep it."""
        pattern, form = LLM_FORMS[str(info.field_name)]
        if value is not None and not re.fullmatch(pattern, value):
            where = "the key itself belongs in the environment variable that llm.key_env names"
            raise ValueError(f"llm.{info.field_name} needs {form}; {where}")
        return value

    @model_validator(mode="after")
    def check_annotators_differ(self) -> "LLMConfig":
        if self.num_annotators > 1 and self.temperature == 0:
            raise ValueError(
                f"llm.num_annotators={self.num_annotators} with llm.temperature=0 would ask the same question for the "
                "same answer; set a temperature, 0.7 for example"
            )
        return self


class NoiseConfig(Section):
    """Errors put into the feedback on training samples, each with this probability per span: for studies."""

    flip: float = Field(0.0, ge=0, le=1, description="good becomes poor, and poor good")
    drop: float = Field(0.0, ge=0, le=1, description="the span is lost")
    drop_poor: float = Field(0.0, ge=0, le=1, description="the same of poor spans, where above drop; 0.6: recall 40 %")
    move: float = Field(0.0, ge=0, le=1, description="the span goes to another place of the response")


SOURCES = ("reward_model", "llm", "human", "program")


class FeedbackConfig(Section):
    """The feedback source: what judges a response."""

    source: str = Field("reward_model", description=f"{', '.join(SOURCES)} (the task's own), or pkg.mod:function")
    style: StyleConfig = StyleConfig()
    reward_model: PathOrName[str | None] = Field(None, description="folder or hub name of the span reward model")
    reward_revision: str | None = None
    engine: RewardEngineConfig = RewardEngineConfig()
    llm: LLMConfig = LLMConfig()
    human_file: PathOrName[str | None] = Field(
        None, description="JSON lines or CSV: prompt_id and/or prompt, response, critique, quotes or offsets"
    )
    human_columns: dict[str, str] = Field({}, description="our field -> the human file's, e.g. {critique: comment}")
    sandbox: SandboxConfig = SandboxConfig()
    concurrency: ResumeMutable[int] = Field(2, ge=1, description="sandboxes at once, in evaluation as well")
    timeout_s: float = Field(
        120, gt=0, description="one judgement, all tries; decides which samples are judged. A reward model with "
        "engine.max_new_tokens above 256 has longer in proportion",
    )  # fmt: skip
    max_failed_share: float = Field(0.5, ge=0, le=1, description="a step with more failed feedback stops the run")
    noise: NoiseConfig | None = Field(None, description="errors put into training feedback; evaluation has none")

    @model_validator(mode="after")
    def check_source(self) -> Self:
        need = {
            "reward_model": ("reward_model", self.reward_model),
            "llm": ("llm.model, which the server at llm.url knows or engines of ours serve", self.llm.model),
            "human": ("human_file", self.human_file),
        }
        for field, asked in (("source", self.source), ("align", self.judge_model)):
            if asked in need and need[asked][1] is None:
                raise ValueError(f"{field}={asked} needs {need[asked][0]}")
        if self.source not in SOURCES and ":" not in self.source:
            raise ValueError(
                f"source={self.source!r} is none of {', '.join(SOURCES)}, and no import path pkg.mod:function"
            )
        return self

    @property
    def judge_model(self) -> Literal["reward_model", "llm"] | None:
        """Which model has a part in the feedback."""
        return self.source if self.source in ("reward_model", "llm") else None

    @property
    def own_engines(self) -> bool:
        """Whether that model is served by engines of ours."""
        return self.judge_model == "reward_model" or (self.judge_model == "llm" and self.llm.url is None)


class AnnotateConfig(FeedbackConfig):
    """Stage 1's feedback source, and whose responses it judges."""

    source: str = Field("program", description=f"{', '.join(SOURCES)} (the task's own), or pkg.mod:function")
    responses: Literal["data", "policy"] = Field(
        "data", description="data: the response that each record holds; policy: sampled from model.policy"
    )
    planted: float = Field(
        0.0, ge=0, le=100, description="responses with planted faults beside the others, for each prompt: 0.5 is one "
        "for every second prompt; the task needs a method plant_faults",
    )  # fmt: skip
    align: Literal["llm", "reward_model"] | None = Field(
        None, description="who finds the spans of human critiques that have none; none: such critiques are refused"
    )
    human_file: ResumeMutable[PathOrName[str | None]] = Field(None, description="as in feedback; by default data.path")
    heldout_share: ResumeMutable[float] = Field(
        0.1, gt=0, lt=1, description="of prompts: their records go to heldout.jsonl"
    )
    # These two only decide which records are missing, and those are asked for again.
    timeout_s: ResumeMutable[float] = Field(120, gt=0, description="one judgement, all tries")
    max_failed_share: ResumeMutable[float] = Field(
        0.5, ge=0, le=1, description="records with failed feedback; with more the job fails"
    )

    @model_validator(mode="after")
    def check_planted(self) -> Self:
        if self.planted and self.source == "human":
            raise ValueError(
                f"planted={self.planted:g} adds responses that source=human has no judgement of; set it to 0"
            )
        return self

    @field_validator("noise")
    @classmethod
    def check_no_noise(cls, noise: NoiseConfig | None) -> None:
        if noise is not None:
            raise ValueError("noise is for training a policy; records are written as they were given: leave it out")

    @property
    def judge_model(self) -> Literal["reward_model", "llm"] | None:
        """The source, or the aligner of human critiques."""
        return self.align if self.source == "human" else super().judge_model
