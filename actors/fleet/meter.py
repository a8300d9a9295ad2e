"""Work of a fleet's engines since the last query: each engine counts, the driver adds up. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(kw_only=True)
class Measured:
    """One engine; it counts in it until it is read. Preempted: had its cache taken, and is computed again."""

    busy_s: float = 0.0  # with a request
    num_generated: int = 0  # tokens
    num_preempted: int = 0  # requests
    num_steps: int = 0  # of its scheduler
    sum_queued: int = 0  # over the steps: requests that were in the engine and not decoded
    cache_use: float = 0.0  # the largest share of its KV cache that was in use
    cache_tokens: int = 0  # that have room in the cache


class Meter:
    """Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._so_far = Measured()
        self._open, self._since = 0, 0.0

    def enter(self, now: float) -> None:
        """A request begins."""
        if self._open == 0:
            self._since = now
        self._open += 1

    def leave(self, now: float) -> None:
        self._count_time(now)
        self._open -= 1

    def step(self, *, generated: int, preempted: int, queued: int, cache_use: float) -> None:
        """One step of the scheduler."""
        now = self._so_far
        now.num_generated += generated
        now.num_preempted += preempted
        now.num_steps += 1
        now.sum_queued += queued
        now.cache_use = max(now.cache_use, cache_use)

    def read(self, now: float, *, cache_tokens: int) -> Measured:
        """Since the last call."""
        self._count_time(now)
        found, self._so_far = self._so_far, Measured()
        found.cache_tokens = cache_tokens
        return found

    def _count_time(self, now: float) -> None:
        if self._open:
            self._so_far.busy_s += now - self._since
            self._since = now


def summary(engines: Sequence[Measured]) -> dict[str, float]:
    """Of a fleet, {} where none had a step. Two engines, 800 tokens in 2 s and 400 in 1 s: tokens_per_s 400.

    >>> two = [Measured(busy_s=2, num_generated=800, num_steps=8), Measured(busy_s=1, num_generated=400, num_steps=4)]
    >>> summary(two)["tokens_per_s"]
    400.0
    """
    steps = sum(engine.num_steps for engine in engines)
    if not steps:
        return {}
    generated, busy_s = sum(e.num_generated for e in engines), sum(e.busy_s for e in engines)
    return {
        "tokens_per_s": generated / busy_s if busy_s else 0.0,
        "queued": sum(e.sum_queued for e in engines) / steps,
        "cache_use": max(e.cache_use for e in engines),
        "preemptions": float(sum(e.num_preempted for e in engines)),
    }
