"""When a request may be made: so many at once, so many a minute, and a pause after one that failed.

Decisions are pure, their clock is handed in; `Gate` waits for what they say.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 20.0


class Pace:
    """A token bucket of one: requests are 60 / per_minute seconds apart, so that no minute has more than its share.

    None: no bound. `hold` stops everybody, as a server that says "429, retry after 7 s" wants it.
    """

    def __init__(self, per_minute: float | None) -> None:
        self._interval_s = 60 / per_minute if per_minute else 0.0
        self._next = float("-inf")  # on the caller's clock

    def take(self, now: float) -> float:
        """0 and the request is counted; else the seconds after which to ask again."""
        wait_s = self._next - now
        if wait_s > 0:
            return wait_s
        self._next = now + self._interval_s
        return 0.0

    def hold(self, until: float) -> None:
        self._next = max(self._next, until)


def retry_pause_s(num_failures: int, *, asked_s: float | None, jitter: float) -> float:
    """Pause after the `num_failures`-th failure in a row: what the server asked for, else doubling with a bound.

    `jitter` in [0, 1) spreads those that failed together.

        retry_pause_s(1, asked_s=None, jitter=0) == 0.25
        retry_pause_s(3, asked_s=None, jitter=0.5) == 1.5
        retry_pause_s(3, asked_s=7, jitter=0.5) == 7
    """
    if asked_s is not None:
        return asked_s
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 30)) * (1 + jitter) / 2


class Gate:
    """Lets requests through, first come first served. Belongs to the event loop it first waits in."""

    def __init__(self, *, concurrency: int, per_minute: float | None) -> None:
        self._places = asyncio.Semaphore(concurrency)
        self._queue = asyncio.Lock()
        self._pace = Pace(per_minute)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """One of `concurrency` requests at a time, at the pace. The wait ends: each request inside has a deadline."""
        async with self._places:
            async with self._queue:
                while (wait_s := self._pace.take(time.monotonic())) > 0:
                    await asyncio.sleep(wait_s)
            yield

    def hold(self, seconds: float) -> None:
        """No request begins for so long."""
        self._pace.hold(time.monotonic() + seconds)
