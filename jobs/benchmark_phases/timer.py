"""The timer: sides of a comparison in turns, ABBA, the first of each discarded; medians, spread, CPU seconds, memory.

Time is that of the wall. CPU seconds are of this process and all its descendants, Ray's and the engines' included, and
what others took of the machine meanwhile stands beside them.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from jobs.benchmark_phases.random_models import Models
from t2g.config import BenchmarkJob
from t2g.errors import RunStopped, UserError
from t2g.resources.memory import GIB

SAMPLE_S = 3.0  # at who else is busy, before anything starts
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Done:
    """The work of one measurement."""

    amount: float  # in units of the comparison
    more: Mapping[str, float] = field(default_factory=dict)  # what else is worth a median


Side = Callable[[], Awaitable[Done]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Sides that do the same work."""

    name: str
    unit: str  # unit of `Done.amount`
    sides: Mapping[str, Side]
    reference: str = ""  # the side that the others are compared with
    aims: Mapping[str, float] = field(default_factory=dict)  # factors of the reference's rate, by side


def abba_order(sides: Sequence[str], repeats: int) -> list[str]:
    """Return the ABBA order of the sides, so that a drift of the machine affects all sides equally.

    >>> abba_order(["a", "b"], 3)
    ['a', 'b', 'b', 'a', 'a', 'b']
    """
    order: list[str] = []
    for turn in range(repeats):
        order += sides if turn % 2 == 0 else reversed(sides)
    return order


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each field, and the spread of `seconds`: half of its range as a share of its median.

    >>> summary([{"seconds": 1.0}, {"seconds": 2.0}, {"seconds": 4.0}])
    {'seconds': 2.0, 'spread': 0.75}
    """
    seconds = [row["seconds"] for row in rows]
    medians: dict[str, float] = {}
    for name in {**rows[-1], **rows[0]}:
        medians[name] = statistics.median(row[name] for row in rows if name in row)
    half_range = (max(seconds) - min(seconds)) / 2
    medians["spread"] = half_range / medians["seconds"]
    return medians


def tree() -> list[psutil.Process]:
    """Return this process and its descendants."""
    process = psutil.Process()
    return [process, *process.children(recursive=True)]


def cpu_seconds() -> dict[int, float]:
    """Return the CPU seconds of each process of the tree, by its id."""
    seconds: dict[int, float] = {}
    for process in tree():
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds[process.pid] = times.user + times.system
    return seconds


def cpu_since(before: Mapping[int, float]) -> float:
    """Return the CPU seconds of the live processes; a process that ends meanwhile is counted in part."""
    seconds = cpu_seconds()
    return sum(max(0.0, now - before.get(pid, 0.0)) for pid, now in seconds.items())


def machine_seconds() -> float:
    """Return the busy seconds of all cores since the machine started."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def peak_gib() -> float:
    """Return the sum of the peak memory of each process of the tree; shared pages count several times."""
    total = 0
    for process in tree():
        with suppress(OSError, StopIteration):
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = next(line for line in status if line.startswith("VmHWM"))
            peak_kib = int(peak.split()[1])
            total += 1024 * peak_kib
    return total / GIB


def check_idle_machine(most: float) -> None:
    """Raise UserError if other programs use more than this share of the machine."""
    cpu_before = cpu_seconds()
    everyone = machine_seconds()
    time.sleep(SAMPLE_S)
    others_s = machine_seconds() - everyone - cpu_since(cpu_before)
    others_cores = others_s / SAMPLE_S
    busy = min(1.0, others_cores / (psutil.cpu_count() or 1))  # the system counts in hundredths of a second
    if busy > most:
        raise UserError(
            f"other programs take {busy:.0%} of this machine, and max_busy={most:g} allows {most:.0%}: times would "
            "be theirs; wait for their end, or raise max_busy"
        )


class Bench:
    """The config and models of every phase, and the timer."""

    def __init__(self, config: BenchmarkJob) -> None:
        self.config = config
        self.models = Models(config)

    async def measure(self, comparison: Comparison) -> Record:
        """Measure a comparison. Raises RunStopped if a side exceeds `deadline_s`."""
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in comparison.sides}
        order = abba_order([*comparison.sides], self.config.repeats + 1)
        for number, name in enumerate(order):
            row = await self._run_side(comparison, name)
            print(f"  {comparison.name}, {name}: {row['seconds']:.2f} s, {row['cpu_s']:.2f} CPU s", flush=True)
            if number >= len(comparison.sides):
                rows[name].append(row)
        sides = {name: summary(measured) for name, measured in rows.items()}
        return {
            "name": comparison.name,
            "unit": comparison.unit,
            "reference": comparison.reference,
            "aims": comparison.aims,
            "sides": sides,
        }

    async def _run_side(self, comparison: Comparison, name: str) -> dict[str, float]:
        cpu_before = cpu_seconds()
        everyone = machine_seconds()
        started = time.monotonic()
        try:
            done = await asyncio.wait_for(comparison.sides[name](), self.config.deadline_s)
        except TimeoutError:
            raise RunStopped(
                f"{comparison.name}, {name}: not done within deadline_s={self.config.deadline_s:g}"
            ) from None
        seconds = time.monotonic() - started
        cpu_s = cpu_since(cpu_before)
        others_s = max(0.0, machine_seconds() - everyone - cpu_s)
        row: dict[str, float] = {
            "seconds": seconds,
            "cpu_s": cpu_s,
            "others_cpu_s": others_s,
            "peak_gib": peak_gib(),
            "amount": done.amount,
            "rate": done.amount / seconds,
        }
        row |= done.more
        return {key: float(value) for key, value in row.items()}
