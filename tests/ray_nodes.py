"""Nodes of a Ray cluster on this machine."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from actors.cluster.placement import SLOW_START

START_TRIES = 4
END_S = 20.0


def start_patiently(start: Callable[[], Any]) -> Any:
    """Start a node, again where Ray's own limit of 30 s was exceeded, as on a busy machine."""
    this_process = psutil.Process()
    for _ in range(START_TRIES - 1):
        before = set(this_process.children(recursive=True))
        try:
            return start()
        except Exception as error:  # Ray has no type of its own for it
            if SLOW_START not in str(error):
                raise
            after = set(this_process.children(recursive=True))
            _kill(after - before)  # a node that comes late would add its CPUs to the cluster
    return start()


def _kill(processes: set[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=END_S)
