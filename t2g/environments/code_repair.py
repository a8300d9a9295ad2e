"""The environment of programs: it runs the visible tests, and replies with what failed."""

from collections.abc import Sequence

from t2g.environments.environment import Reply
from t2g.sandbox import SandboxConfig, find_refusal
from t2g.tasks.code import CodeTask, extract_code
from t2g.tasks.code_feedback import describe_unsupported
from t2g.text.tokenizer import Message
from t2g.types import Prompt


class CodeRepair:
    """Done when all tests of the record's field `test` pass. Its metric is `passed`, 1 or 0."""

    def __init__(self, task: CodeTask, sandbox: SandboxConfig) -> None:
        if not isinstance(task, CodeTask):
            raise ValueError(f"task {task.name} has no programs; it needs to be code or a class that derives from it")
        refusal = find_refusal(sandbox.require)
        if refusal:
            raise ValueError(refusal)
        self._task = task
        self._sandbox = sandbox

    def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Reply:
        """Run the tests on the last turn. A plain function: each call has a thread of its own."""
        if not self._task.can_measure(prompt):
            raise ValueError("the record has no tests; field test needs a text")
        turn = messages[-1]["content"]
        outcome = self._task.run_tests(prompt, turn, prompt.payload["test"], self._sandbox)
        if outcome.reason == "bad_tests":
            raise ValueError("the record's tests do not compile, or hold no test")
        if outcome.reason == "unsupported":
            raise ValueError(describe_unsupported(outcome))
        code, _ = extract_code(turn)
        text = self._task.describe_failures(outcome, code, self._sandbox)
        metrics = {"passed": float(outcome.passed)}
        return Reply(text, outcome.passed, metrics)
