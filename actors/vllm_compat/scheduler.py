"""vLLM schedulers that send a response in few large messages instead of one message per token.

No caller reads a response before its end. A message per token, with three small arrays for its logprob, would be the
largest cost of an engine core after the model. vLLM imports this module in the core's process by the name in
`scheduler_cls`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

UNJOINABLE_FIELDS = ("prompt_token_id_logprobs", "routed_experts", "new_sampling_mask")  # fields of an output
MAX_KEPT_STEPS = 64  # per response: bounds the memory of the core


def join_outputs(outputs: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Join the outputs of one request.

    Args:
        outputs: At least one, in order; all logprobs have one width. The prompt's logprobs come with the first output.

    Raises:
        ValueError: An output has a field that cannot be joined.
    """
    first = outputs[0]
    last = outputs[-1]
    for name in UNJOINABLE_FIELDS:
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


class JoiningMixin:
    """Keep the outputs of each step until the response ends, MAX_KEPT_STEPS steps are kept, or the engine is paused.

    vLLM gives the weight version per message, not per token, and changes weights only while it is paused. A message
    with outputs from before and after a pause would have a wrong version.
    """

    pause_state: PauseState

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending: dict[str, list[EngineCoreOutput]] = {}  # by request id

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        if messages.keys() - {0}:
            raise ValueError(f"outputs for clients {sorted(messages)} cannot be joined; set join_outputs=false")
        pending = self._pending
        for message in messages.values():
            for output in message.outputs:
                pending.setdefault(output.request_id, []).append(output)
            due = [
                output.request_id
                for output in message.outputs
                if output.finished or len(pending[output.request_id]) >= MAX_KEPT_STEPS
            ]
            message.outputs = [join_outputs(pending.pop(request_id)) for request_id in due]
        if self._must_flush():
            message = messages.setdefault(0, EngineCoreOutputs())
            message.outputs = [*message.outputs, *map(join_outputs, pending.values())]
            pending.clear()
        return messages

    def has_requests(self) -> bool:
        """Return True while a paused engine keeps outputs: the core then makes one more step, without tokens."""
        return super().has_requests() or self._must_flush()  # type: ignore[misc,no-any-return]

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        for request in finished:
            self._pending.pop(request.request_id, None)
        return finished

    def _must_flush(self) -> bool:
        return self.pause_state == PauseState.PAUSED_ALL and bool(self._pending)


class JoiningScheduler(JoiningMixin, Scheduler):  # type: ignore[misc]
    """vLLM's `Scheduler` with joined outputs."""


class JoiningAsyncScheduler(JoiningMixin, AsyncScheduler):  # type: ignore[misc]
    """vLLM's `AsyncScheduler`, which plans one step ahead, with joined outputs."""
