"""Check the GPU set on a machine without a GPU: `python3 docker/gpu_set.py FOLDER`, from the repository's root.

It installs the set into FOLDER (a virtual environment of some 9 GB, made if it does not exist, with the uv of `make
setup`) and prints a line for each check; the exit code is 1 if one fails. What needs a GPU is `python -m
jobs.gpu_check`.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL = """#include <cuda_runtime.h>
__global__ void k() {}
extern "C" int f() { k<<<1, 1>>>(); return cudaDeviceSynchronize(); }
"""
PROGRAMS = ("jobs.__main__", "t2g.sandbox.start")  # importing them runs something
COMPILER = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")


def install(folder: Path) -> None:
    """Make the environment and install the set; a second call only installs what is missing."""
    if not (folder / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    import install as set_up

    pins = folder / "constraints.txt"
    pins.write_text((ROOT / "docker/constraints-gpu.txt").read_text())
    paths = {".venv/bin/python": str(folder / "bin/python"), ".venv/constraints.txt": str(pins)}
    command = [paths.get(word, word) for word in set_up.install_command("gpu", "", "")]
    subprocess.run([".venv/bin/uv", *command, "--quiet"], cwd=ROOT, check=True)
    project = [
        "pip",
        "install",
        "--quiet",
        "--python",
        paths[".venv/bin/python"],
        "--no-deps",
        "--no-build-isolation",
        ".",
    ]
    subprocess.run([".venv/bin/uv", *project], cwd=ROOT, check=True)
    subprocess.run([str(folder / "bin/python"), "docker/toolkit.py", "link"], cwd=ROOT, check=True, env=environment())


def environment() -> dict[str, str]:
    """Return an environment in which this checkout's packages are imported, without a compiler of the machine."""
    variables = dict(os.environ)
    for name in ("CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV"):
        variables.pop(name, None)
    return variables | {"PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1", "CUDA_VISIBLE_DEVICES": ""}


# ------------------------------------------------------------------------ checks, by the Python of the environment
def check_versions() -> str:
    """Check that the compiler's packages have the CUDA version that torch was built with."""
    from importlib.metadata import version

    import torch

    versions = {name: version(name) for name in COMPILER}
    for compiler_version in versions.values():
        major_minor = ".".join(compiler_version.split(".")[:2])
        assert major_minor == torch.version.cuda, (torch.version.cuda, versions)
    return f"CUDA {torch.version.cuda}"


def check_deepspeed() -> str:
    """Check that DeepSpeed's comparison of compiler and torch accepts the toolkit."""
    from deepspeed.ops.op_builder.builder import assert_no_cuda_mismatch, installed_cuda_version

    assert assert_no_cuda_mismatch("gpu_set")
    return "{}.{}".format(*installed_cuda_version())


def check_flashinfer() -> str:
    """Check that FlashInfer finds the compiler of the toolkit."""
    import torch
    from flashinfer.jit.cpp_ext import get_cuda_path, get_cuda_version

    assert get_cuda_path() == os.environ["CUDA_HOME"], get_cuda_path()
    assert str(get_cuda_version()) == torch.version.cuda
    return str(get_cuda_version())


def check_kernel() -> str:
    """Check that a kernel compiles and links as FlashInfer links its own."""
    home = os.environ["CUDA_HOME"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "k.cu")
        source.write_text(KERNEL)
        command = [f"{home}/bin/nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler=-fPIC", "-c", str(source)]
        subprocess.run([*command, "-o", f"{folder}/k.o"], check=True, timeout=300)
        link = [f"{folder}/k.o", "-shared", f"-L{home}/lib64", f"-L{home}/lib64/stubs", "-lcudart", "-lcuda"]
        subprocess.run(["g++", *link, "-o", f"{folder}/k.so"], check=True, timeout=300)
        return f"{Path(folder, 'k.so').stat().st_size} bytes"


def check_imports() -> str:
    """Check that every module of the project can be imported."""
    failed: dict[str, str] = {}
    count = 0
    for package in ("t2g", "actors", "jobs"):
        for module in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            if module.name not in PROGRAMS and not module.name.startswith("jobs.starter"):
                count += 1
                try:
                    importlib.import_module(module.name)
                except Exception as error:  # noqa: BLE001 a report of all that failed
                    failed[module.name] = f"{type(error).__name__}: {error}"
    assert not failed, json.dumps(failed, indent=1)
    return f"{count} modules"


def check_arguments() -> str:
    """Check that vLLM knows every argument that an engine on GPUs gives it."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from actors.engines.engine import Engine
    from t2g.config import RolloutConfig

    engine = Engine("m", RolloutConfig(gpus=2, dtype="bfloat16"), seed=1, transport="nccl", can_sleep=True)
    AsyncEngineArgs(**engine.arguments())
    return f"{len(engine.arguments())} arguments"


CHECKS: tuple[Callable[[], str], ...] = (
    check_versions,
    check_deepspeed,
    check_flashinfer,
    check_kernel,
    check_imports,
    check_arguments,
)


def run_checks() -> int:
    """Run every check and print its line; return the number of those that failed."""
    from actors.cluster.toolkit import build_environment

    os.environ |= build_environment()
    failed = 0
    for check in CHECKS:
        name = re.sub("^check_", "", check.__name__)
        try:
            print(f"{name}: ok, {check()}", flush=True)
        except Exception as error:  # noqa: BLE001 a line for each check
            failed += 1
            print(f"{name}: FAILED, {type(error).__name__}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:] == ["--checks"]:
        sys.exit(run_checks() > 0)
    if len(sys.argv) != 2:
        sys.exit("usage: python3 docker/gpu_set.py FOLDER")
    target = Path(sys.argv[1]).absolute()
    install(target)
    checks = [str(target / "bin/python"), __file__, "--checks"]
    sys.exit(subprocess.run(checks, cwd=ROOT, env=environment()).returncode)
