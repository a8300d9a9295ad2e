"""An actor that holds a GPU and does nothing with it, for tests of placement and GPU sharing; imports little."""

import asyncio
import time
from typing import Any

import ray


class Tenant:
    """An engine or a rank."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.log: list[tuple[float, str]] = []
        self.naps_s = 0.0

    async def start(self, *address: Any) -> int:
        return 100

    async def address(self) -> tuple[str, int]:
        return "here", 1

    async def check_health(self) -> None: ...

    async def sleep(self, *part: str) -> None:
        await asyncio.sleep(self.naps_s)
        self.log.append((time.time(), "sleeps"))

    async def wake_up(self, *part: str) -> None:
        await asyncio.sleep(self.naps_s)
        self.log.append((time.time(), "works"))

    offload_states = sleep  # a rank's
    reload_states = wake_up

    async def get_log(self) -> tuple[str, list[tuple[float, str]]]:
        """Return the GPU and the log of what was done when."""
        return ray.get_runtime_context().get_accelerator_ids()["GPU"][0], self.log

    async def nap(self, seconds: float) -> None:
        self.naps_s = seconds
