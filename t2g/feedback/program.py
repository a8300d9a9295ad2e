"""Feedback from a program: a plain function of the user's, called from the loop without being trusted."""

import asyncio
import importlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

from t2g.errors import UserError
from t2g.feedback.parse import make_feedback, no_feedback, read_judgement
from t2g.feedback.waiting import FailureLog, PerLoop
from t2g.types import Prompt, SpanFeedback

Critic = Callable[..., Any]  # (prompt_text, response_text[, payload=]) -> (critique, good quotes, poor quotes)


class ProgramFeedback:
    """A plain function from prompt text and response to (critique, good quotes, poor quotes).

    Called as `critic(prompt_text, response_text)`, and with `payload=` too where it has a parameter of that name. It
    may return a dict with those keys as well; for quotes see `t2g.feedback.parse.read_quote`. One call runs at a time,
    since a plain function may keep state.
    """

    name = "program"

    def __init__(self, import_path: str, *, timeout_s: float = 120) -> None:
        self._critic = load_function(import_path)
        self._path = import_path
        self._timeout_s = timeout_s
        parameters = inspect.signature(self._critic).parameters.values()
        self._wants_payload = any(p.name == "payload" or p.kind is p.VAR_KEYWORD for p in parameters)
        self._failures = FailureLog()
        self._turn = PerLoop(lambda: asyncio.Semaphore(1))

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        keywords = {"payload": prompt.payload} if self._wants_payload else {}
        try:
            async with self._turn.get():
                answer = await _in_thread(self._timeout_s, self._critic, prompt.prompt_text, response_text, **keywords)
            critique, good, poor = read_judgement(answer)
        except TimeoutError:
            self._fail("timeout", prompt, f"gave no answer within feedback.timeout_s={self._timeout_s:g}")
        except _CriticRaised as raised:
            error = raised.__cause__
            self._fail(type(error).__name__, prompt, f"raised {type(error).__name__}: {error!s:.200}")
        except ValueError as error:
            self._fail("rubbish", prompt, f"returned rubbish: {error}")
        else:
            return make_feedback(critique, good, poor, response_text, source=self.name, version=self._path)
        return no_feedback("failed", source=self.name, version=self._path)

    def _fail(self, kind: str, prompt: Prompt, sentence: str) -> None:
        self._failures.say(kind, f"critic {self._path} {sentence}, on prompt {prompt.prompt_id}")


def load_function(import_path: str) -> Critic:
    """The function at `pkg.mod:function`. UserError when there is none, or importing it fails."""
    module_name, _, attribute = import_path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise UserError(f"feedback.source={import_path} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UserError(f"feedback.source={import_path} is a {type(function).__name__}; it needs to be a function")
    return function


class _CriticRaised(Exception):
    """Carries whatever the critic raised as its cause, apart from what our own code may raise."""


async def _in_thread(timeout_s: float, function: Critic, *args: Any, **keywords: Any) -> Any:
    """The function's result from a daemon thread: one that hangs is left behind and cannot keep the process alive."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not result.done():
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

    def run() -> None:
        value, failure = None, None
        try:
            value = function(*args, **keywords)
        except BaseException as error:  # noqa: BLE001 a critic that calls sys.exit must not end the run either
            failure = _CriticRaised()
            failure.__cause__ = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, name="critic", daemon=True).start()
    return await asyncio.wait_for(result, timeout_s)
