"""How a config names a function that a Python program hands over, and what identifies such a function."""

import functools
import json.decoder
import linecache
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from t2g.config import FeedbackConfig
from t2g.config.python_functions import forget_functions, import_object, name_function, source_text
from t2g.errors import UserError
from t2g.feedback.sources.make import make_local_source
from t2g.runs.contents import source_hash
from t2g.tasks.prompts_only import PromptsTask


def judge(prompt: str, response: str) -> str:
    return response


def closure(word: str) -> Callable[..., Any]:
    def find(prompt: str, response: str) -> bool:
        return word in response

    return find


class Judge:
    def __call__(self, prompt: str, response: str) -> str:
        return prompt

    def method(self, prompt: str, response: str) -> str:
        return response


@pytest.fixture(autouse=True)
def no_functions() -> Iterator[None]:
    forget_functions()
    yield
    forget_functions()


def in_cell(monkeypatch: pytest.MonkeyPatch, text: str, name: str = "judge") -> Any:
    """Run `text` as a notebook runs a cell: in `__main__`, which has no file, with its lines kept for tracebacks."""
    main = ModuleType("__main__")
    file = f"<cell {hash(text)}>"
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(linecache.cache, file, (len(text), None, text.splitlines(keepends=True), file))
    exec(compile(text, file, "exec"), main.__dict__)  # noqa: S102
    return getattr(main, name)


def test_a_function_of_a_module_keeps_its_import_path() -> None:
    path = name_function(judge)
    assert path == f"{__name__}:judge"
    assert import_object(path) is judge
    assert source_text(path) is None
    assert name_function(json.decoder.JSONDecoder) == "json.decoder:JSONDecoder"


def test_a_function_without_an_import_path_has_the_name_and_the_content_of_its_text() -> None:
    first = closure("a")
    lines = "    def find(prompt: str, response: str) -> bool:\n        return word in response\n"
    path = name_function(first)
    assert path == name_function(first) == "__main__:find"
    assert import_object(path) is first and source_text(path) == lines
    judges = Judge()
    assert name_function(judges.method) == name_function(judges.method) == "__main__:method"
    assert source_hash("__main__:method") != source_hash(path)


@pytest.mark.parametrize("function", [functools.partial(judge, response="r"), Judge()])
def test_what_its_text_does_not_identify_is_refused(function: Any) -> None:
    with pytest.raises(UserError, match=rf"^got an object of the type {type(function).__name__}: write a function"):
        name_function(function)


def test_a_cell_that_is_run_again_names_the_new_function(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for text in (
        "def judge(p, r):\n    return p\n",
        "def judge(p, r):\n    return r\n",
        "def judge(p, r):\n    return p\n",
    ):
        forget_functions()
        function = in_cell(monkeypatch, text)
        path = name_function(function)
        assert path == "__main__:judge" and import_object(path) is function
        hashes.append(source_hash(path))
    assert hashes[0] == hashes[2] != hashes[1]


def test_two_functions_of_one_name_are_refused() -> None:
    name_function(closure("a"))
    with pytest.raises(UserError, match=r"^__main__:find: two functions .* rename one$"):
        name_function(closure("b"))


def test_a_function_without_source_text_is_refused() -> None:
    with pytest.raises(UserError, match=r"^__main__:<lambda> has no source text: define it in a file or in a cell of"):
        name_function(eval("lambda p, r: p"))  # noqa: S307


def test_the_command_line_refuses_a_function_of_a_program_in_one_sentence() -> None:
    with pytest.raises(UserError) as caught:
        make_local_source(FeedbackConfig(source="__main__:judge"), PromptsTask())
    assert str(caught.value).startswith("feedback.source=__main__:judge cannot be imported: ")
    assert "Python program that started this run" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert source_hash("__main__:judge") == ""
