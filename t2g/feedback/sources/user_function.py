"""Calls of a user's function, which is untrusted: at most so many at once, each with a deadline and a reason."""

import asyncio
import inspect
import math
import random
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from t2g.config.python_functions import import_object
from t2g.config.secrets import mask_secrets
from t2g.errors import MissingLocally, RunStopped, UserError
from t2g.feedback.sources.chat_client import FailureLog, PerLoop
from t2g.feedback.sources.watchdog import WATCHDOG, WatchedCall
from t2g.text.segments import printable

MAX_TIMEOUTS = 3  # in a row
MAX_REASON_CHARS = 300
BACKOFF_S = 1.0  # before the first retry, doubled before each further one
MAX_BACKOFF_S = 60.0

Result = TypeVar("Result")


class FunctionFailed(Exception):
    """A call without a usable answer; the message is the reason, a sentence."""

    def __init__(self, reason: str, *, error: str = "") -> None:
        super().__init__(reason)
        self.error = error  # that the function raised, with its type: it may succeed when it is called again


class UserFunction:
    """A user's function.

    Each call of a plain function has a thread of its own, which a call that exceeds `timeout_s` keeps: a thread cannot
    be stopped, and stays watched until the function returns. An async function runs on one event loop in a thread of
    its own, so that blocking code in it does not block the driver. Code that holds the interpreter lock blocks it all
    the same: the watchdog then ends the process.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        kind: str,
        key: str,
        timeout_s: float,
        concurrency: int = 1,
        retries: int = 0,
        log: Path | None = None,
        section: str = "feedback",
    ) -> None:
        """Prepare the calls.

        Args:
            kind: "feedback function", for messages.
            key: The config key and value that name it, for messages.
            concurrency: Maximum number of concurrent calls; 1 for a function that keeps state.
            retries: Further calls of a function that raised, each later than the one before.
            log: File for the first traceback of each kind; its folder is created if needed.
            section: Section of the config that has timeout_s.
        """
        self._function = function
        self._kind = kind
        self._key = key
        self._timeout_s = timeout_s
        self._section = section
        self._retries = retries
        self._failures = FailureLog()
        self._log = log
        self._logged_types: set[str] = set()  # types of errors
        self._num_timeouts = 0  # since the last answer
        self._timed_out_at = -math.inf  # time of the last counted timeout
        self._calls = PerLoop(lambda: asyncio.Semaphore(concurrency))

    async def call(self, read: Callable[[Any], Result], prompt_id: str, *arguments: Any, **options: Any) -> Result:
        """Return what `read` makes of the function's answer; it runs where the function runs, as an answer may be lazy.

        Args:
            options: Keyword arguments, which are passed if the function takes them.
            read: Raises FunctionFailed for an answer of another form.
            prompt_id: The prompt of the call, for messages.

        Raises:
            FunctionFailed: The function raised, gave no answer in time, or its answer has another form.
            RunStopped: MAX_TIMEOUTS calls in a row, begun one after the other, exceeded `timeout_s`.
        """
        async with self._calls.get():
            self._check_timeouts()
            WATCHDOG.start()
            accepted = select_options(self._function, options)
            call = partial(self._function, *arguments, **accepted)
            answer = await self._call_once(call, read, prompt_id)
            for attempt in range(self._retries):
                if not isinstance(answer, FunctionFailed) or not answer.error:
                    break
                wait_s = min(BACKOFF_S * 2**attempt, MAX_BACKOFF_S)
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))  # concurrent calls must not return together
                answer = await self._call_once(call, read, prompt_id)
        if isinstance(answer, FunctionFailed):
            reason = mask_secrets(f"the {self._kind} {answer}")
            kind = reason.partition(":")[0]
            self._failures.log(kind, f"{self._key}: {reason}, on prompt {prompt_id}")
            self._check_timeouts()
            raise FunctionFailed(reason, error=answer.error)
        return answer

    async def _call_once(
        self, call: Callable[[], Any], read: Callable[[Any], Result], prompt_id: str
    ) -> Result | FunctionFailed:
        started = time.monotonic()
        watched = WatchedCall(
            function=f"{self._key}: the {self._kind}",
            prompt_id=prompt_id,
            timeout=f"{self._section}.timeout_s={self._timeout_s:g}",
            deadline=started + self._timeout_s,
            log=self._log,
        )
        try:
            answer = await asyncio.wait_for(self._start_call(call, read, watched), self._timeout_s)
        except TimeoutError:
            watched.has_timed_out = True
            if started >= self._timed_out_at:  # concurrent calls that time out together count once
                self._num_timeouts += 1
                self._timed_out_at = time.monotonic()
            return FunctionFailed(f"gave no answer within {self._section}.timeout_s={self._timeout_s:g}")
        self._num_timeouts = 0
        return answer

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """Start an event loop in a daemon thread, for as long as the process lives."""
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="async user function", daemon=True).start()
        return loop

    def _start_call(
        self, call: Callable[[], Any], read: Callable[[Any], Result], watched: WatchedCall
    ) -> Awaitable[Result | FunctionFailed]:
        def answer() -> Result | FunctionFailed:
            try:
                with WATCHDOG.watch(watched):
                    return read(call())
            except BaseException as error:  # noqa: BLE001 sys.exit in a function must not end the run
                return self._make_failed(error)

        async def answer_async() -> Result | FunctionFailed:
            try:
                with WATCHDOG.watch(watched):
                    return read(await call())
            except BaseException as error:  # noqa: BLE001 as above
                return self._make_failed(error)

        call_method = type(self._function).__call__
        is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(call_method)
        if not is_async:
            return run_in_thread(answer)
        future = asyncio.run_coroutine_threadsafe(answer_async(), self._loop)
        return asyncio.wrap_future(future)

    def _make_failed(self, error: BaseException) -> FunctionFailed:
        if isinstance(error, FunctionFailed):
            return error
        message = mask_secrets(traceback.format_exception_only(error)[-1].strip())  # str(error) may raise
        reference = self._log_traceback(error)
        error_text = shorten(printable(message))
        return FunctionFailed(f"raised {error_text}{reference}", error=error_text)

    def _log_traceback(self, error: BaseException) -> str:
        """Write the traceback of the first error of its type to the log; return a reference to it, or ''."""
        kind = type(error).__name__
        if self._log is None or kind in self._logged_types:
            return ""
        self._logged_types.add(kind)
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            text = "".join(traceback.format_exception(error))
            with self._log.open("a", encoding="utf-8", errors="replace") as file:
                file.write(mask_secrets(text))
        except OSError:
            return ""
        return f" (traceback in {self._log})"

    def _check_timeouts(self) -> None:
        if self._num_timeouts >= MAX_TIMEOUTS:
            raise RunStopped(
                f"{self._key}: the {self._kind} gave no answer {MAX_TIMEOUTS} times in a row, in {self._timeout_s:g} s "
                f"each; correct the function, or raise {self._section}.timeout_s"
            )


def load_function(
    import_path: str, key: str, form: str, *, num_arguments: int = 0, options: Iterable[str] = ()
) -> Callable[..., Any]:
    """Return the function at `pkg.mod:function`. It is not called.

    Args:
        key: The config key and value that name it, for messages.
        form: What it is called with, for messages.
        num_arguments: Number of its positional arguments.
        options: Keyword arguments that are passed if it takes them.

    Raises:
        MissingLocally: The module does not exist on this machine.
        UserError: The function does not exist, or cannot be imported or called.
    """
    try:
        function = import_object(import_path)
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything
        kind = MissingLocally if isinstance(error, ModuleNotFoundError) else UserError
        raise kind(f"{key} cannot be imported: {describe_error(error)}") from error
    check_function(function, key, form, num_arguments=num_arguments, options=options)
    return function


def check_function(function: Any, key: str, form: str, *, num_arguments: int, options: Iterable[str] = ()) -> None:
    """Raise UserError if this is no function, or cannot be called so; the arguments are those of `load_function`."""
    if not callable(function):
        raise UserError(f"{key} has the type {type(function).__name__}; it needs to be a function")
    text = getattr(function, "__name__", "")
    try:
        signature = inspect.signature(function)
        text += str(signature)
        accepted = select_options(function, dict.fromkeys(options))
        signature.bind(*range(num_arguments), **accepted)
    except (TypeError, ValueError) as error:  # a built-in class has no signature
        raise UserError(f"{key} cannot be called with {form}, but is {text}: {error}") from None


def describe_error(error: BaseException) -> str:
    """Return type and message of an error in a user's code, without the secrets that it repeats."""
    return mask_secrets(f"{type(error).__name__}: {error}")


def select_options(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the keyword arguments that the function takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_all:
        return dict(options)
    return {name: value for name, value in options.items() if name in parameters}


def shorten(text: str) -> str:
    """Return at most MAX_REASON_CHARS characters, cut at a blank."""
    cut = text[:MAX_REASON_CHARS]
    if text == cut:
        return text
    cut_at_blank = cut.rpartition(" ")[0] or cut
    return f"{cut_at_blank} …"


def run_in_thread(call: Callable[[], Result]) -> Awaitable[Result]:
    """Start `call`, which must not raise, in a daemon thread, which does not keep the process alive if it hangs."""
    result: Future[Result] = Future()
    result.set_running_or_notify_cancel()  # else a timeout cancels it, and set_result raises in the thread
    threading.Thread(target=lambda: result.set_result(call()), name="user function", daemon=True).start()
    return asyncio.wrap_future(result)
