"""Complete the CUDA toolkit of the installed packages, and compile what would take minutes inside a run.

    python docker/toolkit.py link      # lib64, libcudart.so and a stub of libcuda.so, which the packages do not have
    python docker/toolkit.py compile   # DeepSpeed's Adam for states in the host's memory; some minutes

Run it with the Python of the environment; `make gpu` and the image do both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from actors.cluster.toolkit import build_environment, toolkit_folder


def link(home: Path) -> None:
    """Add the names that linkers ask for: -L lib64 -lcudart, and -L lib64/stubs -lcuda."""
    (home / "lib/stubs").mkdir(exist_ok=True)
    for link_path, target in (("lib64", "lib"), ("lib/libcudart.so", "libcudart.so.13")):
        if not (home / link_path).exists():
            (home / link_path).symlink_to(target)
    # The driver has the library itself, often without the name that a linker looks for.
    stub = ("-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o", str(home / "lib/stubs/libcuda.so"))
    subprocess.run([os.environ.get("CXX", "g++"), *stub], check=True, timeout=60)


def compile_adam() -> None:
    """Compile DeepSpeed's CPU Adam where a rank will look for it; an unchanged one is kept."""
    os.environ |= build_environment()
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)


if __name__ == "__main__":
    folder = toolkit_folder()
    if folder is None:
        sys.exit("The installed packages hold no CUDA compiler; install the GPU set (make gpu).")
    if sys.argv[1:] == ["link"]:
        link(folder)
    elif sys.argv[1:] == ["compile"]:
        compile_adam()
    else:
        sys.exit("usage: python docker/toolkit.py link|compile")
