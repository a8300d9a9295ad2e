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
    folders = [Path(path, "cu13") for path in (spec.submodule_search_locations or ())] if spec else []
    return next((folder for folder in folders if (folder / "bin/nvcc").exists()), None)


def build_environment() -> dict[str, str]:
    """Return the environment variables of these builds that the user has not set.

    CUDA_HOME: FlashInfer and DeepSpeed refuse a compiler of another version, which PATH may have.
    TORCH_EXTENSIONS_DIR: DeepSpeed compiles for the present CPU. An image may run on another CPU, which needs a folder
    of its own.
    """
    home = toolkit_folder()
    if home is None:
        return {}
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    key = xxhash.xxh3_64_hexdigest(f"{cpu} {platform.python_version()} {home}".encode())
    extensions = Path("~/.cache/t2g/extensions").expanduser() / key
    found = {"CUDA_HOME": str(home), "TORCH_EXTENSIONS_DIR": str(extensions)}
    missing = {name: value for name, value in found.items() if name not in os.environ}
    if shutil.which("ninja") is None:  # it lies beside the interpreter, whose folder may not be on PATH
        missing["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    return missing
