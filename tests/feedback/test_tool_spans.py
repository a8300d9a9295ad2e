"""Spans of tools' errors: the arguments that an error names, or the whole call."""

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.train_policy.policy_data import check_spans
from t2g.config import PolicyJob
from t2g.data.buffer import Group, read_groups, write_groups
from t2g.environments.toolbox import ToolBox
from t2g.errors import UserError
from t2g.feedback.sources.next_message import NextMessageFeedback
from t2g.feedback.sources.program import ProgramFeedback
from t2g.feedback.sources.user_function import UserFunction
from t2g.feedback.tool_spans import (
    TOOL_RESULTS,
    dump_results,
    find_named_arguments,
    find_quoted_words,
    find_tool_spans,
    load_results,
)
from t2g.loop.sampling import judge_answer
from t2g.loop.tool_metrics import tool_metrics
from t2g.text.json_schema import find_violations
from t2g.text.tool_calls import read_hermes_calls, read_llama3_calls
from t2g.types import PolicyTurn, Prompt, Rollout, ToolResult

CALL = '<tool_call>{"name": "f", "arguments": {"town": "Oslo", "days": 2, "filter": {"min": "Oslo"}}}</tool_call>'


def make_result(text: str, status: Any = "failed", answer: str = CALL, number: int = 0) -> ToolResult:
    call = read_hermes_calls(answer)[number]
    return ToolResult(
        tool="f", text=text, status=status, characters=call.characters, arguments=call.argument_characters
    )


@pytest.mark.parametrize(
    ("text", "quotes"),
    [
        ("Error: `town` is unknown", ['"Oslo"']),
        ("Error: 'filter.min' and \"days\" are wrong", ["2", '"Oslo"']),
        ("Error: `min` is wrong", ['"Oslo"']),
        ("Error: KeyError: 2", []),
        ("Error: KeyError: '2'", ["2"]),
        ("Error: KeyError: 'Oslo'", ['"Oslo"', '"Oslo"']),
        ('Error: `days` is 2; it needs to be one of "Oslo"', ["2"]),
        ("Error: the town is unknown", []),
        ("Error: `country` is missing", []),
    ],
)
def test_an_error_is_about_the_arguments_that_it_names(text: str, quotes: list[str]) -> None:
    places = find_named_arguments(make_result(text), CALL)
    assert [CALL[start:end] for start, end in places] == quotes
    spans = find_tool_spans([make_result(text)], CALL, text)
    expected = places or [(0, len(CALL))]
    assert [(span.start, span.end, span.label) for span in spans] == [(*place, -1) for place in expected]
    assert {span.critique_range for span in spans} == {(0, len(text))}


UNKNOWN = '<tool_call>{"name": "serch", "arguments": {"thing": "phone"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "quotes"),
    [
        ('Error: there is no tool "serch"; the tools are lookup, calculate', ['"serch"']),
        ("Error: `item` is missing; `thing` is no argument of serch", ['"thing"']),
        ("Error: the call is no JSON: Expecting ',' delimiter at character 3", [UNKNOWN]),
    ],
)
def test_an_error_without_an_argument_is_about_the_words_that_it_quotes(text: str, quotes: list[str]) -> None:
    result = replace(make_result(text, "malformed", UNKNOWN), arguments={})
    spans = find_tool_spans([result], UNKNOWN, text)
    assert [UNKNOWN[span.start : span.end] for span in spans] == quotes


@pytest.mark.parametrize(
    "marked",
    [
        '<tool_call>{"name": "f" ^"^arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1 ^2^}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1}^<^/tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1}}^}^</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1^}^',
        '<tool_call>{"name": "f", "argu^m^',
        '<tool_call>{"name": "f", "arguments": {"a": "2 * 3}}^<^/tool_call>',
        '<tool_call>{"name": "f", "arguments": ^"a: 1"^}</tool_call>',
        '{"name": "f", "parameters": {"a": 1^}^',
    ],
)
def test_an_error_of_json_is_about_the_character_where_it_ceases_to_be_json(marked: str) -> None:
    """What precedes the marked span is as in a valid call; of a call that ends too early, it is the last character."""
    before, quote, after = marked.split("^")
    answer = before + quote + after
    read = read_hermes_calls if answer.startswith("<") else read_llama3_calls
    no_tools = ToolBox((), make_function=UserFunction, max_calls=1)
    results = asyncio.run(no_tools.call(Prompt(prompt_id="p", task="tiny_tools", prompt_text=""), read(answer)))
    stored_results = load_results({TOOL_RESULTS: dump_results(results)})
    (span,) = find_tool_spans(stored_results, answer, stored_results[0].text)
    assert (span.start, span.end) == (len(before), len(before) + len(quote))


def test_an_error_about_a_line_of_code_is_about_that_line() -> None:
    code = 'x = ["é"]\nprint(x[3], "a")\n'
    answer = f"<tool_call>{json.dumps({'name': 'f', 'arguments': {'code': code}}, ensure_ascii=False)}</tool_call>"
    text = 'Error: RuntimeError: IndexError: list index out of range in line 2: `print(x[3], "a")`'
    (span,) = find_tool_spans([make_result(text, answer=answer)], answer, text)
    assert answer[span.start : span.end] == r"print(x[3], \"a\")"


def test_results_that_are_no_fault_of_the_call_have_no_spans() -> None:
    results = [make_result("7", "ok"), make_result("Error: the tool f gave no answer", "lost")]
    assert find_tool_spans(results, CALL, "7\n\nError: the tool f gave no answer") == []


def test_each_error_is_about_its_own_call_and_its_own_part_of_the_critique() -> None:
    answer = CALL + " " + CALL
    results = [make_result("Error: `days` is bad", answer=answer, number=number) for number in (0, 1)]
    critique = "\n\n".join(result.text for result in results)
    first, second = find_tool_spans(results, answer, critique)
    assert second.start - first.start == len(CALL) + 1
    assert first.critique_range == (0, 20) and second.critique_range == (22, 42)


NAMES = st.sampled_from(["town", "days", "unit"])


@given(st.dictionaries(NAMES, st.integers(0, 9) | st.sampled_from(["a", "days", "b c"]), min_size=1), NAMES)
def test_a_wrong_type_is_about_that_argument(arguments: dict[str, Any], wrong: str) -> None:
    """The message of a violation, made by the check of schemas, leads back to the value."""

    answer = f'<tool_call>{{"name": "f", "arguments": {json.dumps(arguments)}}}</tool_call>'
    schema = {"properties": {name: {"type": "boolean"} if name == wrong else {} for name in arguments}}
    violations = find_violations(arguments, schema, "f")
    assert len(violations) == (wrong in arguments)
    for violation in violations:
        result = make_result(f"Error: {violation.message}", "malformed", answer)
        places = [answer[start:end] for start, end in find_named_arguments(result, answer)]
        assert json.dumps(arguments[wrong]) in places


def make_rollout(answers: list[str], results: list[tuple[ToolResult, ...]]) -> Rollout:
    turns = []
    text = ""
    for answer, of_turn in zip(answers, results, strict=True):
        reply = "\n\n".join(result.text for result in of_turn)
        start = len(text)
        end = start + len(answer)
        turn = PolicyTurn(
            tokens=(start, end), characters=(start, end), answer_start=start, reply=reply, results=of_turn
        )
        turns.append(turn)
        text += answer
    size = len(text)
    return Rollout(
        prompt_id="p", sample_index=0, prompt_ids=np.array([1], np.int32), response_ids=np.arange(size, dtype=np.int32),
        rollout_logprobs=np.zeros(size, np.float32), response_text=text, finish_reason="stop", policy_versions=(),
        environment_turns=tuple(turns),
    )  # fmt: skip


def praise(prompt: str, response: str, critique: str) -> Any:
    """An aligner: it praises the town of a call whose result is a number."""
    return critique, ['"Oslo"'] if critique == "7" else [], []


def test_errors_are_mapped_and_the_user_s_program_maps_the_others() -> None:
    failed = make_result("Error: `days` is bad")
    right = make_result("7", "ok")
    rollout = make_rollout([CALL, CALL], [(failed,), (right,)])
    prompt = Prompt(prompt_id="p", prompt_text="How?", task="t", payload={"tool_results": "the record's own"})
    for aligner, expected in (
        (None, [(CALL.index("2"), -1)]),
        (ProgramFeedback(praise, field="align"), [(CALL.index("2"), -1), (len(CALL) + CALL.index('"Oslo"'), 1)]),
    ):
        feedback = asyncio.run(judge_answer(NextMessageFeedback(aligner), prompt, rollout))
        spans = sorted((span.start, span.label) for span in feedback.spans)
        assert spans == expected
        assert {span.criterion for span in feedback.spans} <= {"turn_1", "turn_2"}
        assert failed.text in feedback.critique


def test_code_in_backticks_is_found_in_linear_time() -> None:
    call = '{"name": "run", "arguments": {"code": "x = days"}}'
    text = "`run` fails at `x = days`"
    fault = ToolResult(tool="run", text=text, status="failed", characters=(0, len(call)))
    assert [call[start:end] for start, end in find_quoted_words(fault, call)] == ['"run"', "x = days"]
    started = time.thread_time()
    doubled = replace(fault, text="``x = days`` is wrong")
    assert [call[start:end] for start, end in find_quoted_words(doubled, call)] == ["x = days"]
    find_quoted_words(replace(fault, text="`" + "-" * 20_000), call)
    assert time.thread_time() - started < 1


def test_results_are_kept_in_checkpoints_and_payloads(tmp_path: Any) -> None:
    result = make_result("Error: `days` is bad")
    assert load_results({"tool_results": dump_results([result])}) == (result,)
    assert load_results({}) == ()
    rollout = make_rollout([CALL], [(result,)])
    prompt = Prompt(prompt_id="p", prompt_text="", task="t", prompt_ids=rollout.prompt_ids)
    feedback = asyncio.run(judge_answer(NextMessageFeedback(), prompt, rollout))
    write_groups(tmp_path / "buffer", {1: [Group(prompt=prompt, samples=((rollout, feedback),))]})
    ((restored, _),) = read_groups(tmp_path / "buffer", {"p": prompt})[1][0].samples
    assert restored.environment_turns == rollout.environment_turns


def test_calls_are_counted() -> None:
    statuses = ("ok", "malformed", "failed", "lost")
    results = tuple(replace(make_result("x"), status=status) for status in statuses)
    silent = make_rollout([CALL], [()])
    metrics = tool_metrics([make_rollout([CALL], [results]), silent])
    assert metrics == {"turns/calls": 2, "turns/malformed_share": 0.25, "turns/tool_error_share": 0.5}
    assert tool_metrics([silent]) == {}


def test_replies_without_spans_are_refused_unless_there_are_tools() -> None:
    values = {"model": {"policy": "m"}, "data": {"path": "d"}, "environment": "a:B"}
    job = PolicyJob.model_validate(values | {"feedback": {"source": "next_message"}})
    check_spans(job, has_tools=True)
    with pytest.raises(UserError, match=r"set feedback\.align"):
        check_spans(job, has_tools=False)
    aligned = PolicyJob.model_validate(values | {"feedback": {"source": "next_message", "align": "a:b"}})
    check_spans(aligned, has_tools=False)
