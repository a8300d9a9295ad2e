"""Whether a task can measure the responses to a prompt: it says so from the record alone, and `measure` agrees."""

from typing import Any

import pytest

from t2g.config import WorldConfig
from t2g.sandbox import SandboxConfig
from t2g.tasks.base import get_task
from t2g.tasks.code import CodeTask
from t2g.tasks.tiny import programs, world
from t2g.types import Prompt

TESTS = "from solution import f\n\n\ndef test_one():\n    assert f() == 1\n"
POST = next(world.make_records(count=1, heldout=False, rates=WorldConfig(), seed=1))
PROGRAM = next(programs.make_records(count=1, heldout=True, rates=WorldConfig(), seed=1))


@pytest.mark.parametrize(
    ("task_name", "payload", "can"),
    [
        ("summarization", {"ideal_human_summary": "A phone hums."}, True),
        ("summarization", {"ideal_human_summary": "", "tldr_human_reference_summary": "A phone."}, True),
        ("summarization", {"ideal_human_summary": " "}, False),
        ("summarization", {"ideal_human_summary": 3}, False),
        ("summarization", {}, False),
        ("findings", {"ideal_human_summary": "Zinc helps."}, True),
        ("findings", {}, False),  # it has metrics without a reference, and ROUGE is none of them
        ("finding_lines", {}, False),
        ("checked_lines", {}, True),
        ("code", {"test": TESTS}, True),
        ("code", {"test": " \n"}, False),
        ("code", {"test": ["assert f() == 1"]}, False),
        ("code", {}, False),
        ("tiny", {"facts": POST["facts"]}, True),
        ("tiny", {"ideal_human_summary": "A phone hums."}, False),
        ("tiny_code", {"test": PROGRAM["test"], "hidden_test": PROGRAM["hidden_test"]}, True),
        ("tiny_code", {"hidden_test": PROGRAM["hidden_test"]}, False),
        ("tiny_tools", {"answer": "7"}, True),
        ("tiny_tools", {"answer": 7}, False),
        ("prompts", {"reference": "x"}, False),
        ("qa", {"chosen": "x"}, False),
    ],
)
def test_the_answer_is_that_of_measure_and_runs_no_program(
    monkeypatch: pytest.MonkeyPatch, task_name: str, payload: dict[str, Any], can: bool
) -> None:
    task = get_task(task_name)
    prompt = Prompt(prompt_id="p", prompt_text="a post", task=task_name, payload=payload)
    with monkeypatch.context() as patched:
        patched.setattr(CodeTask, "run", lambda *_: pytest.fail("a program was run"))
        assert task.can_measure(prompt) is can
    if can:
        measured = task.measure(prompt, "def f():\n    return 1\n", sandbox=SandboxConfig())
        assert measured is not None and task.score_name in measured
