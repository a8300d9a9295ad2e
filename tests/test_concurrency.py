"""Whatever ends a group of coroutines, none of them goes on behind it."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from t2g.concurrency import (
    cancel_all,
    finish_in_thread,
    gather_all,
    gather_unless_stopped,
    run_with_background,
    wait_unless_stopped,
)
from t2g.errors import Stopped


class Works:
    """Coroutines that tell what became of them."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def rests(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # an ending takes a moment
            self.events.append("ended")
            raise

    async def fails_at_its_end(self, error: Exception) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise error

    async def gives(self, value: int, rounds: int = 3) -> int:
        for _ in range(rounds):
            await asyncio.sleep(0)
        self.events.append(f"gave {value}")
        return value

    async def fails(self, rounds: int = 3) -> None:
        for _ in range(rounds):
            await asyncio.sleep(0)
        raise ValueError("failed")


def tidy(work: Coroutine[Any, Any, Any]) -> Any:
    """What it returns; nothing else runs at its end, error or not."""

    async def run() -> Any:
        try:
            return await work
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return asyncio.run(run())


def test_results_come_in_order_of_the_works() -> None:
    works = Works()
    assert tidy(gather_all(works.gives(i, rounds=5 - i) for i in range(5))) == [0, 1, 2, 3, 4]
    assert works.events == [f"gave {i}" for i in (4, 3, 2, 1, 0)]
    assert tidy(gather_all([])) == []


def test_the_first_error_ends_the_others_before_it_is_raised() -> None:
    works = Works()
    with pytest.raises(ValueError, match="failed"):
        tidy(gather_all([works.rests(), works.fails(), works.rests(), works.gives(1, rounds=1)]))
    assert works.events == ["gave 1", "ended", "ended"]


def test_a_cancelled_group_ends_its_members() -> None:
    works = Works()

    async def cancelled() -> None:
        task = asyncio.ensure_future(gather_all([works.rests(), works.rests()]))
        await works.gives(1)  # they are under way
        await cancel_all([task])
        assert task.cancelled()

    tidy(cancelled())
    assert works.events == ["gave 1", "ended", "ended"]


def test_the_main_work_ends_what_runs_beside_it() -> None:
    works = Works()
    assert tidy(run_with_background(works.gives(7, rounds=9), works.rests(), works.gives(1), works.rests())) == 7
    assert works.events == ["gave 1", "gave 7", "ended", "ended"]


def test_an_error_beside_the_main_work_ends_it() -> None:
    works = Works()
    with pytest.raises(ValueError, match="failed"):
        tidy(run_with_background(works.rests(), works.gives(1), works.fails(), works.rests()))
    assert works.events == ["gave 1", "ended", "ended"]


def test_an_error_at_the_end_of_a_cancelled_work_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Such as a last checkpoint for which the disk has no room."""
    works = Works()
    with pytest.raises(ValueError, match="failed"):
        tidy(run_with_background(works.fails_at_its_end(OSError("the disk is full")), works.fails()))
    assert caplog.messages == ["error after cancellation: OSError: the disk is full"]

    caplog.clear()
    lost = ValueError("learner rank 1 died")

    async def fail() -> None:
        await works.gives(1)
        raise lost

    with pytest.raises(ValueError, match="rank 1 died"):
        tidy(gather_all([works.fails_at_its_end(lost), fail(), works.rests()]))
    assert caplog.messages == [], "the caller raises it"


def test_an_error_of_a_thread_whose_caller_was_cancelled_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    began = threading.Event()
    goes_on = threading.Event()

    def write() -> None:
        began.set()
        goes_on.wait(20)
        raise OSError("the disk is full")

    async def cancelled() -> None:
        task = asyncio.ensure_future(finish_in_thread(write))
        await asyncio.to_thread(began.wait, 20)
        task.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    tidy(cancelled())
    assert caplog.messages == ["error after cancellation: OSError: the disk is full"]


def test_an_error_of_the_main_work_is_its_own() -> None:
    works = Works()
    with pytest.raises(ValueError, match="failed"):
        tidy(run_with_background(works.fails(), works.rests()))
    assert works.events == ["ended"]


def test_a_stop_ends_what_runs() -> None:
    works = Works()
    with pytest.raises(Stopped):
        tidy(gather_unless_stopped([works.gives(1), works.rests()], lambda: bool(works.events)))
    assert works.events == ["gave 1", "ended"]
    assert tidy(gather_unless_stopped([works.gives(1), works.gives(2)], lambda: False)) == [1, 2]
    assert tidy(gather_unless_stopped([], lambda: False)) == []
    with pytest.raises(ValueError, match="failed"):
        tidy(gather_unless_stopped([works.rests(), works.fails()], lambda: False))


def test_foreign_tasks_continue_after_a_stop() -> None:
    works = Works()

    async def waiting() -> None:
        tasks = [asyncio.ensure_future(works.gives(1)), asyncio.ensure_future(works.rests())]
        with pytest.raises(Stopped):
            await wait_unless_stopped(tasks, lambda: bool(works.events))
        assert not tasks[1].done()
        await cancel_all(tasks)
        assert await wait_unless_stopped(tasks[:1], lambda: False) == [1]

    tidy(waiting())
