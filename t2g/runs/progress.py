"""A progress bar per stage with time left; plain lines where there is no terminal."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import get_console
from rich.progress import MofNCompleteColumn, Progress

SECONDS_BETWEEN_LINES = 10.0
RATE_PERIOD_S = 3600.0  # rich looks back 30 s: a step of a minute would leave it without a rate


class Stage:
    """A bar on a terminal, else at most one line in SECONDS_BETWEEN_LINES."""

    def __init__(self, name: str, total: int, done: int, progress: Progress) -> None:
        self._progress, self._last = progress, progress.get_time()
        progress.add_task(name, total=total, completed=done)
        (self._task,) = progress.tasks
        progress.advance(self._task.id, 0)  # rich measures from its first sample on

    def advance(self, count: int = 1) -> None:
        """So many more of the stage's `total` are done."""
        task, now = self._task, self._progress.get_time()
        self._progress.advance(task.id, count)
        late = self._progress.disable and now - self._last >= SECONDS_BETWEEN_LINES
        if late and (left := task.time_remaining) is not None:
            self._last = now
            self.say(f"{task.description}: {task.completed:.0f} of {task.total:.0f}, {duration(left)} left")

    def reach(self, done: int) -> None:
        """So many of the stage's `total` are done."""
        self.advance(done - int(self._task.completed))

    def say(self, line: str) -> None:
        """Print a line of its own, above the bar where there is one."""
        # Without rich's own reading of brackets and numbers, and without breaking the line.
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def stage(name: str, total: int, done: int = 0) -> Iterator[Stage]:
    """Show the progress of one stage while the block runs; the last line says how long it took.

    done: how much of `total` an earlier session did; the time left is told from the pace of this one.
    On a terminal a bar that vanishes at the end; elsewhere at most one line in 10 s, for logs.
    """
    console = get_console()  # one for all: nested stages share one live display
    begin = console.get_time()
    columns = *Progress.get_default_columns(), MofNCompleteColumn()
    look = {"console": console, "disable": not console.is_terminal, "transient": True}
    with Progress(*columns, **look, speed_estimate_period=RATE_PERIOD_S) as progress:
        shown = Stage(name, total, done, progress)
        if done:
            shown.say(f"{name}: going on after {done} of {total}")
        yield shown
    shown.say(f"{name}: done in {duration(console.get_time() - begin)}")


@contextmanager
def begun(what: str) -> Iterator[None]:
    """Say that something that takes its time begins, and how long it took."""
    started = time.monotonic()
    print(f"{what} ...", file=sys.stderr, flush=True)
    yield
    print(f"{what}: {duration(time.monotonic() - started)}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """
    >>> duration(7.4), duration(75), duration(3700)
    ('7 s', '1 min 15 s', '1 h 01 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
