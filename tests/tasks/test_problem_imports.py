"""A program with the imports of its problem: every line keeps its number, and feedback blames the response's lines."""

from typing import Any

import pytest

from t2g.config import StyleConfig
from t2g.environments.code_repair import CodeRepair
from t2g.sandbox import SandboxConfig
from t2g.tasks.code import CodeTask
from t2g.tasks.code_feedback import make_feedback_function
from t2g.tasks.problem_imports import add_imports
from t2g.types import Prompt, Span

LIMITS = SandboxConfig(require=(), timeout_s=30)
IMPORTS = "from typing import List\nimport math"
TESTS = "from solution import f, g\n\ndef test_f():\n    assert f([4]) == 2\n\ndef test_g():\n    assert g([4]) == 4\n"
PROGRAM = "def f(x: List[int]):\n    return math.sqrt(x[0])\n\ndef g(x: List[int]):\n    return x[1]\n"
PAYLOAD = {"test": TESTS, "imports": IMPORTS}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "code", ["a\nb", "", "x", "# c\nfrom __future__ import annotations\nb\nc\n", "from __future__ import annotations"]
)
def test_a_line_keeps_its_text_and_number(code: str, line_end: str) -> None:
    code = code.replace("\n", line_end)
    program = add_imports(code, {"imports": IMPORTS.replace("\n", line_end)})
    texts = {}
    for number, text in enumerate(program.code.splitlines(), start=1):
        if line := program.to_original_line(number):
            texts[line] = text
    assert texts == dict(enumerate(code.splitlines(), start=1))
    assert set(IMPORTS.splitlines()) <= set(program.code.splitlines())


def test_without_imports_the_program_is_as_it_was() -> None:
    program = add_imports("a\nb", {"imports": None})
    assert program.code == "a\nb"
    assert [program.to_original_line(line) for line in (1, 2)] == [1, 2]


@pytest.mark.parametrize("opening", ["", "from __future__ import annotations\n"])
def test_feedback_blames_lines_of_the_response(opening: str) -> None:
    """Without the imports both tests fail with a NameError, which blames the first line."""
    response = f"Here:\n```python\n{opening}{PROGRAM}```\n"
    judge = make_feedback_function(LIMITS, StyleConfig())
    judgement = judge("question", response, payload=PAYLOAD)
    assert _texts(response, judgement["poor"]) == ["return x[1]"]
    assert _texts(response, judgement["good"]) == ["return math.sqrt(x[0])"]
    line = PROGRAM[: PROGRAM.index("return x[1]")].count("\n") + opening.count("\n") + 1
    assert f"in line {line}: return x[1]" in judgement["critique"]
    assert [test.get("line") for test in judgement["execution"]["tests"]] == [None, line]


def test_a_repair_names_lines_of_the_response() -> None:
    prompt = Prompt(prompt_id="1", prompt_text="p", task="code", payload=PAYLOAD)
    reply = CodeRepair(CodeTask(), LIMITS).reply(prompt, [{"role": "assistant", "content": PROGRAM}])
    assert not reply.done
    assert "in line 5: return x[1]" in reply.text
    right = PROGRAM.replace("x[1]", "x[0]")
    assert CodeRepair(CodeTask(), LIMITS).reply(prompt, [{"role": "assistant", "content": right}]).done


def _texts(response: str, spans: list[Span]) -> list[Any]:
    return [response[span.start : span.end] for span in spans]
