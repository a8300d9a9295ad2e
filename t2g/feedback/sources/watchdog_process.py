"""The process of `t2g.feedback.sources.watchdog`: it kills its parent when the parent reports nothing for too long.

It imports nothing but the standard library, and runs by its path. Standard input has a JSON line for each report of the
parent: `limit_s`, the seconds without a report that are allowed, or null; `sentence`, why the parent is killed; `log`,
a file for the sentence and the tracebacks, or null.

    python -I -S watchdog_process.py PARENT_PID SIGNALS_FD SIGNAL_LIMIT_S TRACEBACKS_FD DUMP_SIGNAL
"""

import json
import os
import select
import signal
import sys
from contextlib import suppress
from typing import Any

TICK_S = 0.5
FIRST_PIECE_S = 10.0  # until the parent begins to write its tracebacks, on a busy machine
NEXT_PIECE_S = 1.0  # without a further piece of them
MAX_BYTES = 2**20  # bytes of the tracebacks
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def watch(parent: int, signals_fd: int, signal_limit_s: float) -> dict[str, Any] | None:
    """Watch the parent; return its last report when it reports nothing for too long, or None at its end.

    Seconds are counted in ticks of this process, so that a suspended machine costs none, nor does a stopped parent.

    Args:
        signals_fd: A pipe with a byte for each signal that reaches the parent.
        signal_limit_s: Seconds without a report that are allowed after a signal to stop.
    """
    report: dict[str, Any] = {"limit_s": None}
    silent_s = 0.0
    rest = b""
    while os.getppid() == parent:
        readable, _, _ = select.select([0, signals_fd], [], [], TICK_S)
        if 0 in readable:
            data = os.read(0, 65536)
            if not data:
                return None
            *lines, rest = (rest + data).split(b"\n")
            if lines:
                silent_s = 0.0
                with suppress(ValueError):  # a full pipe cut the line
                    report = json.loads(lines[-1])
        elif signals_fd in readable:
            numbers = os.read(signals_fd, 4096)
            if STOP_SIGNALS & {*numbers} and report["limit_s"] is not None:
                report["limit_s"] = min(report["limit_s"], silent_s + signal_limit_s)
        elif not is_stopped(parent):
            silent_s += TICK_S
        if report["limit_s"] is not None and silent_s >= report["limit_s"]:
            return report
    return None


def is_stopped(process: int) -> bool:
    """Return whether the process is stopped, as by a debugger."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"


def read_tracebacks(parent: int, tracebacks_fd: int, dump_signal: int) -> str:
    """Let the parent write its tracebacks, and return them; "" if it cannot."""
    if not dump_signal:
        return ""
    os.kill(parent, dump_signal)
    data = b""
    limit_s = FIRST_PIECE_S
    while select.select([tracebacks_fd], [], [], limit_s)[0]:
        limit_s = NEXT_PIECE_S
        piece = os.read(tracebacks_fd, 65536)
        data += piece
        if not piece or len(data) > MAX_BYTES:
            break
    return data.decode(errors="replace")


def end(parent: int, report: dict[str, Any], tracebacks: str) -> None:
    """Say why the parent ends, and kill it."""
    if report["log"]:
        with suppress(OSError):
            os.makedirs(os.path.dirname(report["log"]), exist_ok=True)
            with open(report["log"], "a", encoding="utf-8", errors="replace") as file:
                file.write(f"{report['sentence']}\n{tracebacks}")
    else:
        print(tracebacks, file=sys.stderr)
    print(report["sentence"], file=sys.stderr, flush=True)
    os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    for number in STOP_SIGNALS:  # the parent decides
        signal.signal(number, signal.SIG_IGN)
    parent = int(sys.argv[1])
    signals_fd = int(sys.argv[2])
    signal_limit_s = float(sys.argv[3])
    tracebacks_fd = int(sys.argv[4])
    dump_signal = int(sys.argv[5])
    last_report = watch(parent, signals_fd, signal_limit_s)
    if last_report is not None:
        tracebacks = read_tracebacks(parent, tracebacks_fd, dump_signal)
        end(parent, last_report, tracebacks)
