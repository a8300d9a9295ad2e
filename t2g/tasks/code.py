"""KodCode: Python problems with tests (Xu et al., arXiv 2503.02951), in the formats of the hub and of the authors.

Fields: question_id; question; test, a pytest module that imports from `solution`; response or solution, the code to
judge; solution is also the reference; log of its tests, an object or a string; gpt_difficulty.
"""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from t2g.config import StyleConfig
from t2g.errors import RunStopped, UserError
from t2g.sandbox import Outcome, Refused, SandboxConfig, SandboxFailed, choose_mode, run_solution
from t2g.tasks.base import FeedbackFunction, Record, Review, Task, get_optional_text, get_text
from t2g.tasks.problem_imports import add_imports, run_with_imports
from t2g.tasks.references import NEITHER
from t2g.text.tokenizer import Message
from t2g.types import Prompt

MAX_NOTE_CHARS = 2000  # characters of the log, and of the tests
# Possessive quantifiers, and no piece overlaps the start of the next match: else time is quadratic in the text.
_FENCE = re.compile(
    r"^[ \t]*+```[ \t]*+(\w*+)[^\n`]*+\n(.*?)(?=^[ \t]*+```|\Z)(?:[ \t]*+```)?", re.MULTILINE | re.DOTALL
)
_IMPORTED = re.compile(r"^[^\S\n]*+from\s++solution\s++import\s++(\([^()]*+\)|[^\n#]++)", re.MULTILINE)


@contextmanager
def _stop_without_sandbox() -> Iterator[None]:
    """Stop the run if no sandbox starts: a score of 0 would count a program as wrong that never ran.

    Raises:
        RunStopped: The run can be resumed.
        UserError: This machine cannot isolate the programs.
    """
    try:
        yield
    except Refused as error:
        raise UserError(str(error)) from error
    except SandboxFailed as error:
        raise RunStopped(f"the task code cannot run programs: {error}; the same command resumes the run") from error


class CodeTask(Task):
    name = "code"
    score_name = "passed"
    step_pattern = r"\n"
    input_fields = ("question",)
    instruction = (
        "Solve the following problem in Python. Answer with the whole program in one block that starts with ```python, "
        "without tests and without examples of its use.\n\n"
    )
    review = Review(
        opening="You review a Python solution of a programming problem: is it correct, complete, efficient, readable?",
        input_name="Problem",
        subject="solution",
        sparse="none or a few of each, single statements or expressions, not whole functions",
        severity="3 is wrong, 2 is wrong in rare cases only, 1 works and could be improved",
        questions="What is the program meant to do? Which algorithm does it use, and does it solve the problem? Where "
        "is its logic wrong, and which lines make a test fail? Which edge cases does it miss? Where does it waste "
        "time? What works and could be improved?",
    )

    def policy_messages(self, record: Record, input_limit: int | None = None) -> list[Message]:
        return [{"role": "user", "content": self.instruction + self.prompt_text(record)}]

    def prompt_text(self, record: Record) -> str:
        """Return the question and the names that the tests import: a question may not name its function."""
        question = get_text(record, "question")
        names = _find_imported_names(record.get("test"))
        if not names:
            return question
        return f"{question}\n\nThe tests import from your program: {', '.join(names)}"

    def reference(self, record: Record) -> str | None:
        """Return the solution in the form that the policy is to answer."""
        solution = get_optional_text(record, "solution")
        if solution is None:
            return None
        return "```python\n" + solution.strip("\n") + "\n```"

    def response(self, record: Record) -> str | None:
        return get_optional_text(record, "response", "solution")

    def notes(self, prompt: Prompt, response_text: str) -> str | None:
        """Return difficulty and tests, and for the record's own response the log."""
        parts = [
            _format_note("Difficulty", prompt.payload.get("gpt_difficulty")),
            _format_note("Tests", prompt.payload.get("test")),
            super().notes(prompt, response_text),
        ]
        return "\n\n".join(part for part in parts if part) or None

    def own_notes(self, payload: Mapping[str, Any]) -> str | None:
        return _format_log(payload.get("log"))

    def make_feedback_function(self, *, style: StyleConfig, sandbox: SandboxConfig) -> FeedbackFunction:
        """Return a function that runs the tests of payload["test"] on the response in a sandbox."""
        from t2g.tasks.code_feedback import make_feedback_function

        return make_feedback_function(sandbox, style, self.run)

    def describe_failures(self, outcome: Outcome, code: str, sandbox: SandboxConfig) -> str:
        """Return the failing tests and the lines that raise, for a policy that repairs its program."""
        from t2g.tasks.code_feedback import find_code_lines, format_critique

        return format_critique(outcome, find_code_lines(code, 0), [], [], sandbox)

    def can_measure(self, prompt: Prompt) -> bool:
        tests = prompt.payload.get("test")
        return isinstance(tests, str) and bool(tests.strip())

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float] | None:
        """Return {"passed": 1 or 0}: whether all tests pass within the sandbox's limits; None without tests.

        A program that the sandbox cannot measure also has {"unsupported": 1}.
        """
        if not self.can_measure(prompt):
            return None
        outcome = self.run_tests(prompt, response_text, prompt.payload["test"], sandbox)
        return {"passed": float(outcome.passed), "unsupported": float(outcome.reason == "unsupported")}

    def passed(self, prompt: Prompt, response_text: str, tests: str, sandbox: SandboxConfig) -> float:
        """Return 1 if the program in the response passes these tests, else 0."""
        return float(self.run_tests(prompt, response_text, tests, sandbox).passed)

    def run_tests(self, prompt: Prompt, response_text: str, tests: str, sandbox: SandboxConfig) -> Outcome:
        """Run tests on the program in the response, with the problem's imports and in the record's mode."""
        code, _ = extract_code(response_text)
        program = textwrap.dedent(code)  # a fence in a list is indented
        return run_with_imports(self.run, program, tests, prompt.payload, sandbox)

    @_stop_without_sandbox()
    def reference_mode(self, prompt: Prompt, *, sandbox: SandboxConfig) -> str | None:
        solution = prompt.payload.get("solution")
        tests = prompt.payload.get("test")
        if not isinstance(solution, str) or not isinstance(tests, str):
            return None
        program = add_imports(solution, prompt.payload)
        return choose_mode(program.code, tests, sandbox) or NEITHER

    @_stop_without_sandbox()
    def run(self, code: str, tests: str, sandbox: SandboxConfig) -> Outcome:
        return run_solution(code, tests, sandbox)


def extract_code(response_text: str) -> tuple[str, int]:
    """Return the program in a response and its start: code == response_text[start : start + len(code)].

    The program is the first fenced block that is marked as Python, else the first block. An unclosed block extends to
    the end. A response without a block is a program as a whole.

        extract_code("Sure:\\n```python\\nx = 1\\n```\\nDone.") == ("x = 1\\n", 16)
    """
    blocks = list(_FENCE.finditer(response_text))
    if not blocks:
        return response_text, 0
    marked = (block for block in blocks if block[1].lower().startswith("py"))
    block = next(marked, blocks[0])
    return block[2], block.start(2)


def _find_imported_names(test: Any) -> list[str]:
    """Return the names that a test module imports from `solution`, in order; [] if it is no text.

    >>> _find_imported_names("from solution import Stack, pop as take\\n")
    ['Stack', 'pop']
    """
    if not isinstance(test, str):
        return []
    names = dict[str, None]()
    for match in _IMPORTED.finditer(test):
        for part in match[1].strip("()").split(","):
            name, *_ = part.split() or [""]
            if name.isidentifier():
                names[name] = None
    return list(names)


def _format_log(log: Any) -> str | None:
    """Return a log of tests in at most about MAX_NOTE_CHARS characters. The end is kept: it lists the failures."""
    if isinstance(log, str):
        try:
            parsed = json.loads(log)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            log = parsed
    if not isinstance(log, dict):
        return _format_note("Log of the tests", log)
    outcome = "have no known outcome"
    passed = log.get("passed")
    if isinstance(passed, int) and passed in (0, 1):
        outcome = "passed" if passed else "failed"
    kind = log.get("error_type")
    if isinstance(kind, str):
        outcome = f"{outcome} ({kind})"
    summary = f"The tests {outcome}."
    for stream in ("stdout", "stderr"):
        printed = _format_note("Log of the tests", log.get(stream))
        if printed:
            return f"{summary}\n{printed}"
    return summary


def _format_note(heading: str, text: Any) -> str | None:
    """Return the end of `text` under a heading, or None if it is no text, or blank."""
    if not isinstance(text, str) or not text.strip():
        return None
    text = text.strip()
    if len(text) > MAX_NOTE_CHARS:
        text = f"… {text[-MAX_NOTE_CHARS:]}"
    return f"{heading}:\n{text}"
