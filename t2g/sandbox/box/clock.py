"""How long the parts of a sandbox wait, and the alarm that interrupts what runs too long."""

import signal
import time
import types
from collections.abc import Callable
from typing import Any

START_S = 60.0  # for the sandbox to be made; the deadline of a run counts from then on, whatever else the machine does
# Past the deadline. The solution rings at once, so that its hanging line can be named; who does not react is ended.
TESTS_RING_S, KILL_S = 0.2, 1.0
AGAIN_S = 0.02
TIMED_OUT = b'"timed out"'  # the line of a supervisor that had to kill the tests


class OutOfTime(BaseException):
    """The time is up. Raised in the solution or a test, wherever it is."""


def set_alarm(function: Callable[..., Any], deadline: float, again_s: float = 0.0) -> None:
    """From `deadline` (seconds of time.monotonic) on raises OutOfTime inside `function` and what it calls, and nowhere
    else: an alarm in the code that handles the first one would lose the verdict. again_s: and raises it again this
    often, since a test may swallow it; 0: once.
    """

    def ring(number: int, frame: types.FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is function.__code__:
                raise OutOfTime("the time is up")
            frame = frame.f_back

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(deadline - time.monotonic(), 1e-3), again_s)
