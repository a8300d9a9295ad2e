"""vLLM's executor for engines on several GPUs, kept in step with its workers after a failed call."""

import time
from typing import Any
from uuid import uuid4

import cloudpickle
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from actors.vllm_compat.transports import CONNECT_S, STALL_S

DRAIN_S = STALL_S + CONNECT_S + 30  # longer than a worker waits at the rendezvous and for NCCL


class DrainingExecutor(MultiprocExecutor):
    """vLLM's MultiprocExecutor, without replies that a failed call leaves behind.

    Its `collective_rpc` raises at the first worker that failed, and leaves the replies of the workers after it in their
    queues. The next call would take these for its own (vLLM issue 58242): after one failed weight update every further
    one would fail. After a call that timed out nothing is read: its worker may still be at it.
    """

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().collective_rpc(method, *args, **kwargs)
        except RuntimeError:
            if not self.is_failed:
                self._drain()
            raise

    def _drain(self) -> None:
        """Have each worker reply with a marker, and drop the replies before it."""
        marker = uuid4().hex
        reply_marker = cloudpickle.dumps(lambda worker: marker)
        self.rpc_broadcast_mq.enqueue((reply_marker, (), {}, None))
        last_reply = (WorkerProc.ResponseStatus.SUCCESS, marker)
        deadline = time.monotonic() + DRAIN_S
        try:
            for replies in self.response_mqs:
                while replies.dequeue(timeout=max(0.0, deadline - time.monotonic())) != last_reply:
                    pass
        except TimeoutError:  # a worker hangs: the engine ends, and the fleet starts another one
            self.is_failed = True
            if self.failure_callback is not None:
                self.failure_callback()
