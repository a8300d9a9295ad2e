"""One vLLM engine in an actor process, with the tokenizer of its model: the base of every worker.

It knows neither prompts nor retries. vllm is imported after the environment of the process is set.
"""

import asyncio
import itertools
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Iterable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np

from actors.cluster.fanout import first_line, first_sentence
from actors.cluster.placement import listening_environment
from actors.cluster.toolkit import build_environment
from actors.engines.core_log import find_core_error
from actors.fleet.meter import EngineStats, Meter
from actors.vllm_compat.stats import make_stat_logger
from actors.weights.adapters import engine_arguments
from t2g.config import EngineConfig, LoRAConfig, Transport
from t2g.errors import UserError
from t2g.resources.memory import GPU_BATCHED_TOKENS, estimate_engine
from t2g.resources.model_shape import find_shape
from t2g.text.ends import find_end_ids
from t2g.text.offsets import decode
from t2g.text.tokenizer import load_tokenizer
from t2g.types import FinishReason

WARM_UP_TOKENS = 48  # a first bfloat16 forward of at most 4 tokens is an illegal instruction on CPUs with AMX
MIN_BATCHED_TOKENS = 4096  # tokens of one step of a CPU engine
PLUGIN = "t2g_store"  # the entry point of actors.vllm_compat.plugin
JOINING_SCHEDULER = "actors.vllm_compat.scheduler.JoiningScheduler"
JOINING_ASYNC_SCHEDULER = "actors.vllm_compat.scheduler.JoiningAsyncScheduler"
MULTI_GPU_EXECUTOR = "actors.vllm_compat.executor.DrainingExecutor"
CORE_POLL_S = 1.0
OVERRIDES_CACHE = "VLLM_CPU_KVCACHE_SPACE"  # a variable that overrides kv_cache_memory_bytes, in steps of 1 GiB
LOG = "the worker's log in Ray's folder"
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled response."""

    ids: np.ndarray  # [R] int32, the stop token included
    text: str  # decoded by our tokenizer
    logprobs: np.ndarray  # [R] float32, of softmax(logits / temperature)
    finish_reason: FinishReason
    versions: tuple[tuple[int, int, int], ...]  # (start, end, weight version): adjoining ranges, all of ids


# glibc's malloc then keeps freed memory: a weight sync packs every matrix again, and new memory from the system costs
# more than the packing.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def engine_environment(config: EngineConfig, *, owner: int, receives_weights: bool) -> dict[str, str]:
    """Return vLLM's environment variables, for this process before the import and for the engine core."""
    common = {
        "T2G_ENGINE_OWNER": str(owner),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_PLUGINS": PLUGIN,  # excludes other installed plug-ins
    }
    if config.gpus:
        return common | compile_cache() | build_environment()
    environment = common | {
        # 0: model and scheduler share the core process. As two processes each loads torch and vLLM, and the scheduler
        # polls for the model's answer.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Bound threads of two engines would fight for one core while the other core idles.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.threads),
        # A waiting thread must sleep: spinning takes the core from the learner and from other engines. It spins for a
        # moment first: in a step of a small model the next part comes sooner than a sleeping thread wakes up.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "10000" if config.threads > 1 else "0",  # some tens of microseconds
        "KMP_BLOCKTIME": "0",
    }
    if receives_weights:
        return environment | KEEP_MEMORY
    return environment


def check_argument_names(arguments: Iterable[str], known: Collection[str]) -> None:
    """Raise UserError for the first of `engine_args` that vLLM does not know."""
    for name in arguments:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            advice = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"engine_args.{name} is no argument of vLLM{advice}")


def compile_cache() -> dict[str, str]:
    """Return the folder of vLLM's compile cache: in the folder of the models, so that the next pod can use it.

    HF_HOME=/mnt/t2g/huggingface -> {"VLLM_CACHE_ROOT": "/mnt/t2g/vllm"}; {} if it is already set, or not writable.
    """
    models = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    cache_root = models.expanduser().parent
    if "VLLM_CACHE_ROOT" in os.environ or not os.access(cache_root, os.W_OK):
        return {}
    return {"VLLM_CACHE_ROOT": str(cache_root / "vllm")}


class Engine:
    """An `AsyncLLM`. `start` first; then `generate` and `compute_logprobs`."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        *,
        seed: int,
        revision: str | None = None,
        transport: Transport | None = None,
        lora: LoRAConfig | None = None,
        guided: bool = False,
        can_sleep: bool = False,
    ) -> None:
        """Describe an engine without starting it.

        Args:
            transport: Transport of received weights, if any.
            lora: Settings of received adapters, if any.
            can_sleep: Whether the engine can sleep.
        """
        self._model = model
        self._revision = revision
        self._config = config
        self._seed = seed
        self._transport = transport
        self._lora = lora
        self._adapter = None
        self._guided = guided
        self._can_sleep = can_sleep
        self._is_sleeping = False
        self._request_numbers = itertools.count()
        self._meter = Meter()
        self._llm: Any = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Load the model and warm up; return the size of its vocabulary.

        Raises:
            UserError: vLLM refuses the model or the settings, or as `check_tokenizer`.
        """
        os.environ.pop(OVERRIDES_CACHE, None)
        receives_weights = self._transport is not None
        environment = engine_environment(self._config, owner=os.getpid(), receives_weights=receives_weights)
        os.environ.update(environment)
        os.environ.update(listening_environment(os.environ))
        self._tokenizer = load_tokenizer(self._model, self._revision)
        self._stop_ids = find_end_ids(self._tokenizer, self._model, self._revision)
        self.check_tokenizer()
        from vllm import envs
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.exceptions import EngineDeadError

        self._check_build(for_cpus=current_platform.is_cpu())
        known = {field.name for field in fields(AsyncEngineArgs)}
        check_argument_names(self._config.engine_args, known)
        try:
            engine_args = AsyncEngineArgs(**self.arguments())
            vllm_config = engine_args.create_engine_config(UsageContext.ENGINE_CONTEXT)
            self._adjust(vllm_config)
            stat_loggers = [make_stat_logger(self._meter)]
            self._llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True, stat_loggers=stat_loggers)
        except UserError:
            raise
        except (TypeError, ValueError, OSError) as error:
            raise UserError(f"vLLM cannot serve the model {self._model}: {first_sentence(error)}") from error
        except RuntimeError as error:  # also where the core, a separate process, failed
            core_error = find_core_error()
            reason = f" ({core_error})" if core_error else ""
            raise UserError(
                f"vLLM cannot serve the model {self._model}: {first_sentence(error)}{reason}; {LOG} has the traceback"
            ) from error

        warm_up_ids = np.zeros(WARM_UP_TOKENS, np.int32)
        try:
            await self.compute_logprobs(warm_up_ids[: self._config.max_model_len - 1])
        except EngineDeadError as error:
            raise UserError(
                f"vLLM loaded the model {self._model} and died in its first forward: its kernels may not know this "
                f"shape (on a CPU the head dimension must be 32 or more); {LOG} says which"
            ) from error
        envs.enable_envs_cache()  # otherwise each token reads the environment twice
        self._watch = asyncio.create_task(self._end_with_core())
        return self._llm.model_config.get_vocab_size()

    def check_tokenizer(self) -> None:
        """Raise UserError for a tokenizer that the worker cannot use."""

    def _check_build(self, *, for_cpus: bool) -> None:
        """Raise UserError if the installed vLLM is for other devices: its core would die without an error."""
        if for_cpus == (self._config.gpus > 0):
            other = "CPUs: gpus must be 0" if for_cpus else "GPUs: gpus must be more, or auto"
            raise UserError(f"gpus={self._config.gpus:g} for {self._model}, and the vLLM installed is for {other}")

    def _adjust(self, vllm_config: Any) -> None:
        """Check vLLM's configuration and set what depends on it. Raises UserError, see the single checks."""
        from vllm.platforms import current_platform

        if self._lora is not None:
            self._check_adapters(vllm_config)
        if not self._config.gpus:
            self._check_kv_cache(vllm_config)
        elif self._config.gpus < 1:
            gpu_bytes = current_platform.get_device_total_memory()
            self._fix_kv_cache(vllm_config, gpu_bytes=gpu_bytes)
        if self._config.join_outputs:
            self._join_outputs(vllm_config)

    def _join_outputs(self, vllm_config: Any) -> None:
        """Set the scheduler that joins outputs. Raises UserError for an engine with outputs that it cannot join."""
        unjoined = {
            "routed experts": vllm_config.aux_output_config.enable_return_routed_experts,
            "sampling masks": vllm_config.model_config.return_sampling_mask,
            "several clients": vllm_config.parallel_config._api_process_count > 1,
        }
        for name, is_on in unjoined.items():
            if is_on:
                raise UserError(f"engine_args asks for {name}, which join_outputs excludes; set join_outputs=false")
        scheduling = vllm_config.scheduler_config
        is_async = scheduling.async_scheduling
        scheduling.scheduler_cls = JOINING_ASYNC_SCHEDULER if is_async else JOINING_SCHEDULER

    def _check_adapters(self, vllm_config: Any) -> None:
        """Raise UserError for an architecture whose adapters vLLM cannot load."""
        from vllm.model_executor.model_loader.utils import get_model_cls
        from vllm.model_executor.models import supports_lora

        served = get_model_cls(vllm_config.model_config)
        if not supports_lora(served):
            raise UserError(
                f"vLLM loads no LoRA adapters for {served.__name__}, the architecture of {self._model}: with "
                "learner.sync_adapters=false the learner sends merged weights"
            )

    def _check_kv_cache(self, vllm_config: Any) -> None:
        """Raise UserError if not even one sequence fits: the engine core would die without an error."""
        model = vllm_config.model_config
        parallel = vllm_config.parallel_config
        if model.use_mla or model.is_hybrid or model.get_sliding_window() is not None:
            return  # needs less than a key and a value for each token, layer and head

        num_layers = model.get_num_layers(parallel)
        num_heads = model.get_num_kv_heads(parallel)
        head_bytes = model.get_head_size() * model.dtype.itemsize
        needed_bytes = kv_cache_bytes(
            num_tokens=model.max_model_len,
            block_size=vllm_config.cache_config.block_size,
            token_bytes=2 * num_layers * num_heads * head_bytes,
        )
        if needed_bytes > self._config.kv_cache_gib * 2**30:
            needed_gib = math.ceil(needed_bytes / 2**30 * 100) / 100
            raise UserError(
                f"kv_cache_gib is {self._config.kv_cache_gib:g}, and one sequence of {self._model} with "
                f"max_model_len={model.max_model_len} needs {needed_gib:g} GiB: raise the one or lower the other"
            )

    def _fix_kv_cache(self, vllm_config: Any, *, gpu_bytes: int) -> None:
        """Compute the size of the KV cache, so that vLLM does not measure it.

        vLLM's measurement counts memory that other processes on the GPU allocate or free meanwhile: two engines that
        start together would fail. If the shape is unknown or nothing seems to fit, vLLM measures.

        The successor of an engine starts while other processes use its GPU. It gets the same cache as at a first start.
        vLLM refuses a start when less than gpu_memory_utilization is free, so on a shared GPU this is set to what an
        engine keeps: its weights and its cache.
        """
        shape = find_shape(self._model, self._revision)
        if shape is None:
            return
        fit = estimate_engine(shape, self._config, sequences=1, gpu_bytes=gpu_bytes)
        if not fit.fitting:
            return
        cache = vllm_config.cache_config
        cache.kv_cache_memory_bytes = int(fit.cache)
        kept_bytes = fit.parts["weights"] + fit.cache
        cache.gpu_memory_utilization = kept_bytes / gpu_bytes

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM's engine, by vLLM's names."""
        config = self._config
        arguments: dict[str, Any] = {
            "model": self._model,
            "revision": self._revision,
            "tokenizer_revision": self._revision,
            "trust_remote_code": False,
            "load_format": "safetensors",  # a .bin file is a pickle, which can run code
            "dtype": config.dtype,
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "enforce_eager": config.enforce_eager,
        }
        arguments |= {
            "enable_prefix_caching": True,
            "seed": self._seed,
            # The default, raw logprobs, ignores the temperature: no importance ratio would be near 1.
            "logprobs_mode": "processed_logprobs",
            # The model's own generation_config.json would set top_p, penalties and a cap on max_tokens.
            "generation_config": "vllm",
            "disable_log_stats": True,
            "skip_tokenizer_init": not self._guided,
            # Inside a placement group vLLM would choose ray, which needs a bundle for each GPU.
            "distributed_executor_backend": "uni" if config.tensor_parallel == 1 else MULTI_GPU_EXECUTOR,
        }
        if config.gpus:
            arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
            arguments["tensor_parallel_size"] = config.tensor_parallel
            arguments["max_num_batched_tokens"] = GPU_BATCHED_TOKENS
            arguments["enable_sleep_mode"] = self._can_sleep
        else:
            arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
            # A prompt prefilled in two steps kills the engine: vLLM rewinds the request's own generator by an offset,
            # which a CPU generator does not have.
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(MIN_BATCHED_TOKENS, config.max_model_len)
        if self._lora is not None:
            arguments |= engine_arguments(self._lora, self._model, self._revision)
        elif self._transport is not None:
            arguments["weight_transfer_config"] = {"backend": f"t2g_{self._transport}"}  # see actors.vllm_compat.plugin
        if self._guided:
            # Otherwise a model may write white space between the tokens of JSON until its answer is truncated.
            arguments["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
        return arguments | config.engine_args

    async def check_health(self) -> None:
        """Return once the core's loop answers, which it does also while the engine is paused or full."""
        await self._await_core(self._llm.is_sleeping())

    async def sleep(self) -> None:
        """Wait for running requests, then move the weights to host memory and drop the KV cache."""
        if not self._is_sleeping:
            await self._await_core(self._llm.sleep(level=1, mode="wait"))
            self._is_sleeping = True

    async def wake_up(self) -> None:
        """Move the weights back to the GPU."""
        if self._is_sleeping:
            await self._await_core(self._llm.wake_up())
            self._is_sleeping = False

    async def measure(self) -> EngineStats:
        """Return the statistics of vLLM since the last call."""
        cache = self._llm.vllm_config.cache_config
        num_blocks = cache.num_gpu_blocks or 0
        return self._meter.read(time.monotonic(), cache_tokens=num_blocks * cache.block_size)

    async def generate(
        self,
        prompt_ids: np.ndarray,
        *,
        temperature: float,
        max_new_tokens: int,
        seed: int | None,
        guide: dict[str, Any] | None = None,
    ) -> Completion:
        """Sample one response.

        Args:
            temperature: 0 is greedy.
            guide: A `grammar` (EBNF) or `json` schema for guided decoding.
        """
        from vllm.sampling_params import StructuredOutputsParams

        guided_decoding = StructuredOutputsParams(**guide) if guide else None
        finished = await self._run_request(
            prompt_ids,
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            max_tokens=max_new_tokens,
            seed=seed,
            stop_token_ids=self._stop_ids,
            logprobs=0,
            flat_logprobs=True,  # three lists instead of a dict and an object for each token
            structured_outputs=guided_decoding,
        )
        output = finished.outputs[0]
        ids = np.asarray(output.token_ids, np.int32)
        logprobs = output.logprobs.logprobs  # logprobs of the sampled tokens alone
        assert len(logprobs) == len(ids)

        versions: list[tuple[int, int, int]] = []
        for part in output.weight_versions:
            version = parse_weight_version(part.version)
            versions.append((part.start, part.end, version))
        return Completion(
            ids=ids,
            text=decode(self._tokenizer, ids),
            logprobs=np.asarray(logprobs, np.float32),
            finish_reason=output.finish_reason,
            versions=tuple(versions),
        )

    async def compute_logprobs(self, ids: np.ndarray) -> np.ndarray:
        """Return [N - 1] float32: entry t is log softmax(logits)[ids[t + 1]] after ids[: t + 1].

        The temperature is always 1: vLLM's prompt logprobs skip the sampling processors in every `logprobs_mode`.
        """
        finished = await self._run_request(ids, temperature=0.0, max_tokens=1, prompt_logprobs=0)
        following = zip(finished.prompt_logprobs[1:], ids[1:], strict=True)
        logprobs = [entry[int(token)].logprob for entry, token in following]
        return np.asarray(logprobs, np.float32)

    async def _run_request(self, ids: np.ndarray, **sampling: Any) -> Any:
        """Return vLLM's final output for these tokens.

        Raises:
            RuntimeError: vLLM aborted the request, failed, or stopped it for repetition; the fleet retries it.
        """
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **sampling)
        prompt = TokensPrompt(prompt_token_ids=[int(token) for token in ids])
        request_id = str(next(self._request_numbers))
        stream = self._llm.generate(prompt, params, request_id, lora_request=self._adapter)
        self._meter.enter(time.monotonic())
        try:
            (output,) = await self._await_core(_collect(stream))
        finally:
            self._meter.leave(time.monotonic())
        reason = output.outputs[0].finish_reason
        if reason not in get_args(FinishReason):
            raise RuntimeError(f"vLLM ended the request with finish_reason={reason}; stop or length is needed")
        return output

    async def _await_core(self, answer: Awaitable[Answer]) -> Answer:
        """Return the core's answer. If the core died, end this process, so that the driver sees a dead worker.

        Raises:
            RuntimeError: vLLM's own error without text, with its cause.
        """
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            return await answer
        except EngineGenerateError as error:
            cause = error.__cause__ or error
            raise RuntimeError(f"vLLM failed in a request: {first_line(cause)}") from error
        except EngineDeadError:
            if self._watch is None:
                raise
            os._exit(1)

    async def _end_with_core(self) -> None:
        """End this process with the core: otherwise the actor would take requests that no engine answers."""
        while not self._llm.errored:
            await asyncio.sleep(CORE_POLL_S)
        os._exit(1)


async def _collect(stream: AsyncIterator[Answer]) -> list[Answer]:
    return [item async for item in stream]


def kv_cache_bytes(*, num_tokens: int, block_size: int, token_bytes: int) -> int:
    """Return the bytes of the blocks of one sequence, and of the block that vLLM reserves.

    >>> kv_cache_bytes(num_tokens=100, block_size=16, token_bytes=512) == (7 + 1) * 16 * 512
    True
    """
    num_blocks = math.ceil(num_tokens / block_size) + 1
    return num_blocks * block_size * token_bytes


def parse_weight_version(label: str) -> int:
    """Return the version in a label of vLLM; "default", before the first commit, is 0."""
    return 0 if label == "default" else int(label)
