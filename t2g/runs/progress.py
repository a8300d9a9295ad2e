"""Progress of long work: a bar with the time left on a terminal, plain lines elsewhere, and the lines in a file.

A block of `show_progress` or `log_duration` prints a line at least every 15 seconds; the innermost block prints it.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from rich import get_console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from t2g.files import check_regular

SECONDS_BETWEEN_LINES = 10.0
MAX_SILENCE_S = 14.0  # with POLL_S at most 15 seconds without a line
POLL_S = 1.0
RATE_PERIOD_S = 3600.0  # rich's default of 30 s gives no rate for steps of a minute
MIN_ITEMS = 3  # items before a time left is estimated; the first one pays for warm-up and does not count
PROGRESS_FILE = "progress.log"

_folder: Path | None = None  # run folder of progress.log
_last_line_at = 0.0  # time.monotonic()
_blocks: list[object] = []  # the innermost is last


class TimeLeftColumn(TimeRemainingColumn):
    """The time left on a terminal; a dash while too few items are done for an estimate."""

    def render(self, task: Task) -> Text:
        """Return the time left."""
        if task.finished or time_left(task) is not None:
            return super().render(task)
        return Text("time left unknown")


def time_left(task: Task) -> float | None:
    """Return the estimated seconds until the task ends; None before MIN_ITEMS items of this session."""
    num_of_session = task.completed - task.fields["done_before"]
    return task.time_remaining if num_of_session >= MIN_ITEMS else None


class ProgressBar:
    """A bar on a terminal; elsewhere at most one line in SECONDS_BETWEEN_LINES."""

    def __init__(self, name: str, total: int, done: int, progress: Progress) -> None:
        self._progress = progress
        self._last = progress.get_time()
        progress.add_task(name, total=total, completed=done, done_before=done, phase="")
        (self._task,) = progress.tasks  # rich measures the speed from the end of the first item on

    def advance(self, count: int = 1) -> None:
        """Add `count` to the finished items."""
        now = self._progress.get_time()
        self._progress.advance(self._task.id, count)
        is_due = self._progress.disable and now - self._last >= SECONDS_BETWEEN_LINES
        left = time_left(self._task) if is_due else None
        if left is not None:
            self._last = now
            self.print_line(f"{self.count}, {format_duration(left)} left")

    def set_phase(self, phase: str) -> None:
        """Show what the current item does: sampling, feedback, learning."""
        self._progress.update(self._task.id, phase=phase)

    def advance_to(self, done: int) -> None:
        """Set the finished items to `done`, unless more are finished."""
        num_new = done - int(self._task.completed)
        self.advance(max(0, num_new))

    def print_line(self, line: str) -> None:
        """Print a line, above the bar if there is one. Rich must not interpret brackets or wrap the line."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        record_line(line)

    @property
    def count(self) -> str:
        return f"{self._task.description}: {self._task.completed:.0f} of {self._task.total:.0f}"

    @property
    def position(self) -> str:
        """Return the finished items, and the phase of the current one."""
        phase = self._task.fields["phase"]
        return f"{self.count}, {phase}" if phase else self.count

    @property
    def is_complete(self) -> bool:
        return self._task.completed >= (self._task.total or 0)


@contextmanager
def show_progress(name: str, total: int, done: int = 0) -> Iterator[ProgressBar]:
    """Show a progress bar while the block runs, and print how long it took.

    On a terminal the bar disappears at the end; elsewhere at most one line is printed in 10 s, for logs. The last line
    says how many items are finished, where some are not: the block was stopped, or left some out.

    Args:
        done: Items of `total` that an earlier session finished; they do not count for the time left.
    """
    console = get_console()  # the shared console: nested bars use one live display
    started = console.get_time()
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[phase]}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeLeftColumn(),
        MofNCompleteColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        speed_estimate_period=RATE_PERIOD_S,
    )
    with progress:
        bar = ProgressBar(name, total, done, progress)
        if done:
            bar.print_line(f"{name}: going on after {done} of {total}")
        write = record_line if console.is_terminal else bar.print_line  # the bar is on the terminal
        with _limit_silence(lambda elapsed: write(f"{bar.position}, {elapsed} so far")):
            yield bar
    duration = format_duration(console.get_time() - started)
    if bar.is_complete:
        bar.print_line(f"{name}: done in {duration}")
    else:
        bar.print_line(f"{bar.count}, ended after {duration}")


@contextmanager
def log_duration(work: str, purpose: str = "") -> Iterator[None]:
    """Print the start of `work` and its purpose, then how long the block took."""
    started = time.monotonic()
    print_line(f"{work}: {purpose} ..." if purpose else f"{work} ...")
    with _limit_silence(lambda elapsed: print_line(f"{work}: {elapsed} so far")):
        yield
    duration = format_duration(time.monotonic() - started)
    print_line(f"{work}: {duration}")


def print_line(line: str) -> None:
    """Print a line to stderr, and record it in progress.log."""
    print(line, file=sys.stderr, flush=True)
    record_line(line)


@contextmanager
def _limit_silence(write_line: Callable[[str], None]) -> Iterator[None]:
    """Call `write_line` with the elapsed time whenever the innermost block printed no line for MAX_SILENCE_S."""
    ended = threading.Event()
    started = time.monotonic()

    def watch() -> None:
        while not ended.wait(POLL_S):
            is_innermost = _blocks[-1:] == [ended]
            silence_s = time.monotonic() - max(_last_line_at, started)
            if is_innermost and silence_s >= MAX_SILENCE_S:
                elapsed = format_duration(time.monotonic() - started)
                write_line(elapsed)

    _blocks.append(ended)
    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()  # it would write its line after the block's last one
        _blocks.remove(ended)


def record_line(line: str) -> None:
    """Append the line and its time to progress.log, inside a block of `record_lines`."""
    global _last_line_at
    _last_line_at = time.monotonic()
    if _folder is None:
        return
    with suppress(OSError):  # a full disk raises its error when results are written
        _folder.mkdir(parents=True, exist_ok=True)
        with (_folder / PROGRESS_FILE).open("a", encoding="utf-8", errors="replace") as file:
            written_at = datetime.now().astimezone().isoformat(timespec="seconds")
            file.write(f"{written_at} {line}\n")


@contextmanager
def record_lines(folder: Path) -> Iterator[None]:
    """Record all lines of the block in progress.log of a run folder; the outermost such block decides the folder."""
    global _folder
    check_regular(folder / PROGRESS_FILE)
    outer = _folder
    _folder = outer or folder
    try:
        yield
    finally:
        _folder = outer


def format_duration(seconds: float) -> str:
    """Return a duration for users.

    >>> format_duration(7.4), format_duration(75), format_duration(3700)
    ('7 s', '1 min 15 s', '1 h 01 min')
    """
    minutes, seconds = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if minutes:
        return f"{minutes} min {seconds:02d} s"
    return f"{seconds} s"
