"""What every source that waits for somebody else needs: state of one event loop, and failures said once."""

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PerLoop(Generic[T]):
    """A semaphore or a client, made anew when another event loop runs: both belong to the loop they first wait in."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._of: tuple[asyncio.AbstractEventLoop, T] | None = None

    def get(self) -> T:
        loop = asyncio.get_running_loop()
        if self._of is None or self._of[0] is not loop:
            self._of = (loop, self._make())
        return self._of[1]


class FailureLog:
    """Says each kind of failed judgement once, in a sentence; what counts failed feedback says how often."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, kind: str, sentence: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("feedback failed: %s (said once, counted each time)", sentence)
