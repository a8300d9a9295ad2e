"""Tools that an environment offers: Python functions, and what the chat template says about them.

    def weather(town: str, prompt: Prompt) -> str:
        '''Return the weather.

        Args:
            town: A town of Norway.
        '''

The policy sees `weather(town)`. A parameter with the type `Prompt` gets the prompt of the conversation.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, get_type_hints

from t2g.errors import UserError
from t2g.feedback.sources.user_function import describe_error
from t2g.types import Prompt

FORM = "a function with type hints and a docstring, or a pair of a schema and a function"


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the policy may call."""

    name: str
    schema: dict[str, Any]  # OpenAI's form: {"type": "function", "function": {"name": ..., "parameters": ...}}
    function: Callable[..., Any]
    prompt_parameter: str | None = None  # the parameter that gets the prompt

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Return the JSON schema of the arguments."""
        return self.schema["function"].get("parameters", {})


def read_tools(environment: Any, key: str) -> list[Tool]:
    """Return the tools of an environment, [] for one without.

    Args:
        key: The config key and value that name it, for messages.

    Raises:
        UserError: `tools` is no list of tools, or two of them have one name.
    """
    definitions = getattr(environment, "tools", ())
    if not isinstance(definitions, Sequence) or isinstance(definitions, str):
        raise UserError(f"{key}: its tools are {definitions!r:.80}; they need to be a list, each {FORM}")
    tools: dict[str, Tool] = {}
    for definition in definitions:
        tool = _read_tool(definition, environment, key)
        if tool.name in tools:
            raise UserError(f"{key} has two tools with the name {tool.name}")
        tools[tool.name] = tool
    return list(tools.values())


def _read_tool(definition: Any, environment: Any, key: str) -> Tool:
    is_pair = isinstance(definition, tuple) and len(definition) == 2
    schema, function = definition if is_pair else (None, definition)
    if not callable(function):
        raise UserError(f"{key} has the tool {definition!r:.80}; it needs to be {FORM}")
    name = getattr(function, "__name__", type(function).__name__)
    try:
        function = _bind(function, environment)
        hints = get_type_hints(function) if schema is None else getattr(function, "__annotations__", {})
        prompt_parameter = _find_prompt_parameter(hints)
        if schema is None:
            schema = _make_schema(function, hints, prompt_parameter)
    except Exception as error:  # hints and docstrings of a user's function may be anything
        raise UserError(f"{key}: the tool {name} has no schema: {describe_error(error)}") from error
    if isinstance(schema, Mapping) and "function" not in schema:
        schema = {"type": "function", "function": schema}
    if not _is_schema(schema):
        raise UserError(
            f"{key}: the schema of the tool {name} is {schema!r:.80}; it needs to be a function of OpenAI's form with "
            "a name, and parameters of the type object"
        )
    name = schema["function"]["name"]
    return Tool(name=name, schema=dict(schema), function=function, prompt_parameter=prompt_parameter)


def _bind(function: Callable[..., Any], environment: Any) -> Callable[..., Any]:
    """Return the function; one that a class body lists as its tool is bound to the environment."""
    first_parameter = next(iter(inspect.signature(function).parameters), "")
    return MethodType(function, environment) if first_parameter == "self" else function


def _find_prompt_parameter(hints: Mapping[str, Any]) -> str | None:
    for name, hint in hints.items():
        if hint is Prompt and name != "return":
            return name
    return None


def _make_schema(
    function: Callable[..., Any], hints: Mapping[str, Any], prompt_parameter: str | None
) -> dict[str, Any]:
    """Return the schema of a function without the parameter that gets the prompt."""
    from transformers.utils import get_json_schema

    def described() -> None:
        pass

    signature = inspect.signature(function)
    parameters = [one for one in signature.parameters.values() if one.name != prompt_parameter]
    described.__name__ = function.__name__
    described.__doc__ = function.__doc__
    described.__annotations__ = {name: hint for name, hint in hints.items() if name != prompt_parameter}
    described.__dict__["__signature__"] = signature.replace(parameters=parameters)
    return get_json_schema(described)


def _is_schema(schema: Any) -> bool:
    if not isinstance(schema, Mapping) or not isinstance(schema["function"], Mapping):
        return False
    function = schema["function"]
    parameters = function.get("parameters", {})
    has_name = isinstance(function.get("name"), str) and function["name"].strip() != ""
    return has_name and isinstance(parameters, Mapping) and parameters.get("type", "object") == "object"
