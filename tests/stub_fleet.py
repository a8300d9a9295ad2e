"""A fleet whose engines answer at once and compute nothing: what remains is the work of the driver's own process."""

import asyncio
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

from actors.fleet.fleet import Fleet
from actors.fleet.fleet_worker import FleetWorker
from actors.fleet.health import Health, State
from t2g.config import EngineConfig

ANSWER_S = 0.05


class StubFleet(Fleet):
    """A fleet whose workers serve without a process. Needs a running event loop."""

    role = "stub"
    actor = None

    def __init__(self, engines: int) -> None:
        config = EngineConfig.model_validate({"workers": engines, "health": {"check_interval_s": 1e9}})
        no_processes = config.workers.model_copy(update={"initial": 0})
        idle = config.model_copy(update={"workers": no_processes})
        super().__init__({}, idle, placement_timeout_s=1)
        self.target_size = engines
        self.num_requests = 0
        loop = asyncio.get_running_loop()
        for number in range(engines):
            worker: Any = FleetWorker(f"stub {number}", None, config)  # type: ignore[arg-type]
            sample = SimpleNamespace(remote=partial(self._answer, loop))
            worker.handle = SimpleNamespace(sample=sample)
            worker.health = Health(since=0, state=State.SERVING)
            self._workers.append(worker)

    def _answer(self, loop: asyncio.AbstractEventLoop) -> Any:
        """Return an object with a future, like a Ray reference."""
        self.num_requests += 1
        answer: Future[None] = Future()
        loop.call_later(ANSWER_S, answer.set_result, None)
        return SimpleNamespace(future=lambda: answer)
