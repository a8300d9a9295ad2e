"""The folder of `t2g init --template tools`: its tools, its questions, and the reward for a right answer."""

import asyncio
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from jobs import __main__ as console
from t2g.config import PolicyJob, loading
from t2g.data.load import load_records
from t2g.data.prompts import make_prompts
from t2g.environments.environment import Environment
from t2g.feedback.tool_spans import find_tool_spans
from t2g.tasks.base import get_task
from t2g.text.tool_calls import read_hermes_calls


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert console.main(["init", str(tmp_path / "mine"), "--template", "tools"]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    monkeypatch.delitem(sys.modules, "desk", raising=False)
    return tmp_path / "mine"


def write_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_the_tools_answer_the_questions_and_an_error_blames_its_argument(folder: Path) -> None:
    assert {file.name for file in folder.iterdir()} == {"README.md", "desk.py", "policy.yaml", "questions.jsonl"}
    config = loading.load(PolicyJob, folder / "policy.yaml", ["model.policy=some/model"], environ={})
    task = get_task(config.task)
    environment = Environment(config, task)
    prompts = make_prompts(load_records(config.data), task, None, 0)
    assert len(prompts) >= config.rollout.prompts_per_step

    def call(prompt: Any, turn: str) -> list[str]:
        return [result.text for result in asyncio.run(environment.call_tools(prompt, read_hermes_calls(turn)))]

    for prompt in prompts:
        orders = re.findall(r"\d+", prompt.prompt_text)
        prices = call(prompt, "".join(write_call("price", order=int(order)) for order in orders))
        (total,) = call(prompt, write_call("add", numbers=[*map(float, prices)]))
        assert float(total) == prompt.payload["answer"]

    turn = write_call("price", order=7)
    results = asyncio.run(environment.call_tools(prompts[0], read_hermes_calls(turn)))
    (span,) = find_tool_spans(results, turn, results[0].text)
    assert turn[span.start : span.end] == "7"


def test_the_reward_is_for_the_number_in_the_last_turn(folder: Path) -> None:
    answered = import_module("desk").answered
    transcripts = ["It is 21.25.", "21.25\n\n[tool add]\n21.25\n\n[assistant]\nIt is 3", "none", "21.25 or 7"]
    assert answered(["?"] * 4, transcripts, answer=[21.25] * 4, orders=[{}] * 4) == [1, 0, 0, 0]
