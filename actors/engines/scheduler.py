"""vLLM's scheduler, whose responses leave the engine core in few large messages and not token by token.

Nobody reads a response of ours before its end; a message for each token of each response, with three small arrays for
its logprob, is what an engine core would do most beside the model. vLLM loads this file in the core's process, by the
name in its `scheduler_cls`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

UNJOINED = ("prompt_token_id_logprobs", "routed_experts", "new_sampling_mask")  # fields of an output
MOST = 64  # steps of a response that are kept: what they take in the core is bounded


def joined(outputs: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Join the outputs of one request, at least one, in their order: tokens, logprobs of one width, and the prompt's
    logprobs, which come with the first output. Raises ValueError for outputs of another kind."""
    first, last = outputs[0], outputs[-1]
    for name in UNJOINED:
        if getattr(first, name) is not None:
            raise ValueError(f"{name} of request {first.request_id} cannot be joined; set join_outputs=false")
    if len(outputs) > 1:
        last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
        last.prefill_stats = first.prefill_stats
        last.new_prompt_logprobs_tensors = first.new_prompt_logprobs_tensors
        last.events = [event for output in outputs for event in output.events or ()] or None
        logprobs = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
        if logprobs:
            ids, values, ranks, _ = zip(*logprobs, strict=True)
            last.new_logprobs = LogprobsLists(np.concatenate(ids), np.concatenate(values), np.concatenate(ranks))
    return last


class _Keeps:
    """What a step gave is kept until its response ends, MOST steps are kept, or the engine is paused: vLLM says of a
    message, and not of a token, by which weights it was made, and changes weights while it is paused alone."""

    pause_state: PauseState

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._kept: dict[str, list[EngineCoreOutput]] = {}

    def update_from_output(self, *args: Any, **named: Any) -> dict[int, EngineCoreOutputs]:
        sent: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **named)  # type: ignore[misc]
        if sent.keys() - {0}:
            raise ValueError(f"outputs for clients {sorted(sent)} cannot be joined; set join_outputs=false")
        for message in sent.values():
            for output in message.outputs:
                self._kept.setdefault(output.request_id, []).append(output)
            due = [o.request_id for o in message.outputs if o.finished or len(self._kept[o.request_id]) >= MOST]
            message.outputs = [joined(self._kept.pop(request_id)) for request_id in due]
        if self._must_send():
            rest = sent.setdefault(0, EngineCoreOutputs())
            rest.outputs = [*rest.outputs, *map(joined, self._kept.values())]
            self._kept.clear()
        return sent

    def has_requests(self) -> bool:
        """So the core makes one step more, of no tokens, before it says that it is paused."""
        return super().has_requests() or self._must_send()  # type: ignore[misc,no-any-return]

    def finish_requests(self, *args: Any, **named: Any) -> Any:
        ended = super().finish_requests(*args, **named)  # type: ignore[misc]
        for request in ended:
            self._kept.pop(request.request_id, None)
        return ended

    def _must_send(self) -> bool:
        return self.pause_state == PauseState.PAUSED_ALL and bool(self._kept)


class KeepingScheduler(_Keeps, Scheduler):  # type: ignore[misc]
    """Beside vLLM's `Scheduler`."""


class KeepingAsyncScheduler(_Keeps, AsyncScheduler):  # type: ignore[misc]
    """Beside vLLM's `AsyncScheduler`, which plans a step ahead."""
