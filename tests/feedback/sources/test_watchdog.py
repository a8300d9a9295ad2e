"""A user's function that holds the interpreter lock: a process of its own ends the run with a sentence."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from t2g.feedback.sources import user_function, watchdog_process
from t2g.feedback.sources.user_function import FunctionFailed, UserFunction
from t2g.feedback.sources.watchdog import MARGIN_S, Watchdog, WatchedCall, format_sentence

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60
PROGRAM = """
    import asyncio, os, re, signal, sys, threading, time
    from pathlib import Path

    from t2g.feedback.sources import watchdog
    from t2g.feedback.sources.program import ProgramFeedback
    from t2g.types import Prompt

    watchdog.MARGIN_S, watchdog.SIGNAL_LIMIT_S, watchdog.BEAT_S = {margin_s}, 1.0, 0.1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def backtrack(prompt, response):
        print("begins", flush=True)
        re.match(r"(a+)+$", "a" * 64 + "b")

    async def backtrack_async(prompt, response):
        backtrack(prompt, response)

    def loop(prompt, response):
        print("begins", flush=True)
        while True:
            pass

    def sleep(prompt, response):
        print("begins", flush=True)
        time.sleep(3)
        return "It is fine.", [], []

    program = ProgramFeedback({function}, timeout_s={timeout_s}, log=Path("feedback.log"))
    prompt = Prompt(prompt_id="p7", prompt_text="", task="prompts")
    print(asyncio.run(program.judge(prompt, "x")).reason, flush=True)
"""


def start(folder: Path, function: str, *, timeout_s: float, margin_s: float = 1.0) -> "subprocess.Popen[str]":
    code = textwrap.dedent(PROGRAM).format(function=function, timeout_s=timeout_s, margin_s=margin_s)
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("function", ["backtrack", "backtrack_async"])
def test_a_function_that_holds_the_interpreter_lock_ends_the_run_with_a_sentence(function: str, tmp_path: Path) -> None:
    with start(tmp_path, function, timeout_s=0.5) as program:
        _, errors = program.communicate(timeout=DEADLINE_S)
    assert program.returncode == -signal.SIGKILL
    assert "feedback.source=program: the feedback function blocks the whole process, on prompt p7" in errors
    assert "feedback.timeout_s=0.5" in errors
    log = (tmp_path / "feedback.log").read_text()
    assert "in backtrack" in log, "the log shows the line that blocks"
    assert "blocks the whole process" in log


def test_sigterm_ends_a_process_whose_interpreter_lock_is_held(tmp_path: Path) -> None:
    with start(tmp_path, "backtrack", timeout_s=600) as program:
        assert program.stdout is not None and program.stdout.readline() == "begins\n"
        time.sleep(0.5)
        program.send_signal(signal.SIGTERM)
        _, errors = program.communicate(timeout=DEADLINE_S)
    assert program.returncode == -signal.SIGKILL and "or after a signal" in errors


@pytest.mark.parametrize(("function", "timeout_s"), [("loop", 0.5), ("sleep", 0.5), ("sleep", 30)])
def test_a_process_that_is_not_blocked_lives(function: str, timeout_s: float, tmp_path: Path) -> None:
    with start(tmp_path, function, timeout_s=timeout_s, margin_s=10) as program:
        output, errors = program.communicate(timeout=DEADLINE_S)
    assert program.returncode == 0 and "blocks the whole process" not in errors
    assert ("gave no answer within" in output) == (timeout_s < 1)


def test_sigterm_of_a_process_that_is_not_blocked_is_its_own(tmp_path: Path) -> None:
    with start(tmp_path, "sleep", timeout_s=30) as program:
        assert program.stdout is not None and program.stdout.readline() == "begins\n"
        program.send_signal(signal.SIGTERM)
        program.communicate(timeout=DEADLINE_S)
    assert program.returncode == 143


def test_a_stopped_process_is_not_killed(tmp_path: Path) -> None:
    with start(tmp_path, "sleep", timeout_s=0.1, margin_s=1.0) as program:
        assert program.stdout is not None and program.stdout.readline() == "begins\n"
        program.send_signal(signal.SIGSTOP)
        time.sleep(3)
        program.send_signal(signal.SIGCONT)
        program.communicate(timeout=DEADLINE_S)
    assert program.returncode == 0


def test_tracebacks_that_begin_late_are_read_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the process that is killed gets no time at first."""
    monkeypatch.setattr(watchdog_process, "NEXT_PIECE_S", 0.9)
    tracebacks_out, tracebacks_in = os.pipe()
    writer = subprocess.Popen(["sh", "-c", "sleep 1; echo begin; echo end"], stdout=tracebacks_in)
    tracebacks = watchdog_process.read_tracebacks(os.getpid(), tracebacks_out, signal.SIGCONT)
    writer.wait(timeout=DEADLINE_S)
    os.close(tracebacks_in)
    os.close(tracebacks_out)
    assert tracebacks == "begin\nend\n"


def test_the_sentence_names_functions_and_the_latest_prompts() -> None:
    def call(function: str, prompt_id: str) -> WatchedCall:
        return WatchedCall(function=function, prompt_id=prompt_id, timeout="t=1", deadline=0.0, log=None)

    calls = [call("a: the judge", "1"), *(call("b: the reward", str(i)) for i in range(2, 7))]
    sentence = format_sentence(calls)
    assert sentence.startswith("a: the judge or b: the reward blocks the whole process, on prompt 6, 5, 4 or 3 others:")


class RecordingWatchdog(Watchdog):
    """Reports to this test in place of a process."""

    def _start_process(self) -> None:
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def last_limit_s(self) -> float | None:
        """End the process, and return the limit of the last report."""
        assert self._process is not None
        output, _ = self._process.communicate(timeout=DEADLINE_S)
        return json.loads(output.splitlines()[-1])["limit_s"]


def test_a_call_that_timed_out_stays_watched_and_leaves_other_calls_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread goes on. Other code may hold the lock for longer than MARGIN_S meanwhile."""
    recording = RecordingWatchdog()
    monkeypatch.setattr(user_function, "WATCHDOG", recording)
    end = threading.Event()

    async def time_out() -> None:
        hanging = UserFunction(end.wait, kind="function", key="k", timeout_s=0.05)
        with pytest.raises(FunctionFailed, match="gave no answer"):
            await hanging.call(lambda answer: answer, "p1")

    asyncio.run(time_out())
    other = WatchedCall(function="f", prompt_id="p2", timeout="t", deadline=time.monotonic() + 300, log=None)
    with recording.watch(other):
        assert len(recording._calls) == 2
    limit_s = recording.last_limit_s()
    end.set()
    assert limit_s is not None and limit_s > 300 + MARGIN_S - DEADLINE_S
