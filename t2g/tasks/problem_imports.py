"""Run a program that relies on the imports of its problem, as a response to HumanEval may.

The imports are inserted before the program runs. The outcome has the line numbers of the program without them.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from t2g.sandbox import Outcome, SandboxConfig
from t2g.tasks.references import resolve_tests_mode

RunTests = Callable[[str, str, SandboxConfig], Outcome]
_FUTURE = re.compile(r"^from[ \t]+__future__[ \t]+import[^\r\n]+", re.MULTILINE)
_LINE_END = re.compile(r"\r\n|\r|\n")


class CompleteProgram(NamedTuple):
    """A program with the problem's imports."""

    code: str
    before: int = 0  # lines of the program before the imports
    added: int = 0  # lines of the imports

    def to_original_line(self, line: int) -> int:
        """Return the line, from 1, of the program without the imports; 0 for a line of the imports."""
        if line <= self.before:
            return line
        if line <= self.before + self.added:
            return 0
        return line - self.added


def add_imports(code: str, payload: Mapping[str, Any]) -> CompleteProgram:
    """Return the program with payload["imports"], if there are any, before it but after an import from __future__."""
    imports = payload.get("imports")
    if not isinstance(imports, str):
        return CompleteProgram(code)
    imports = _LINE_END.sub("\n", imports) + "\n"
    future = _FUTURE.search(code)  # no other statement may precede it
    if not future:
        return CompleteProgram(imports + code, added=imports.count("\n"))
    head = code[: future.end()]
    before = 1 + len(_LINE_END.findall(head))
    return CompleteProgram(f"{head}\n{imports}{code[future.end() :]}", before, 1 + imports.count("\n"))


def run_with_imports(
    run: RunTests, code: str, tests: str, payload: Mapping[str, Any], sandbox: SandboxConfig
) -> Outcome:
    """Run a record's tests on a program, with the problem's imports and in the record's mode.

    Returns:
        The outcome, with the line numbers of `code`. It has no line of the imports.
    """
    program = add_imports(code, payload)
    outcome = run(program.code, tests, resolve_tests_mode(sandbox, payload))
    if not program.added:
        return outcome
    tests_of_code = []
    for test in outcome.tests:
        trace = _to_original_lines(program, test.trace)
        lines = _to_original_lines(program, test.lines)
        returned = program.to_original_line(test.returned)
        tests_of_code.append(replace(test, trace=trace, lines=lines, returned=returned))
    return replace(outcome, tests=tuple(tests_of_code))


def _to_original_lines(program: CompleteProgram, lines: Iterable[int]) -> tuple[int, ...]:
    originals = (program.to_original_line(line) for line in lines)
    return tuple(line for line in originals if line)
