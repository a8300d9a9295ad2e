"""The environment that a config names, and calls of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from t2g.config import PolicyJob
from t2g.environments.toolbox import ToolBox
from t2g.environments.tools import read_tools
from t2g.errors import UserError
from t2g.feedback.parse import MAX_ANSWER_CHARS, read_metrics, replace_surrogates
from t2g.feedback.sources.user_function import (
    FunctionFailed,
    UserFunction,
    check_function,
    describe_error,
    load_function,
    select_options,
    shorten,
)
from t2g.tasks.base import Task
from t2g.text.tokenizer import Message
from t2g.text.tool_calls import ToolCall
from t2g.types import Prompt, ToolResult

SHIPPED = {
    "code_repair": "t2g.environments.code_repair:CodeRepair",
    "python": "t2g.environments.python_tool:PythonTool",
    "tiny_tools": "t2g.environments.tiny.table_tools:TinyTools",
}


@dataclass(frozen=True)
class Reply:
    """The environment's message about the policy's last turn."""

    text: str
    done: bool = False  # whether the conversation ends; the text is then feedback alone
    metrics: dict[str, float] = field(default_factory=dict)  # finite numbers; of a conversation the last ones count


class Environment:
    """An object with the method `reply(prompt, messages)`, async or not, which returns a `Reply`, and perhaps `tools`.

    It may be constructed with the keyword arguments `task` and `sandbox`. The messages are the policy's first answer,
    the reply to it, and so on to the policy's last answer, without thinking. A turn with calls gets the results of the
    tools instead of a reply. An object with tools needs no method `reply`: a turn without calls then ends the
    conversation.
    """

    def __init__(self, config: PolicyJob, task: Task) -> None:
        """Construct the environment.

        Raises:
            UserError: It cannot be imported or constructed, has no method `reply`, or its tools cannot be used.
        """
        key = f"environment={config.environment}"
        name = str(config.environment)
        path = SHIPPED.get(name, name)
        if ":" not in path:
            raise UserError(f"{key} is neither {', '.join(SHIPPED)} nor an import path, as in pkg.mod:Class")
        sources = config.feedback.named_sources.values()
        sandbox = config.feedback.sandbox
        options = {"task": task, "sandbox": sandbox}
        make = load_function(path, key, "no arguments, or task= or sandbox=", options=options)
        try:
            environment = make(**select_options(make, options))
        except Exception as error:  # a user's class may raise anything
            raise UserError(f"{key} cannot be constructed: {describe_error(error)}") from error
        timeout_s = max(source.timeout_s for source in sources)
        concurrency = max(source.concurrency for source in sources)
        if config.environment in SHIPPED:
            concurrency = sandbox.max_concurrent  # with more programs at once than cores, right ones time out
        calls = {"key": key, "log": config.run.folder / "feedback.log", "timeout_s": timeout_s}
        make_function = partial(_make_function, concurrency=concurrency, **calls)
        tools = read_tools(environment, key)
        self.tools = ToolBox(tools, make_function, max_calls=config.rollout.max_calls) if tools else None
        reply = getattr(environment, "reply", None)
        self._function: UserFunction | None = None
        if reply is not None or not tools:
            check_function(reply, f"{key}, its method reply,", "(prompt, messages)", num_arguments=2)
            self._function = make_function(reply, "environment")

    async def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Reply:
        """Return the reply to the last turn.

        Raises:
            FunctionFailed, RunStopped: As `UserFunction.call`.
        """
        if self._function is None:
            return Reply("", done=True)
        own_messages = [*map(dict, messages)]
        return await self._function.call(read_reply, prompt.prompt_id, prompt, own_messages)

    async def call_tools(self, prompt: Prompt, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Return the results of a turn's calls. RunStopped as `UserFunction.call`."""
        assert self.tools is not None, "calls are read only if there are tools"
        return await self.tools.call(prompt, calls)


def _make_function(function: Callable[..., Any], kind: str, **options: Any) -> UserFunction:
    return UserFunction(function, kind=kind, **options)


def read_reply(answer: Any) -> Reply:
    """Return a checked copy of an environment's answer. FunctionFailed for anything but a usable `Reply`."""
    if not isinstance(answer, Reply) or not isinstance(answer.text, str):
        raise FunctionFailed(f"returned {answer!r:.80}; it needs to return Reply(text, done, metrics)")
    is_empty = not (answer.text.strip() or answer.done)
    if len(answer.text) > MAX_ANSWER_CHARS or is_empty:
        raise FunctionFailed(
            f"returned a text of {len(answer.text)} characters; it needs 1 to {MAX_ANSWER_CHARS}, or done=True"
        )
    try:
        metrics = read_metrics(answer.metrics)
    except ValueError as error:
        raise FunctionFailed(f"returned an invalid Reply: {shorten(str(error))}") from None
    return Reply(replace_surrogates(answer.text), bool(answer.done), metrics)
