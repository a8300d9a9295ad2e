"""Where the builds of a running job find their compiler: the CUDA toolkit of torch's own version, as it is installed.

FlashInfer compiles kernels when an engine first needs them, DeepSpeed its Adam for the host. Set-up does its part in
`docker/toolkit.py`.
"""

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

import xxhash


def toolkit_folder() -> Path | None:
    """Return the toolkit's folder among the installed packages, None where they hold no compiler."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(path, "cu13") for path in (spec.submodule_search_locations or ())] if spec else []
    return next((folder for folder in folders if (folder / "bin/nvcc").exists()), None)


def build_environment() -> dict[str, str]:
    """Return what these builds read from the environment, without what the user has set.

    CUDA_HOME: FlashInfer and DeepSpeed refuse a compiler of another version, as one on PATH may be.
    TORCH_EXTENSIONS_DIR: DeepSpeed compiles for the CPU it is on; an image may run on another one, which needs a
    folder of its own.
    """
    home = toolkit_folder()
    if home is None:
        return {}
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    key = xxhash.xxh3_64_hexdigest(f"{cpu} {platform.python_version()} {home}".encode())
    extensions = Path("~/.cache/t2g/extensions").expanduser() / key
    found = {"CUDA_HOME": str(home), "TORCH_EXTENSIONS_DIR": str(extensions)}
    missing = {name: value for name, value in found.items() if name not in os.environ}
    if shutil.which("ninja") is None:  # it lies beside an interpreter that was called by its path
        missing["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    return missing
