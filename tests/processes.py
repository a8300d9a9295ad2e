"""Processes by the title that they give themselves, as Ray's workers and vLLM's cores do."""

import psutil


def title(process: psutil.Process) -> str:
    """Empty for one that has ended, or is a zombie that nobody has waited for."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
