"""A clock of an event loop that tests set forward: a deadline passes without a wait, and not before."""

import asyncio
import time


class LoopClock:
    """The clock of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._skipped_s = 0.0
        self._loop.time = self._time  # type: ignore[method-assign]

    def _time(self) -> float:
        return time.monotonic() + self._skipped_s

    def skip(self, seconds: float) -> None:
        """Set the clock forward, from any thread, once the loop has set the deadlines of what runs now."""
        self._loop.call_soon_threadsafe(self._advance, seconds)

    def _advance(self, seconds: float) -> None:
        self._skipped_s += seconds

    async def wait(self, seconds: float) -> None:
        """Let this time pass in the loop, at once: what is due earlier happens first."""
        waiting = asyncio.ensure_future(asyncio.sleep(seconds))
        await asyncio.sleep(0)  # the loop has its deadline now
        self.skip(seconds)
        await waiting
