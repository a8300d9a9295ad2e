"""How an engine core's answers leave it: nothing is lost or told under other weights, in few messages."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from actors.engines.engine import JOINING_ASYNC_SCHEDULER, JOINING_SCHEDULER
from actors.vllm_compat.scheduler import (
    MAX_KEPT_STEPS,
    JoiningAsyncScheduler,
    JoiningMixin,
    JoiningScheduler,
    join_outputs,
)
from t2g.types import FinishReason as OurFinishReason


class Steps:
    """In place of vLLM's scheduler, which plans a step ahead: a step gives each request the next of its tokens, also
    the one that was under way when the engine was paused. A token is its own logprob and rank."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self.requests = {
            str(number): SimpleNamespace(request_id=str(number), length=length, done=0)
            for number, length in enumerate(lengths)
        }
        self.pause_state = PauseState.UNPAUSED
        self.under_way = False  # a step, in a paused engine
        self.wrong = ""  # what ends with an error in the next step

    def update_from_output(self) -> dict[int, EngineCoreOutputs]:
        paused = self.pause_state == PauseState.PAUSED_ALL
        if paused and not self.under_way:
            return {}
        self.under_way = False
        outputs = [self._next(name) for name in [*self.requests]]
        failed = self.finish_requests(self.wrong)  # the mixin's, as vLLM's own calls it
        self.wrong = ""
        outputs += [
            EngineCoreOutput(request_id=request.request_id, new_token_ids=[], finish_reason=FinishReason.ERROR)
            for request in failed
        ]
        return {0: EngineCoreOutputs(outputs=outputs)} if outputs else {}

    def _next(self, name: str) -> EngineCoreOutput:
        request = self.requests[name]
        first = request.done == 0
        token = token_of(name, request.done)
        request.done = request.done + 1
        ended = request.done == request.length
        if ended:
            del self.requests[name]
        column = np.asarray([token])
        logprobs = LogprobsLists(column[:, None], -column[:, None].astype(np.float32), column)
        scheduled = EngineCoreEvent(EngineCoreEventType.SCHEDULED, float(token))
        return EngineCoreOutput(
            request_id=name, new_token_ids=[token], finish_reason=FinishReason.LENGTH if ended else None,
            new_logprobs=logprobs, prefill_stats=PrefillStats(num_prompt_tokens=token) if first else None,
            events=[scheduled],
        )  # fmt: skip

    def has_requests(self) -> bool:
        return self.under_way or (self.pause_state != PauseState.PAUSED_ALL and bool(self.requests))

    def finish_requests(self, name: str) -> list[Any]:
        ended = self.requests.pop(name, None)
        return [ended] if ended else []


def token_of(name: str, place: int) -> int:
    return 1000 * int(name) + place


class Kept(JoiningMixin, Steps):
    pass


@dataclass
class Core:
    """As vLLM's: each message carries the version of the weights, which change while it is paused and idle alone."""

    scheduler: Kept
    version: int = 0
    messages: int = 0
    reports: dict[str, list[tuple[int, float, int]]] = field(default_factory=dict)  # (token, logprob, version)
    expected: dict[str, list[tuple[int, float, int]]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def step(self) -> None:
        scheduler = self.scheduler
        if scheduler.pause_state == PauseState.UNPAUSED or scheduler.under_way:
            for name, request in scheduler.requests.items():
                token = token_of(name, request.done)
                self.expected.setdefault(name, []).append((token, -float(token), self.version))
        for message in scheduler.update_from_output().values():
            for output in message.outputs:
                self.take(output)

    def take(self, output: EngineCoreOutput) -> None:
        self.messages += 1
        if output.finish_reason == FinishReason.ERROR:
            return  # nobody reads what it had
        name = output.request_id
        ids = output.new_token_ids
        began = output.request_id not in self.reports
        known = self.reports.setdefault(name, [])
        logprobs = output.new_logprobs
        assert logprobs is not None
        assert logprobs.logprob_token_ids[:, 0].tolist() == logprobs.sampled_token_ranks.tolist() == ids
        assert [event.timestamp for event in output.events or ()] == ids
        prefill = output.prefill_stats
        assert (prefill and prefill.num_prompt_tokens) == (token_of(name, 0) if began else None)
        known.extend((t, p, self.version) for t, p in zip(ids, logprobs.logprobs[:, 0].tolist(), strict=True))
        if output.finish_reason == FinishReason.LENGTH:
            self.ended.add(name)

    def new_weights(self) -> None:
        self.scheduler.pause_state = PauseState.PAUSED_ALL
        self.scheduler.under_way = bool(self.scheduler.requests)
        while self.scheduler.has_requests():
            self.step()
        self.version += 1
        self.scheduler.pause_state = PauseState.UNPAUSED


EVENTS = st.lists(st.sampled_from(["step"] * 30 + ["weights", "weights", "abort", "error"]), max_size=400)


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4), events=EVENTS)
@example(lengths=[2, 5], events=["step", "weights"])  # one ends in the step that was under way
@settings(max_examples=100, deadline=None)
def test_every_token_is_delivered_once_in_order_with_its_version(lengths: list[int], events: list[str]) -> None:
    core = Core(Kept(lengths))
    lost: set[str] = set()
    for event in [*events, *["step"] * max(lengths)]:
        last = next(reversed(core.scheduler.requests), "")
        if event == "weights":
            core.new_weights()
            continue
        if event == "abort":
            core.scheduler.finish_requests(last)
            assert last not in core.scheduler._pending
        elif event == "error":
            core.scheduler.wrong = last
        if event != "step":
            lost.add(last)
        core.step()
    whole = {str(number) for number in range(len(lengths))}
    assert core.ended >= whole - lost
    for name in core.ended:
        assert core.reports[name] == core.expected[name]
        assert len(core.reports[name]) == lengths[int(name)]
    assert core.scheduler._pending == {} and not core.scheduler.has_requests()


def test_a_response_leaves_in_as_many_messages_as_it_has_sixty_fours() -> None:
    core = Core(Kept([200, 1]))
    for _ in range(200):
        core.step()
    assert core.messages == math.ceil(200 / MAX_KEPT_STEPS) + 1


def test_what_is_joined_passes_through_vllms_own_encoding() -> None:
    scheduler = Kept([3])
    for _ in range(3):
        sent = scheduler.update_from_output()
    encoded = MsgpackEncoder().encode(sent[0])
    (output,) = MsgpackDecoder(EngineCoreOutputs).decode(encoded).outputs
    assert output.new_token_ids == [0, 1, 2]
    assert output.new_logprobs.logprobs.tolist() == [[0.0], [-1.0], [-2.0]]


@pytest.mark.parametrize("name", ["prompt_token_id_logprobs", "routed_experts", "new_sampling_mask"])
def test_an_output_that_is_not_joined_is_refused_by_its_name(name: str) -> None:
    output = EngineCoreOutput(request_id="7", new_token_ids=[1], finish_reason=FinishReason.LENGTH)
    setattr(output, name, np.zeros(1))
    with pytest.raises(ValueError, match=rf"^{name} of request 7 cannot be joined; set join_outputs=false$"):
        join_outputs([output])


def test_outputs_for_several_clients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steps, "update_from_output", lambda _: {0: EngineCoreOutputs(), 2: EngineCoreOutputs()})
    with pytest.raises(ValueError, match=r"^outputs for clients \[0, 2\] cannot be joined; set join_outputs=false$"):
        Kept([3]).update_from_output()


def test_they_are_vllms_schedulers() -> None:
    assert issubclass(JoiningScheduler, Scheduler) and issubclass(JoiningAsyncScheduler, AsyncScheduler)
    assert JoiningAsyncScheduler.update_from_output is JoiningMixin.update_from_output
    classes = [JoiningScheduler, JoiningAsyncScheduler]
    assert [f"{kind.__module__}.{kind.__name__}" for kind in classes] == [JOINING_SCHEDULER, JOINING_ASYNC_SCHEDULER]


def test_every_finish_reason_of_vllm_is_classified() -> None:
    """A new one is a failure until somebody reads what it means; see `Engine._run_request`."""
    failures = {"abort", "error", "repetition"}
    assert {str(reason) for reason in FinishReason} == {*get_args(OurFinishReason), *failures}
