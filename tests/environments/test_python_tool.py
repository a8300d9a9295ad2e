"""The tool python: what a program prints, and why it failed."""

import asyncio
import json

import pytest

from t2g.config import PolicyJob
from t2g.environments.environment import Environment
from t2g.environments.python_tool import NO_OUTPUT
from t2g.tasks.base import get_task
from t2g.text.tool_calls import read_hermes_calls
from t2g.types import Prompt, ToolResult

PROMPT = Prompt(prompt_id="1", prompt_text="How?", task="code")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    run = {"root": str(tmp_path_factory.mktemp("runs"))}
    feedback = {"source": "next_message", "sandbox": {"require": [], "timeout_s": 3, "max_output_kib": 1}}
    job = {"model": {"policy": "m"}, "data": {"path": "d"}, "environment": "python", "feedback": feedback}
    return Environment(PolicyJob.model_validate(job | {"run": run}), get_task("code"))


def run(environment: Environment, *programs: str) -> list[ToolResult]:
    calls = [json.dumps({"name": "python", "arguments": {"code": code}}) for code in programs]
    text = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    return asyncio.run(environment.call_tools(PROMPT, read_hermes_calls(text)))


def test_a_program_returns_what_it_prints_and_an_error_names_its_line(environment: Environment) -> None:
    results = run(environment, "print(6 * 7)", "x = 1", "x = [1]\nprint(x[3])", "def f(:", "print('x' * 9999)")
    assert [(one.status, one.text) for one in results[:4]] == [
        ("ok", "42\n"),
        ("ok", NO_OUTPUT),
        ("failed", "Error: RuntimeError: IndexError: list index out of range in line 2: `print(x[3])`"),
        ("failed", "Error: RuntimeError: SyntaxError: invalid syntax in line 1: `def f(:`"),
    ]
    assert results[4].status == "failed" and "too much output" in results[4].text


def test_programs_of_one_turn_share_nothing(environment: Environment) -> None:
    first, second = run(environment, "open('a', 'w').write('1')", "print(open('a').read())")
    assert first.status == "ok" and second.status == "failed" and "FileNotFoundError" in second.text
