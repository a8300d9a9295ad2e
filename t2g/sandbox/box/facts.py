"""What the text of the tests tells about them, before they run."""

import ast
from dataclasses import dataclass

_RAISES = ("raises", "assertRaises")


@dataclass(frozen=True)
class TestFacts:
    """Facts from the syntax tree of the tests."""

    __test__ = False  # pytest looks for classes named Test*

    constants: frozenset[str]  # texts in it, stripped
    modules: frozenset[str]  # names that are used as a module is: `math` in `math.sqrt`
    expected_errors: frozenset[str]  # names of classes that `pytest.raises` and `assertRaises` expect
    imports_solution: bool  # at once, not only in a test


def read_tests(tree: ast.Module) -> TestFacts:
    constants: set[str] = set()
    modules: set[str] = set()
    expected_errors: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str() as value):
                constants.add(value.strip())
            case ast.Attribute(value=ast.Name(id=name)):
                modules.add(name)
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=[kind, *_]):
                if name.startswith(_RAISES):
                    expected_errors |= _find_names(kind)
    return TestFacts(
        constants=frozenset(constants),
        modules=frozenset(modules),
        expected_errors=frozenset(expected_errors),
        imports_solution=any(map(_imports_solution, tree.body)),
    )


def _imports_solution(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom) and "solution" in ast.unparse(node)


def _find_names(node: ast.expr) -> set[str]:
    names = set()
    for part in ast.walk(node):
        match part:
            case ast.Attribute(attr=name) | ast.Name(id=name):
                names.add(name)
    return names
