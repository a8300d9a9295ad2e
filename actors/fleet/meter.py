"""Statistics of a fleet's engines since the last query: each engine counts, the driver adds up. No side effects."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(kw_only=True)
class EngineStats:
    """Counters of one engine since they were last read."""

    busy_s: float = 0.0  # time with a request
    num_generated: int = 0  # tokens
    num_preempted: int = 0  # requests that lost their KV cache and were computed again
    num_steps: int = 0  # steps of its scheduler
    sum_queued: int = 0  # over the steps: requests that were in the engine and not decoded
    cache_use: float = 0.0  # the largest share of its KV cache in use
    cache_tokens: int = 0  # capacity of the cache


class Meter:
    """The counters of one engine. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._so_far = EngineStats()
        self._open = 0
        self._since = 0.0

    def enter(self, now: float) -> None:
        """Count a request that begins."""
        if self._open == 0:
            self._since = now
        self._open += 1

    def leave(self, now: float) -> None:
        self._count_time(now)
        self._open -= 1

    def step(self, *, generated: int, preempted: int, queued: int, cache_use: float) -> None:
        """Count one step of the scheduler."""
        stats = self._so_far
        stats.num_generated += generated
        stats.num_preempted += preempted
        stats.num_steps += 1
        stats.sum_queued += queued
        stats.cache_use = max(stats.cache_use, cache_use)

    def read(self, now: float, *, cache_tokens: int) -> EngineStats:
        """Return the counters since the last call, and reset them."""
        self._count_time(now)
        stats = self._so_far
        self._so_far = EngineStats()
        stats.cache_tokens = cache_tokens
        return stats

    def _count_time(self, now: float) -> None:
        if self._open:
            self._so_far.busy_s += now - self._since
            self._since = now


def summary(engines: Sequence[EngineStats]) -> dict[str, float]:
    """Return the metrics of a fleet, {} if no engine had a step.

    >>> first = EngineStats(busy_s=2, num_generated=800, num_steps=8)
    >>> second = EngineStats(busy_s=1, num_generated=400, num_steps=4)
    >>> summary([first, second])["tokens_per_s"]
    400.0
    """
    num_steps = sum(engine.num_steps for engine in engines)
    if not num_steps:
        return {}
    num_generated = sum(engine.num_generated for engine in engines)
    busy_s = sum(engine.busy_s for engine in engines)
    sum_queued = sum(engine.sum_queued for engine in engines)
    num_preempted = sum(engine.num_preempted for engine in engines)
    return {
        "tokens_per_s": num_generated / busy_s if busy_s else 0.0,
        "queued": sum_queued / num_steps,
        "cache_use": max(engine.cache_use for engine in engines),
        "preemptions": float(num_preempted),
    }
