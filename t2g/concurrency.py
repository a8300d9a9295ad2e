"""Coroutines side by side that end together: whatever happens, nothing that was begun goes on unseen."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from t2g.errors import Stopped

STOP_POLL_S = 0.2  # a signal is noticed within this time

Result = TypeVar("Result")
Work = Coroutine[Any, Any, Result]


async def cancel_all(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    """Cancel those that still run, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def gather_all(works: Iterable[Work[Result]]) -> list[Result]:
    """What they return, in order. The first exception is raised, once the others have been ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def run_with_background(main: Work[Result], *others: Work[None]) -> Result:
    """What `main` returns, while `others` run beside it, which may return before it does.

    The first exception of any is raised, once all have been ended.
    """
    tasks = [asyncio.ensure_future(work) for work in (main, *others)]
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
    """What they return, in order; the first exception is raised at once. Stopped soon after `stop()` says so.

    The tasks are the caller's: those that still run go on.
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
    """`together`, but Stopped soon after `stop()` says so."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await wait_unless_stopped(tasks, stop)
    finally:
        await cancel_all(tasks)
