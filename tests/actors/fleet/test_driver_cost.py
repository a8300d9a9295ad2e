"""What the driver's own process takes for a sample, which bounds how many engines it can keep busy."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from stub_fleet import StubFleet

ENGINES = 64
SAMPLES = 4096
GROUP = 8
MAX_CPU_S = 500e-6  # of a sample; 60 us on two cores of a server


async def request_samples() -> int:
    """Request SAMPLES responses in groups, and return the number of requests that the engines got."""
    fleet = StubFleet(ENGINES)

    async def request_group() -> None:
        requests: list[Callable[[Any], Any]] = [lambda engine: engine.sample.remote()] * GROUP
        await fleet.calls(requests, timeout_s=600, what="a group")

    await asyncio.gather(*(request_group() for _ in range(SAMPLES // GROUP)))
    return fleet.num_requests


def test_a_sample_costs_the_driver_little_processor_time() -> None:
    started = time.process_time()
    assert asyncio.run(request_samples()) == SAMPLES, "one request for each sample"
    assert time.process_time() - started < MAX_CPU_S * SAMPLES
