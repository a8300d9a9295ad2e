"""The language of the code: standard names, imperative docstrings, plain words."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("t2g", "actors", "jobs", "docker")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
# Names that the style guide replaced. Each is compared with whole identifiers, leading underscores left out.
NAMES = """
    agreed announce announced announcement arena arm asked asleep barred bell beside_bytes bury by_token cares
    compute_step_ids crew deltas hand_over identity_fields intake invitation journal_version keeps_buckets
    lends lent_bytes loss_mean made_of maps may_differ meeting mind old_is_current participants partname
    patience patience_s place_rewards policypart proved said segment_ids select_share shown stage stages step_ids
    synctarget taught teach teachers_words tell told w_end w_span want weightowner whoever
"""
REPLACED = frozenset(NAMES.split())
# A variable, argument, attribute or function has the name of what it holds or does, in the packages and in the tests.
CONTENTLESS = frozenset(
    ("asked", "found", "given", "got", "kept", "made", "own", "said", "shown", "told", "want", "wanted")
)
FIELDS_OF_RECORDS = {"t2g/sandbox/run.py": {"got"}}  # the file format: TestResult
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
REPLACED_PARTS = ("in_words", "last_words", "summary_words", "smoke_words", "_crew", "_meeting", "patience")
# One spelling, that of the libraries, in names and prose; `group_normalised` is a value of a config key.
BRITISH = re.compile(
    r"\w*(?:(?:summar|(?<!group_)normal|serial|initial|recogn|token|util|minim|maxim|optim|penal|random)is(?:e|ing|ation)"
    r"|behaviour|colour|favour|neighbour|artefact|licence)\w*",
    re.IGNORECASE,
)
SPEAKS_TO_MODELS = "t2g/tasks/tiny"  # generated posts and prompts: another spelling would be another world
MAX_RIDDLES = 90  # whole words in all packages; some stand in prompts that a model reads
RIDDLES = re.compile(r"\b(?:told|said|asked|whoever|nobody|one that|words)\b", re.IGNORECASE)
# A docstring of a function begins with a verb, as "Return", and not with one of these.
NO_VERB = frozenset(
    ("A", "All", "An", "As", "At", "By", "Each", "Every", "For", "From", "How", "If", "In", "Is", "It", "Its",
     "None", "Nothing", "Of", "On", "One", "Only", "Same", "See", "Several", "That", "The", "Their", "This",
     "Those", "To", "True", "UserError", "What", "Where", "Whether", "Which", "Who", "Whoever", "Whose", "Why",
     "With")
)  # fmt: skip


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def find_identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield the names of variables, attributes, arguments, functions and classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def find_bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module gives to variables, attributes, arguments, functions and patterns."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.MatchAs(name=str(name)):
                yield name


def find_contentless_names(file: Path) -> list[str]:
    """Return the names of a file that do not say what they hold, without underscores at the ends."""
    names = {name.strip("_") for name in find_bound_names(parse(file))}
    allowed = FIELDS_OF_RECORDS.get(str(file.relative_to(ROOT)), set())
    return sorted((names & CONTENTLESS) - allowed)


def is_replaced(name: str) -> bool:
    plain = name.strip("_").lower()
    return plain in REPLACED or any(part in plain for part in REPLACED_PARTS)


def find_first_words(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names of functions with a docstring, and the first word of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            yield node.name, text.split()[0]


def test_the_checks_find_what_they_look_for() -> None:
    tree = ast.parse('def f(told):\n    """What it returns."""\n    self._patience_s = summary_words\n')
    assert {name for name in find_identifiers(tree) if is_replaced(name)} == {"told", "_patience_s", "summary_words"}
    assert list(find_first_words(tree)) == [("f", "What")]


def files_of(package: str) -> list[Path]:
    return [file for file in FILES if file.relative_to(ROOT).parts[0] == package]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_replaced_name_is_left(package: str) -> None:
    replaced: dict[str, list[str]] = {}
    for file in files_of(package):
        names = {name for name in find_identifiers(parse(file)) if is_replaced(name)}
        if names:
            replaced[str(file.relative_to(ROOT))] = sorted(names)
    assert replaced == {}


def test_bound_names_are_those_of_variables_arguments_attributes_and_functions() -> None:
    source = (
        "def found(given):\n    self.made = [own for own in given]\n    with kept.got as shown:\n        told(want=1)\n"
    )
    assert CONTENTLESS.intersection(find_bound_names(ast.parse(source))) == {"found", "given", "made", "own", "shown"}


@pytest.mark.parametrize("folder", [*PACKAGES, "tests"])
def test_names_say_what_they_hold(folder: str) -> None:
    files = TEST_FILES if folder == "tests" else files_of(folder)
    contentless = {str(file.relative_to(ROOT)): find_contentless_names(file) for file in files}
    assert {file: names for file, names in contentless.items() if names} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_of_functions_begin_with_a_verb(package: str) -> None:
    without_verb: dict[str, str] = {}
    for file in files_of(package):
        for name, word in find_first_words(parse(file)):
            if word.strip("`\"',.:;") in NO_VERB:
                without_verb[f"{file.relative_to(ROOT)}: {name}"] = word
    assert without_verb == {}


def test_riddles_are_rare() -> None:
    riddles = Counter({str(file.relative_to(ROOT)): len(RIDDLES.findall(file.read_text())) for file in FILES})
    assert riddles.total() < MAX_RIDDLES, riddles.most_common(20)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_spelling_is_american(package: str) -> None:
    british: dict[str, list[str]] = {}
    for file in FILES:
        name = str(file.relative_to(ROOT))
        if not name.startswith(f"{package}/") or name.startswith(SPEAKS_TO_MODELS):
            continue
        if words := BRITISH.findall(file.read_text(encoding="utf-8")):
            british[name] = words
    assert british == {}


def find_defined_types(tree: ast.AST) -> tuple[list[str], set[str]]:
    """Return the names of the classes, and those of the TypeVars, of a module."""
    classes: list[str] = []
    type_vars: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name):
                classes.append(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="TypeVar"))):
                type_vars.add(name)
    return classes, type_vars


def test_no_comment_begins_with_of() -> None:
    """A comment or docstring names its subject: "# width of a row", not "# of a row"."""
    places = []
    for file in FILES:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(r"(^|\s)# [oO]f |^\s*(\"{3})?([\w*]+: )?Of ", line):
                places.append(f"{file.relative_to(ROOT)}:{number}")
    assert places == []


def test_no_two_classes_share_a_name() -> None:
    """A TypeVar may have the name of another TypeVar, not that of a class."""
    classes: Counter[str] = Counter()
    type_vars: set[str] = set()
    for file in FILES:
        file_classes, file_type_vars = find_defined_types(parse(file))
        classes.update(file_classes)
        type_vars |= file_type_vars
    assert [name for name, count in classes.items() if count > 1] == []
    assert type_vars & classes.keys() == set()
