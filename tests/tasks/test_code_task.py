"""KodCode: published records, prompts of policy and annotator, and extraction of the program from a response."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.config import DataConfig, StyleConfig
from t2g.data.load import load_records
from t2g.errors import RunStopped
from t2g.sandbox import SandboxConfig, SandboxFailed
from t2g.tasks import code
from t2g.tasks.base import get_task
from t2g.tasks.code import MAX_NOTE_CHARS, extract_code
from t2g.types import Prompt

TASK = get_task("code")
ROWS = load_records(DataConfig(path=str(Path(__file__).parents[1] / "data" / "kodcode.jsonl")))


def prompt(**payload: Any) -> Prompt:
    return Prompt(prompt_id="1", prompt_ids=np.zeros(0, np.int32), prompt_text="p", task="code", payload=payload)


def test_a_published_record() -> None:
    first = ROWS[0]
    assert TASK.prompt_id(first) == "Prefill_1_I"
    assert TASK.prompt_text(first) == f"{first['question']}\n\nThe tests import from your program: mean"
    assert TASK.response(first) == first["solution"]
    assert TASK.response(first | {"response": "r"}) == "r"
    assert TASK.reference(first) == f"```python\n{first['solution'].strip()}\n```"
    assert "question" not in TASK.payload(first)
    assert TASK.payload(first)["test"] == first["test"]
    assert TASK.response({"question": "q"}) is TASK.reference({"question": "q"}) is None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["question_id"])
def test_the_shipped_faults_are_at_their_stated_positions(row: dict[str, Any]) -> None:
    """Every solution is whole lines of Python, and its faulty lines are lines of code."""
    compile(row["solution"], "solution.py", "exec")
    lines = row["solution"].splitlines()
    assert all(1 <= number <= len(lines) and lines[number - 1].strip() for number in row["faulty_lines"])


def test_about_half_of_the_shipped_solutions_have_a_fault() -> None:
    assert sum(bool(row["faulty_lines"]) for row in ROWS) == 7
    assert {type(row.get("log")) for row in ROWS} == {dict, str, type(None)}


@pytest.mark.parametrize(
    ("test", "names"),
    [
        ("from solution import mean\n", "mean"),
        ("import pytest\nfrom solution import (\n    Stack,\n    pop as take,\n)\n", "Stack, pop"),
        ("def test():\n    from solution import f, g  # both\n", "f, g"),
        ("from solution import a\nfrom solution import b, a\n", "a, b"),
    ],
)
def test_names_that_the_tests_import(test: str, names: str) -> None:
    assert TASK.prompt_text({"question": "q", "test": test}) == f"q\n\nThe tests import from your program: {names}"


@pytest.mark.parametrize("test", [None, 3, "", "import solution\n", "from solution import *\n"])
def test_tests_that_import_no_name(test: Any) -> None:
    assert TASK.prompt_text({"question": "q", "test": test}) == "q"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ({"passed": True, "stdout": "3 passed", "stderr": ""}, "The tests passed.\nLog of the tests:\n3 passed"),
        ({"passed": False, "error_type": "timeout"}, "The tests failed (timeout)."),
        ({"passed": False, "stdout": " ", "stderr": "Boom"}, "The tests failed.\nLog of the tests:\nBoom"),
        ({"passed": "no", "stdout": 3}, "The tests have no known outcome."),
        ({"passed": ["test_a"], "failed": []}, "The tests have no known outcome."),
        ({"passed": 1}, "The tests passed."),
        (json.dumps({"passed": False, "stdout": "x"}), "The tests failed.\nLog of the tests:\nx"),
        ("1 failed", "Log of the tests:\n1 failed"),
        ("[" * 100_000, f"Log of the tests:\n… {'[' * MAX_NOTE_CHARS}"),
        ("head" + "x" * MAX_NOTE_CHARS, f"Log of the tests:\n… {'x' * MAX_NOTE_CHARS}"),
        (None, None),
        ("", None),
        (["x"], None),
    ],
)
def test_a_log_in_any_form(log: Any, expected: str | None) -> None:
    assert TASK.notes(prompt(solution="s", log=log), "s") == expected


def test_notes_of_a_sampled_response_are_without_the_log_of_another() -> None:
    payload = {"solution": "s", "log": "1 failed", "test": "assert 1", "gpt_difficulty": "easy"}
    assert TASK.notes(prompt(**payload), "t") == "Difficulty:\neasy\n\nTests:\nassert 1"
    assert TASK.notes(prompt(**payload), "s") == "Difficulty:\neasy\n\nTests:\nassert 1\n\nLog of the tests:\n1 failed"
    assert TASK.notes(prompt(), "s") is None


@pytest.mark.parametrize(("row", "passed"), [(ROWS[0], 0.0), (ROWS[1], 1.0)])
def test_the_measure_is_whether_the_tests_pass(row: dict[str, Any], passed: float) -> None:
    answer = f"Here it is:\n```python\n{row['solution']}```\nIt takes a list."
    measures = TASK.measure(prompt(test=row["test"]), answer, sandbox=SandboxConfig())
    assert measures == {TASK.score_name: passed, "unsupported": 0.0}
    assert TASK.measure(prompt(), answer, sandbox=SandboxConfig()) is None


def test_a_program_in_the_block_of_a_list_is_run_without_its_indent() -> None:
    answer = "1. Here:\n\n   ```python\n   def double(n):\n       return 2 * n\n   ```\n"
    record = prompt(test="from solution import double\n\ndef test_double():\n    assert double(2) == 4\n")
    measures = TASK.measure(record, answer, sandbox=SandboxConfig())
    assert measures == {TASK.score_name: 1.0, "unsupported": 0.0}
    judge = TASK.make_feedback_function(style=StyleConfig(), sandbox=SandboxConfig())
    judged = judge("question", answer, payload=record.payload)
    assert not judged["poor"]


@pytest.mark.parametrize(("timeout_s", "passed"), [(0.3, 0.0), (10.0, 1.0)])
def test_the_measure_is_taken_within_the_limits_given(timeout_s: float, passed: float) -> None:
    slow = prompt(test="import time\n\ndef test_slow():\n    time.sleep(0.6)\n")
    measures = TASK.measure(slow, "x = 1", sandbox=SandboxConfig(timeout_s=timeout_s))
    assert measures == {TASK.score_name: passed, "unsupported": 0.0}


def test_a_sandbox_that_did_not_start_is_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise SandboxFailed("a sandbox did not start within 60 s")

    judge = TASK.make_feedback_function(style=StyleConfig(), sandbox=SandboxConfig())
    monkeypatch.setattr(code, "run_solution", fail)
    monkeypatch.setattr(code, "choose_mode", fail)
    record = prompt(test="def test():\n    pass\n", solution="x = 1\n")
    for call in (
        lambda: TASK.measure(record, "x = 1\n", sandbox=SandboxConfig()),
        lambda: TASK.reference_mode(record, sandbox=SandboxConfig()),
        lambda: judge("question", "x = 1\n", payload=record.payload),
    ):
        with pytest.raises(RunStopped, match="a sandbox did not start within 60 s; the same command resumes"):
            call()


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("x = 1\n", "x = 1\n"),
        ("", ""),
        ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```py\r\nx = 1\r\n```", "x = 1\r\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```bash\npip install y\n```\n```Python3\nx = 1\n```", "x = 1\n"),
        ("```python\na\n```\n```python\nb\n```", "a\n"),
        ("```python\nx = 1", "x = 1"),  # cut by its length
        ("```python\n```", ""),
        ("  ```python\n  x = 1\n  ```\n", "  x = 1\n"),
        ("Use ```x``` here.\n```python\ny\n```", "y\n"),
        ("```x = 1```\n", "```x = 1```\n"),  # no block
        ("é ☕\n```python\nprint('é')\n```", "print('é')\n"),
    ],
)
def test_the_program_in_a_response(response: str, code: str) -> None:
    assert extract_code(response)[0] == code


@given(st.text(st.sampled_from("`\n \tpyx"), max_size=40))
def test_a_program_is_a_piece_of_its_response(response: str) -> None:
    code, start = extract_code(response)
    assert response[start : start + len(code)] == code


@given(st.text("ab\n ", max_size=20), st.text("ab\n ", max_size=20))
def test_a_block_is_found_whatever_stands_around_it(before: str, code: str) -> None:
    response = f"{before}\n```python\n{code}\n```\nEnd"
    assert extract_code(response) == (code + "\n", len(before) + len("\n```python\n"))
