"""A watchdog for users' functions that block the whole process.

A function that holds Python's interpreter lock, as a regular expression that backtracks does, stops every other thread:
no deadline fires and no signal is handled. A process of its own (`watchdog_process`) therefore gets a report every
BEAT_S while functions run. Without reports it kills this process, with a sentence and the tracebacks of all threads:
MARGIN_S after the deadline of a call, or after TIMED_OUT_LIMIT_S if all calls that still run have timed out.
"""

import atexit
import faulthandler
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from t2g.feedback.sources import watchdog_process
from t2g.text.segments import printable

BEAT_S = 1.0
MARGIN_S = 30.0  # after a call's deadline, which the event loop enforces while it runs
# For a call that timed out: its thread goes on, and may take the lock later. Other code of the process never holds the
# lock for so long.
TIMED_OUT_LIMIT_S = 600.0
SIGNAL_LIMIT_S = 10.0  # after SIGTERM or Ctrl-C
DUMP_SIGNAL = signal.SIGUSR2
MAX_NAMED = 3  # calls in the message: any of them may block


@dataclass(kw_only=True, eq=False)
class WatchedCall:
    """A call of a user's function that runs, also after it timed out: nothing can stop its thread."""

    function: str  # config key and kind, for messages
    prompt_id: str
    timeout: str  # key and value of its deadline
    deadline: float  # time.monotonic()
    log: Path | None  # file for the tracebacks
    has_timed_out: bool = False

    def compute_limit_s(self) -> float:
        """Return the seconds without a report that are allowed while this call runs."""
        if self.has_timed_out:
            return TIMED_OUT_LIMIT_S
        return max(0.0, self.deadline - time.monotonic()) + MARGIN_S


class Watchdog:
    """The watchdog of this process. It starts with the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, WatchedCall] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, unless it runs. Call it in the main thread, where possible, so that it sees signals."""
        with self._lock:
            if self._process is None:
                with suppress(OSError):  # functions work without it
                    self._start_process()

    @contextmanager
    def watch(self, call: WatchedCall) -> Iterator[None]:
        """Watch a call until the end of the block."""
        number = next(self._numbers)
        with self._lock:
            self._calls[number] = call
            self._report()
        try:
            yield
        finally:
            with self._lock:
                del self._calls[number]
                if not self._calls:
                    self._report()

    def _start_process(self) -> None:
        signals_out, signals_in = os.pipe()
        tracebacks_out, tracebacks_in = os.pipe()
        os.set_blocking(signals_in, False)
        is_free = signal.getsignal(DUMP_SIGNAL) is signal.SIG_DFL
        if is_free:  # faulthandler needs no interpreter lock
            faulthandler.register(DUMP_SIGNAL, file=tracebacks_in, all_threads=True)
        dump_signal = int(DUMP_SIGNAL) if is_free else 0
        arguments = (os.getpid(), signals_out, SIGNAL_LIMIT_S, tracebacks_out, dump_signal)
        command = [sys.executable, "-I", "-S", watchdog_process.__file__, *map(str, arguments)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=[signals_out, tracebacks_out],
            start_new_session=True,  # Ctrl-C is for this process
        )
        os.close(signals_out)
        os.close(tracebacks_out)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # a report may be lost, but not wait
        self._process = process
        threading.Thread(target=self._beat, name="watchdog", daemon=True).start()
        atexit.register(self._stop_process)
        with suppress(ValueError):  # not the main thread
            previous = signal.set_wakeup_fd(signals_in, warn_on_full_buffer=False)
            if previous != -1:  # an event loop's
                signal.set_wakeup_fd(previous)

    def _stop_process(self) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            with self._lock:
                if self._calls:
                    self._report()

    def _report(self) -> None:
        if self._process is None or self._process.stdin is None:
            return
        report: dict[str, float | str | None] = {"limit_s": None, "sentence": "", "log": None}
        if self._calls:
            calls = [*self._calls.values()]
            first = min(calls, key=WatchedCall.compute_limit_s)
            report["limit_s"] = first.compute_limit_s()
            report["sentence"] = format_sentence(calls)
            report["log"] = str(first.log.resolve()) if first.log else None
        line = json.dumps(report) + "\n"
        with suppress(OSError, ValueError):  # the watchdog was killed, is slow, or this process ends
            os.write(self._process.stdin.fileno(), line.encode())


def format_sentence(calls: list[WatchedCall]) -> str:
    """Return why the process is killed while these calls run."""
    latest = calls[-1]
    functions = " or ".join(dict.fromkeys(call.function for call in calls))
    prompts = list(dict.fromkeys(call.prompt_id for call in reversed(calls)))
    named = ", ".join(prompts[:MAX_NAMED])
    num_others = len(prompts) - MAX_NAMED
    others = f" or {num_others} others" if num_others > 0 else ""
    where = f" (tracebacks in {latest.log})" if latest.log else ""
    return printable(
        f"{functions} blocks the whole process, on prompt {named}{others}: it holds Python's interpreter lock beyond "
        f"{latest.timeout}, or after a signal. The process is killed{where}. Correct the function; the same command "
        "goes on."
    )


WATCHDOG = Watchdog()
