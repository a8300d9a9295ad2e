"""Run a solution against its tests in a sandbox and return the result of each test.

README.md lists what a verdict proves, what differs from plain pytest, and what isolates a run.
"""

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic.dataclasses import dataclass

from t2g.sandbox.box.clock import KILL_S, START_S, TIMED_OUT
from t2g.sandbox.box.isolation import missing_isolation, set_dumpable
from t2g.sandbox.config import SandboxConfig
from t2g.sandbox.fork_server import PACKAGES, SandboxFailed, fork_sandbox

Mode = Literal["separate", "together"]
MODES: tuple[str, ...] = get_args(Mode)
MAX_VERDICT_BYTES = 2**22
MAX_TESTS = 100  # results that an outcome keeps
MAX_TEXT = 300  # characters of one text in a result
Text = Annotated[str, AfterValidator(lambda text: " ".join(text[:MAX_TEXT].split()))]
Line = Annotated[int, Field(ge=0, lt=2**31)]
TESTS_MIB = 64  # memory of the tests' process, in addition to the solution's
Reason = Literal[
    "passed", "failed", "syntax", "bad_tests", "timeout", "exited", "killed", "too_much_output", "left_processes",
    "unsupported", "no_result",
]  # fmt: skip
_INCONCLUSIVE = ("timeout", "killed", "no_result")  # may be caused by a slow machine or one out of memory
_CLEANUP_S = 2.0  # for the supervisor to end the remaining processes; then it is killed
_VISIBLE = [  # readable in a run: the libraries of the system and the interpreter, and its packages
    "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib64", "/etc/ld.so.cache",
    f"{sys.base_prefix}/lib", *map(sysconfig.get_path, ("stdlib", "platstdlib")), *PACKAGES,
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, config={"strict": True})
class TestResult:
    """Result of one test. Line numbers are those of the solution, from 1."""

    __test__ = False  # pytest looks for classes named Test*

    name: Text
    passed: bool
    skipped: bool = False
    unsupported: bool = False  # the test decides nothing here; the error says why
    error: Text = ""  # name of the exception's type
    message: Text = ""
    statement: Text = ""  # statement of the tests in which the error was raised
    expected: Text = ""  # repr of the compared value; "" if the assertion compared nothing
    got: Text = ""
    trace: tuple[Line, ...] = ()  # lines of the traceback, innermost last
    lines: tuple[Line, ...] = ()  # lines that ran during this test
    returned: Line = 0  # line of the last return to the test; 0: none


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one run."""

    passed: bool
    reason: Reason
    tests: tuple[TestResult, ...]
    isolation: tuple[str, ...]  # isolation in force, by the names in README.md
    mode: Mode = "separate"  # together: the solution could have forged this outcome
    output: str
    seconds: float  # wall clock, including the start of the sandbox


class Refused(RuntimeError):
    """This machine cannot isolate what `SandboxConfig.require` names. Nothing ran; the message says how to fix it."""


def find_refusal(require: Iterable[str]) -> str:
    """Return the message of `Refused`; "" if this machine can isolate all of `require`."""
    outcome = run_solution("", "", SandboxConfig(require=()))
    missing = missing_isolation(require, outcome.isolation)
    if not missing:
        return ""
    return _format_refusal(missing)


def run_solution(code: str, tests: str, limits: SandboxConfig) -> Outcome:
    """Run pytest-style `tests` (`from solution import f`) against `code`.

    Other processes of this user can no longer read the memory and environment of the calling process
    (`isolation.set_dumpable`). `limits.tests=auto` means separate here; `choose_mode` resolves it by a reference.

    Raises:
        Refused: This machine cannot isolate what `limits.require` names.
        SandboxFailed: Two attempts started no sandbox within START_S.
    """
    set_dumpable(False)
    with _sandbox_limit(limits.max_concurrent):
        started = time.monotonic()
        with contextlib.suppress(SandboxFailed):
            return _run(code, tests, limits, started, started + START_S / 2)
        return _run(code, tests, limits, started, started + START_S)


@functools.cache
def _sandbox_limit(count: int) -> threading.BoundedSemaphore:
    """Return the limit of sandboxes at once, which all users in this process share."""
    return threading.BoundedSemaphore(count)


def _run(code: str, tests: str, limits: SandboxConfig, started: float, start_deadline: float) -> Outcome:
    """Run code and tests in one sandbox. Times are seconds of time.monotonic."""
    mode: Mode = "separate"
    if limits.tests == "together":
        mode = "together"
    folder = tempfile.mkdtemp(prefix="t2g-sandbox-")
    memory_bytes = (limits.memory_mib + TESTS_MIB) * 2**20
    cgroup = _make_cgroup(Path(folder).name, memory_bytes)
    try:
        plan = limits.dump_limits() | {"tests": mode, "cgroup": cgroup, "folder": folder, "visible": _VISIBLE}
        job = json.dumps({"code": code, "tests": tests}).encode()
        result = _run_plan(json.dumps(plan), job, limits, start_deadline)
    finally:
        _remove_folder(folder)
        _remove_cgroup(cgroup)
    return _parse(*result, mode, limits, time.monotonic() - started)


def choose_mode(reference: str, tests: str, limits: SandboxConfig) -> Mode | None:
    """Return the mode in which the reference solution passes `tests`, `separate` before `together`; None if neither.

    `together` is tried only if the tests failed or are unsupported in `separate`, not after a timeout. Otherwise a slow
    machine would choose the mode in which a solution can forge its verdict.
    """
    modes: list[Mode] = ["separate", "together"]
    if limits.tests != "auto":
        modes = [limits.tests]
    for mode in modes:
        variant = limits.model_copy(update={"tests": mode})
        outcome = run_solution(reference, tests, variant)
        if outcome.reason in _INCONCLUSIVE:
            outcome = run_solution(reference, tests, variant)
        if outcome.passed:
            return mode
        if outcome.reason not in ("failed", "unsupported"):
            return None
    return None


def _make_cgroup(name: str, memory: int) -> str:
    """Return the folder of a new cgroup with this memory limit in bytes.

    Returns "" if this user may make none; then the supervisor alone bounds the memory.
    """
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):  # version 1
            root = Path("/sys/fs/cgroup/memory")
            limit_file = "memory.limit_in_bytes"
        elif number == "0":
            root = Path("/sys/fs/cgroup")
            limit_file = "memory.max"
        else:
            continue
        folder = root / path.strip("/") / name
        with contextlib.suppress(OSError):
            folder.mkdir()
            (folder / limit_file).write_text(str(memory), encoding="ascii")
            return str(folder)
        _remove_cgroup(str(folder))
    return ""


def _remove_cgroup(folder: str) -> None:
    """Remove a cgroup once its last process has ended; "" stands for no cgroup."""
    deadline = time.monotonic() + _CLEANUP_S
    while os.path.isdir(folder) and time.monotonic() < deadline:
        try:
            os.rmdir(folder)
        except OSError:
            time.sleep(0.001)


def _remove_folder(folder: str) -> None:
    """Remove the working folder with the files that a solution without its own file system left there."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):  # folders without rights, or too deep
        subprocess.run(["chmod", "-R", "u+rwx", folder], capture_output=True, check=False)
        subprocess.run(["rm", "-rf", folder], capture_output=True, check=False)


def _format_refusal(missing: list[str]) -> str:
    """Return the message of `Refused` for missing names of `isolation.MECHANISMS`."""
    return (
        f"generated code cannot be isolated from this machine's {', '.join(missing)}: allow user namespaces (sysctl "
        "user.max_user_namespaces), or run on Linux 5.13 or later with landlock in /sys/kernel/security/lsm, in a "
        "container whose profile allows landlock and seccomp; sandbox.require names what a run may not do without"
    )


def _run_plan(plan: str, job: bytes, limits: SandboxConfig, start_deadline: float) -> tuple[bytes, bytes, bool]:
    """Start a sandbox, wait until it ends, and return its verdict, its output and whether it missed its deadline.

    A sandbox that missed its deadline is killed.
    """
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as stdin, tempfile.NamedTemporaryFile() as output, open(reader, "rb", 0) as verdict:
        stdin.write(job)
        stdin.seek(0)
        with open(writer, "wb", 0), open(output.name, "ab", 0) as output_end:  # write-only for the run
            process = fork_sandbox(plan, [stdin.fileno(), writer, output_end.fileno()], start_deadline)
        received = b""
        deadline = start_deadline
        while len(received) <= MAX_VERDICT_BYTES and _wait(verdict.fileno(), deadline):
            piece = os.read(verdict.fileno(), 65536)
            if not piece:
                break
            if not received:  # the first line: the time of the run begins
                deadline = time.monotonic() + limits.timeout_s + KILL_S + _CLEANUP_S
            received += piece
        is_late = not _wait(process, deadline)
        if is_late:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)
        return received, output.read(limits.max_output_kib * 1024 + 1), is_late


def _wait(descriptor: int, deadline: float) -> bool:
    """Return whether the descriptor becomes readable before the deadline; that of a process does when it ends."""
    poll = select.poll()  # select refuses descriptors from 1024 on, which a driver may have
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * max(deadline - time.monotonic(), 0.05)))


class _Verdict(BaseModel):
    """Verdict line of the tests' process. Tests come from data sets, so that even this line may be invalid."""

    reason: Reason
    tests: list[TestResult]
    output: str = ""


def _parse(verdict: bytes, output: bytes, is_late: bool, mode: Mode, limits: SandboxConfig, seconds: float) -> Outcome:
    lines = verdict.split(b"\n")
    if not lines[0]:  # written before code of the solution or the tests runs
        raise SandboxFailed(f"a sandbox did not start within {seconds:.0f} s: {output[-500:].decode(errors='replace')}")
    isolation = tuple(json.loads(lines[0]))
    if missing := missing_isolation(limits.require, isolation):
        raise Refused(_format_refusal(missing))
    try:
        parsed = _Verdict.model_validate_json(b"".join(lines[1:2]))
    except ValidationError:
        parsed = _Verdict(reason="no_result", tests=[])
    reason = parsed.reason
    max_output = limits.max_output_kib * 1024
    if len(output) > max_output:
        reason = "too_much_output"
    elif is_late or lines[-1] == TIMED_OUT:
        reason = "timeout"
    all_output = parsed.output + output.decode(errors="replace")
    return Outcome(
        passed=reason == "passed",
        reason=reason,
        tests=_limit_results(parsed.tests),
        isolation=isolation,
        mode=mode,
        output=all_output[:max_output],
        seconds=seconds,
    )


def _limit_results(tests: list[TestResult]) -> tuple[TestResult, ...]:
    """Return at most MAX_TESTS results in the order in which they ran; failed tests take precedence."""
    failed = [index for index, test in enumerate(tests) if not test.passed]
    passed = [index for index, test in enumerate(tests) if test.passed]
    indices = (failed + passed)[:MAX_TESTS]
    return tuple(tests[index] for index in sorted(indices))
