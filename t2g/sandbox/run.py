"""A sandbox for generated code: runs a solution against its tests and says what happened, test by test.

What this proves and what not, what right solutions lose, and what isolates a run: README.md.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic.dataclasses import dataclass

from t2g.sandbox.box.clock import KILL_S, START_S, TIMED_OUT
from t2g.sandbox.box.isolation import hide, lacking
from t2g.sandbox.config import SandboxConfig
from t2g.sandbox.fork_server import PACKAGES, SandboxFailed, fork_sandbox

Mode = Literal["separate", "together"]
MAX_VERDICT_BYTES = 2**22
MAX_TESTS = 100  # results that an outcome keeps
MAX_TEXT = 300  # characters of one text in a result
Text = Annotated[str, AfterValidator(lambda text: " ".join(text[:MAX_TEXT].split()))]
Line = Annotated[int, Field(ge=0, lt=2**31)]
TESTS_MIB = 64  # of the tests' process, beside the solution's memory
Reason = Literal[
    "passed", "failed", "syntax", "bad_tests", "timeout", "exited", "killed", "too_much_output", "left_processes",
    "no_result",
]  # fmt: skip
_INCONCLUSIVE = ("timeout", "killed", "no_result")  # a machine that is slow or out of memory causes these, too
_SPARE_S = 2.0  # for the supervisor, to end what is left; past this it is ended itself
_VISIBLE = [  # what a run can read: the system's libraries, the interpreter's, and its packages
    "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib64", "/etc/ld.so.cache",
    f"{sys.base_prefix}/lib", *map(sysconfig.get_path, ("stdlib", "platstdlib")), *PACKAGES,
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, config={"strict": True})
class TestResult:
    """One test. Lines are lines of the solution, from 1."""

    __test__ = False  # pytest looks for classes named Test*

    name: Text
    passed: bool
    skipped: bool = False
    error: Text = ""  # name of the exception's type
    message: Text = ""
    statement: Text = ""  # of the tests, where it was raised
    expected: Text = ""  # repr of what the assertion compared, where it compared something
    got: Text = ""
    trace: tuple[Line, ...] = ()  # of the traceback, innermost last
    lines: tuple[Line, ...] = ()  # that ran during this test
    returned: Line = 0  # of the last return to the test; 0: none


@dataclass(frozen=True, kw_only=True)
class Outcome:
    passed: bool
    reason: Reason
    tests: tuple[TestResult, ...]
    isolation: tuple[str, ...]  # what was in force, by the names in README.md
    mode: Mode = "separate"  # of the tests; together: the solution can have forged this outcome
    output: str
    seconds: float  # wall clock, the start of the sandbox included


class Refused(RuntimeError):
    """This machine cannot isolate what `SandboxConfig.require` names: nothing ran. The sentence says how to get it."""


def available(require: Iterable[str]) -> str:
    """The sentence of `Refused`, or nothing where this machine can isolate all of `require`."""
    return _refusal(lacking(require, run_solution("", "", SandboxConfig(require=())).isolation))


def run_solution(code: str, tests: str, limits: SandboxConfig) -> Outcome:
    """Run pytest-style `tests` (`from solution import f`) against `code`.

    The calling process hides its memory and environment (`isolation.hide`). `limits.tests=auto` is separate:
    `choose_mode` needs a reference.

    Raises:
        Refused: This machine cannot isolate what `limits.require` names.
        SandboxFailed: Two attempts started no sandbox within START_S.
    """
    hide()
    started = time.monotonic()
    with contextlib.suppress(SandboxFailed):
        return _run(code, tests, limits, started, started + START_S / 2)
    return _run(code, tests, limits, started, started + START_S)


def _run(code: str, tests: str, limits: SandboxConfig, started: float, start_deadline: float) -> Outcome:
    """Run them in one sandbox. Times are of time.monotonic."""
    mode: Mode = "together" if limits.tests == "together" else "separate"
    stage = tempfile.mkdtemp(prefix="t2g-sandbox-")
    cgroup = _make_cgroup(Path(stage).name, (limits.memory_mib + TESTS_MIB) * 2**20)
    try:
        plan = limits.model_dump() | {"tests": mode, "cgroup": cgroup, "stage": stage, "visible": _VISIBLE}
        job = json.dumps({"code": code, "tests": tests}).encode()
        found = _converse(json.dumps(plan), job, limits, start_deadline)
    finally:
        _remove(stage)
        _remove_cgroup(cgroup)
    return _read(*found, mode, limits, time.monotonic() - started)


def choose_mode(reference: str, tests: str, limits: SandboxConfig) -> Mode | None:
    """Return the mode in which `tests` pass the reference solution, `separate` if both; None if neither.

    `together` is tried only where the tests ran and failed: else a slow machine would decide that a solution can forge
    its verdict.
    """
    modes: tuple[Mode, ...] = ("separate", "together") if limits.tests == "auto" else (limits.tests,)
    for mode in modes:
        variant = limits.model_copy(update={"tests": mode})
        outcome = run_solution(reference, tests, variant)
        if outcome.reason in _INCONCLUSIVE:
            outcome = run_solution(reference, tests, variant)
        if outcome.passed:
            return mode
        if outcome.reason != "failed":
            return None
    return None


def _make_cgroup(name: str, memory: int) -> str:
    """The folder of a cgroup that holds so many bytes; "" where this user may make none: the supervisor watches."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        old = "memory" in controllers.split(",")
        if old or number == "0":
            folder = Path("/sys/fs/cgroup", "memory" if old else "", path.strip("/"), name)
            with contextlib.suppress(OSError):
                folder.mkdir()
                limit = folder / ("memory.limit_in_bytes" if old else "memory.max")
                limit.write_text(str(memory), encoding="ascii")
                return str(folder)
            _remove_cgroup(str(folder))
    return ""


def _remove_cgroup(folder: str) -> None:
    """Remove it once the last process in it has ended; "": there is none."""
    deadline = time.monotonic() + _SPARE_S
    while os.path.isdir(folder) and time.monotonic() < deadline:
        try:
            os.rmdir(folder)
        except OSError:
            time.sleep(0.001)


def _remove(stage: str) -> None:
    """Whatever a solution that had no file system of its own has left there."""
    try:
        shutil.rmtree(stage)
    except (OSError, RecursionError):  # folders without rights, or too deep
        subprocess.run(["chmod", "-R", "u+rwx", stage], capture_output=True, check=False)
        subprocess.run(["rm", "-rf", stage], capture_output=True, check=False)


def _refusal(missing: list[str]) -> str:
    if not missing:
        return ""
    return (
        f"generated code cannot be isolated from this machine's {', '.join(missing)}: allow user namespaces (sysctl "
        "user.max_user_namespaces), or run on Linux 5.13 or later with landlock in /sys/kernel/security/lsm, in a "
        "container whose profile allows landlock and seccomp; sandbox.require names what a run may not do without"
    )


def _converse(plan: str, job: bytes, limits: SandboxConfig, start_deadline: float) -> tuple[bytes, bytes, bool]:
    """Start a sandbox and wait for its end or the deadline: (verdict, output, whether it was ended here)."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as given, tempfile.NamedTemporaryFile() as output, open(reader, "rb", 0) as verdict:
        given.write(job)
        given.seek(0)
        with open(writer, "wb", 0), open(output.name, "ab", 0) as end:  # what runs can write its output, not read it
            process = fork_sandbox(plan, [given.fileno(), writer, end.fileno()], start_deadline)
        found, deadline = b"", start_deadline
        while len(found) <= MAX_VERDICT_BYTES and _wait(verdict.fileno(), deadline):
            piece = os.read(verdict.fileno(), 65536)
            if not piece:
                break
            if not found:  # the first line: the time of the run begins
                deadline = time.monotonic() + limits.timeout_s + KILL_S + _SPARE_S
            found += piece
        late = not _wait(process, deadline)
        if late:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)
        return found, output.read(limits.max_output_kib * 1024 + 1), late


def _wait(descriptor: int, deadline: float) -> bool:
    """Return whether it can be read, or of a process whether it has ended, before the deadline."""
    poll = select.poll()  # select refuses descriptors from 1024 on, which a driver has
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * max(deadline - time.monotonic(), 0.05)))


class _Verdict(BaseModel):
    """The line that the tests' process writes. Tests come from data sets: even this may be broken."""

    reason: Reason
    tests: list[TestResult]
    output: str = ""


def _read(verdict: bytes, output: bytes, late: bool, mode: Mode, limits: SandboxConfig, seconds: float) -> Outcome:
    lines = verdict.split(b"\n")
    if not lines[0]:  # written before anything of theirs runs
        raise SandboxFailed(f"a sandbox did not start within {seconds:.0f} s: {output[-500:].decode(errors='replace')}")
    isolation = tuple(json.loads(lines[0]))
    if missing := lacking(limits.require, isolation):
        raise Refused(_refusal(missing))
    try:
        found = _Verdict.model_validate_json(lines[1] if len(lines) > 1 else b"")
    except ValidationError:
        found = _Verdict(reason="no_result", tests=[])
    reason = found.reason
    if len(output) > limits.max_output_kib * 1024:
        reason = "too_much_output"
    elif late or lines[-1] == TIMED_OUT:
        reason = "timeout"
    return Outcome(
        passed=reason == "passed",
        reason=reason,
        tests=_most_telling(found.tests),
        isolation=isolation,
        mode=mode,
        output=f"{found.output}{output.decode(errors='replace')}"[: limits.max_output_kib * 1024],
        seconds=seconds,
    )


def _most_telling(tests: list[TestResult]) -> tuple[TestResult, ...]:
    """Return at most MAX_TESTS, failed ones first to stay, in the order in which they ran."""
    kept = sorted(range(len(tests)), key=lambda place: (tests[place].passed, place))[:MAX_TESTS]
    return tuple(tests[place] for place in sorted(kept))
