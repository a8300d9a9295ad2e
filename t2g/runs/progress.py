"""Progress of long work: a bar per stage with the time left, plain lines elsewhere, and the lines in a file.

Work within `stage` or `log_duration` is never silent for 15 seconds: the innermost block then says how far it is.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from rich import get_console
from rich.progress import MofNCompleteColumn, Progress

SECONDS_BETWEEN_LINES = 10.0
MAX_SILENCE_S, POLL_S = 14.0, 1.0  # together at most 15 seconds without a line
RATE_PERIOD_S = 3600.0  # rich looks back 30 s: a step of a minute would leave it without a rate
PROGRESS_FILE = "progress.log"

_folder: Path | None = None  # of the run that keeps the lines
_last_line_at = 0.0  # of time.monotonic
_blocks: list[object] = []  # the innermost is last


class ProgressBar:
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
            self.print_line(f"{self.position}, {format_duration(left)} left")

    def advance_to(self, done: int) -> None:
        """So many of the stage's `total` are done, or more by an earlier call."""
        self.advance(max(0, done - int(self._task.completed)))

    def print_line(self, line: str) -> None:
        """Print a line of its own, above the bar where there is one."""
        # Without rich's own reading of brackets and numbers, and without breaking the line.
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        record_line(line)

    @property
    def position(self) -> str:
        return f"{self._task.description}: {self._task.completed:.0f} of {self._task.total:.0f}"


@contextmanager
def show_progress(name: str, total: int, done: int = 0) -> Iterator[ProgressBar]:
    """Show the progress of one stage while the block runs; the last line says how long it took.

    done: how much of `total` an earlier session did; the time left follows from the pace of this one.
    On a terminal a bar that vanishes at the end; elsewhere at most one line in 10 s, for logs.
    """
    console = get_console()  # one for all: nested stages share one live display
    begin = console.get_time()
    columns = *Progress.get_default_columns(), MofNCompleteColumn()
    look = {"console": console, "disable": not console.is_terminal, "transient": True}
    with Progress(*columns, **look, speed_estimate_period=RATE_PERIOD_S) as progress:
        shown = ProgressBar(name, total, done, progress)
        if done:
            shown.print_line(f"{name}: going on after {done} of {total}")
        write = record_line if console.is_terminal else shown.print_line  # the bar is on the terminal
        with _limit_silence(lambda elapsed: write(f"{shown.position}, {elapsed} so far")):
            yield shown
    shown.print_line(f"{name}: done in {format_duration(console.get_time() - begin)}")


@contextmanager
def log_duration(work: str) -> Iterator[None]:
    """Print that `work` begins, and how long the block took."""
    started = time.monotonic()
    _print_line(f"{work} ...")
    with _limit_silence(lambda elapsed: _print_line(f"{work}: {elapsed} so far")):
        yield
    _print_line(f"{work}: {format_duration(time.monotonic() - started)}")


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
    record_line(line)


@contextmanager
def _limit_silence(write_line: Callable[[str], None]) -> Iterator[None]:
    """Call `write_line` with the elapsed time whenever the innermost block printed no line for MAX_SILENCE_S."""
    ended, started = threading.Event(), time.monotonic()

    def watch() -> None:
        while not ended.wait(POLL_S):
            if _blocks[-1:] == [ended] and time.monotonic() - max(_last_line_at, started) >= MAX_SILENCE_S:
                write_line(format_duration(time.monotonic() - started))

    _blocks.append(ended)
    threading.Thread(target=watch, name="progress", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        _blocks.remove(ended)


def record_line(line: str) -> None:
    """Append the line and its time to progress.log of the run whose lines are kept."""
    global _last_line_at
    _last_line_at = time.monotonic()
    if _folder is not None:
        with suppress(OSError):  # a full disk raises an error where results are written
            _folder.mkdir(parents=True, exist_ok=True)
            with (_folder / PROGRESS_FILE).open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {line}\n")


@contextmanager
def record_lines(folder: Path) -> Iterator[None]:
    """Keep all lines of the block in progress.log of a run folder; within another such block, that one keeps them."""
    global _folder
    outer, _folder = _folder, _folder or folder
    try:
        yield
    finally:
        _folder = outer


def format_duration(seconds: float) -> str:
    """
    >>> format_duration(7.4), format_duration(75), format_duration(3700)
    ('7 s', '1 min 15 s', '1 h 01 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
