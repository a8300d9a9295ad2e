"""Concurrent coroutines that end together: no task is left running after an error or a stop."""

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from t2g.errors import Stopped

logger = logging.getLogger(__name__)

STOP_POLL_S = 0.2  # a signal is noticed within this time

Result = TypeVar("Result")
Work = Coroutine[Any, Any, Result]


async def cancel_all(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    """Cancel the tasks that still run, and wait until all have ended.

    An error that a task raises after its cancellation is logged, unless the caller is raising it already.
    """
    raised = sys.exception()
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in running:
        error = None if task.cancelled() else task.exception()
        if error is not raised:
            _log_error(error)


def _log_error(error: BaseException | None) -> None:
    """Log an error that no caller gets: for example that a last checkpoint could not be written."""
    if error is not None:
        logger.error("error after cancellation: %s: %s", type(error).__name__, error)


async def finish_in_thread(call: Callable[..., Result], *args: Any) -> Result:
    """Return the result of call(*args) in a thread.

    A cancelled caller waits for the end of the thread first, and an error of the thread is then logged.
    """
    thread = asyncio.ensure_future(asyncio.to_thread(call, *args))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        while not thread.done():  # also when it is cancelled again
            with suppress(asyncio.CancelledError):
                await asyncio.wait([thread])
        _log_error(thread.exception())
        raise


async def gather_all(works: Iterable[Work[Result]]) -> list[Result]:
    """Return the results in order. The first exception is raised after the other coroutines are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def run_with_background(main: Work[Result], *background: Work[None]) -> Result:
    """Return the result of `main` while `background` runs; background work may return earlier.

    The first exception of any coroutine is raised after all have ended.
    """
    tasks = [asyncio.ensure_future(work) for work in (main, *background)]
    try:
        while not tasks[0].done():
            running = [task for task in tasks if not task.done()]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        return tasks[0].result()
    finally:
        await cancel_all(tasks)


async def wait_unless_stopped(tasks: Sequence["asyncio.Future[Result]"], stop: Callable[[], bool]) -> list[Result]:
    """Return the results in order; the first exception is raised at once.

    The caller owns the tasks: after an exception, unfinished tasks keep running.

    Raises:
        Stopped: `stop()` returned True; it is polled every STOP_POLL_S.
    """
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, timeout=STOP_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
        if stop():
            raise Stopped
        for task in done:
            task.result()
    return [task.result() for task in tasks]


async def gather_unless_stopped(works: Iterable[Work[Result]], stop: Callable[[], bool]) -> list[Result]:
    """Run `gather_all`, but raise Stopped soon after `stop()` returns True."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await wait_unless_stopped(tasks, stop)
    finally:
        await cancel_all(tasks)
