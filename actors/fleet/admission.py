"""Assign requests to workers in order, and measure the share of time in which workers had no request.

Each worker has room for a number of requests. A waiting request costs no CPU time: the driver may have hundreds of
workers and tens of thousands of requests.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from actors.fleet.fleet_worker import FleetWorker
from actors.fleet.health import State

QUEUE = 0.25  # share of max_num_seqs that is queued in a worker, so that it never waits for the driver


@dataclass(frozen=True, eq=False)
class Waiter:
    """Requests that are sent to one worker together."""

    load: int
    avoid: FleetWorker | None
    assigned: "asyncio.Future[FleetWorker]"


class Admission:
    """Assign requests to the workers of a fleet."""

    def __init__(
        self, workers: list[FleetWorker], *, room: int, on_waiting: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Start without requests.

        Args:
            workers: The workers; their owner changes this list.
            room: Number of requests at which a worker gets no more.
            on_waiting: Runs while requests wait.
        """
        self._workers = workers
        self._room = room
        self._on_waiting = on_waiting
        self._waiting: deque[Waiter] = deque()
        self._watch_task: asyncio.Task[None] | None = None
        self.idle = IdleClock()

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    async def enter(self, load: int, *, avoid: FleetWorker | None) -> FleetWorker:
        """Return the worker with the least load for its capacity, once it has room for a request; first in, first out.

        Call `leave` for each of the `load` requests.

        Args:
            avoid: The worker to use last, like workers with a failure.
        """
        waiter = Waiter(load, avoid, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        if len(self._waiting) == 1:
            self.admit()
        if self._waiting and (self._watch_task is None or self._watch_task.done()):
            self._watch_task = asyncio.ensure_future(self._on_waiting())
        try:
            return await waiter.assigned
        except asyncio.CancelledError:
            if waiter.assigned.cancelled():
                with suppress(ValueError):
                    self._waiting.remove(waiter)
            elif waiter.assigned.exception() is None:
                for _ in range(load):
                    self.leave(waiter.assigned.result())
            raise

    def leave(self, worker: FleetWorker) -> None:
        if worker.load == 1:
            self.idle.account(self._workers, time.monotonic())
        worker.load -= 1
        if self._waiting:  # no other worker has more room than before
            prefers_others = worker.health.suspect or self._waiting[0].avoid is worker
            self.admit(None if prefers_others else [worker])

    def admit(self, among: Sequence[FleetWorker] | None = None) -> None:
        """Assign waiting requests while the best of these workers, by default of all, has room."""
        while self._waiting:
            waiter = self._waiting[0]
            workers = among or self._workers
            able = [worker for worker in workers if worker.health.state is State.SERVING and worker.health.reachable]
            worker = min(able, key=partial(_rank, avoid=waiter.avoid), default=None)
            if worker is None or worker.load >= self._room:
                return
            self._waiting.popleft()
            if waiter.assigned.done():  # cancelled, but not removed yet
                continue
            if worker.load == 0:
                self.idle.account(self._workers, time.monotonic())
            worker.load += waiter.load
            waiter.assigned.set_result(worker)

    def refuse(self, error: Exception) -> None:
        """Raise it in every waiting request."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.assigned.done():
                waiter.assigned.set_exception(error)


def _rank(worker: FleetWorker, *, avoid: FleetWorker | None) -> tuple[bool, bool, float]:
    """Return the key by which the best worker for a request comes first."""
    return worker.health.suspect, worker is avoid, worker.load / worker.capacity


class IdleClock:
    """The share of time in which the started workers had no request."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._idle_s = self._all_s = 0.0

    def account(self, workers: Sequence[FleetWorker], now: float) -> None:
        """Add the time since the last call; the loads must not have changed in it."""
        passed = now - self._at
        self._at = now
        loads = [worker.load for worker in workers if worker.health.state in (State.STALE, State.SERVING)]
        self._all_s += passed * len(loads)
        self._idle_s += passed * loads.count(0)

    def share(self, workers: Sequence[FleetWorker], now: float) -> float:
        """Return the idle share since the last call of `share`; 0 without workers."""
        self.account(workers, now)
        share = self._idle_s / self._all_s if self._all_s else 0.0
        self._idle_s = self._all_s = 0.0
        return share
