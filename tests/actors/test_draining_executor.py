"""Calls of several workers after one failed: vLLM's own call, with queues in this process."""

from collections import deque
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from actors.vllm_compat import executor as executor_module
from actors.vllm_compat.executor import DrainingExecutor

SUCCESS = WorkerProc.ResponseStatus.SUCCESS
FAILURE = WorkerProc.ResponseStatus.FAILURE


class Replies(deque[tuple[Any, Any]]):
    """The queue of a worker's replies."""

    def dequeue(self, timeout: float | None) -> tuple[Any, Any]:
        if not self:
            raise TimeoutError
        return self.popleft()


class Workers:
    """Workers that reply to each call, in place of vLLM's queue of calls."""

    def __init__(self, replies: list[Replies]) -> None:
        self.replies = replies
        self.fails: dict[str, set[int]] = {}  # method -> ranks
        self.hanging: set[int] = set()

    def enqueue(self, call: tuple[str | bytes, tuple[Any, ...], dict[str, Any], int | None]) -> None:
        method, arguments, _, output_rank = call
        for rank, replies in enumerate(self.replies):
            if rank in self.hanging or output_rank not in (None, rank):
                continue
            if isinstance(method, bytes):
                replies.append((SUCCESS, cloudpickle.loads(method)("worker")))
            elif rank in self.fails.get(method, ()):
                replies.append((FAILURE, f"{method} of rank {rank}"))
            else:
                replies.append((SUCCESS, (method, rank, *arguments)))


def make_executor(kind: type[MultiprocExecutor], size: int = 3) -> tuple[Any, Workers]:
    """Return an executor without processes, and its workers."""
    executor: Any = kind.__new__(kind)
    workers = Workers([Replies() for _ in range(size)])
    executor.rpc_broadcast_mq = workers
    executor.response_mqs = workers.replies
    executor.futures_queue = deque()
    executor.is_failed = False
    executor.failure_callback = None
    return executor, workers


def call_load_twice(kind: type[MultiprocExecutor], failing: set[int]) -> Callable[[], Any]:
    executor, workers = make_executor(kind)
    workers.fails = {"load": failing}
    with pytest.raises(RuntimeError, match=f"load of rank {min(failing)}"):
        executor.collective_rpc("load")
    return lambda: executor.collective_rpc("load_again", args=(7,))


@pytest.mark.parametrize("failing", [{0}, {1}, {2}, {0, 2}, {0, 1, 2}])
def test_the_call_after_a_failed_one_has_its_own_replies(failing: set[int]) -> None:
    call = call_load_twice(DrainingExecutor, failing)
    assert call() == [("load_again", rank, 7) for rank in range(3)]
    assert call() == [("load_again", rank, 7) for rank in range(3)]


def test_vllm_s_own_executor_confuses_the_replies() -> None:
    """Once it does not, `DrainingExecutor` can go."""
    call = call_load_twice(MultiprocExecutor, {0, 1})
    with pytest.raises(RuntimeError, match="load of rank 1"):
        call()


def test_a_call_that_fails_on_the_only_rank_that_replies_leaves_nothing() -> None:
    executor, workers = make_executor(DrainingExecutor)
    workers.fails = {"load": {1}}
    with pytest.raises(RuntimeError, match="load of rank 1"):
        executor.collective_rpc("load", unique_reply_rank=1)
    assert executor.collective_rpc("other") == [("other", rank) for rank in range(3)]


def test_a_worker_that_hangs_after_a_failed_call_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "DRAIN_S", 0.0)
    executor, workers = make_executor(DrainingExecutor)
    workers.fails = {"load": {0}}
    workers.hanging = {2}
    ends: list[bool] = []
    executor.failure_callback = lambda: ends.append(True)
    with pytest.raises(RuntimeError, match="load of rank 0"):
        executor.collective_rpc("load")
    assert ends == [True]
    with pytest.raises(RuntimeError, match="Executor failed"):
        executor.collective_rpc("load")
