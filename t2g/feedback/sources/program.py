"""Feedback from a task's own function or from a user's function, which is untrusted."""

import asyncio
import importlib
import inspect
import math
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from t2g.errors import MissingLocally, RunStopped, UserError
from t2g.feedback.parse import check_critique, make_failed_feedback, make_feedback, read_judgement
from t2g.feedback.sources.aligning import find_spans
from t2g.feedback.sources.chat_client import FailureLog, PerLoop
from t2g.interfaces import Aligner, FeedbackSource
from t2g.tasks.base import FeedbackFunction
from t2g.types import Prompt, SpanFeedback

MAX_TIMEOUTS = 3  # in a row
MAX_REASON_CHARS = 300
FeedbackOrCritique = SpanFeedback | str  # a text is a critique whose spans the aligner finds
OPTIONS = ("payload", "messages")  # keyword arguments that a function may have


class ProgramFeedback(FeedbackSource):
    """The judgements of a feedback function.

    The function maps prompt text and response to a judgement, see `t2g.feedback.parse.read_judgement`, or to a critique
    alone, a text, of which the aligner finds the spans. An exception is failed feedback with a reason. Each call of a
    plain function has a thread of its own, which a call that exceeds `timeout_s` keeps. An async function runs on one
    event loop in a thread of its own, so that blocking code in it does not block the driver.
    """

    name = "program"

    def __init__(
        self,
        function: FeedbackFunction | str,
        *,
        timeout_s: float = 120,
        concurrency: int = 1,
        log: Path | None = None,
        aligner: Aligner | None = None,
        section: str = "feedback",
    ) -> None:
        """Load the function.

        Args:
            function: The function or its import path. It is called as `function(prompt_text, response_text)`, with
                `payload=` and `messages=` where it has such parameters.
            concurrency: Maximum number of concurrent calls; 1 for a function that keeps state.
            log: File for the first traceback of each kind; its folder is created if needed.
            aligner: Finds the spans of a text alone; without it such an answer is failed feedback.
            section: Section of the config that names the function.

        Raises:
            UserError: As `load_function`.
        """
        self._function = load_function(function, section) if isinstance(function, str) else function
        self._path = function if isinstance(function, str) else _path_of(function)
        paid = function if isinstance(function, str) else ""  # the task's own program is free
        self.journal_version = paid or (aligner.journal_version if aligner else "")
        self._timeout_s = timeout_s
        self._section, self._key = section, f"{section}.source={paid or 'program'}"
        self._options = _find_options(self._function)
        self._failures, self._log, self._kinds = FailureLog(), log, set[str]()
        self._num_timeouts, self._timed_out_at = 0, -math.inf  # since the last answer; time of the last counted timeout
        self._calls = PerLoop(lambda: asyncio.Semaphore(concurrency))
        self._aligner, self.fleet = aligner, aligner.fleet if aligner else None
        self._loop = start_event_loop() if _is_async(self._function) else None

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        """Return the feedback on one response.

        Raises:
            RunStopped: MAX_TIMEOUTS calls in a row, begun one after the other, exceeded `timeout_s`.
        """
        async with self._calls.get():
            self._check_timeouts()
            started = time.monotonic()
            try:
                feedback: FeedbackOrCritique = await asyncio.wait_for(
                    self._start_call(prompt, response_text), self._timeout_s
                )
                self._num_timeouts = 0
            except TimeoutError:
                if started >= self._timed_out_at:  # concurrent calls that time out together count once
                    self._num_timeouts, self._timed_out_at = self._num_timeouts + 1, time.monotonic()
                feedback = self._make_failed(f"gave no answer within {self._section}.timeout_s={self._timeout_s:g}")
        if isinstance(feedback, str):
            own = make_feedback(feedback, (), (), response_text, source=self.name, version=self._path)
            assert self._aligner is not None, "see _read"
            return await find_spans(self._aligner, prompt, response_text, own) if own.critique.strip() else own
        if feedback.status == "failed":
            kind = feedback.reason.partition(":")[0]
            self._failures.log(kind, f"{self._key}: {feedback.reason}, on prompt {prompt.prompt_id}")
            self._check_timeouts()
        return feedback

    def _start_call(self, prompt: Prompt, response_text: str) -> Awaitable[FeedbackOrCritique]:
        """Start a call in its thread or on the event loop, where all code of the function runs, its iterators too."""
        messages = prompt.messages or ({"role": "user", "content": prompt.prompt_text},)
        options = {"payload": prompt.payload, "messages": [*map(dict, messages)]}
        options = {name: options[name] for name in self._options}
        call = partial(self._function, prompt.prompt_text, response_text, **options)

        def answer() -> FeedbackOrCritique:
            try:
                return self._read(call(), response_text)
            except BaseException as error:  # noqa: BLE001 sys.exit in a function must not end the run
                return self._make_raised_feedback(error)

        async def answer_async() -> FeedbackOrCritique:
            try:
                return self._read(await call(), response_text)
            except BaseException as error:  # noqa: BLE001 as above
                return self._make_raised_feedback(error)

        if self._loop is None:
            return run_in_thread(answer)
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer_async(), self._loop))

    def _read(self, answer: Any, response_text: str) -> FeedbackOrCritique:
        if isinstance(answer, str) and self._aligner is None:
            return self._make_failed(
                f"returned a critique alone: {self._section}.align=llm or reward_model finds its spans, or return "
                "(critique, good pieces, poor pieces)"
            )
        try:
            if isinstance(answer, str):
                return check_critique(answer)
            return read_judgement(answer, response_text, source=self.name, version=self._path)
        except ValueError as error:
            return self._make_failed(f"returned an invalid judgement: {_shorten(str(error))}")

    def _make_raised_feedback(self, error: BaseException) -> SpanFeedback:
        message = traceback.format_exception_only(error)[-1].strip()  # str(error) may raise
        return self._make_failed(f"raised {_shorten(message)}{self._log_traceback(error)}")

    def _log_traceback(self, error: BaseException) -> str:
        """Write the traceback of the first error of its type to the log; return a reference to it, or ''."""
        kind = type(error).__name__
        if self._log is None or kind in self._kinds:
            return ""
        self._kinds.add(kind)
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a", encoding="utf-8", errors="replace") as file:
                file.write("".join(traceback.format_exception(error)))
        except OSError:
            return ""
        return f" (traceback in {self._log})"

    def _make_failed(self, sentence: str) -> SpanFeedback:
        reason = f"the feedback function {sentence}"
        return make_failed_feedback("failed", source=self.name, version=self._path, reason=reason)

    def _check_timeouts(self) -> None:
        if self._num_timeouts >= MAX_TIMEOUTS:
            raise RunStopped(
                f"feedback function {self._path} gave no answer {MAX_TIMEOUTS} times in a row, in {self._timeout_s:g} "
                f"s each; correct the function, or raise {self._section}.timeout_s"
            )


def load_function(import_path: str, section: str = "feedback") -> FeedbackFunction:
    """Return the function at `pkg.mod:function`, which `source` of this section of the config names.

    Raises:
        MissingLocally: The module does not exist on this machine.
        UserError: The function does not exist, or cannot be imported or called.
    """
    module_name, _, attribute = import_path.partition(":")
    key = f"{section}.source={import_path}"
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything
        kind = MissingLocally if isinstance(error, ModuleNotFoundError) else UserError
        raise kind(f"{key} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UserError(f"{key} has the type {type(function).__name__}; it needs to be a function")
    try:
        inspect.signature(function).bind("prompt", "response", **dict.fromkeys(_find_options(function)))
    except TypeError as error:
        raise UserError(
            f"{key} cannot be called with (prompt_text, response_text) and perhaps {'= or '.join(OPTIONS)}=, but is "
            f"{function.__name__}{inspect.signature(function)}: {error}"
        ) from None
    return function


def _find_options(function: FeedbackFunction) -> list[str]:
    """Return those of OPTIONS that the function takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return [name for name in OPTIONS if takes_all or name in parameters]


def _is_async(function: FeedbackFunction) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _shorten(text: str) -> str:
    """Return at most MAX_REASON_CHARS characters, cut at a blank."""
    cut = text[:MAX_REASON_CHARS]
    return text if text == cut else f"{cut.rpartition(' ')[0] or cut} …"


def _path_of(function: FeedbackFunction) -> str:
    """Return where a function comes from; for a closure the function that made it."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}:{name.partition('.<locals>')[0]}"


def run_in_thread(call: Callable[[], FeedbackOrCritique]) -> Awaitable[FeedbackOrCritique]:
    """Start `call`, which must not raise, in a daemon thread, which does not keep the process alive if it hangs."""
    result: Future[FeedbackOrCritique] = Future()
    result.set_running_or_notify_cancel()  # else a timeout cancels it, and set_result raises in the thread
    threading.Thread(target=lambda: result.set_result(call()), name="feedback function", daemon=True).start()
    return asyncio.wrap_future(result)


def start_event_loop() -> asyncio.AbstractEventLoop:
    """Start an event loop in a daemon thread, for as long as the process lives."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async feedback function", daemon=True).start()
    return loop
