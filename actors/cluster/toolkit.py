"""The environment of GPU processes: the installed CUDA toolkit of torch's version, and torch's allocator.

FlashInfer compiles kernels when an engine first needs them, and DeepSpeed compiles its CPU Adam. `docker/toolkit.py`
prepares the toolkit at set-up.
"""

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

import xxhash

# Otherwise torch rounds pinned buffers up to a power of two: a sleeping engine would take almost twice its weights.
EXACT_PINNED = "pinned_max_round_threshold_mb:1"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allocator_environment() -> dict[str, str]:
    """Return the environment variable of torch's allocator, {} if the user has set one."""
    if any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return {}
    return {"PYTORCH_ALLOC_CONF": EXACT_PINNED}


def toolkit_folder() -> Path | None:
    """Return the toolkit's folder among the installed packages, None if they contain no compiler."""
    spec = importlib.util.find_spec("nvidia")
    if spec is None:
        return None
    for path in spec.submodule_search_locations or ():
        folder = Path(path, "cu13")
        if (folder / "bin/nvcc").exists():
            return folder
    return None


def build_environment() -> dict[str, str]:
    """Return the environment variables of these builds that the user has not set.

    CUDA_HOME: FlashInfer and DeepSpeed refuse a compiler of another version, which PATH may have.
    TORCH_EXTENSIONS_DIR: DeepSpeed compiles for the present CPU. An image may run on another CPU, which needs a folder
    of its own.
    """
    home = toolkit_folder()
    if home is None:
        return {}
    cpu_info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line for line in cpu_info if line.startswith("flags")), "")
    builder = f"{cpu} {platform.python_version()} {home}"
    key = xxhash.xxh3_64_hexdigest(builder.encode())
    extensions = Path("~/.cache/t2g/extensions").expanduser() / key
    variables = {"CUDA_HOME": str(home), "TORCH_EXTENSIONS_DIR": str(extensions)}
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    if shutil.which("ninja") is None:  # it lies beside the interpreter, whose folder may not be on PATH
        folder = str(Path(sys.executable).parent)
        path = os.environ.get("PATH", os.defpath)
        missing["PATH"] = os.pathsep.join((folder, path))
    return missing
