"""The parts of the engine that need no vLLM."""

import os

import numpy as np
import pytest
import xxhash

from actors.engine import ALIGNMENT, Arena, engine_environment, first_sentence, weight_version
from t2g.config import EngineConfig


def test_the_arena_is_read_back_by_its_path_and_is_used_again() -> None:
    arena = Arena()
    first = (np.arange(5, dtype=np.float32), np.arange(6, dtype=np.uint16).reshape(2, 3))
    offsets, num_bytes = arena.write(first)
    assert offsets == [0, ALIGNMENT] and num_bytes == 2 * ALIGNMENT
    seen = np.memmap(arena.path, np.uint8, "r", shape=(num_bytes,))
    np.testing.assert_array_equal(seen[:20].view(np.float32), first[0])
    np.testing.assert_array_equal(seen[64:76].view(np.uint16).reshape(2, 3), first[1])
    assert arena.xxh3(num_bytes) == xxhash.xxh3_64_hexdigest(seen.tobytes())
    _, smaller = arena.write((np.full(3, 7, np.float32),))
    assert smaller == ALIGNMENT and seen[:12].view(np.float32).tolist() == [7, 7, 7]
    _, larger = arena.write((np.zeros(1000, np.float32),))
    assert larger == 4032 and os.path.getsize(arena.path) == 4032


def test_a_cpu_engine_keeps_to_its_threads_and_sleeps_when_it_waits() -> None:
    environment = engine_environment(EngineConfig(threads=2), owner=17)
    assert environment["OMP_NUM_THREADS"] == "2" and environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["T2G_ENGINE_OWNER"] == "17"
    assert "OMP_NUM_THREADS" not in engine_environment(EngineConfig(gpus=1), owner=17)


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
