"""What an assertion of the tests compared: the two values and the statement, noted while it runs."""

import ast
import builtins
import traceback
from typing import Any

from t2g.sandbox.box.remote import super_of, type_of

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
        for node in reversed(list(ast.walk(tree))):  # an inner function before the one around it: its self is another
            if isinstance(node, ast.Assert):
                text = " ".join((ast.get_source_segment(tests, node) or "").split())
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    self._statements[line] = text
                self._rewrite(node)
            elif isinstance(node, ast.Call) and _is_name(node.func, "type") and len(node.args) == 1:
                node.func, node.args = ast.Name("box_type", ast.Load()), [node.func, *node.args]
            elif isinstance(node, ast.FunctionDef) and node.args.args:
                _pass_on_super(node, node.args.args[0].arg)
        ast.fix_missing_locations(tree)
        vars(builtins).update(box_note=self._note, box_type=type_of, box_super=super_of)
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


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _pass_on_super(function: ast.FunctionDef, first: str) -> None:
    """`super()` to `box_super(__class__, self)`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and _is_name(node.func, "super") and not node.args:
            names = [ast.Name(name, ast.Load()) for name in ("box_super", "__class__", first)]
            node.func, node.args = names[0], names[1:]


def _calls(node: ast.expr) -> bool:
    return any(isinstance(child, ast.Call) for child in ast.walk(node))


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 an object of the tests or the solution
        return f"<{type(value).__name__}>"
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
