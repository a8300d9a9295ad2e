"""What the driver's own process takes for a sample: a fleet whose engines answer at once and compute nothing."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

from actors.fleet.fleet import Fleet
from actors.fleet.fleet_worker import FleetWorker
from actors.fleet.health import Health, State
from jobs.stopwatch.watch import Bench, Done, Race, Record
from t2g.config import EngineConfig

ENGINES = (8, 64, 256)
SAMPLES = 65_536
GROUP = 8
ANSWER_S = 0.05


async def measure(bench: Bench) -> list[Record]:
    sides = {f"{engines} engines": partial(samples, engines) for engines in ENGINES}
    race = Race(name="driver", unit="samples", sides=sides)
    return [await bench.race(race)]


async def samples(engines: int) -> Done:
    fleet = StubFleet(engines)
    before = time.process_time()

    async def group() -> None:
        requests: list[Callable[[Any], Any]] = [lambda engine: engine.sample.remote()] * GROUP
        await fleet.calls(requests, timeout_s=600, what="a group")

    await asyncio.gather(*(group() for _ in range(SAMPLES // GROUP)))
    cpu_s = time.process_time() - before
    return Done(amount=SAMPLES, more={"CPU us a sample": 1e6 * cpu_s / SAMPLES})


class StubFleet(Fleet):
    """A fleet whose workers serve without a process."""

    role = "stub"
    actor = None

    def __init__(self, engines: int) -> None:
        config = EngineConfig.model_validate({"workers": engines, "health": {"check_interval_s": 1e9}})
        no_processes = config.workers.model_copy(update={"initial": 0})
        idle = config.model_copy(update={"workers": no_processes})
        super().__init__({}, idle, placement_timeout_s=1)
        self.target_size = engines
        loop = asyncio.get_running_loop()
        for number in range(engines):
            worker: Any = FleetWorker(f"stub {number}", None, config)  # type: ignore[arg-type]
            sample = SimpleNamespace(remote=partial(answer, loop))
            worker.handle = SimpleNamespace(sample=sample)
            worker.health = Health(since=0, state=State.SERVING)
            self._workers.append(worker)


def answer(loop: asyncio.AbstractEventLoop) -> Any:
    """Return an object with a future, like a Ray reference."""
    answer: Future[None] = Future()
    loop.call_later(ANSWER_S, answer.set_result, None)
    return SimpleNamespace(future=lambda: answer)
