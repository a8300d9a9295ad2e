"""Right programs with ordinary tests are called right: all together, most separate, all by their references."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from library_programs import HELD_OUT, REFUSED
from library_programs import PROGRAMS as LIBRARY_PROGRAMS
from right_programs import PROGRAMS, TOGETHER
from test_sandbox import become_ordinary_without_namespaces, in_child

from t2g.sandbox import Outcome, SandboxConfig, choose_mode, run, run_solution

LIMITS = SandboxConfig(timeout_s=60, cpu_s=60)
ALL = PROGRAMS | LIBRARY_PROGRAMS
SEPARATE = [*PROGRAMS.keys() - TOGETHER]
SAMPLE = (  # of each kind one, for the fast suite
    "pytest.warns", "capfd", "request.param", "expectedFailure", "threads in tests", "a pool in tests", "random.seed",
    "Mock arguments", "inspect.signature", "functools.wraps on a test function", "copy.deepcopy", "is_dataclass",
    "ZoneInfo", "uuid.UUID", "datetime.time", "array", "Decimal in approx", "numpy in the solution",
)  # fmt: skip
LIBRARY_SAMPLE = (
    "array mask", "array in place", "approx of an array", "assert_frame_equal", "stdin lines", "stdin buffer",
    "a script by runpy", "patch json.loads", "patch os.getpid", "inspect.getsource", "importlib.reload", "Random",
    "Pattern", "SimpleNamespace", "match by position", "__cause__", "__notes__", "a long list of nodes",
    "stdout buffer",
)  # fmt: skip


def run_all(names: list[str], mode: str) -> dict[str, Outcome]:
    limits = LIMITS.model_copy(update={"tests": mode})
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(lambda name: run_solution(*ALL[name], limits), names), strict=True))


def failures(outcomes: dict[str, Outcome]) -> dict[str, list[tuple[str, str]]]:
    failed = {}
    for name, outcome in outcomes.items():
        if not outcome.passed:
            failed[name] = [(test.name, test.message) for test in outcome.tests if not test.passed]
    return failed


def test_a_sample_passes_in_a_process_of_its_own() -> None:
    assert failures(run_all([*SAMPLE], "separate")) == {}


def test_a_sample_with_library_objects_passes_in_a_process_of_its_own() -> None:
    assert failures(run_all([*LIBRARY_SAMPLE], "separate")) == {}


@pytest.mark.slow
def test_programs_with_library_objects_pass() -> None:
    assert len(LIBRARY_PROGRAMS) >= 115
    assert len(HELD_OUT) > 50
    assert failures(run_all([*LIBRARY_PROGRAMS], "together")) == {}
    separate = run_all([*LIBRARY_PROGRAMS], "separate")
    assert failures(separate).keys() == REFUSED
    assert len(LIBRARY_PROGRAMS) - len(REFUSED) >= 95
    assert {separate[name].reason for name in REFUSED} <= {"failed", "unsupported"}  # so that `auto` tries `together`


def test_a_sample_passes_together_with_its_tests() -> None:
    assert failures(run_all(["patch builtins.print", "patch time.time", "asyncio.run", "assertLogs"], "together")) == {}


def test_the_reference_chooses_the_mode() -> None:
    assert choose_mode(*PROGRAMS["fizzbuzz"], LIMITS) == "separate"
    assert choose_mode(*PROGRAMS["patch time.time"], LIMITS) == "together"
    assert choose_mode(PROGRAMS["fizzbuzz"][0], PROGRAMS["a stack"][1], LIMITS) is None


@pytest.mark.parametrize(
    ("reasons", "mode"),
    [
        ({"separate": ["timeout", "passed"]}, "separate"),
        ({"separate": ["timeout", "timeout"]}, None),
        ({"separate": ["no_result", "failed"], "together": ["killed", "passed"]}, "together"),
        ({"separate": ["failed"], "together": ["failed"]}, None),
        ({"separate": ["exited"]}, None),
    ],
)
def test_only_tests_that_ran_and_failed_choose_together(
    monkeypatch: pytest.MonkeyPatch, reasons: dict[str, list[str]], mode: str | None
) -> None:
    remaining = {tests: iter(reasons_of_mode) for tests, reasons_of_mode in reasons.items()}

    def run_solution(code: str, tests: str, limits: SandboxConfig) -> Any:
        reason = next(remaining[limits.tests])
        return SimpleNamespace(reason=reason, passed=reason == "passed")

    monkeypatch.setattr(run, "run_solution", run_solution)
    assert choose_mode("", "", SandboxConfig()) == mode
    assert all(next(rest, None) is None for rest in remaining.values())


@pytest.mark.slow
def test_all_pass_together() -> None:
    assert len(PROGRAMS) >= 100
    assert failures(run_all([*PROGRAMS], "together")) == {}


@pytest.mark.slow
def test_most_pass_separate_and_the_rest_is_known() -> None:
    assert failures(run_all([*PROGRAMS], "separate")).keys() == TOGETHER
    assert len(TOGETHER) <= 0.3 * len(PROGRAMS)


@pytest.mark.slow
def test_the_same_pass_with_landlock_alone() -> None:
    outcomes = in_child(become_ordinary_without_namespaces, "test_right_programs", "names_that_fail")
    assert set(outcomes) == TOGETHER


def names_that_fail() -> list[str]:
    return [*failures(run_all([*PROGRAMS], "separate"))]


@pytest.mark.slow
def test_references_make_all_pass() -> None:
    with ThreadPoolExecutor(2) as pool:
        modes = dict(zip(PROGRAMS, pool.map(lambda pair: choose_mode(*pair, LIMITS), PROGRAMS.values()), strict=True))
    assert {name for name, mode in modes.items() if mode == "together"} == TOGETHER
    assert None not in modes.values()
