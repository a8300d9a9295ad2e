"""The parts of the engine that need no vLLM."""

import tomllib
from pathlib import Path

import pytest

from actors.engines.engine import PLUGIN, Engine, engine_environment, first_sentence, kv_cache_bytes, weight_version
from t2g.config import EngineConfig


def test_a_cpu_engine_keeps_to_its_threads_and_sleeps_when_it_waits() -> None:
    environment = engine_environment(EngineConfig(threads=2), owner=17, receives_weights=False)
    assert environment["OMP_NUM_THREADS"] == "2" and environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["T2G_ENGINE_OWNER"] == "17"
    assert not any(name.startswith("MALLOC_") for name in environment)
    assert "OMP_NUM_THREADS" not in engine_environment(EngineConfig(gpus=1), owner=17, receives_weights=True)


def test_an_engine_spreads_over_its_gpus() -> None:
    arguments = Engine("m", EngineConfig(gpus=4), seed=1)._arguments()
    assert (arguments["tensor_parallel_size"], arguments["gpu_memory_utilization"]) == (4, 0.85)
    assert "tensor_parallel_size" not in Engine("m", EngineConfig(), seed=1)._arguments()


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
    assert (weight_version("default"), weight_version("12")) == (0, 12)


def test_the_only_plugin_of_an_engine_is_ours() -> None:
    assert engine_environment(EngineConfig(), owner=17, receives_weights=True)["VLLM_PLUGINS"] == PLUGIN
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert list(project["entry-points"]["vllm.general_plugins"]) == [PLUGIN]


def test_the_cache_of_a_sequence_is_counted_in_whole_blocks_and_one_more() -> None:
    assert kv_cache_bytes(num_tokens=128, block_size=128, token_bytes=10) == 2 * 128 * 10
    assert kv_cache_bytes(num_tokens=129, block_size=128, token_bytes=10) == 3 * 128 * 10
