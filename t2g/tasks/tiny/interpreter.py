"""Interpreter of the tiny world's programs: the sandbox's outcome in under a millisecond, from the syntax tree.

It supports one function of two arguments with branches and returns, over integers and strings, without loops and calls.
For any other program or tests it returns None, and the caller runs the sandbox. No code is executed: programs come from
a model.
"""

import ast
import re
from collections.abc import Iterable

from t2g.sandbox import Outcome, TestResult

_CASE = r'\n\ndef (test_\w+)\(\):\n    (assert f\("(\w+)", (-?\d+)\) == (-?\d+))\n'
_MODULE = re.compile(rf"from solution import f\n(?:{_CASE})+")
_OPERATIONS = {ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__}
Names = dict[str, int | str]


class _UnsupportedError(Exception):
    """The program uses syntax that this interpreter does not support."""


def interpret(code: str, tests: str) -> Outcome | None:
    """Return the outcome of the tests, or None if only the sandbox can tell."""
    if not _MODULE.fullmatch(tests):
        return None
    try:
        function = _find_function(ast.parse(code))
        results = [_run_test(function, *case) for case in re.findall(_CASE, tests)]
    except SyntaxError as error:
        line = error.lineno or 1
        details = {"error": "SyntaxError", "message": error.msg[:200], "trace": (line,)}
        result = TestResult(name="import of the solution", passed=False, **details)
        return _make_outcome("syntax", [result])
    except (_UnsupportedError, ValueError, RecursionError, MemoryError):
        return None
    has_passed = all(result.passed for result in results)
    return _make_outcome("passed" if has_passed else "failed", results)


def _make_outcome(reason: str, results: Iterable[TestResult]) -> Outcome:
    return Outcome(
        passed=reason == "passed",
        reason=reason,
        tests=tuple(results),
        isolation=("interpreted",),
        output="",
        seconds=0,
    )


def _find_function(module: ast.Module) -> ast.FunctionDef:
    match module.body:
        case [ast.FunctionDef(name="f", args=arguments, decorator_list=[], returns=None) as function]:
            names = [argument.arg for argument in arguments.args]
            if len(names) == len(set(names)) == 2 and ast.unparse(arguments) == ", ".join(names):
                return function
    raise _UnsupportedError


def _run_test(
    function: ast.FunctionDef, name: str, statement: str, word: str, argument: str, expected: str
) -> TestResult:
    first, second = function.args.args
    names: Names = {first.arg: word, second.arg: int(argument)}
    lines: list[int] = []
    result = _run_statements(function.body, names, lines)
    ran = {"lines": tuple(sorted(set(lines))), "returned": lines[-1]}
    if result == int(expected):
        return TestResult(name=name, passed=True, **ran)
    details = {"error": "AssertionError", "statement": statement, "expected": expected, "got": repr(result)}
    return TestResult(name=name, passed=False, **details, **ran)


def _run_statements(body: list[ast.stmt], names: Names, lines: list[int]) -> int | str | None:
    """Return the value that these statements return, or None. Append executed lines to `lines`."""
    for statement in body:
        lines.append(statement.lineno)
        match statement:
            case ast.Return(value=ast.expr() as value):
                return _evaluate(value, names)
            case ast.If(test=test):
                chosen = statement.body if _evaluate_condition(test, names) else statement.orelse
                result = _run_statements(chosen, names, lines)
                if result is not None:
                    return result
            case _:
                raise _UnsupportedError
    return None


def _evaluate_condition(test: ast.expr, names: Names) -> bool:
    match test:
        case ast.Compare(left=ast.Name() as left, ops=[ast.Eq()], comparators=[right]):
            return _evaluate(left, names) == _evaluate(right, names)
    raise _UnsupportedError


def _evaluate(node: ast.expr, names: Names) -> int | str:
    match node:
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Constant(value=int() | str() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)) if not isinstance(value, bool):
            return -value
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _evaluate(body if _evaluate_condition(test, names) else orelse, names)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATIONS:
            operands = _evaluate(left, names), _evaluate(right, names)
            if all(isinstance(operand, int) for operand in operands):
                return _OPERATIONS[type(operator)](*operands)
    raise _UnsupportedError
