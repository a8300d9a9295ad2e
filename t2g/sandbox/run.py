"""A sandbox for generated code: runs a solution against its tests and says what happened, test by test.

What this proves and what not, what right solutions lose, and what isolates a run: README.md.
"""

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t2g.sandbox.box.clock import KILL_S, START_S, TIMED_OUT
from t2g.sandbox.box.isolation import hide, lacking
from t2g.sandbox.config import SandboxConfig

MAX_VERDICT_BYTES = 2**22
MAX_TESTS = 100  # results that an outcome keeps
MAX_TEXT = 300  # characters of one text in a result
TESTS_MIB = 64  # of the tests' process, beside the solution's memory
REASONS = (
    "passed", "failed", "syntax", "bad_tests", "timeout", "exited", "killed", "too_much_output", "left_processes",
    "no_result",
)  # fmt: skip
_OWN_CODE = Path(__file__).resolve().parents[2]
_SPARE_S = 2.0  # for the supervisor, to end what is left; past this it is ended itself
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": ".",
    "TMPDIR": ".",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same verdict for the same code
    "PYTHONPATH": str(_OWN_CODE),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib64", "/etc/ld.so.cache")


@dataclass(frozen=True, kw_only=True)
class TestResult:
    """One test. Lines are lines of the solution, from 1."""

    __test__ = False  # pytest looks for classes named Test*

    name: str
    passed: bool
    skipped: bool = False
    error: str = ""  # name of the exception's type
    message: str = ""
    statement: str = ""  # of the tests, where it was raised
    expected: str = ""  # repr of what the assertion compared, where it compared something
    got: str = ""
    trace: tuple[int, ...] = ()  # of the traceback, innermost last
    lines: tuple[int, ...] = ()  # that ran during this test
    returned: int = 0  # of the last return to the test; 0: none


@dataclass(frozen=True, kw_only=True)
class Outcome:
    passed: bool
    reason: str  # one of REASONS
    tests: tuple[TestResult, ...]
    isolation: tuple[str, ...]  # what was in force, by the names in README.md
    output: str
    seconds: float  # wall clock, the start of the sandbox included


class Refused(RuntimeError):
    """This machine cannot isolate what `SandboxConfig.require` names: nothing ran. The sentence says how to get it."""


def available(require: Iterable[str]) -> str:
    """The sentence of `Refused`, or nothing where this machine can isolate all of `require`."""
    return _refusal(lacking(require, run_solution("", "", SandboxConfig(require=())).isolation))


def run_solution(code: str, tests: str, limits: SandboxConfig) -> Outcome:
    """Runs pytest-style `tests` (`from solution import f`) against `code`. Never raises for what they do, but `Refused`
    before they do anything. The calling process hides its memory and environment (`isolation.hide`).
    """
    hide()
    started = time.monotonic()
    stage = tempfile.mkdtemp(prefix="t2g-sandbox-")
    cgroup = _make_cgroup(Path(stage).name, (limits.memory_mib + TESTS_MIB) * 2**20)
    try:
        process = subprocess.Popen(
            _command(stage, cgroup, limits),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=stage, env=_ENVIRONMENT, start_new_session=True,
        )  # fmt: skip
        with process:
            job = json.dumps({"code": code, "tests": tests}).encode()
            said = _converse(process, job, limits)
    finally:
        _remove(stage)
        if cgroup:
            _remove_cgroup(cgroup)
    return _read(*said, limits, time.monotonic() - started)


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
    """Once the last process in it has ended."""
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


def _command(stage: str, cgroup: str, limits: SandboxConfig) -> list[str]:
    paths = sysconfig.get_paths()
    packages = list(dict.fromkeys((paths["purelib"], paths["platlib"])))
    plan = {
        "require": limits.require,
        "cgroup": cgroup,
        "timeout_s": limits.timeout_s,
        "stage": stage,  # an empty folder: the working folder, or where a new root is built
        "visible": [*_SYSTEM, f"{sys.base_prefix}/lib", paths["stdlib"], paths["platstdlib"], *packages],
        "packages": packages,
        "own_code": str(_OWN_CODE),
        "max_output": limits.max_output_kib * 1024,
        "max_processes": limits.max_processes,
        "tmp_bytes": 4 * limits.max_file_mib * 2**20,
        "limits": {"memory_mib": limits.memory_mib, "cpu_s": limits.cpu_s, "file_mib": limits.max_file_mib},
    }
    python = getattr(sys, "_base_executable", None) or sys.executable  # a virtual environment's would read its files
    return [python, "-s", "-S", "-P", str(Path(__file__).with_name("start.py")), json.dumps(plan)]


def _converse(process: subprocess.Popen[bytes], job: bytes, limits: SandboxConfig) -> tuple[bytes, bytes, str]:
    """Hands over the job and reads until the end or the deadline: (verdict, output, the reason known here or "")."""
    assert process.stdin and process.stdout and process.stderr
    verdict, output, flood = bytearray(), bytearray(), False
    deadline = time.monotonic() + START_S + _SPARE_S
    with selectors.DefaultSelector() as selector:
        for stream, event in ((process.stdin, selectors.EVENT_WRITE), (process.stdout, selectors.EVENT_READ),
                              (process.stderr, selectors.EVENT_READ)):  # fmt: skip
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, event)
        while process.stdout in {key.fileobj for key in selector.get_map().values()}:
            ready = selector.select(max(deadline - time.monotonic(), 0))
            if not ready or len(verdict) > MAX_VERDICT_BYTES:
                break
            for key, _ in ready:
                stream = key.fileobj
                if stream is process.stdin:
                    job = _feed(process.stdin, job)
                    done = not job
                else:
                    piece = os.read(stream.fileno(), 65536)
                    if stream is process.stdout and not verdict:  # its first line: the time of the run begins
                        deadline = time.monotonic() + limits.timeout_s + KILL_S + _SPARE_S
                    (verdict if stream is process.stdout else output).extend(piece)
                    flood = len(output) > limits.max_output_kib * 1024
                    done = not piece or (stream is process.stderr and flood)
                if done:
                    selector.unregister(stream)
                    stream.close()  # who goes on writing into it gets an error
    try:
        late = process.wait(max(deadline - time.monotonic(), 0.05)) == TIMED_OUT
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        late = True
    reason = "too_much_output" if flood else "timeout" if late and verdict else ""
    return bytes(verdict), bytes(output[: limits.max_output_kib * 1024]), reason


def _feed(stream: Any, job: bytes) -> bytes:
    """What is left to write; nothing when the other side has gone."""
    try:
        return job[os.write(stream.fileno(), job) :]
    except BrokenPipeError:
        return b""


def _read(verdict: bytes, output: bytes, reason: str, limits: SandboxConfig, seconds: float) -> Outcome:
    """The outcome; tests come from data sets, so that even the verdict is read as something that may be broken."""
    lines = verdict.split(b"\n")
    isolation = list(map(_text, _json(lines[0], list)))  # written before anything of theirs runs
    if isolation and (missing := lacking(limits.require, isolation)):
        raise Refused(_refusal(missing))
    found = _json(lines[1] if len(lines) > 1 else b"", dict)
    reason = reason or (found.get("reason") if found.get("reason") in REASONS else "no_result")
    tests = tuple(_result(item) for item in _list(found.get("tests")) if isinstance(item, dict))
    text = f"{_text(found.get('output'))}{output.decode(errors='replace')}"[: limits.max_output_kib * 1024]
    return Outcome(
        passed=reason == "passed",
        reason=reason,
        tests=_most_telling(tests),
        isolation=tuple(isolation),
        output=text,
        seconds=seconds,
    )


def _json(line: bytes, kind: type) -> Any:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return kind()
    return found if isinstance(found, kind) else kind()


def _text(value: Any) -> str:
    """What is text, without the halves of characters that no file can hold."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _result(item: dict[str, Any]) -> TestResult:
    texts = ("name", "error", "message", "statement", "expected", "got")
    words = {key: " ".join(_text(item.get(key))[:MAX_TEXT].split()) for key in texts}
    lines = {key: tuple(filter(_is_line, _list(item.get(key)))) for key in ("trace", "lines")}
    returned = item.get("returned")
    return TestResult(
        passed=item.get("passed") is True,
        skipped=item.get("skipped") is True,
        returned=returned if _is_line(returned) else 0,
        **words,
        **lines,
    )


def _is_line(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _most_telling(tests: tuple[TestResult, ...]) -> tuple[TestResult, ...]:
    """At most MAX_TESTS, failed ones first to stay, in the order in which they ran."""
    if len(tests) <= MAX_TESTS:
        return tests
    kept = sorted(range(len(tests)), key=lambda place: (tests[place].passed, place))[:MAX_TESTS]
    return tuple(tests[place] for place in sorted(kept))
