"""One worker of a fleet: its place, its process, the requests that wait for it."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.cluster import placement
from actors.cluster.fanout import first_line
from actors.fleet.health import Event, Health, State, after, overdue
from t2g.config import EngineConfig

# No answer will come: the worker is gone, was ended by Ray's memory monitor, or its answer went with a node.
DIED = (RayActorError, OutOfMemoryError, ObjectLostError)


def died_of(error: Exception) -> Literal["died", "unreachable"]:
    """A node that does not answer may come back, with its workers: its requests go elsewhere, its probes decide."""
    return "unreachable" if isinstance(error, ActorUnavailableError | ObjectLostError) else "died"


def fate(error: Exception) -> Literal["died", "could not be reached"]:
    """What an exception of DIED says of the worker."""
    return "died" if died_of(error) == "died" else "could not be reached"


def why(error: Exception) -> str:
    """What an exception of DIED says, in one line: of a worker that could not be made, what its constructor raised."""
    lines = str(error).strip().splitlines()
    if "creation task" in str(error):
        return f"{type(error).__name__}: {lines[-1][:300]}"
    return first_line(error)


def cause(error: RayTaskError) -> Exception:
    """What the worker raised; Ray's own error also where that did not survive the way."""
    return error.cause if isinstance(error.cause, Exception) else error


class Member:
    """A worker from the wish for a place to its end. Its fleet decides; this does."""

    def __init__(self, name: str, place: PlacementGroup, config: EngineConfig) -> None:
        self.name, self.place, self._config = name, place, config
        self.handle: Any = None  # none until there is a place
        self.health = Health(since=time.monotonic())
        self.load = 0  # sequences it was given and has not finished
        self.version: int | None = None  # of its weights
        self.restarts = 0  # predecessors of the same name
        self.lost_at: float | None = None  # when its predecessor was lost, until it serves
        self.warned = False  # that it waits for a place
        self.syncing = False  # its engine is paused, or has weights not proved yet: no probe, and no answer counts
        self._starting: Any = None
        self._probe: Any = None
        self._probed_at = time.monotonic()
        self._in_vain: set[asyncio.Future[None]] = set()  # one per waiting request, resolved when it waits in vain
        self._unsettled: set[asyncio.Future[None]] = set()  # one per answer that came while `syncing`
        self._catching_up: asyncio.Future[None] | None = None

    def begin(self, actor: Any, arguments: tuple[Any, ...]) -> None:
        """Start the process in its place."""
        self.handle = actor.options(**placement.actor_options(self._config, self.place)).remote(*arguments)
        self._starting = self.handle.start.remote()
        self.health = Health(since=time.monotonic())

    def sync_ended(self) -> None:
        """Call it once the worker's state says how."""
        self.syncing = False
        _release(self._unsettled)

    def happens(self, event: Event, reason: str = "") -> State:
        now = time.monotonic()
        self.health = after(self.health, event, now=now, config=self._config.health, reason=reason)
        return self.health.state

    def overdue(self, now: float) -> str:
        return overdue(self.health, now=now, config=self._config)

    def take_start(self) -> tuple[Any] | None:
        """What `start` returned, once it has. Raises as `ray.get`."""
        if not ray.wait([self._starting], timeout=0)[0]:
            return None
        return (ray.get(self._starting),)

    def take_probe(self, now: float) -> Literal["probe_answered", "probe_failed"] | None:
        """The outcome of a probe, once; the next one is sent when it is due. Raises as `ray.get`."""
        health = self._config.health
        if self.syncing:
            self._probe = None
            return None
        if self._probe is None:
            at_once = self.health.suspect and self.health.failed_probes == 0
            if now - self._probed_at >= health.probe_every_s or at_once:
                self._probe, self._probed_at = self.handle.probe.remote(), now
            return None
        if ray.wait([self._probe], timeout=0)[0]:
            probe, self._probe = self._probe, None
            ray.get(probe)
            return "probe_answered"
        if now - self._probed_at > health.probe_timeout_s:
            self._probe = None
            return "probe_failed"
        return None

    async def answer(self, submit: Callable[[Any], Any], timeout_s: float) -> tuple[Any] | None:
        """What it answers; None when it stopped serving meanwhile. Raises TimeoutError, and as `ray.get`."""
        in_vain = asyncio.get_running_loop().create_future()
        self._in_vain.add(in_vain)
        ref = submit(self.handle)
        answer = asyncio.wrap_future(ref.future())
        try:
            await asyncio.wait([answer, in_vain], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                await self._verdict(in_vain)  # on the weights that may have made it
            if in_vain.done():
                return None
            if answer.done():
                return (answer.result(),)
            raise TimeoutError
        finally:
            self._in_vain.discard(in_vain)
            if not answer.done():
                answer.cancel()
                with contextlib.suppress(RayActorError):
                    ray.cancel(ref)

    async def _verdict(self, in_vain: "asyncio.Future[None]") -> None:
        """Until no weight sync is under way; the sync has the deadline."""
        if not self.syncing:
            return
        settled = asyncio.get_running_loop().create_future()
        self._unsettled.add(settled)
        try:
            await asyncio.wait([settled, in_vain], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._unsettled.discard(settled)

    def interrupt(self) -> None:
        """Whoever waits for it asks somebody else."""
        _release(self._in_vain)

    def bring_up(self, catch_up: "Callable[[Member], Awaitable[None]]") -> None:
        """Have it brought the current weights, unless that is under way. Without an event loop nothing happens yet."""
        if self._catching_up is not None and not self._catching_up.done():
            return
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
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


def _release(waiting: set["asyncio.Future[None]"]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
