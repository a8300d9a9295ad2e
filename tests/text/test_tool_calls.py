"""Calls in a sampled text: what is read, at which characters, and that no text raises."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.text.json_ranges import find_values
from t2g.text.json_schema import find_violations
from t2g.text.tool_calls import NamedCall, locate_calls, read_hermes_calls, read_llama3_calls

KEYS = st.text(alphabet='ab_é"\\', min_size=1, max_size=4)
LEAVES = st.none() | st.booleans() | st.integers(-99, 99) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))
SEPARATORS = st.sampled_from([(", ", ": "), (",", ":"), (" ,\n", " :\t")])
NAMES = st.sampled_from(["weather", "f"])


def list_values(value: Any, path: str = "") -> dict[str, Any]:
    """Each value by its path, as plain recursion."""
    values = {path: value}
    if isinstance(value, dict):
        for key, member in value.items():
            values |= list_values(member, f"{path}.{key}" if path else key)
    if isinstance(value, list):
        for number, member in enumerate(value):
            values |= list_values(member, f"{path}[{number}]")
    return values


@given(value=VALUES, separators=SEPARATORS, before=st.sampled_from(["", "x ", "{"]), is_ascii=st.booleans())
def test_the_characters_of_each_value_are_its_json(value: Any, separators: Any, before: str, is_ascii: bool) -> None:
    text = before + json.dumps(value, separators=separators, ensure_ascii=is_ascii) + " }"
    places = find_values(text, len(before))
    assert places.keys() == list_values(value).keys()
    for path, expected in list_values(value).items():
        start, end = places[path]
        assert json.loads(text[start:end]) == expected


def test_the_docstring_s_example() -> None:
    expected = {"town": (9, 15), "days[0]": (26, 27), "days[1]": (29, 31), "days": (25, 32), "": (0, 33)}
    assert find_values('{"town": "Oslo", "days": [1, 20]}') == expected


def test_a_long_key_of_a_long_list_is_refused_in_little_memory() -> None:
    text = json.dumps({"name": "f", "arguments": {"k" * 20_000: [0] * 10_000}})
    tracemalloc.start()
    (call,) = read_hermes_calls(f"<tool_call>{text}</tool_call>")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert call.problem.startswith("the call is no JSON: the paths of its values have more than 1000000 characters")
    assert peak < 10 * 2**20


@settings(max_examples=40)
@given(
    calls=st.lists(st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=3),
    separators=SEPARATORS,
)
def test_calls_are_read_as_they_were_written(calls: list[tuple[str, dict[str, Any]]], separators: Any) -> None:
    def write(name: str, field: str, arguments: Any) -> str:
        return json.dumps({"name": name, field: arguments}, separators=separators)

    hermes = [f"<tool_call>\n{write(name, 'arguments', values)}\n</tool_call>" for name, values in calls]
    llama3 = [write(name, "parameters", values) for name, values in calls]
    texts = {"arguments": "Hm. " + "\n".join(hermes), "parameters": " " + "; ".join(llama3) + "\n"}
    for field, read in (("arguments", read_hermes_calls), ("parameters", read_llama3_calls)):
        text = texts[field]
        read_calls = read(text)
        assert [(call.name, call.arguments, call.problem) for call in read_calls] == [(n, a, "") for n, a in calls]
        for call, (name, arguments) in zip(read_calls, calls, strict=True):
            start, end = call.characters
            assert json.loads(text[start:end].removeprefix("<tool_call>").removesuffix("</tool_call>"))["name"] == name
            values = list_values(arguments)
            values.pop("")
            assert call.argument_characters.keys() == values.keys()
            for path, (first, last) in call.argument_characters.items():
                assert json.loads(text[first:last]) == values[path]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"name": "f", "arguments": {"a": 1}', "the call is no JSON: Expecting ',' delimiter at character 35"),
        ("", "the call is no JSON: Expecting value at character 0"),
        ('{"arguments": {}}', "the call needs to be an object with a name and arguments"),
        ("[1]", "the call needs to be an object"),
        ('{"name": "f", "arguments": [1]}', "the arguments are [1]; they need to be an object"),
        ('{"name": "f", "arguments": {"a": NaN}}', "the call is no JSON: NaN is no number of JSON"),
        ("[" * 100_000, "the call is no JSON"),
    ],
)
def test_a_malformed_call_is_a_call_with_a_problem(body: str, problem: str) -> None:
    text = f"Go <tool_call>{body}</tool_call>"
    (call,) = read_hermes_calls(text)
    assert call.problem.startswith(problem)
    assert text[slice(*call.characters)] == f"<tool_call>{body}</tool_call>"
    assert not call.arguments and not call.argument_characters


def test_a_call_that_is_cut_and_texts_without_calls() -> None:
    text = '<tool_call>\n{"name": "f", "argu'
    (cut,) = read_hermes_calls(text)
    assert cut.problem and cut.characters == (0, len(text))
    (whole,) = read_hermes_calls('<tool_call>{"name": "f", "arguments": {}}')
    assert (whole.name, whole.problem) == ("f", "")
    (llama,) = read_llama3_calls('{"name": "f", "parameters": {"a":')
    assert llama.problem and llama.characters == (0, 33)
    for text in ("", "4", "<tool_response>4</tool_response>", "Use </tool_call>"):
        assert read_hermes_calls(text) == []
    for text in ("", "4", 'Say {"name": "f", "parameters": {}}'):
        assert read_llama3_calls(text) == []


@settings(max_examples=200)
@given(
    st.text(alphabet='{}[]":,;a1\\u <tool_call>/\ud800\x00'), st.sampled_from([read_hermes_calls, read_llama3_calls])
)
def test_no_text_raises(text: str, read: Any) -> None:
    for call in read(text) + read("<tool_call>" + text) + read("{" + text):
        start, end = call.characters
        assert start < end
        first, last = call.error_characters or call.characters
        assert start <= first < last <= end


def test_calls_of_other_forms_are_located_by_their_names() -> None:
    text = "<f><town>Oslo</town><days>2</days></f> and <f><town>Bergen</town></f>"
    calls = [NamedCall("f", {"town": "Oslo", "days": 2}), NamedCall("f", {"town": "Bergen", "x": True})]
    first, second = locate_calls(text, calls)
    quoted = {name: text[slice(*place)] for name, place in first.argument_characters.items()}
    assert quoted == {"town": "Oslo", "days": "2"}
    assert text[slice(*second.argument_characters["town"])] == "Bergen" and len(second.argument_characters) == 1
    assert first.characters[1] == second.characters[0] and second.characters[1] == len(text)
    (lost,) = locate_calls("nothing", [NamedCall("f", {"a": 1})])
    assert lost.characters == (0, 7) and not lost.argument_characters
    assert locate_calls("nothing", []) == []


SCHEMA = {
    "type": "object",
    "properties": {
        "town": {"type": "string", "enum": ["Oslo", "Bergen"]},
        "days": {"type": "array", "items": {"type": "integer"}},
        "limit": {"type": ["integer", "null"]},
        "unit": {"anyOf": [{"type": "string"}, {"type": "number"}], "nullable": True},
        "filter": {"type": "object", "properties": {"min": {"type": "number"}}, "required": ["min"]},
    },
    "required": ["town"],
}


@pytest.mark.parametrize(
    ("arguments", "violations"),
    [
        ({"town": "Oslo", "days": [1, 2], "limit": None, "unit": None, "filter": {"min": 1, "other": 2}}, []),
        ({"town": "Oslo", "limit": 2.0, "unit": 1.5}, []),
        ({}, [("", "`town` is missing")]),
        ({"town": 7}, [("town", "`town` is 7; it needs to be string")]),
        ({"town": "Rom"}, [("town", '`town` is "Rom"; it needs to be one of "Oslo", "Bergen"')]),
        ({"town": "Oslo", "days": [1, "2"]}, [("days[1]", '`days[1]` is "2"; it needs to be integer')]),
        ({"town": "Oslo", "limit": True}, [("limit", "`limit` is true; it needs to be integer or null")]),
        ({"town": "Oslo", "unit": []}, [("unit", "`unit` is []; it needs to be string")]),
        ({"town": "Oslo", "filter": {}}, [("", "`filter.min` is missing")]),
        ({"town": "Oslo", "x": 1}, [("x", "`x` is no argument of weather")]),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], violations: list[tuple[str, str]]) -> None:
    assert find_violations(arguments, SCHEMA, "weather") == violations


def test_a_tool_may_take_arguments_that_its_schema_does_not_name() -> None:
    open_schema = {"properties": {}, "additionalProperties": True}
    assert find_violations({"a": 1}, open_schema, "t") == []
    integers = {"properties": {}, "additionalProperties": {"type": "integer"}}
    assert find_violations({"a": 1}, integers, "t") == []


TYPED_VALUES = (0, -1, 2.0, 0.5, 1e300, True, None, "", "1", [], [1], {}, {"a": 1})


@pytest.mark.parametrize("kind", ["string", "integer", "number", "boolean", "null", "array", "object"])
def test_the_types_are_those_of_jsonschema(kind: str) -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator({"type": kind})
    for value in TYPED_VALUES:
        is_valid = not find_violations({"a": value}, {"properties": {"a": {"type": kind}}}, "f")
        assert is_valid == validator.is_valid(value), value
