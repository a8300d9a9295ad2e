"""How much a reader must hold in mind: sizes of statements and functions in AST nodes, and shapes that stop the eye.

A statement is an assignment, a return, a raise, an assertion or a call on its own. Docstrings are none, and neither
are tables of literals. A code line is neither empty nor a comment nor part of a docstring.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("t2g", "actors", "jobs", "docker")
MAX_STATEMENT = 60
MAX_FUNCTION = 400
MEDIAN = 13
P90 = 26
P90_OF_TESTS = 28
COMPREHENSIONS = 4.0  # for each 100 code lines
CONDITIONALS = 2.0
MAX_TUPLE_ASSIGNMENTS = 40  # values that belong together
# Packages of formulas: a name of one letter is a symbol there, and a docstring has it.
WITH_FORMULAS = ("t2g/algo/", "t2g/study/")
KEYS = {("t2g/config/learning.py", "r")}  # of config files, as PEFT spells it

STATEMENT_TYPES = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr, ast.Raise, ast.Assert)
COMPREHENSION_TYPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTION_TYPES = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPE_TYPES = (*FUNCTION_TYPES, ast.ClassDef, ast.Module)
CONTAINERS = (ast.Dict, ast.List, ast.Tuple, ast.Set)
LITERAL_TYPES = (*CONTAINERS, ast.Constant, ast.Name, ast.UnaryOp, ast.USub, ast.expr_context)


@dataclass(frozen=True, kw_only=True, order=True)
class Place:
    nodes: int = 0
    file: str
    line: int
    name: str = ""

    def __str__(self) -> str:
        described = f"{self.file}:{self.line} {self.name}".strip()
        return f"{described} ({self.nodes} nodes)" if self.nodes else described


@dataclass(frozen=True, kw_only=True)
class Count:
    """What the files of some packages hold."""

    num_lines: Counter[str] = field(default_factory=Counter)  # by file
    statements: list[Place] = field(default_factory=list)
    functions: list[Place] = field(default_factory=list)
    comprehensions: list[Place] = field(default_factory=list)
    nested: list[Place] = field(default_factory=list)  # comprehensions that contain another one
    conditionals: list[Place] = field(default_factory=list)
    tuple_assignments: list[Place] = field(default_factory=list)

    def nodes_at(self, share: float) -> int:
        """Return the size that this share of the statements does not reach."""
        sizes = sorted(place.nodes for place in self.statements)
        return sizes[int(share * len(sizes))]

    def per_100_lines(self, places: Sequence[Place]) -> float:
        return 100 * len(places) / self.num_lines.total()


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_table(node: ast.AST) -> bool:
    """Return whether the value of a statement is a literal."""
    value = getattr(node, "value", None)
    if value is None:
        return False
    return all(isinstance(part, LITERAL_TYPES) for part in ast.walk(value))


def is_tuple_assignment(node: ast.AST) -> bool:
    """Return whether a statement assigns as many values as it has targets; an exchange of two names is none."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    targets = {ast.unparse(part) for part in target.elts}
    values = {ast.unparse(part) for part in node.value.elts}
    return targets != values


def measure_sizes(tree: ast.AST) -> dict[ast.AST, int]:
    """Return the number of nodes of each subtree, children before their parents."""
    sizes: dict[ast.AST, int] = {}

    def measure(node: ast.AST) -> int:
        sizes[node] = 1 + sum(map(measure, ast.iter_child_nodes(node)))
        return sizes[node]

    measure(tree)
    return sizes


def has_inner_comprehension(node: ast.AST) -> bool:
    inner = [part for part in ast.walk(node) if isinstance(part, COMPREHENSION_TYPES)]
    return len(inner) > 1


def count_code_lines(source: str, nodes: Iterable[ast.AST]) -> int:
    left_out: set[int] = set()
    for node in nodes:
        if is_docstring(node):
            left_out.update(range(node.lineno, node.end_lineno + 1))
    num_lines = 0
    for number, line in enumerate(source.splitlines(), start=1):
        text = line.strip()
        if text and not text.startswith("#") and number not in left_out:
            num_lines += 1
    return num_lines


def add_file(count: Count, source: str, tree: ast.AST, file: str) -> None:
    sizes = measure_sizes(tree)
    count.num_lines[file] += count_code_lines(source, sizes)
    for node in sizes:
        places = choose_lists(count, node)
        if places:
            name = getattr(node, "name", "")
            place = Place(file=file, line=node.lineno, nodes=sizes[node], name=name)
            for list_of_places in places:
                list_of_places.append(place)


def choose_lists(count: Count, node: ast.AST) -> list[list[Place]]:
    """Return the lists that a node belongs to."""
    if isinstance(node, FUNCTION_TYPES):
        return [count.functions]
    if isinstance(node, ast.IfExp):
        return [count.conditionals]
    if isinstance(node, COMPREHENSION_TYPES):
        return [count.comprehensions, count.nested] if has_inner_comprehension(node) else [count.comprehensions]
    if not isinstance(node, STATEMENT_TYPES) or is_docstring(node):
        return []
    places = [] if is_table(node) else [count.statements]
    if is_tuple_assignment(node):
        places.append(count.tuple_assignments)
    return places


@cache
def count_packages(*packages: str) -> Count:
    count = Count()
    for file in list_files(packages):
        source = file.read_text(encoding="utf-8")
        add_file(count, source, parse(file), str(file.relative_to(ROOT)))
    return count


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def list_files(packages: Sequence[str]) -> list[Path]:
    return sorted(file for package in packages for file in (ROOT / package).rglob("*.py"))


def count_source(source: str) -> Count:
    count = Count()
    add_file(count, source, ast.parse(source), "m.py")
    return count


def find_undocumented_letters(tree: ast.AST, *, has_formulas: bool) -> Iterator[tuple[int, str]]:
    """Yield line and name of variables, fields and parameters with a name of one letter.

    Left out are names in the docstring of their function, class or module, if `has_formulas`.
    """
    open_scopes: list[tuple[ast.AST, str]] = [(tree, "")]  # with the docstrings around
    while open_scopes:
        scope, text = open_scopes.pop()
        if isinstance(scope, SCOPE_TYPES):
            text += ast.get_docstring(scope) or ""
        name = find_assigned_name(scope)
        if len(name) == 1 and name != "_":
            is_symbol = has_formulas and re.search(rf"\b{name}\b", text) is not None
            if not is_symbol:
                yield scope.lineno, name
        open_scopes += [(child, text) for child in ast.iter_child_nodes(scope)]


def find_assigned_name(node: ast.AST) -> str:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else ""


def describe(places: Sequence[Place]) -> str:
    """Return a line for each place, the largest first."""
    lines = [str(place) for place in sorted(places, reverse=True)]
    return "\n".join([f"{len(places)} places:", *lines])


def describe_densest(count: Count, places: Sequence[Place], per_lines: int = 100) -> str:
    """Return the files that have the most of these places for their length."""
    by_file = Counter(place.file for place in places)
    shares = {file: per_lines * number / max(count.num_lines[file], 1) for file, number in by_file.items()}
    densest = sorted(shares, key=lambda file: -shares[file])[:10]
    lines = [f"{file}: {by_file[file]} in {count.num_lines[file]} lines" for file in densest]
    return "\n".join(["most in", *lines])


# ---------------------------------------------------------------------------------------------------------- the product
def test_statements_are_small_in_the_median() -> None:
    count = count_packages(*PRODUCT)
    longer = [place for place in count.statements if place.nodes > MEDIAN]
    assert count.nodes_at(0.5) <= MEDIAN, describe_densest(count, longer)


def test_few_statements_are_dense() -> None:
    count = count_packages(*PRODUCT)
    dense = [place for place in count.statements if place.nodes > P90]
    assert count.nodes_at(0.9) <= P90, describe_densest(count, dense)


def test_comprehensions_and_conditional_expressions_are_rare() -> None:
    count = count_packages(*PRODUCT)
    comprehensions = count.per_100_lines(count.comprehensions)
    conditionals = count.per_100_lines(count.conditionals)
    assert comprehensions <= COMPREHENSIONS, describe_densest(count, count.comprehensions)
    assert conditionals <= CONDITIONALS, describe_densest(count, count.conditionals)


def test_no_statement_is_large() -> None:
    large = [place for place in count_packages(*PRODUCT).statements if place.nodes > MAX_STATEMENT]
    assert not large, describe(large)


def test_no_function_is_large() -> None:
    large = [place for place in count_packages(*PRODUCT).functions if place.nodes > MAX_FUNCTION]
    assert not large, describe(large)


def test_no_comprehension_contains_another() -> None:
    nested = count_packages(*PRODUCT).nested
    assert not nested, describe(nested)


def test_a_statement_assigns_one_value() -> None:
    assignments = count_packages(*PRODUCT).tuple_assignments
    assert len(assignments) <= MAX_TUPLE_ASSIGNMENTS, describe(assignments)


def test_names_of_one_letter_are_symbols_of_formulas() -> None:
    letters = []
    for path in list_files(PRODUCT):
        file = str(path.relative_to(ROOT))
        for line, name in find_undocumented_letters(parse(path), has_formulas=file.startswith(WITH_FORMULAS)):
            if (file, name) not in KEYS:
                letters.append(Place(file=file, line=line, name=name))
    assert not letters, describe(letters)


# ------------------------------------------------------------------------------------------------------------ the tests
def test_few_statements_of_tests_are_dense() -> None:
    count = count_packages("tests")
    dense = [place for place in count.statements if place.nodes > P90_OF_TESTS]
    assert count.nodes_at(0.9) <= P90_OF_TESTS, describe_densest(count, dense)


def test_no_statement_of_a_test_is_large_and_no_comprehension_contains_another() -> None:
    count = count_packages("tests")
    large = [place for place in count.statements if place.nodes > MAX_STATEMENT]
    assert not large, describe(large)
    assert not count.nested, describe(count.nested)


def test_a_statement_of_a_test_assigns_one_value() -> None:
    assignments = count_packages("tests").tuple_assignments
    assert len(assignments) <= MAX_TUPLE_ASSIGNMENTS, describe(assignments)


# ---------------------------------------------------------------------------------------------------------- the counter
def test_the_nodes_of_a_statement_by_hand() -> None:
    """Assign; Name, Store; BinOp; Name, Load; Mult; Constant."""
    [statement] = count_source("total = price * 2").statements
    assert statement == Place(file="m.py", line=1, nodes=8)


@pytest.mark.parametrize(
    ("source", "sizes"),
    [
        ("f()", [4]),  # Expr; Call; Name, Load
        ("def f():\n    return", [1]),
        ("def f():\n    return x.y", [5]),  # Return; Attribute, Load; Name, Load
        ("x: int = f(y)", [10]),  # AnnAssign; Call; four times Name with its context
        ("x += f()\nassert x", [7, 3]),
        ("x = y\nreturn_value = 1\nx += 1", []),  # names and numbers are literals, too
        ("if x == y:\n    raise E", [3]),  # a condition is no statement
    ],
)
def test_the_sizes_of_statements(source: str, sizes: list[int]) -> None:
    assert [place.nodes for place in count_source(source).statements] == sizes


def test_tables_and_docstrings_are_no_statements() -> None:
    source = (
        '"""What it is."""\nTABLE = {"a": (1, -2), "b": [x, {3}]}\n\n\ndef f():\n    """Return 1."""\n    return 1\n'
    )
    assert count_source(source).statements == []


def test_the_size_of_a_function_has_all_that_is_in_it() -> None:
    """FunctionDef; arguments, arg; Return; Name, Load."""
    [function] = count_source("def f(x):\n    return x").functions
    assert (function.name, function.nodes) == ("f", 6)


@pytest.mark.parametrize(
    ("source", "is_nested"),
    [
        ("x = [y for y in z]", False),
        ("x = [y for z in w for y in z]", False),
        ("x = [[y for y in z] for z in w]", True),
        ("x = {y: 1 for y in sorted(v for v in z)}", True),
        ("x = [y for y in z]\nx = [y for y in z]", False),
    ],
)
def test_a_comprehension_in_another_is_nested(source: str, is_nested: bool) -> None:
    nested = count_source(source).nested
    assert [place.line for place in nested] == [1] * is_nested


@pytest.mark.parametrize(
    ("source", "is_one"),
    [
        ("a, b = 1, 2", True),
        ("a, b = x, f(y)", True),
        ("a, b = b, a", False),
        ("a, b = f()", False),
        ("a, b = sorted((x, y))", False),
        ("a = 1, 2", False),
    ],
)
def test_an_assignment_of_several_values(source: str, is_one: bool) -> None:
    assert len(count_source(source).tuple_assignments) == is_one


def test_lines_without_code_are_left_out_of_the_shares() -> None:
    source = '"""Two\nlines."""\n\n# A comment.\nx = 1 if y else [z for z in w]  # code\nf(\n    x\n)\n'
    count = count_source(source)
    assert count.num_lines.total() == 4
    assert count.per_100_lines(count.conditionals) == count.per_100_lines(count.comprehensions) == 25


def test_percentiles_of_the_sizes() -> None:
    """Sizes 3, 4, 7, 10: of `raise E`, `f()`, `x += f()`, `x: int = f(y)`."""
    count = count_source("x: int = f(y)\nf()\nx += f()\nraise E")
    assert [count.nodes_at(share) for share in (0, 0.25, 0.5, 0.9)] == [3, 4, 7, 10]


def test_a_failure_names_file_line_and_count() -> None:
    places = [Place(file="a.py", line=3, nodes=61), Place(file="b.py", line=5, nodes=70, name="f")]
    assert describe(places) == "2 places:\nb.py:5 f (70 nodes)\na.py:3 (61 nodes)"


def test_one_letter_is_a_symbol_if_a_docstring_has_it() -> None:
    source = 'def f(k, n):\n    """Return C(n, 2)."""\n    _ = t = n\n    return [i for i in t]\n'
    tree = ast.parse(source)
    assert sorted(find_undocumented_letters(tree, has_formulas=True)) == [(1, "k"), (3, "t"), (4, "i")]
    assert (1, "n") in [*find_undocumented_letters(tree, has_formulas=False)]
