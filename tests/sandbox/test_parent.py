"""The parent that forks sandboxes: what a run inherits from it, and that no run changes it."""

import os
import resource
import secrets
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from t2g.sandbox import Outcome, SandboxConfig, SandboxFailed, fork_server, run, run_solution
from t2g.sandbox.box import isolation

LIMITS = SandboxConfig(timeout_s=20, cpu_s=20)
TOGETHER = LIMITS.model_copy(update={"tests": "together"})
BOTH = pytest.mark.parametrize("limits", [LIMITS, TOGETHER], ids=["separate", "together"])
HONEST = "def f(x):\n    return x + 1\n", "from solution import f\ndef test():\n    assert f(1) == 2\n"


def parent() -> int:
    assert fork_server._server is not None
    return fork_server._server.process.pid


def value_of(code: str, limits: SandboxConfig, tests: str = "") -> str:
    """Return the text that f() of the solution gives."""
    tests = tests or "from solution import f\ndef test():\n    print(f())\n"
    outcome = run_solution(code, tests, limits)
    assert outcome.passed, outcome
    return outcome.output.strip()


@BOTH
def test_a_run_inherits_no_descriptor_but_its_own(limits: SandboxConfig) -> None:
    code = (
        "import os, stat\ndef kind(n):\n    try:\n        return stat.S_IFMT(os.fstat(n).st_mode)\n"
        "    except OSError:\n"
        "        return 0\ndef f():\n    kinds = [kind(n) for n in range(4096)]\n"
        "    types = stat.S_IFSOCK, stat.S_IFIFO, stat.S_IFDIR\n"
        "    return [kinds.count(kind) for kind in types], sum(map(bool, kinds))\n"
    )
    # A socket to the tests; or together two sockets. Never a folder, as the machine's /proc.
    assert value_of(code, limits) == ("([1, 0, 0], 4)" if limits is LIMITS else "([2, 0, 0], 5)")


@BOTH
def test_a_run_inherits_the_parents_environment_alone(limits: SandboxConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T2G_SECRET", "hush")
    names = set(value_of("import os\ndef f(): return ' '.join(os.environ)\n", limits).split())
    assert names - {"LC_CTYPE", "PYTEST_VERSION", "PYTEST_CURRENT_TEST"} == fork_server._ENVIRONMENT.keys()


def test_the_parent_never_holds_code_or_tests() -> None:
    if os.geteuid() != 0:
        pytest.skip("reads the memory of a process that hides it")
    mark = secrets.token_hex(20)
    assert value_of(f"def f(): return '{mark}'\n", LIMITS) == mark
    run_solution(f"# {mark}\n", f"# {mark}\n", TOGETHER)
    is_present = False
    size = 0
    with open(f"/proc/{parent()}/mem", "rb", 0) as memory:
        for line in Path(f"/proc/{parent()}/maps").read_text().splitlines():
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            if line.split()[1].startswith("rw"):
                memory.seek(low)
                held = memory.read(high - low)
                size = size + len(held)
                is_present = is_present or mark.encode() in held
    assert size > 2**20 and not is_present


POISON = """
import builtins, gc, os, random, sys
import pytest, _pytest.python
def poison():
    builtins.poisoned = sys.poisoned = pytest.poisoned = True
    pytest.raises = pytest.approx = lambda *a, **k: True
    _pytest.python.Module.collect = lambda self: []
    os.environ['POISON'] = '1'
    for place in ('.', '/tmp', os.path.dirname(pytest.__file__), '/usr/lib', '/dev/shm'):
        try:
            open(place + '/poison.py', 'w').close()
        except OSError:
            pass
    for name in list(sys.modules):
        if 't2g' in name:
            sys.modules[name].__dict__.clear()
poison()
"""
CLEAN = """
import builtins, os, pytest, sys
def test():
    assert not any(hasattr(m, 'poisoned') for m in (builtins, sys, pytest)) and 'POISON' not in os.environ
    assert [name for name in os.listdir('.') if 'poison' in name] == [] and 0.1 + 0.2 == pytest.approx(0.3)
    assert not os.path.exists(os.path.dirname(pytest.__file__) + '/poison.py')
    with pytest.raises(ImportError):
        import poison
"""


def test_no_run_leaves_anything_for_the_next() -> None:
    run_solution(*HONEST, LIMITS)
    before = parent()
    assert not run_solution(f"{POISON}def f(x): return 0\n", HONEST[1], LIMITS).passed
    run_solution(f"{POISON}def f(x): return 0\n", HONEST[1], TOGETHER)
    run_solution(HONEST[0], f"{POISON}{HONEST[1]}", LIMITS)  # tests that attack
    for limits in (LIMITS, TOGETHER):
        outcome = run_solution(HONEST[0], CLEAN, limits)
        assert outcome.passed, outcome
    assert parent() == before


def test_runs_share_no_random_numbers() -> None:
    code = "import random, numpy\ndef f(): return random.random(), float(numpy.random.rand())\n"
    tests = "import random, numpy\nfrom solution import f\n"
    tests += "def test():\n    print(*f(), random.random(), numpy.random.rand())\n"
    numbers = " ".join(value_of(code, LIMITS, tests) for _ in range(2)).split()
    assert len(set(numbers)) == len(numbers) == 8  # else a solution could predict what the tests draw


KILLS = (
    "os.kill(os.getppid() or -1, signal.SIGKILL)", "os.kill(os.getppid() or -1, signal.SIGSTOP)", "os.killpg(0, 9)",
    "os.kill(-1, signal.SIGKILL)", "[os.kill(n, 9) for n in range(2, 2 ** 16) if n != os.getpid()]",
    "os.kill(PARENT, signal.SIGKILL)", "os.kill(PARENT, signal.SIGSTOP)",
    "signal.pidfd_send_signal(os.pidfd_open(PARENT), 9)",
)  # fmt: skip


@pytest.mark.parametrize("kill", KILLS)
@BOTH
def test_no_run_ends_or_stops_the_parent(kill: str, limits: SandboxConfig) -> None:
    run_solution(*HONEST, LIMITS)
    before = parent()
    attack = kill.replace("PARENT", str(before))
    code = f"import os, signal\ndef f(x):\n    try:\n        {attack}\n    except OSError:\n        pass\n"
    assert not run_solution(code, HONEST[1], limits.model_copy(update={"timeout_s": 3})).passed
    assert run_solution(*HONEST, limits).passed and parent() == before


def test_the_parent_keeps_no_children_that_ended() -> None:
    outcomes = [run_solution(*HONEST, LIMITS) for _ in range(6)]
    assert all(outcome.passed for outcome in outcomes)
    assert len(isolation.children(parent())) <= 2


def test_a_caller_may_have_more_descriptors_than_select_takes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert max(held) > 1024 and run_solution(*HONEST, LIMITS).passed
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_right_program_may_print_what_is_no_text() -> None:
    code = "def f(x):\n    print('\\ud800')\n    return x + 1\n"
    outcome = run_solution(code, HONEST[1], LIMITS)
    assert (outcome.reason, outcome.output) == ("passed", "?\n")


def test_a_parent_that_was_lost_is_replaced() -> None:
    assert run_solution(*HONEST, LIMITS).passed
    before = parent()
    os.kill(before, signal.SIGKILL)
    assert run_solution(*HONEST, LIMITS).passed and parent() != before


def test_threads_wait_for_a_stopped_parent_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_solution(*HONEST, LIMITS).passed
    monkeypatch.setattr(run, "START_S", 10.0)
    os.kill(parent(), signal.SIGSTOP)
    started = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda _: run_solution(*HONEST, LIMITS), range(4)))
    assert [outcome.reason for outcome in outcomes] == ["passed"] * 4
    assert time.monotonic() - started < 15  # half of START_S, and four runs by a new parent


def test_a_sandbox_that_does_not_start_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float] = []

    def fork_nothing(plan: str, descriptors: list[int], deadline: float) -> int:
        deadlines.append(deadline - time.monotonic())
        return os.pidfd_open(ended)

    ended = os.fork()
    if ended == 0:
        os._exit(0)
    monkeypatch.setattr(run, "fork_sandbox", fork_nothing)
    with pytest.raises(SandboxFailed, match="did not start"):
        run_solution(*HONEST, LIMITS)
    os.waitpid(ended, 0)
    assert deadlines == pytest.approx([run.START_S / 2, run.START_S], rel=0.3)


def test_a_fork_of_the_caller_has_a_parent_of_its_own() -> None:
    assert run_solution(*HONEST, LIMITS).passed
    child = os.fork()
    if child == 0:
        outcome: Outcome | None = None
        try:
            outcome = run_solution(*HONEST, LIMITS)
            fork_server._server.end()  # type: ignore[union-attr]
        finally:
            os._exit(0 if outcome and outcome.passed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run_solution(*HONEST, LIMITS).passed
