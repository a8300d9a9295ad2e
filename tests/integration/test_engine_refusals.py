"""Models and arguments that vLLM does not serve: one sentence, before any engine process starts; and those it does."""

import asyncio
import fnmatch
import json
import os
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from models import random_model
from transformers import GPT2Config, GPT2LMHeadModel
from vllm.v1.executor import Executor

from actors.engines.engine import (
    JOINING_ASYNC_SCHEDULER,
    JOINING_SCHEDULER,
    MULTI_GPU_EXECUTOR,
    Engine,
    engine_environment,
)
from actors.vllm_compat.executor import DrainingExecutor
from t2g.config import EngineConfig, LoRAConfig
from t2g.config.feedback import RESERVED_ARGUMENTS
from t2g.errors import UserError
from t2g.text.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def refuse(folder: Path, **settings: Any) -> str:
    config = EngineConfig(**{"max_model_len": 64, "kv_cache_gib": 0.1} | settings)
    with pytest.raises(UserError) as caught:
        asyncio.run(Engine(str(folder), config, seed=1).start())
    return str(caught.value)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert str(tmp_path) in refuse(tmp_path)


def test_an_unknown_architecture(tmp_path: Path) -> None:
    random_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["Nonesuch"], "model_type": "nonesuch"})
    )
    assert "nonesuch" in refuse(tmp_path).lower()


def test_an_architecture_that_vllm_does_not_serve(tmp_path: Path) -> None:
    random_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    changes = {"architectures": ["VitsModel"], "model_type": "vits"}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert "VitsModel" in refuse(tmp_path)


def test_a_window_longer_than_the_models(tmp_path: Path) -> None:
    random_model(tmp_path)
    sentence = refuse(tmp_path, max_model_len=4096)
    assert "max_model_len (4096) is greater than the derived max_model_len (max_position_embeddings=2048" in sentence


def test_a_cache_smaller_than_one_sequence(tmp_path: Path) -> None:
    """2 layers, 2 heads of 32, keys and values in float32: 1 KiB a token, 2 blocks of at least 64 tokens."""
    random_model(tmp_path)
    sentence = refuse(tmp_path, kv_cache_gib=1e-4)
    assert re.fullmatch(
        r"kv_cache_gib is 0\.0001, and one sequence of \S+ with max_model_len=64 needs 0\.01 GiB: raise the one .*",
        sentence,
    )


def vllm_config(folder: Path, config: EngineConfig, **how: Any) -> Any:
    """As `Engine.start` makes it, of vLLM's own classes; on this platform, whose GPUs nobody asks."""
    os.environ.update(engine_environment(config, owner=os.getpid(), receives_weights=True))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else the CPU's platform makes mp of uni
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(**Engine(str(folder), config, seed=3, **how).arguments()).create_engine_config()


@pytest.mark.parametrize(("gpus", "executor"), [(1, "uni"), (2, MULTI_GPU_EXECUTOR)])
def test_vllm_takes_every_argument_of_a_gpu_engine(tmp_path: Path, gpus: int, executor: str) -> None:
    engine_args = {"kv_cache_dtype": "auto", "block_size": 32, "watermark": 0.02}
    config = EngineConfig(gpus=gpus, max_model_len=64, enforce_eager=False, engine_args=engine_args)
    resolved = vllm_config(random_model(tmp_path), config, transport="nccl", guided=True)
    assert resolved.parallel_config.distributed_executor_backend == executor
    assert (Executor.get_class(resolved) is DrainingExecutor) == (gpus > 1)
    assert resolved.parallel_config.tensor_parallel_size == resolved.parallel_config.world_size == gpus
    assert (resolved.scheduler_config.max_num_seqs, resolved.scheduler_config.max_num_batched_tokens) == (512, 8192)
    assert (resolved.cache_config.gpu_memory_utilization, resolved.cache_config.block_size) == (0.85, 32)
    assert resolved.cache_config.enable_prefix_caching and not resolved.model_config.enforce_eager
    assert (resolved.model_config.logprobs_mode, resolved.model_config.seed) == ("processed_logprobs", 3)
    assert resolved.load_config.load_format == "safetensors" and resolved.weight_transfer_config.backend == "t2g_nccl"
    assert resolved.structured_outputs_config.disable_any_whitespace


def test_a_part_of_a_gpu_is_given_its_cache_in_vllms_own_config(tmp_path: Path) -> None:
    config = EngineConfig(gpus=0.5, max_model_len=64)
    resolved = vllm_config(folder := random_model(tmp_path), config)
    assert resolved.cache_config.kv_cache_memory_bytes is None, "it would measure"
    Engine(str(folder), config, seed=3)._fix_kv_cache(resolved, gpu_bytes=24 * 2**30)
    assert 10 * 2**30 < resolved.cache_config.kv_cache_memory_bytes < 11 * 2**30  # half of 24, less 1 and small weights


@pytest.mark.parametrize(
    ("argument", "outputs"),
    [
        ({"enable_return_routed_experts": True}, "routed experts"),
        ({"return_sampling_mask": True}, "sampling masks"),
        ({"_api_process_count": 2}, "several clients"),
    ],
)
def test_outputs_that_are_not_joined_are_refused_unless_joining_is_off(
    tmp_path: Path, argument: dict[str, Any], outputs: str
) -> None:
    resolved = vllm_config(folder := random_model(tmp_path), EngineConfig(max_model_len=64))
    for section in (resolved.aux_output_config, resolved.model_config, resolved.parallel_config):
        for name, value in argument.items():
            if hasattr(section, name):
                object.__setattr__(section, name, value)
    sentence = f"engine_args asks for {outputs}, which join_outputs excludes; set join_outputs=false"
    with pytest.raises(UserError, match=rf"^{sentence}$"):
        Engine(str(folder), EngineConfig(), seed=1)._join_outputs(resolved)
    assert resolved.scheduler_config.scheduler_cls is None


def test_joining_sets_one_of_our_schedulers(tmp_path: Path) -> None:
    resolved = vllm_config(folder := random_model(tmp_path), EngineConfig(max_model_len=64))
    Engine(str(folder), EngineConfig(), seed=1)._join_outputs(resolved)
    assert resolved.scheduler_config.scheduler_cls in (JOINING_SCHEDULER, JOINING_ASYNC_SCHEDULER)


def test_every_argument_that_is_refused_is_one_of_vllms() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = [field.name for field in fields(AsyncEngineArgs)]
    assert [p for patterns in RESERVED_ARGUMENTS.values() for p in patterns if not fnmatch.filter(known, p)] == []


def test_arguments_that_vllm_does_not_know_or_take(tmp_path: Path) -> None:
    random_model(tmp_path)
    words = "engine_args.quantisation is no argument of vLLM; did you mean quantization?"
    assert words in refuse(tmp_path, engine_args={"quantisation": "x"})
    assert "quantization" in refuse(tmp_path, engine_args={"quantization": "no_such_method"})


def test_an_architecture_without_adapters_names_the_key_that_sends_merged_weights(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(random_model(tmp_path)))
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=128, n_embd=64, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    lora = LoRAConfig(r=4, alpha=8)
    engine = Engine(str(tmp_path), EngineConfig(max_model_len=64, kv_cache_gib=0.1), seed=1, lora=lora)
    with pytest.raises(UserError, match=r"GPT2LMHeadModel.*learner\.sync_adapters=false"):
        asyncio.run(engine.start())
