"""The installed GPU set, on a machine without a GPU: versions, compiler, imports, arguments (`docker/gpu_set.py`)."""

import os
import subprocess
from pathlib import Path

import pytest
from docker_programs import DOCKER, load_program

SET = os.environ.get("T2G_GPU_SET", "")


@pytest.mark.slow
@pytest.mark.skipif(not SET, reason="T2G_GPU_SET names no folder with the GPU set; docker/gpu_set.py makes one")
def test_every_check_holds() -> None:
    program = load_program("gpu_set")
    command = [str(Path(SET, "bin/python")), str(DOCKER / "gpu_set.py"), "--checks"]
    done = subprocess.run(
        command, cwd=DOCKER.parent, env=program.environment(), capture_output=True, text=True, timeout=1800, check=False
    )
    lines = [line for line in done.stdout.splitlines() if ": ok, " in line or ": FAILED, " in line]
    assert len(lines) == len(program.CHECKS)
    assert [line for line in lines if ": FAILED, " in line] == []
    assert done.returncode == 0
