"""What an assertion of the tests compared: the two values and the statement, noted while it runs."""

import ast
import builtins
import traceback
from typing import Any

MAX_TEXT = 300
FILE = "tests.py"


class Asserts:
    """compile() rewrites `assert f(x) == y` to `assert note_got(f(x)) == note_expected(y)`, which changes no value."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}  # "got" and "expected" of the comparison that ran last
        self._statements: dict[int, str] = {}  # line -> the whole assert statement that begins there or goes on
        self._lines: list[str] = []

    def compile(self, tests: str) -> Any:
        tree = ast.parse(tests, FILE)
        self._lines = tests.split("\n")
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                text = " ".join((ast.get_source_segment(tests, node) or "").split())
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    self._statements[line] = text
                self._rewrite(node)
        ast.fix_missing_locations(tree)
        builtins.box_note = self._note  # type: ignore[attr-defined]
        return compile(tree, FILE, "exec", dont_inherit=True)

    def _note(self, side: str, value: Any, *expected: bool) -> Any:
        self.last[side] = value
        if expected:
            self.last["expected"] = expected[0]
        return value

    def _rewrite(self, node: ast.Assert) -> None:
        """The comparison that decides: the whole test, or the parts of an `and`."""
        test, expected = node.test, True
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            expected, test = False, test.operand
        parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        compared = False
        for part in parts:
            if isinstance(part, ast.Compare) and len(part.ops) == 1 and isinstance(part.ops[0], ast.Eq | ast.Is):
                swapped = not _calls(part.left) and _calls(part.comparators[0])
                sides = ("expected", "got") if swapped else ("got", "expected")
                part.left = _noted(sides[0], part.left)
                part.comparators[0] = _noted(sides[1], part.comparators[0])
                compared = True
        if not compared and isinstance(test, ast.Call | ast.Name | ast.Attribute | ast.Subscript):
            noted = _noted("got", test, ast.Constant(expected))
            node.test = noted if expected else ast.UnaryOp(ast.Not(), noted)

    def explain(self, error: BaseException) -> dict[str, str]:
        """{"statement": ..., "expected": ..., "got": ...} where they are known; texts of bounded length."""
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == FILE]
        if not frames:
            return {}
        line = frames[-1].lineno or 1
        known: dict[str, str] = {}
        if line in self._statements:
            known["statement"] = self._statements[line][:MAX_TEXT]
            if type(error) is AssertionError and not hasattr(error, "solution_lines"):
                known |= {side: _shown(value) for side, value in self.last.items()}
        elif 0 < line <= len(self._lines):
            known["statement"] = self._lines[line - 1].strip()[:MAX_TEXT]
        return known


def _noted(side: str, *values: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("box_note", ast.Load()), [ast.Constant(side), *values], [])


def _calls(node: ast.expr) -> bool:
    return any(isinstance(child, ast.Call) for child in ast.walk(node))


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 an object of the tests or the solution
        return f"<{type(value).__name__}>"
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
