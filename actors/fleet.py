"""The workers of one role as their driver sees them: started together, loaded evenly, each wait with a deadline.

Knows nothing of what the workers do. A worker that died is not replaced; its requests go to another.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors import placement
from actors.fanout import first_line
from t2g.errors import RunStopped, UserError
from t2g.sections import EngineConfig

logger = logging.getLogger(__name__)

DIED = (RayActorError, OutOfMemoryError)  # the second: ended by Ray's memory monitor


@dataclass
class Member:
    """One worker. `load` counts the sequences it was given and has not finished."""

    name: str
    handle: Any
    group: PlacementGroup
    load: int = 0
    ping: Any = None  # of a worker that was late: its answer is awaited before the worker is preferred again
    lost: str | None = None  # why it is not used any more


class Fleet:
    """Starts `config.workers` actors of one class. `wait_ready` before the first request; `close` at the end.

    Of a worker's methods it calls `start`, and `ping`, whose answer says that the worker works.
    """

    def __init__(
        self, role: str, actor: Any, arguments: tuple[Any, ...], config: EngineConfig, *, placement_timeout_s: float
    ) -> None:
        self._role, self._config = role, config
        self._waiters: list[asyncio.Future[None]] = []
        self._members = []
        for i, group in enumerate(placement.reserve(role, config, timeout_s=placement_timeout_s)):
            handle = actor.options(**placement.actor_options(config, group)).remote(*arguments)
            self._members.append(Member(name=f"{role} worker {i}", handle=handle, group=group))
        self._starting = {m.name: m.handle.start.remote() for m in self._members}

    def wait_ready(self) -> Any:
        """Until every engine serves; returns what the workers' `start` returned (the same for all).

        Raises UserError for a model that cannot be served, RunStopped for a worker that is late or died.
        """
        self._wait(self._starting, self._config.start_timeout_s, "start")
        self._raise_if_none_left()
        return ray.get(self._starting[self.alive()[0].name])

    def alive(self) -> list[Member]:
        return [m for m in self._members if m.lost is None]

    async def call(self, submit: Callable[[Any], Any], *, load: int, timeout_s: float, what: str) -> Any:
        """`submit(worker)` on the least loaded worker, and once more, on another if there is one, when that one dies
        or is late. A worker that was late is passed over until it answers a ping. A request that finds all engines full
        waits here, before its deadline starts.

        Raises TimeoutError when both were late, RunStopped when no worker is left, and the worker's own UserError.
        """
        tried: Member | None = None
        for _ in range(2):
            member = await self._enter(load, avoid=tried)
            tried = member
            ref = submit(member.handle)
            try:
                async with asyncio.timeout(timeout_s):
                    return await ref
            except DIED as error:
                self._lose(member, f"died ({first_line(error)})")
            except TimeoutError:
                ray.cancel(ref)
                member.ping = member.ping or member.handle.ping.remote()
                logger.warning("%s has not answered %s within %g s", member.name, what, timeout_s)
            except RayTaskError as error:
                raise _cause(error) from None
            finally:
                self._leave(member, load)
        self._raise_if_none_left()
        raise TimeoutError(f"{what}: no answer in two tries of {timeout_s:g} s, the last by {tried.name}")

    async def _enter(self, load: int, *, avoid: Member | None) -> Member:
        """Waits end: each request inside has a deadline, and leaving wakes all who wait."""
        while True:
            self._raise_if_none_left()
            self._end_quarantines()
            # A late worker has the lowest load of all: it would attract every request.
            member = min(self.alive(), key=lambda m: (m.ping is not None, m is avoid, m.load))
            if member.load == 0 or member.load + load <= self._config.max_num_seqs:
                member.load += load
                return member
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _end_quarantines(self) -> None:
        for member in self.alive():
            if member.ping is not None and ray.wait([member.ping], timeout=0)[0]:
                member.ping = None

    def _leave(self, member: Member, load: int) -> None:
        member.load -= load
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def on_all(self, submit: Callable[[Any], Any], *, timeout_s: float, what: str) -> dict[str, Any]:
        """`submit(worker)` on every living worker at once -> answers by worker name, without those that died or were
        late, which are lost. Raises RunStopped when none is left, and what a worker itself raised.
        """
        refs = {m.name: submit(m.handle) for m in self.alive()}
        self._wait(refs, timeout_s, what)
        self._raise_if_none_left()
        return {m.name: ray.get(refs[m.name]) for m in self.alive()}

    def _wait(self, refs: dict[str, Any], timeout_s: float, what: str) -> None:
        members = {m.name: m for m in self.alive()}
        deadline = time.monotonic() + timeout_s
        for name, ref in refs.items():
            try:
                ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
            except DIED as error:
                self._lose(members[name], f"died during {what} ({first_line(error)})")
            except ray.exceptions.GetTimeoutError:
                self._lose(members[name], f"did not finish {what} within {timeout_s:g} s")
            except RayTaskError as error:
                raise _cause(error) from None

    def _lose(self, member: Member, reason: str) -> None:
        """Kill it for good: a worker that comes back would serve old weights."""
        if member.lost is None:
            member.lost = reason
            logger.warning("%s %s; %d of %d left", member.name, reason, len(self.alive()), len(self._members))
            self._remove(member)

    def _remove(self, member: Member) -> None:
        ray.kill(member.handle, no_restart=True)
        remove_placement_group(member.group)

    def _raise_if_none_left(self) -> None:
        if not self.alive():
            reasons = "; ".join(f"{m.name} {m.lost}" for m in self._members)
            raise RunStopped(f"no {self._role} worker is left: {reasons}")

    def close(self) -> None:
        """End every worker; their engine cores end with them."""
        for member in self.alive():
            member.lost = "was closed"
            self._remove(member)


def _cause(error: RayTaskError) -> Exception:
    """The worker's own error where it says something to the user, else Ray's, which carries the remote traceback."""
    return error.cause if isinstance(error.cause, UserError | RunStopped) else error
