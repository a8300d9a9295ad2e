"""One worker of a fleet: its place, its process, the requests that wait for it."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal

import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.cluster import placement
from actors.cluster.fanout import first_line
from actors.fleet.health import Health, State
from t2g.config import EngineConfig

# No answer will come: the worker is gone, was ended by Ray's memory monitor, or its answer went with a node.
DIED = (RayActorError, OutOfMemoryError, ObjectLostError)
UNREACHABLE = (ActorUnavailableError, ObjectLostError)  # of these: a node that may come back, with its workers


def fate(error: Exception) -> Literal["died", "could not be reached"]:
    """What an exception of DIED says of the worker."""
    return "could not be reached" if isinstance(error, UNREACHABLE) else "died"


def why(error: Exception) -> str:
    """What an exception says in one line: of a call, what the worker raised, of a worker that could not be made, what
    its constructor did."""
    lines = str(error).strip().splitlines()
    if "creation task" in str(error):
        return f"{type(error).__name__}: {lines[-1]}"
    return first_line(cause(error))


def cause(error: Exception) -> Exception:
    """What the worker raised; Ray's own error also where that did not survive the way."""
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error


class Interrupted(Exception):
    """The worker stopped serving: its requests go to another worker."""


class Notifier:
    """Wakes all who wait for it, each in its own event loop."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    async def wait(self, *others: "asyncio.Future[Any]", timeout_s: float | None = None) -> bool:
        """Until it rings or one of the others is done; whether that was so in time."""
        rung = asyncio.get_running_loop().create_future()
        self._waiting.add(rung)
        try:
            done, _ = await asyncio.wait([rung, *others], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return bool(done)
        finally:
            self._waiting.discard(rung)

    def ring(self) -> None:
        for rung in self._waiting:
            if not rung.done():
                rung.set_result(None)


class Member:
    """A worker from the wish for a place to its end. Its fleet decides; this does."""

    def __init__(self, name: str, place: PlacementGroup, config: EngineConfig) -> None:
        self.name, self.place, self._config = name, place, config
        self.handle: Any = None  # none until there is a place
        self.starting: Any = None  # reference to what its start returns
        self.health = Health(since=time.monotonic())
        self.load = 0  # sequences it was given and has not finished
        self.version: int | None = None  # of its weights
        self.restart_times: tuple[float, ...] = ()  # of its predecessors of the same name, and of itself
        self.predecessor_reason = ""  # why its predecessor was lost
        self.lost_at: float | None = None  # when its predecessor was lost, until it serves
        self.warned = False  # that it waits for a place
        self.capacity = 1.0  # as a share of the largest of the fleet
        self.syncing = False  # its engine is paused, or has weights not proved yet: no probe, and no answer counts
        self._probe: Any = None
        self._probed_at = time.monotonic()
        self._num_interrupts = 0
        self._changed = Notifier()  # `syncing` or the number of interrupts
        self._catching_up: asyncio.Future[None] | None = None

    def begin(self, actor: Any, arguments: Mapping[str, Any]) -> None:
        """Start the process in its place."""
        self.handle = actor.options(**placement.actor_options(self._config, self.place)).remote(**arguments)
        self.starting = self.handle.start.remote()
        self.health = Health(since=time.monotonic())

    @property
    def restarts(self) -> int:
        """The number of its predecessors."""
        return len(self.restart_times)

    def sync_ended(self) -> None:
        """Call it once the worker's state says how."""
        self.syncing = False
        self._changed.ring()

    def probed(self, now: float) -> bool:
        """Whether it has answered a probe since the last call; the next one is sent when it is due.

        Raises TimeoutError for a probe that is late, and as `ray.get`.
        """
        health = self._config.health
        if self.syncing:
            self._probe = None
        elif self._probe is None:
            at_once = self.health.suspect and self.health.failed_probes == 0
            if now - self._probed_at >= health.probe_every_s or at_once:
                self._probe, self._probed_at = self.handle.probe.remote(), now
        elif ray.wait([self._probe], timeout=0)[0]:
            probe, self._probe = self._probe, None
            ray.get(probe)
            return True
        elif now - self._probed_at > health.probe_timeout_s:
            self._probe = None
            raise TimeoutError
        return False

    async def answers(
        self, submits: Sequence[Callable[[Any], Any]], timeout_s: float, leave: "Callable[[Member], None]"
    ) -> list["asyncio.Future[Any]"]:
        """What it answers to each, once no weight sync is under way: the weights that made it may be refused. Of those
        that are late, a cancelled future. leave(self): as soon as one ends.

        Raises Interrupted.
        """
        deadline, num_interrupts = time.monotonic() + timeout_s, self._num_interrupts
        requests: list[tuple[Any, asyncio.Future[Any]]] = []
        try:
            for submit in submits:
                ref = submit(self.handle)
                requests.append((ref, asyncio.wrap_future(ref.future())))
                requests[-1][1].add_done_callback(lambda _: leave(self))
            answers = [answer for _, answer in requests]
            all_done = asyncio.gather(*answers, return_exceptions=True)
            while self._num_interrupts == num_interrupts:
                if not all_done.done():
                    if await self._changed.wait(all_done, timeout_s=max(0.0, deadline - time.monotonic())):
                        continue
                    if not self.syncing:
                        return answers
                    break
                if self.syncing:  # the sync has the deadline
                    await self._changed.wait()
                else:
                    return answers
            raise Interrupted
        finally:
            for ref, answer in requests:
                if not answer.done():
                    answer.cancel()
                    with contextlib.suppress(RayActorError):
                        ray.cancel(ref)
            for _ in submits[len(requests) :]:
                leave(self)

    def interrupt(self) -> None:
        """Send the waiting requests to other workers."""
        self._num_interrupts += 1
        self._changed.ring()

    def bring_up(self, catch_up: "Callable[[Member], Coroutine[Any, Any, None]]") -> None:
        """Have it brought the current weights, unless that is under way."""
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.ensure_future(catch_up(self))

    def dispensable(self) -> tuple[bool, bool, bool, int]:
        """Sorts first who is missed least: without a place, not serving, suspect, with little to do."""
        serving = self.health.state is State.SERVING
        return self.handle is not None, serving, not self.health.suspect, self.load

    def report(self) -> dict[str, Any]:
        state = {"state": str(self.health.state), "version": self.version, "reason": self.health.reason}
        return {"name": self.name, **state, "restarts": self.restarts, "load": self.load}

    def remove(self) -> None:
        """Kill it and give its place back."""
        self.interrupt()
        if self._catching_up is not None:
            self._catching_up.cancel()
        if self.handle is not None:
            ray.kill(self.handle, no_restart=True)
        remove_placement_group(self.place)
