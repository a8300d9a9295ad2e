"""Deadlines of the parts of a sandbox, and the alarm that interrupts code that runs too long."""

import signal
import time
import types
from collections.abc import Callable
from typing import Any

START_S = 60.0  # for the start of the sandbox; the deadline of a run counts from then on, however slow the machine is
# Seconds past the deadline. The alarm of the solution has none, so that its hanging line is known; then the alarm of
# the tests rings, and at last the supervisor kills them.
TESTS_ALARM_S = 0.2
KILL_S = 1.0
REPEAT_S = 0.02
TIMED_OUT = b'"timed out"'  # written by a supervisor that had to kill the tests


class OutOfTime(BaseException):
    """The time is up. Raised in the solution or a test, wherever it is."""


def set_alarm(function: Callable[..., Any], deadline: float, repeat_s: float = 0.0) -> None:
    """Raise OutOfTime inside `function`, or in what it calls, from the deadline on.

    It is raised nowhere else: in the code that handles the first exception, a second one would lose the verdict.

    Args:
        function: Running function; a call of it must be on the stack for the exception to be raised.
        deadline: Seconds of time.monotonic.
        repeat_s: Interval of further exceptions, since a test may catch the first; 0: only one.
    """

    def ring(number: int, frame: types.FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is function.__code__:
                raise OutOfTime("the time is up")
            frame = frame.f_back

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(deadline - time.monotonic(), 1e-3), repeat_s)
