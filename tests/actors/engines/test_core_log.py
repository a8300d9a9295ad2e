"""Why a core ended, from the log of its worker."""

import subprocess
import sys
from pathlib import Path

import pytest

from actors.engines.core_log import MAX_CHARS, TAIL_BYTES, find_core_error

OUT_OF_MEMORY = """Traceback (most recent call last):
  File "gpu_worker.py", line 594, in load_model
    raise error
        ^^^^^
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""
CHAINED = """Traceback (most recent call last):
  File "registry.py", line 1, in resolve
KeyError: 'qwen9'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "registry.py", line 2, in resolve
ValueError: model type qwen9 is not supported
"""
IGNORED = """Exception ignored in: <function Engine.__del__ at 0x7f>
Traceback (most recent call last):
  File "engine.py", line 1, in __del__
AttributeError: no attribute 'core'
"""
UNUSUAL = """Traceback (most recent call last):
  File "jit.py", line 1, in run
triton.runtime.errors.OutOfResources: out of resource: shared memory
"""
LATER = """Traceback (most recent call last):
  File "utils.py", line 1431, in wait_for_engine_startup
RuntimeError: Engine core initialization failed. See root cause above.
"""
ENGINE = """
import subprocess, sys
from actors.engines.core_log import find_core_error
subprocess.run([sys.executable, "-c", "import no_such_kernel"])
print(find_core_error())
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (OUT_OF_MEMORY + LATER, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        (CHAINED + LATER, "ValueError: model type qwen9 is not supported"),
        (IGNORED + OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("ConnectionError: retrying\n" + UNUSUAL + LATER, "triton.runtime.errors.OutOfResources: out of resource: "
        "shared memory"),
        (LATER + "Process EngineCore:\n" + UNUSUAL, "triton.runtime.errors.OutOfResources: out of resource: shared "
        "memory"),
    ],
)  # fmt: skip
def test_the_error_is_that_of_the_traceback_that_ended_the_core(tmp_path: Path, text: str, error: str) -> None:
    log = tmp_path / "worker.err"
    log.write_text("Loading safetensors checkpoint shards: 100% Completed\n" + text)
    assert find_core_error(log) == error


@pytest.mark.parametrize("text", ["", "step 1\nError rates fall\n  ValueError: indented\n"])
def test_a_log_without_a_traceback_says_nothing(tmp_path: Path, text: str) -> None:
    log = tmp_path / "worker.err"
    log.write_text(text)
    assert find_core_error(log) is None
    assert find_core_error(tmp_path / "missing.err") is None


def test_a_long_log_is_read_from_its_end_and_a_long_line_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    earlier = LATER.encode() + b"\xff" * TAIL_BYTES
    log.write_bytes(earlier + b"\nTraceback (most recent call last):\n  File\nValueError: " + b"x" * 1000 + b"\n")
    error = find_core_error(log)
    assert error is not None and error.startswith("ValueError: xxx") and len(error) == MAX_CHARS


def test_a_process_finds_the_error_of_its_child(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    with log.open("w") as stderr:
        done = subprocess.run(
            [sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, stderr=stderr, text=True, check=True
        )
    assert done.stdout.strip() == "ModuleNotFoundError: No module named 'no_such_kernel'"


def test_a_terminal_is_no_log(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
