"""Find the installed CUDA toolkit of torch's version, for kernels that are compiled in a running job.

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
