"""The parts of the engine that need no vLLM."""

import tomllib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.cluster.fanout import first_sentence
from actors.engines.engine import (
    MULTI_GPU_EXECUTOR,
    PLUGIN,
    Engine,
    engine_environment,
    kv_cache_bytes,
    parse_weight_version,
)
from t2g.config import EngineConfig
from t2g.config.base_jobs import ENGINE_SHARE
from t2g.errors import UserError
from t2g.resources.memory import GIB
from t2g.resources.model_shape import LLAMA_3_8B, ModelShape


def test_a_cpu_engine_keeps_to_its_threads_and_sleeps_when_it_waits() -> None:
    environment = engine_environment(EngineConfig(threads=2), owner=17, receives_weights=False)
    assert environment["OMP_NUM_THREADS"] == "2" and environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["T2G_ENGINE_OWNER"] == "17"
    assert not any(name.startswith("MALLOC_") for name in environment)
    assert "OMP_NUM_THREADS" not in engine_environment(EngineConfig(gpus=1), owner=17, receives_weights=True)


def test_an_engine_spreads_over_its_gpus() -> None:
    arguments = Engine("m", EngineConfig(gpus=4), seed=1).arguments()
    assert (arguments["tensor_parallel_size"], arguments["gpu_memory_utilization"]) == (4, 0.85)
    assert "tensor_parallel_size" not in Engine("m", EngineConfig(), seed=1).arguments()


@pytest.mark.parametrize(
    ("gpus", "executor"),
    [(0, "uni"), (0.6, "uni"), (1, "uni"), (2, MULTI_GPU_EXECUTOR), (8, MULTI_GPU_EXECUTOR)],
)
def test_no_engine_has_an_executor_that_asks_ray_for_more(gpus: float, executor: str) -> None:
    assert Engine("m", EngineConfig(gpus=gpus), seed=1).arguments()["distributed_executor_backend"] == executor


def test_a_gpu_engine_takes_large_steps_and_its_user_may_choose_others() -> None:
    def batched(**engine_args: int) -> object:
        return Engine("m", EngineConfig(gpus=1, engine_args=engine_args), seed=1).arguments()["max_num_batched_tokens"]

    assert (batched(), batched(max_num_batched_tokens=16384)) == (8192, 16384)


@pytest.mark.parametrize("gpus", [0, 2])
def test_fields_set_by_the_program_are_refused_from_users(gpus: float) -> None:
    config = EngineConfig(gpus=gpus)
    arguments = Engine("m", config, seed=1, transport="store", guided=True).arguments()
    free = {"max_num_batched_tokens", "enable_prefix_caching"}
    EngineConfig(engine_args=dict.fromkeys(free & arguments.keys(), 1))
    for name in arguments.keys() - free:
        with pytest.raises(ValueError, match=rf"{name} cannot be set: "):
            EngineConfig(engine_args={name: 1})


@pytest.mark.parametrize(("gpus", "for_cpus"), [(0, False), (1, True), (0.5, True)])
def test_an_engine_that_this_vllm_has_not_is_refused_in_a_sentence(gpus: float, for_cpus: bool) -> None:
    with pytest.raises(UserError, match=rf"gpus={gpus:g} for m, and the vLLM installed is for .*PUs: gpus must be "):
        Engine("m", EngineConfig(gpus=gpus), seed=1)._check_build(for_cpus=for_cpus)
    Engine("m", EngineConfig(gpus=gpus), seed=1)._check_build(for_cpus=not for_cpus)


def test_engines_on_parts_of_a_gpu_do_not_measure_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has what the estimate of `jobs.deploy check` says, whoever starts beside it."""

    def fixed(shape: ModelShape | None, gpus: float, gpu_gib: float) -> float | None:
        monkeypatch.setattr("actors.engines.engine.find_shape", lambda model, revision: shape)
        cache = SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=gpus)
        engine = Engine("m", EngineConfig(gpus=gpus, dtype="bfloat16"), seed=1)
        engine._fix_kv_cache(SimpleNamespace(cache_config=cache), gpu_bytes=int(gpu_gib * GIB))
        # A successor finds less free than the share that it had: what the others take, and their contexts.
        assert shape is None or cache.gpu_memory_utilization < gpus or not cache.kv_cache_memory_bytes
        return cache.kv_cache_memory_bytes

    taken = 2 * LLAMA_3_8B.numel / GIB + 1 + 512 * 128_256 * 14 / GIB + 1  # weights, a step, the sampler, all else
    assert fixed(LLAMA_3_8B, 0.6, 80) == pytest.approx((0.6 * 80 - taken) * GIB, abs=1)
    assert fixed(LLAMA_3_8B, 0.3, 80) == pytest.approx((0.3 * 80 - taken) * GIB, abs=1)
    assert fixed(LLAMA_3_8B, 0.3, 24) is fixed(None, 0.6, 80) is None, "where it cannot be known, vLLM measures"


def test_an_engine_that_can_sleep_has_one_cache_at_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own check refuses no successor beside a rank's 10 GiB, and the cache is that of a first start."""
    from vllm.v1.worker.utils import request_memory

    monkeypatch.setattr("actors.engines.engine.find_shape", lambda model, revision: LLAMA_3_8B)
    gpu_bytes = 80 * GIB
    config = EngineConfig(gpus=1, dtype="bfloat16", gpu_memory_utilization=0.89)
    config = config.model_copy(update={"gpus": ENGINE_SHARE})  # as `Fleets` does for gpu_sharing=alternate
    cache = SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.89)
    engine = Engine("m", config, seed=1, can_sleep=True)
    engine._fix_kv_cache(SimpleNamespace(cache_config=cache), gpu_bytes=gpu_bytes)
    taken = 2 * LLAMA_3_8B.numel / GIB + 1 + 512 * 128_256 * 14 / GIB + 1
    assert cache.kv_cache_memory_bytes == pytest.approx((0.89 * 80 - taken) * GIB, abs=1)
    beside = SimpleNamespace(total_memory=gpu_bytes, free_memory=gpu_bytes - 10 * GIB, device_="cuda:0")
    weights = 2 * LLAMA_3_8B.numel
    assert request_memory(beside, cache) == pytest.approx(cache.kv_cache_memory_bytes + weights, abs=2)
    refused = SimpleNamespace(gpu_memory_utilization=0.89)
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(beside, refused)


def test_what_is_compiled_lies_beside_the_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    of = partial(engine_environment, owner=17, receives_weights=True)
    assert of(EngineConfig(gpus=1))["VLLM_CACHE_ROOT"] == str(tmp_path / "vllm")
    assert "VLLM_CACHE_ROOT" not in of(EngineConfig())
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no" / "such"))
    assert "VLLM_CACHE_ROOT" not in of(EngineConfig(gpus=1)), "it cannot be written"
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/elsewhere")
    assert "VLLM_CACHE_ROOT" not in of(EngineConfig(gpus=1)), "the user's own stays"


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("Invalid folder. Try another\nmore", "Invalid folder"),
        (
            "1 validation error for ModelConfig\n  Value error, no such architecture [type=value_error, input=...]\n x",
            "no such architecture",
        ),
        ("", "ValueError"),
    ],
)
def test_one_sentence_of_what_vllm_says(message: str, sentence: str) -> None:
    assert first_sentence(ValueError(message)) == sentence


def test_weights_have_version_0_until_the_first_sync() -> None:
    assert (parse_weight_version("default"), parse_weight_version("12")) == (0, 12)


def test_the_only_plugin_of_an_engine_is_ours() -> None:
    assert engine_environment(EngineConfig(), owner=17, receives_weights=True)["VLLM_PLUGINS"] == PLUGIN
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert list(project["entry-points"]["vllm.general_plugins"]) == [PLUGIN]


def test_the_cache_of_a_sequence_is_counted_in_whole_blocks_and_one_more() -> None:
    assert kv_cache_bytes(num_tokens=128, block_size=128, token_bytes=10) == 2 * 128 * 10
    assert kv_cache_bytes(num_tokens=129, block_size=128, token_bytes=10) == 3 * 128 * 10
