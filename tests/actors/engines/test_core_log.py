"""Why a core ended, from the log of its worker."""

import subprocess
import sys
from pathlib import Path

import pytest

from actors.engines.core_log import MAX_CHARS, TAIL_BYTES, find_core_error

TRACEBACK = """Loading safetensors checkpoint shards: 100% Completed | 1/1
Process EngineCore:
Traceback (most recent call last):
  File "gpu_worker.py", line 594, in load_model
    raise OutOfMemoryError: not a last line
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above.
"""
ENGINE = """
import subprocess, sys
from actors.engines.core_log import find_core_error
subprocess.run([sys.executable, "-c", "import no_such_kernel"])
print(find_core_error())
"""


def test_the_first_error_is_the_cause_of_the_others(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text(TRACEBACK)
    assert find_core_error(log) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize("text", ["", "step 1\nError rates fall\n  ValueError: indented\n"])
def test_a_log_without_a_traceback_says_nothing(tmp_path: Path, text: str) -> None:
    log = tmp_path / "worker.err"
    log.write_text(text)
    assert find_core_error(log) is None
    assert find_core_error(tmp_path / "missing.err") is None


def test_a_long_log_is_read_from_its_end_and_a_long_line_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_bytes(b"KeyError: earlier\n" + b"\xff" * TAIL_BYTES + b"\nValueError: " + b"x" * 1000 + b"\n")
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
