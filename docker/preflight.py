"""Check before the installation what this machine lacks; one sentence each. Standard library only.

`python3 docker/preflight.py cpu` prints the sentences and exits 1, or prints nothing and exits 0. Annotations are
strings and the syntax is old, so that a Python that is too old can still print the sentence about it.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

MIN_PYTHON = (3, 11)
MIN_MEMORY_GIB = 12.0
MEMORY_SLACK = 0.92  # the kernel of a 12 GiB machine reserves a part: MemTotal is 11.x
MIN_DISK_GIB = {"cpu": 8.0, "gpu": 25.0}
MIN_DRIVER = 580  # the driver of CUDA 13
MIN_GLIBC = (2, 28)  # the wheels are manylinux_2_28
CPU_FLAGS = ("avx2", "fma", "f16c")  # the least of vLLM's two CPU kernels and of torch's vectorized ones
GIB = 2**30
# DeepSpeed and torch compile kernels at the first start; without one of these a run fails in the middle.
PROBE = "#include <Python.h>\n#include <omp.h>\n#include <vector>\nint main() { return omp_get_max_threads() < 1; }\n"


def system_problem(system: str, machine: str, libc: tuple[str, str]) -> str | None:
    """Check system and C library; `libc` is of platform.libc_ver(), e.g. ("glibc", "2.36")."""
    if system != "Linux" or machine != "x86_64":
        return f"The system is {system} {machine}; Linux on x86_64 is needed."
    name, version = libc
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < MIN_GLIBC:
        libc_text = " ".join(libc).strip() or "no glibc"
        return "The C library is {}; glibc {}.{} or newer is needed.".format(libc_text, *MIN_GLIBC)
    return None


def python_problem(version: tuple[int, int], executable: str) -> str | None:
    if version >= MIN_PYTHON:
        return None
    return "Python is {}.{} ({}); {}.{} or newer is needed: name one with `make PYTHON=python3.11 ...`.".format(
        version[0], version[1], executable, *MIN_PYTHON
    )


def cpu_problem(cpuinfo: str) -> str | None:
    """Check the CPU's instruction sets; `cpuinfo` is the text of /proc/cpuinfo."""
    flags = _first_line(cpuinfo, "flags").partition(":")[2].split()
    missing = [flag for flag in CPU_FLAGS if flag not in flags]
    if not missing:
        return None
    return "The CPU lacks {}; vLLM's CPU kernels need {}.".format(", ".join(missing), ", ".join(CPU_FLAGS))


def memory_problem(meminfo: str, cgroup_limit: str) -> str | None:
    """Check the memory by the texts of /proc/meminfo and of the control group's memory.max ("max" or "": no limit)."""
    total = _first_line(meminfo, "MemTotal:")
    total_kib = int(total.split()[1]) if total else 0
    total_gib = total_kib * 1024 / GIB
    limit = cgroup_limit.strip()
    if limit.isdigit():
        total_gib = min(total_gib, int(limit) / GIB)
    if total_gib >= MIN_MEMORY_GIB * MEMORY_SLACK:
        return None
    return f"Memory is {total_gib:.1f} GiB; {MIN_MEMORY_GIB:.0f} GiB are needed."


def disk_problem(free_bytes: int, folder: Path, kind: str) -> str | None:
    need = MIN_DISK_GIB[kind]
    if free_bytes >= need * GIB:
        return None
    return f"Free disk space under {folder} is {free_bytes / GIB:.1f} GiB; {need:.0f} GiB are needed."


def venv_problem(has_ensurepip: bool) -> str | None:
    if has_ensurepip:
        return None
    return "Python cannot make virtual environments; install its venv package (Debian: python3-venv)."


def compiler_problem(compiler: str, include: str) -> str | None:
    """Compile a probe and write nothing; `compiler` is the command, `include` the folder that should hold Python.h."""
    if shutil.which(compiler) is None:
        return f"There is no C++ compiler ({compiler}); install g++ (Debian: build-essential) or set CXX."
    if not Path(include, "Python.h").is_file():
        return f"Python's headers are missing ({include}/Python.h); install them (Debian: python3-dev)."
    command = [compiler, "-x", "c++", "-std=c++17", "-fopenmp", "-fsyntax-only", "-I", include, "-"]
    tried = subprocess.run(command, input=PROBE, capture_output=True, text=True, timeout=60)
    if tried.returncode == 0:
        return None
    first = next((line for line in tried.stderr.splitlines() if "error" in line), "no reason given")
    return f"The C++ compiler {compiler} cannot compile C++17 with OpenMP: {first.strip()}"


def numa_problem(library: str | None) -> str | None:
    """Check libnuma; `library` is of ctypes.util.find_library("numa")."""
    if library is not None:
        return None
    return "libnuma.so.1 is missing, to which vLLM's CPU kernels are linked; install it (Debian: libnuma1)."


def nvidia_problem(answer: str | None) -> str | None:
    """Check the driver; `answer` is nvidia-smi's, a line with the version for each GPU, or None without nvidia-smi."""
    if answer is None:
        return f"There is no nvidia-smi; the GPU set needs an NVIDIA driver {MIN_DRIVER} or newer (CUDA 13)."
    first = (answer.strip().splitlines() or [""])[0].strip()
    major = first.split(".")[0]
    if not major.isdigit():
        return f"nvidia-smi gives no driver version ({first[:100]!r}); {MIN_DRIVER} or newer is needed (CUDA 13)."
    if int(major) < MIN_DRIVER:
        return f"The NVIDIA driver is {first}; {MIN_DRIVER} or newer is needed (CUDA 13)."
    return None


def driver_answer() -> str | None:
    """Return the output of nvidia-smi, or its error; None if there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "no answer within 60 s"
    return done.stdout or done.stderr


def problems(kind: str, folder: Path) -> list[str]:
    """Return a sentence for everything that this machine lacks for the set `kind` ("cpu" or "gpu") in `folder`."""
    sentences = [
        system_problem(platform.system(), platform.machine(), platform.libc_ver()),
        python_problem(sys.version_info[:2], sys.executable),
        venv_problem(_can_import("ensurepip")),
    ]
    compiler = os.environ.get("CXX", "g++")
    include = sysconfig.get_paths()["include"]
    sentences.append(compiler_problem(compiler, include))

    cgroup_limit = _text("/sys/fs/cgroup/memory.max")
    sentences.append(memory_problem(_text("/proc/meminfo"), cgroup_limit))
    free_bytes = shutil.disk_usage(str(folder)).free
    sentences.append(disk_problem(free_bytes, folder, kind))

    if kind == "cpu":
        library = ctypes.util.find_library("numa")
        sentences += [cpu_problem(_text("/proc/cpuinfo")), numa_problem(library)]
    else:
        sentences.append(nvidia_problem(driver_answer()))
    return [sentence for sentence in sentences if sentence is not None]


def _can_import(module: str) -> bool:
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def _first_line(text: str, start: str) -> str:
    """Return the first line of a text that begins with `start`, or "" if there is none."""
    for line in text.splitlines():
        if line.startswith(start):
            return line
    return ""


def _text(path: str) -> str:
    """Return the text of a file; "" if it does not exist: outside Linux, or outside a control group."""
    file = Path(path)
    return file.read_text() if file.is_file() else ""


if __name__ == "__main__":
    missing = problems(sys.argv[1], Path.cwd())
    print("\n".join(missing), end="\n" if missing else "")
    sys.exit(1 if missing else 0)
