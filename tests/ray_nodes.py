"""Nodes of a Ray cluster on this machine."""

from collections.abc import Callable
from typing import Any

import psutil

from actors.cluster.placement import SLOW_START, end_processes

START_TRIES = 4


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
            end_processes(after - before)  # a node that comes late would add its CPUs to the cluster
    return start()
