"""What an environment returns is checked; the environments of programs say what fails."""

import asyncio
import math
import threading
import time
from typing import Any

import pytest

from t2g.config import PolicyJob
from t2g.environments import Reply
from t2g.environments.environment import Environment, read_reply
from t2g.feedback.sources.user_function import FunctionFailed
from t2g.tasks.code import CodeTask
from t2g.tasks.tiny.programs import make_tests
from t2g.tasks.tiny.task import TinyCodeTask
from t2g.types import Prompt

TESTS = make_tests([("red", 2, 4), ("red", 5, 7), ("blue", 2, 6)])
RIGHT = (
    'def f(k, n):\n    if k == "red":\n        return n + 2\n    if k == "blue":\n        return n * 3\n    return n\n'
)
WRONG = RIGHT.replace("n + 2", "n + 3")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "returned None; it needs to return Reply"),
        (("text", True), "it needs to return Reply"),
        (Reply(7), "needs to return Reply"),  # type: ignore[arg-type]
        (Reply(" "), "a text of 1 characters; it needs 1 to"),
        (Reply("x", metrics={"a": math.nan}), "finite numbers by name"),
    ],
)
def test_other_answers_are_failed_replies(answer: Any, message: str) -> None:
    with pytest.raises(FunctionFailed, match=message):
        read_reply(answer)


def test_a_reply_is_copied() -> None:
    assert read_reply(Reply("a\ud800", 1, {"x": 1})) == Reply("a\ufffd", True, {"x": 1.0})  # type: ignore[arg-type]
    assert read_reply(Reply("", done=True)).done


def ask_often(num_calls: int, task: CodeTask, program: str, payload: dict[str, Any], **feedback: Any) -> list[Reply]:
    job = PolicyJob.model_validate(
        {
            "model": {"policy": "unused"},
            "data": {"path": "unused"},
            "environment": "code_repair",
            "feedback": {"source": "pkg:judge"} | feedback,
        }
    )
    prompt = Prompt(prompt_id="p", prompt_text="red: add 2; blue: times 3.", task=task.name, payload=payload)

    async def run() -> list[Reply]:
        environment = Environment(job, task)
        turns = [{"role": "assistant", "content": program}]
        return list(await asyncio.gather(*(environment.reply(prompt, turns) for _ in range(num_calls))))

    return asyncio.run(run())


def ask(task: CodeTask, program: str, payload: dict[str, Any]) -> Reply:
    (reply,) = ask_often(1, task, program, payload)
    return reply


def test_code_repair_says_what_fails() -> None:
    task = TinyCodeTask()
    tiny = [ask(task, program, {"test": TESTS}) for program in (RIGHT, WRONG, "def f(")]
    assert tiny == [
        Reply("All pass.", True, {"passed": 1.0}),
        Reply("red fails.", False, {"passed": 0.0}),
        Reply("Syntax.", False, {"passed": 0.0}),
    ]
    task.describe_failures = super(TinyCodeTask, task).describe_failures  # type: ignore[method-assign]
    reply = ask(task, f"Here:\n```python\n{WRONG}```", {"test": TESTS})
    assert not reply.done
    assert reply.text.splitlines() == [
        "The program fails 2 of 3 tests.",
        'test_red_2 fails: assert f("red", 2) == 4 expects 4 and gets 5.',
        'test_red_5 fails: assert f("red", 5) == 7 expects 7 and gets 8.',
    ]
    with pytest.raises(FunctionFailed, match="the record has no tests"):
        ask(CodeTask(), RIGHT, {})


class SlowTask(TinyCodeTask):
    """Counts the programs that run at once. Each of them waits until a second one runs."""

    running = most = 0

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)

    def run(self, *arguments: Any, **options: Any) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        self._barrier.wait(20)
        time.sleep(0.02)
        self.running -= 1
        return super().run(*arguments, **options)


def test_code_repair_runs_as_many_programs_at_once_as_the_sandbox_allows() -> None:
    task = SlowTask()
    replies = ask_often(6, task, RIGHT, {"test": TESTS}, sandbox={"concurrency": 2}, concurrency=16)
    assert [reply.done for reply in replies] == [True] * 6
    assert task.most == 2
