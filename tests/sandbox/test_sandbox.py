"""Solutions against tests in the sandbox: what tests may do with a solution, and what a solution cannot do at all."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attacks import ATTACKS, HONEST, LIMITS, SECRET, TESTS, limits_of, sandbox_processes

from t2g.sandbox import MAX_TESTS, SandboxConfig, run, run_solution
from t2g.sandbox.box import confine, isolation
from t2g.sandbox.box.clock import OutOfTime, set_alarm

# Not 65534, which stands for every user that a namespace does not know; of this run, since processes count per user.
ORDINARY = 20000 + os.getpid() % 20000
ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = {"user", "pid", "network", "ipc", "mount"}
# -- who runs it, and what the machine allows


def become_ordinary() -> None:
    """In a child of root: a user without privileges, who can read interpreter and code wherever they lie."""
    folders = sorted({Path(path).resolve() for path in (sys.base_prefix, sys.prefix, ROOT)})
    hidden = {path: gate for path in folders if (gate := closed_gate(path)) is not None}
    if hidden:
        assert isolation.unshare(isolation.MOUNT)
        isolation._mount("none", "/", None, isolation._MS_REC | isolation._MS_PRIVATE, None)
    held = {path: os.open(path, os.O_PATH) for path in hidden}
    for gate in set(hidden.values()):
        isolation._mount("tmpfs", str(gate), "tmpfs", 0, "mode=755")
    for path, folder in held.items():
        if not path.exists():  # a venv comes with the clone that it lies in
            path.mkdir(parents=True)
            isolation._mount(f"/proc/self/fd/{folder}", str(path), None, isolation._MS_BIND | isolation._MS_REC, None)
    os.setgroups([])
    os.setresgid(ORDINARY, ORDINARY, ORDINARY)
    os.setresuid(ORDINARY, ORDINARY, ORDINARY)
    isolation.libc.prctl(isolation._PR_SET_DUMPABLE, 1, 0, 0, 0)


def closed_gate(path: Path) -> Path | None:
    """The outermost folder on the way to `path` that others may not pass."""
    return next((p for p in reversed(path.parents) if not p.stat().st_mode & 0o001), None)


def forbid_namespaces() -> None:
    """In a child: from now on this process and its children can make no namespace, as in many containers."""
    proc = os.open("/proc", os.O_RDONLY)
    assert isolation.new_user_namespace(proc)
    for kind in ("user", "pid", "net", "mnt", "ipc"):
        Path(f"/proc/sys/user/max_{kind}_namespaces").write_text("0")
    isolation.drop_privileges()
    isolation.libc.prctl(isolation._PR_SET_DUMPABLE, 1, 0, 0, 0)


def become_ordinary_without_namespaces() -> None:
    if os.geteuid() == 0:
        become_ordinary()
    forbid_namespaces()


def forbid_everything() -> None:
    """As in an old container: no namespaces, no Landlock, and no filter can be set."""
    become_ordinary_without_namespaces()
    allow = (confine._RETURN, 0, 0, confine._ALLOW)
    refused = (confine._RETURN, 0, 0, confine._ERROR | errno.EINVAL)
    landlock = [(confine._EQUAL, 0, 1, confine._CREATE_RULESET), refused]
    prctl = confine._match_argument({"x86_64": 157, "aarch64": 167}[os.uname().machine], 0,
                              [(confine._EQUAL, 0, 1, confine._PR_SET_SECCOMP), refused, allow])  # fmt: skip
    confine.set_filter([(confine._LOAD, 0, 0, 0), *landlock, *prctl, allow])


MODES: dict[str, Callable[[], None]] = {
    "this user": lambda: None,
    "ordinary user": become_ordinary,
    "no namespaces": become_ordinary_without_namespaces,
}


# What needs a process of its own for the solution: these forge a verdict, and reach nothing of the machine.
FORGED_TOGETHER = {"expected value from memory", "always equal", "always equal number", "frames", "patched runner"}


@pytest.fixture(
    scope="module",
    params=[*((mode, "separate") for mode in MODES),
            *(pytest.param((mode, "together"), marks=pytest.mark.slow) for mode in MODES)],
    ids="-".join,
)  # fmt: skip
def attacked(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What every attack came to, by one kind of user on one kind of machine, in one mode of `sandbox.tests`."""
    user, tests = request.param
    if user == "ordinary user" and os.geteuid() != 0:
        pytest.skip("this user is an ordinary one: `this user` has shown it")
    script = Path(__file__).with_name("attacks.py")
    with tempfile.TemporaryDirectory() as folder:  # not pytest's: each of its sessions closes them all to other users
        os.chmod(folder, 0o777)
        done = subprocess.run(
            [sys.executable, str(script), folder, tests],
            env={"PYTHONPATH": str(ROOT), "TMPDIR": folder, "PATH": os.environ["PATH"], "SECRET": SECRET},
            preexec_fn=MODES[user], capture_output=True, text=True, check=False, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        made_by_the_program = {"secret", "mine", "listens"}
        written = set(os.listdir(folder)) - made_by_the_program
        yield json.loads(done.stdout) | {"mode": user, "tests": tests, "written": written}


def test_the_honest_solution_passes(attacked: dict[str, Any]) -> None:
    assert attacked["outcomes"]["honest"]["reason"] == "passed"
    assert attacked["uid"] == (os.getuid() if attacked["mode"] == "this user" or os.getuid() else ORDINARY)


@pytest.mark.parametrize("name", [*ATTACKS, "fork bomb"])
def test_an_attack_fails_within_the_limit(attacked: dict[str, Any], name: str) -> None:
    outcome = attacked["outcomes"][name]
    reason, error = ATTACKS[name][1:] if name in ATTACKS else ("*", "*")
    if attacked["tests"] == "together":
        assert not outcome["passed"] or name in FORGED_TOGETHER
        # it can write what it likes
        reason = "*"
        error = "*"
    else:
        assert not outcome["passed"]
    assert outcome["seconds"] < limits_of(name).timeout_s + 30  # an attack that nothing stops takes 180 s
    assert reason in ("*", outcome["reason"])
    assert error in ("*", *(test["error"] for test in outcome["tests"]))


def test_processes_are_limited_and_none_is_left(attacked: dict[str, Any]) -> None:
    assert attacked["limited"]
    assert attacked["left"] == []


def test_nothing_is_written_outside(attacked: dict[str, Any]) -> None:
    assert attacked["written"] == set()


def test_the_outcome_names_what_was_in_force(attacked: dict[str, Any]) -> None:
    in_force = set(attacked["outcomes"]["honest"]["isolation"])
    assert {"process_group", "rlimits"} <= in_force
    if attacked["mode"] == "no namespaces":
        assert not in_force & NAMESPACES
        assert in_force >= {"landlock", "seccomp", "signals"}
    if attacked["mode"] == "ordinary user":
        assert in_force >= NAMESPACES


REFUSAL = """
import json, sys
from t2g.sandbox import Refused, SandboxConfig, find_refusal, run_solution
found = {"available": find_refusal(["network", "files"])}
code = "open('ran', 'w').close()\\ndef f(x):\\n    return x + 1\\n"
tests = "from solution import f\\ndef test():\\n    assert f(1) == 2\\n"
try:
    run_solution(code, tests, SandboxConfig(require=sys.argv[1:]))
except Refused as refused:
    found["refused"] = str(refused)
weak = run_solution(code, tests, SandboxConfig(require=()))
print(json.dumps(found | {"weak": weak.reason, "isolation": weak.isolation}))
"""


def run_in(mode: Callable[[], None], *require: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", REFUSAL, *require], env={"PYTHONPATH": str(ROOT)}, cwd="/",
        preexec_fn=mode, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_child(mode: Callable[[], None], module: str, function: str) -> Any:
    """Return what a function of a test module returns in a process of that mode."""
    code = f"import json, sys; sys.path[:0] = sys.argv[1:]; import {module} as m; print(json.dumps(m.{function}()))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)], env={"PYTHONPATH": str(ROOT)}, cwd="/",
        preexec_fn=mode, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_cannot_be_isolated_is_refused_in_one_sentence() -> None:
    report = run_in(forbid_everything, "processes", "files", "network")
    assert "this machine's processes, files, network:" in report["refused"]
    assert "this machine's network, files:" in report["available"]
    for way in ("user.max_user_namespaces", "landlock", "seccomp", "sandbox.require", "Linux 5.13"):
        assert way in report["refused"]
    assert (report["weak"], set(report["isolation"])) == ("passed", {"process_group", "rlimits"})


@pytest.mark.parametrize(
    ("in_force", "missing"),
    [
        (["pid", "mount", "network"], []),
        (["landlock", "seccomp", "signals"], []),
        (["pid", "network"], ["processes", "files"]),
        (["seccomp", "signals"], ["processes", "files"]),
        (["mount", "seccomp"], ["processes"]),
        (["mount", "pid"], ["network"]),
    ],
)
def test_what_meets_what_is_required(in_force: list[str], missing: list[str]) -> None:
    assert isolation.missing_isolation(("processes", "files", "network"), in_force) == missing


def test_a_process_that_starts_a_sandbox_is_not_dumpable() -> None:
    code = (
        "from t2g.sandbox import find_refusal\nimport ctypes\nfind_refusal([])\n"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    command = [sys.executable, "-c", code]
    env = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "0\n"


def test_what_can_be_isolated_is_not_refused() -> None:
    report = run_in(become_ordinary_without_namespaces, "files", "processes", "network")
    assert report["available"] == "" and "refused" not in report


OLD_KERNEL = """
import os, socket, sys, time
from t2g.sandbox.box import confine
child = os.fork()
if child == 0:
    os.closerange(0, 3)
    time.sleep(2)
    os._exit(0)
confine.landlock_abi = lambda: int(sys.argv[1])
confine.restrict_files(["/usr", sys.base_prefix], ["."])
confine.filter_calls(keep_modes=True, own_signals=True)
tried = {}
def attempt(name, call):
    try:
        call()
        tried[name] = "done"
    except OSError as error:
        tried[name] = error.strerror
attempt("child", lambda: os.kill(child, 9))
attempt("parent", lambda: os.kill(os.getppid(), 0))
attempt("all", lambda: os.kill(-1, 0))
attempt("own", lambda: os.kill(os.getpid(), 0))
attempt("truncate", lambda: os.truncate("mine", 0))
attempt("write", lambda: open("mine", "w").write("x"))
attempt("outside", lambda: open("/etc/passwd"))
attempt("mode", lambda: os.chmod("mine", 0))
attempt("datagrams", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
attempt("packets", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
attempt("stream", socket.socketpair)
print(tried, os.stat("mine").st_mode & 0o777)
"""


@pytest.mark.parametrize("abi", [1, 2, 3, 5])
def test_an_older_kernel_holds_with_the_filter(abi: int, tmp_path: Path) -> None:
    """Landlock learned to guard truncate in its version 3 and signals in its version 6."""
    if confine.landlock_abi() < abi:
        pytest.skip("this kernel's Landlock is older still")
    (tmp_path / "mine").write_text("x")
    (tmp_path / "mine").chmod(0o640)
    done = subprocess.run([sys.executable, "-c", OLD_KERNEL, str(abi)], env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path,
                          capture_output=True, text=True, check=True, timeout=60, start_new_session=True)  # fmt: skip
    denied = "Operation not permitted"
    assert done.stdout.strip() == str({
        "child": denied, "parent": denied, "all": denied, "own": "done", "truncate": denied, "write": "done",
        "outside": "Permission denied", "mode": "done", "datagrams": denied, "packets": denied, "stream": "done",
    }) + " 416"  # fmt: skip


def test_what_runs_is_first_to_go_when_memory_runs_out() -> None:
    code = "import time\ndef f():\n    time.sleep(3)\n"
    tests = "from solution import f\ndef test():\n    f()\n"
    scores: set[str] = set()
    limits = LIMITS.model_copy(update={"timeout_s": 20.0})
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_solution, code, tests, limits)
        while not running.done():
            for folder in sandbox_processes():
                with contextlib.suppress(OSError):
                    scores.add((folder / "oom_score_adj").read_text().strip())
            time.sleep(0.05)
    assert running.result().passed
    assert "1000" in scores


def test_the_line_that_is_still_running_at_the_deadline_is_known() -> None:
    code = "def f(x):\n    y = x\n    while True:\n        pass\n"

    def is_line_known() -> bool:
        outcome = run_solution(code, TESTS, LIMITS.model_copy(update={"timeout_s": 1.0}))
        assert outcome.reason == "timeout"
        last = outcome.tests[-1]
        return last.error == "OutOfTime" and last.trace[-1] in (3, 4)

    # A process that gets no time for a second is killed before it can tell.
    assert any(is_line_known() for _ in range(3))


# -- one run


def test_what_an_outcome_says_of_each_test() -> None:
    code = (
        "def f(x):\n    if x > 1:\n        return x + 2\n    return helper(x)\n\n\ndef helper(x):\n    return 1 // x\n"
    )
    tests = "from solution import f\n\ndef test_a():\n    assert f(1) == 1\n\ndef test_b():\n    assert f(2) == 3\n\n"
    tests += "def test_c():\n    f(0)\n"
    a, b, c = run_solution(code, tests, LIMITS).tests
    assert (a.passed, a.lines, a.returned, a.trace) == (True, (2, 4, 8), 4, ())
    assert (b.passed, b.lines, b.returned, b.trace) == (False, (2, 3), 3, ())
    assert (b.statement, b.expected, b.got) == ("assert f(2) == 3", "3", "4")
    assert (c.error, c.message, c.trace) == ("ZeroDivisionError", "integer division or modulo by zero", (4, 8))
    assert (c.statement, c.expected, c.got) == ("f(0)", "", "")


@pytest.mark.parametrize(
    ("statement", "expected", "actual"),
    [
        ("assert 3 == f(1)", "3", "2"),
        ("assert f(1) == 2 and f(2) == 2", "2", "3"),
        ("assert f(1) > 5", "", ""),
    ],
)
def test_expected_and_got(statement: str, expected: str, actual: str) -> None:
    (test,) = run_solution(HONEST, f"from solution import f\ndef test():\n    {statement}\n", LIMITS).tests
    assert (test.passed, test.statement, test.expected, test.got) == (False, statement, expected, actual)


@pytest.mark.parametrize(
    ("statement", "explanation"),
    [
        ("assert not f(1)", "assert not 2 + where 2 = f(1)"),
        ("assert f(-1)", "assert 0 + where 0 = f(-1)"),
        ("assert f(1) > 5", "assert 2 > 5 + where 2 = f(1)"),
        ("assert f(1) == 3, 'one more'", "one more"),
    ],
)
def test_what_pytest_says_of_an_assertion(statement: str, explanation: str) -> None:
    (test,) = run_solution(HONEST, f"from solution import f\ndef test():\n    {statement}\n", LIMITS).tests
    assert (test.error, test.message) == ("AssertionError", explanation)


@pytest.mark.parametrize(
    ("code", "tests", "reason", "message"),
    [
        ("def f(x:\n", TESTS, "syntax", "'(' was never closed"),
        ("x = 1\0\n", TESTS, "syntax", "null bytes"),
        ("def g(x):\n    return 1\n", TESTS, "failed", "cannot import name 'f' from 'solution'"),
        ("1 / 0\n", TESTS, "failed", "division by zero"),
        ("", TESTS, "failed", "cannot import name 'f'"),
        (HONEST, "from solution import f\n", "bad_tests", ""),
        (HONEST, "def test(:\n", "bad_tests", ""),
        (HONEST, f"{TESTS}x = {'-' * 200_000}1\n", "bad_tests", ""),
        (HONEST, f"{TESTS}x = {'(' * 5000}1{')' * 5000}\n", "bad_tests", ""),
        (HONEST, f"{TESTS}x = 1{'.real' * 100_000}\n", "bad_tests", ""),
        (HONEST, "import pytest\n@pytest.mark.skip\ndef test():\n    pass\n", "failed", ""),
    ],
)
def test_what_does_not_come_to_a_test(code: str, tests: str, reason: str, message: str) -> None:
    outcome = run_solution(code, tests, LIMITS)
    assert (outcome.passed, outcome.reason) == (False, reason)
    assert message in "".join(test.message for test in outcome.tests)


def test_tests_that_hang_or_leave_are_no_success() -> None:
    hang = "from solution import f\ndef test():\n    while True:\n        pass\n"
    assert run_solution(HONEST, hang, LIMITS).reason == "timeout"
    assert run_solution(HONEST, "import os\ndef test():\n    os._exit(0)\n", LIMITS).reason == "no_result"
    assert not run_solution(HONEST, 'import os\nos.write(1, b\'[]\\n{"reason": "passed"}\')\n', LIMITS).passed


WRONG = [3, -1, None, True, "x", [], [[]], {}, {"a": [1]}, "\ud800", 10**30, [1, {}]]


@pytest.mark.parametrize("key", ["reason", "tests", "output", "name", "error", "message", "trace", "lines", "returned"])
def test_tests_that_write_their_own_verdict_never_raise(key: str) -> None:
    """A solution returns values of any type: a verdict, and what a file can hold, comes back."""
    for value in WRONG:
        verdict: Any = {"reason": "failed", "tests": [], "output": ""}
        if key in verdict:
            verdict[key] = value
        else:
            verdict["tests"] = [{"name": "a", "passed": False, key: value}]
        line = b'["pid", "mount", "network"]\n' + json.dumps(verdict).encode()
        outcome = run._parse(line, b"\xff", False, "separate", LIMITS, 1.0)
        assert not outcome.passed
        repr(outcome).encode()
    deep = b'["pid", "mount", "network"]\n{"reason": ' + b"[" * 900 + b"]" * 900 + b"}"
    assert run._parse(deep, b"", False, "separate", LIMITS, 1.0).reason == "no_result"
    forge = "import json, os, gc\nfor file in range(3, 64):\n    try:\n        os.write(file, b'{\"tests\": 5}\\n')\n"
    forge += "    except OSError:\n        pass\nos._exit(0)\n"
    assert run_solution(HONEST, forge, LIMITS).reason == "no_result"


def test_nothing_of_the_environment_is_inherited() -> None:
    os.environ["T2G_TEST_SECRET"] = "hush"
    try:
        code = "import os\ndef f():\n    return sorted(os.environ)\n"
        tests = "from solution import f\ndef test():\n    assert f() == 0\n"
        (test,) = run_solution(code, tests, LIMITS).tests
    finally:
        del os.environ["T2G_TEST_SECRET"]
    assert "PATH" in test.got and "SECRET" not in test.got


def test_output_and_results_are_bounded() -> None:
    code = "import os\ndef f(x):\n    os.write(2, b'raw')\n    print('said')\n    return 'y' * 10**6\n"
    tests = "from solution import f\nimport pytest\n@pytest.mark.parametrize('x', range(150))\ndef test(x):\n    f(x)\n"
    outcome = run_solution(code, tests + "    assert x < 140\n", LIMITS.model_copy(update={"timeout_s": 20.0}))
    assert (outcome.reason, len(outcome.tests)) == ("failed", MAX_TESTS)
    assert sum(not test.passed for test in outcome.tests) == 10  # those that tell most are kept
    assert outcome.output == "said\n" * 150 + "raw" * 150
    (big,) = run_solution(code, "from solution import f\ndef test():\n    assert f(1) == ''\n", LIMITS).tests
    assert len(big.got) == 300


def test_the_alarm_rings_again_but_only_inside_its_function() -> None:
    def swallow() -> int:
        met = 0
        end = time.monotonic() + 20
        while met < 3 and time.monotonic() < end:
            try:
                time.sleep(1)
            except OutOfTime:
                met += 1
        return met

    before = signal.getsignal(signal.SIGALRM)
    try:
        set_alarm(swallow, time.monotonic(), repeat_s=0.002)
        time.sleep(0.02)
        assert swallow() == 3
        time.sleep(0.02)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_is_visible_in_tmp_cannot_be_moved_away() -> None:
    code = (
        "import os, sys\nfrom t2g.sandbox.box import isolation\nfolder, shown = sys.argv[1:]\n"
        "proc = os.open('/proc', os.O_RDONLY)\n"
        "if not isolation.new_user_namespace(proc) or not isolation.unshare(isolation.MOUNT):\n    sys.exit('none')\n"
        "assert isolation.make_minimal_root(folder, [shown], 2**20) and os.listdir(shown) == ['kept']\n"
        "isolation.drop_privileges()\nopen('file', 'w').close()\n"
        "os.rename(os.path.dirname(shown), 'elsewhere')\n"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, tempfile.TemporaryDirectory(dir="/tmp") as visible:
        (Path(visible) / "lib" / "kept").mkdir(parents=True)
        command = [sys.executable, "-c", code, folder, f"{visible}/lib"]
        env = {"PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    if done.stderr.strip() == "none":
        pytest.skip("this machine grants no mount namespace")
    assert "Error: [Errno" in done.stderr and "'elsewhere'" in done.stderr


# -- remaining processes


ALWAYS_OTHERS: list[dict[int, str]] = [{number: "Z"} for number in range(7, 99)]
READINGS: dict[str, tuple[list[dict[int, str]], bool]] = {
    "no process": ([{}, {}], False),
    "a running process": ([{7: "S"}], True),
    "a process that forked and ended while /proc was read": ([{7: "Z"}, {7: "Z", 8: "S"}], True),
    "a process that was reaped before it was read": ([{}, {8: "R"}], True),
    "a process that had ended before": ([{7: "Z"}, {7: "Z"}], False),
    "processes that start again and again": (ALWAYS_OTHERS, True),
}


@pytest.mark.parametrize("case", READINGS)
def test_remaining_processes_are_read_until_two_readings_agree(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 4 is the supervisor, 5 the tester, 6 the worker; the states are those of the worker's children."""
    readings, is_running = READINGS[case]
    each = iter(readings)
    states: dict[int, str] = {}

    def descendants(parent: int) -> list[int]:
        states.update(next(each))
        return [5, 6, *states]

    monkeypatch.setattr(isolation, "children", lambda parent: [6])
    monkeypatch.setattr(isolation, "descendants", descendants)
    monkeypatch.setattr(isolation, "_state", lambda process: states[process])
    assert isolation.has_running_processes(4, 5, has_worker=True) is is_running


@pytest.mark.parametrize("mode", ["separate", "together"])
def test_an_exception_that_is_false_fails_its_test(mode: str) -> None:
    tests = "class Problems(Exception):\n    def __len__(self): return 0\ndef test(): raise Problems('none')\n"
    outcome = run_solution("", tests, SandboxConfig(tests=mode))
    assert outcome.reason == "failed"
    assert outcome.tests[0].error == "Problems"
