"""Nodes of a Ray cluster on this machine."""

from collections.abc import Callable
from typing import Any

from actors.cluster.placement import SLOW_START

START_TRIES = 4


def start_patiently(start: Callable[[], Any]) -> Any:
    """Start a node, again where Ray's own limit of 30 s was exceeded, as on a busy machine."""
    for _ in range(START_TRIES - 1):
        try:
            return start()
        except Exception as error:  # Ray has no type of its own for it
            if SLOW_START not in str(error):
                raise
    return start()
