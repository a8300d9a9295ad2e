"""How an engine core's answers leave it: nothing is lost or told under other weights, in few messages."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from actors.engines.engine import SCHEDULERS
from actors.engines.scheduler import MOST, KeepingAsyncScheduler, KeepingScheduler, _Keeps


class Steps:
    """In place of vLLM's scheduler: a step gives each request the next of its tokens; none where the engine is paused.
    A token is its own logprob and rank."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self.requests: dict[str, Any] = {
            str(number): SimpleNamespace(length=length, done=0) for number, length in enumerate(lengths)
        }
        self.pause_state = PauseState.UNPAUSED

    def update_from_output(self) -> dict[int, EngineCoreOutputs]:
        if self.pause_state == PauseState.PAUSED_ALL:
            return {}
        outputs = [self._next(name) for name in [*self.requests]]
        return {0: EngineCoreOutputs(outputs=outputs)} if outputs else {}

    def _next(self, name: str) -> EngineCoreOutput:
        request = self.requests[name]
        token, request.done = request.done, request.done + 1
        ended = request.done == request.length
        if ended:
            del self.requests[name]
        column = np.asarray([token])
        return EngineCoreOutput(
            request_id=name, new_token_ids=[token], finish_reason=FinishReason.LENGTH if ended else None,
            new_logprobs=LogprobsLists(column[:, None], -column[:, None].astype(np.float32), column),
        )  # fmt: skip

    def has_requests(self) -> bool:
        return self.pause_state != PauseState.PAUSED_ALL and bool(self.requests)

    def finish_requests(self, name: str) -> None:
        self.requests.pop(name, None)


class Kept(_Keeps, Steps):
    pass


@dataclass
class Core:
    """As vLLM's: each message carries the version of the weights, which change while it is paused and idle alone."""

    scheduler: Kept
    version: int = 0
    messages: int = 0
    told: dict[str, list[tuple[int, float, int]]] = field(default_factory=dict)  # (token, logprob, version)
    ended: set[str] = field(default_factory=set)

    def step(self) -> None:
        for message in self.scheduler.update_from_output().values():
            for output in message.outputs:
                self.messages += 1
                ids, logprobs, ranks, _ = output.new_logprobs  # type: ignore[misc]
                assert ids[:, 0].tolist() == ranks.tolist() == output.new_token_ids
                rows = zip(output.new_token_ids, logprobs[:, 0].tolist(), strict=True)
                self.told.setdefault(output.request_id, []).extend((t, p, self.version) for t, p in rows)
                if output.finished:
                    self.ended.add(output.request_id)

    def new_weights(self) -> None:
        self.scheduler.pause_state = PauseState.PAUSED_ALL
        while self.scheduler.has_requests():
            self.step()
        self.version += 1
        self.scheduler.pause_state = PauseState.UNPAUSED


EVENTS = st.lists(st.sampled_from(["step"] * 30 + ["weights", "0", "1"]), max_size=400)


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4), events=EVENTS)
@settings(max_examples=60, deadline=None)
def test_every_token_is_told_once_in_order_and_by_its_weights(lengths: list[int], events: list[str]) -> None:
    core = Core(Kept(lengths))
    wanted: dict[str, list[tuple[int, float, int]]] = {}
    aborted: set[str] = set()
    for event in [*events, *["step"] * max(lengths)]:
        if event == "step":
            for name, request in core.scheduler.requests.items():
                wanted.setdefault(name, []).append((request.done, -float(request.done), core.version))
            core.step()
        elif event == "weights":
            core.new_weights()
        else:
            aborted |= {event} & core.scheduler.requests.keys()
            core.scheduler.finish_requests(event)
            assert event not in core.scheduler._kept
    assert core.ended == {str(number) for number in range(len(lengths))} - aborted
    assert {name: told for name, told in core.told.items() if name in core.ended} == {
        name: told for name, told in wanted.items() if name in core.ended
    }
    assert core.scheduler._kept == {} and not core.scheduler.has_requests()


def test_a_response_leaves_in_as_many_messages_as_it_has_sixty_fours() -> None:
    core = Core(Kept([200, 1]))
    for _ in range(200):
        core.step()
    assert core.messages == math.ceil(200 / MOST) + 1


def test_what_is_joined_passes_through_vllms_own_encoding() -> None:
    scheduler = Kept([3])
    for _ in range(3):
        sent = scheduler.update_from_output()
    encoded = MsgpackEncoder().encode(sent[0])
    (output,) = MsgpackDecoder(EngineCoreOutputs).decode(encoded).outputs
    assert output.new_token_ids == [0, 1, 2] and output.new_logprobs.logprobs.tolist() == [[0.0], [-1.0], [-2.0]]


def test_they_are_vllms_schedulers() -> None:
    assert issubclass(KeepingScheduler, Scheduler) and issubclass(KeepingAsyncScheduler, AsyncScheduler)
    classes = [KeepingScheduler, KeepingAsyncScheduler]
    assert [f"{kind.__module__}.{kind.__name__}" for kind in classes] == [*SCHEDULERS]
