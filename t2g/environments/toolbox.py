"""Calls of an environment's tools: several at once, each with a deadline, and a message to the policy for each call.

No tool ends a conversation: where one hangs, raises, or returns what cannot be shown, the policy gets a sentence.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t2g.concurrency import gather_all
from t2g.environments.tools import Tool
from t2g.feedback.parse import replace_surrogates
from t2g.feedback.sources.user_function import FunctionFailed, UserFunction
from t2g.text.json_ranges import Characters
from t2g.text.json_schema import find_violations
from t2g.text.segments import printable
from t2g.text.tool_calls import ToolCall, shorten_value
from t2g.types import Prompt, ToolResult, ToolStatus

MAX_RESULT_CHARS = 20_000
MakeFunction = Callable[[Callable[..., Any], str], UserFunction]  # function, kind for messages


class ToolBox:
    """The tools of an environment by name."""

    def __init__(self, tools: Sequence[Tool], make_function: MakeFunction, *, max_calls: int) -> None:
        """Prepare the calls.

        Args:
            make_function: Prepares the calls of one tool, which gets its arguments as a mapping.
            max_calls: Maximum of calls in a turn; further calls get an error.
        """
        self._tools = {tool.name: tool for tool in tools}
        self._functions = {
            tool.name: make_function(_take_mapping(tool.function), f"tool {tool.name}") for tool in tools
        }
        self._max_calls = max_calls

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Return what the chat template gets."""
        return [tool.schema for tool in self._tools.values()]

    async def call(self, prompt: Prompt, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Return a result for each call of a turn, in order; the tools run at once.

        Raises:
            RunStopped: As `UserFunction.call`.
        """
        return await gather_all(self._call(prompt, call, number) for number, call in enumerate(calls))

    async def _call(self, prompt: Prompt, call: ToolCall, number: int) -> ToolResult:
        tool = self._tools.get(call.name)
        if number >= self._max_calls:
            return _make_error(call, tool, "lost", f"a turn may make {self._max_calls} calls, and this is one more")
        problem = find_problem(call, self._tools)
        if problem or tool is None:
            return _make_error(call, tool, "malformed", problem)
        arguments: dict[str, Any] = dict(call.arguments)
        if tool.prompt_parameter is not None:
            arguments[tool.prompt_parameter] = prompt
        try:
            text = await self._functions[tool.name].call(_read_result, prompt.prompt_id, arguments)
        except FunctionFailed as failed:
            if failed.error:
                return _make_error(call, tool, "failed", failed.error)
            return _make_error(call, tool, "lost", str(failed))
        return _make_result(call, tool, "ok", text)


def find_problem(call: ToolCall, tools: Mapping[str, Tool]) -> str:
    """Return why a call of these tools, by name, cannot be made, a sentence; "" for a valid one."""
    if call.problem:
        return call.problem
    tool = tools.get(call.name)
    if tool is None:
        return f"there is no tool {shorten_value(call.name)}; the tools are {', '.join(tools)}"
    violations = find_violations(call.arguments, tool.parameters, tool.name)
    return "; ".join(violation.message for violation in violations)


def _make_error(call: ToolCall, tool: Tool | None, status: ToolStatus, sentence: str) -> ToolResult:
    return _make_result(call, tool, status, f"Error: {sentence}")


def _make_result(call: ToolCall, tool: Tool | None, status: ToolStatus, text: str) -> ToolResult:
    return ToolResult(
        tool=tool.name if tool else "",
        text=printable(replace_surrogates(text)),
        status=status,
        characters=call.characters,
        error_characters=call.error_characters,
        arguments=_find_known_arguments(call, tool),
    )


def _find_known_arguments(call: ToolCall, tool: Tool | None) -> dict[str, Characters]:
    """Return the characters of the arguments that the tool has: an error about another one is about its name."""
    known = tool.parameters.get("properties", {}) if tool else {}

    def is_known(path: str) -> bool:
        return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in known)

    return {path: characters for path, characters in call.argument_characters.items() if is_known(path)}


def _take_mapping(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Return the function with its keyword arguments as one mapping: their names may be any."""
    call_method = type(function).__call__
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method):

        async def call_async(arguments: Mapping[str, Any]) -> Any:
            return await function(**arguments)

        return call_async

    def call(arguments: Mapping[str, Any]) -> Any:
        return function(**arguments)

    return call


def _read_result(answer: Any) -> str:
    """Return what a tool returned as a text. FunctionFailed for anything but a text or JSON values of some size."""
    text = answer
    if not isinstance(answer, str):
        try:
            text = json.dumps(answer, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            kind = type(answer).__name__
            raise FunctionFailed(f"returned an object of the type {kind}, which is neither a text nor JSON") from None
    if len(text) > MAX_RESULT_CHARS:
        raise FunctionFailed(f"returned {len(text)} characters; it may return {MAX_RESULT_CHARS}")
    return text
