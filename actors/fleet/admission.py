"""Assign requests to workers in order, and measure the share of time in which workers had no request.

A worker has room for so many requests, and each gives its part back when it ends. A request that waits costs nothing:
with hundreds of workers and tens of thousands of requests the driver's core has other things to do.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from actors.fleet.health import State
from actors.fleet.member import Member

QUEUE = 0.25  # of what a worker does at once: so much more is in it, so that it never waits for the driver


@dataclass(frozen=True, eq=False)
class Waiter:
    """Requests that go to one worker together."""

    load: int
    avoid: Member | None
    place: "asyncio.Future[Member]"


class Admission:
    """To `members`, a list that its owner goes on changing.

    room: requests of a worker at which it gets no more. care: runs while requests wait.
    """

    def __init__(self, members: list[Member], *, room: int, care: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._members, self._room, self._care = members, room, care
        self._waiting: deque[Waiter] = deque()
        self._caring: asyncio.Task[None] | None = None
        self.idle = IdleClock()

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    async def enter(self, load: int, *, avoid: Member | None) -> Member:
        """The worker with the least load for its capacity, once it has room for one; those who came first go first.
        Call `leave` for each of `load`. avoid: the worker to use last, like workers with a failure."""
        waiter = Waiter(load, avoid, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        if len(self._waiting) == 1:
            self.admit()
        if self._waiting and (self._caring is None or self._caring.done()):
            self._caring = asyncio.ensure_future(self._care())
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter.place.cancelled():
                with suppress(ValueError):
                    self._waiting.remove(waiter)
            elif waiter.place.exception() is None:
                for _ in range(load):
                    self.leave(waiter.place.result())
            raise

    def leave(self, member: Member) -> None:
        if member.load == 1:
            self.idle.account(self._members, time.monotonic())
        member.load -= 1
        if self._waiting:  # no other worker has more room than before
            others = member.health.suspect or self._waiting[0].avoid is member
            self.admit(None if others else [member])

    def admit(self, among: Sequence[Member] | None = None) -> None:
        """Who waits goes in as long as the best of these workers, by default of all, has room."""
        while self._waiting:
            waiter = self._waiting[0]
            able = [m for m in among or self._members if m.health.state is State.SERVING and m.health.reachable]
            member = min(able, key=lambda m: (m.health.suspect, m is waiter.avoid, m.load / m.capacity), default=None)
            if member is None or member.load >= self._room:
                return
            self._waiting.popleft()
            if waiter.place.done():  # cancelled, and not yet taken out
                continue
            if member.load == 0:
                self.idle.account(self._members, time.monotonic())
            member.load += waiter.load
            waiter.place.set_result(member)

    def refuse(self, error: Exception) -> None:
        """Raise it in every waiting request."""
        while self._waiting:
            if not (place := self._waiting.popleft().place).done():
                place.set_exception(error)


class IdleClock:
    """Share of the time of those who have started and do not leave in which they had no request."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._idle_s = self._all_s = 0.0

    def account(self, members: Sequence[Member], now: float) -> None:
        """The time since the last call, with the loads as they were all that time."""
        passed, self._at = now - self._at, now
        loads = [m.load for m in members if m.health.state in (State.STALE, State.SERVING)]
        self._all_s += passed * len(loads)
        self._idle_s += passed * loads.count(0)

    def share(self, members: Sequence[Member], now: float) -> float:
        """Since the last call of `share`; 0 where there was no worker."""
        self.account(members, now)
        share = self._idle_s / self._all_s if self._all_s else 0.0
        self._idle_s = self._all_s = 0.0
        return share
