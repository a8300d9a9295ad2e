"""One version of the weights on its way from the learner, or from what is held of it, to several workers at once.

With the transports ipc and nccl (`transports`) nothing is held: the learner sends again, as long as it has that
version. A group of broadcasts is kept until a member leaves or joins, so that no member waits for an engine that has
gone.
"""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from actors.weights.buckets import Rendezvous, Shapes
from actors.weights.probe import Gap, gap_between, is_stuck, why_refused
from t2g.concurrency import cancel_all
from t2g.config import LearnerConfig, RolloutConfig
from t2g.errors import MissedSync
from t2g.interfaces import Turn

BUCKETS_ABOARD = 2  # in a worker at once: one is copied while the engine core loads the other
GRACE_S = 30.0  # at the least
GRACE_RATIO = 3.0  # of the first one's time, where that is more


class WeightSource(Protocol):
    """What the learner group offers to a weight sync. Blocking calls; LearnerLost when a rank is."""

    policy_version: int  # it changes before the weights do

    def announce(self) -> Shapes:
        """Every parameter of the policy in the order in which it is sent, without gathering any."""

    def address(self) -> tuple[str, int]:
        """A host and port for the rendezvous of the next `stream_weights`."""

    def stream_weights(self, dtype: str, *, full: bool, rendezvous: Rendezvous | None) -> Generator[Any, None, None]:
        """References to buckets as `plan_buckets` cuts them; tensors converted to `dtype` ("float32" or "bfloat16").

        full: each with a hash of every tensor. rendezvous: with nccl; the engines are on their way there, and a bucket
        is broadcast without waiting for the next request.
        """

    def probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
        """[N - 1] float32: log softmax(logits)[ids[t + 1]] after ids[: t + 1], at temperature 1 as `Engine.score`."""


class SyncTarget(Protocol):
    """A rollout worker as the fleet knows it."""

    name: str
    handle: Any
    version: int | None  # of its weights; none: those that it loaded from the model's folder
    syncing: bool  # its engine is paused, until the fleet hears that it has the weights or missed them


class EngineFleet(Protocol):
    """What a weight sync needs of `actors.engines.rollout.RolloutFleet`."""

    config: RolloutConfig
    vocab_size: int
    turn: Turn  # whose the GPUs are, with cluster.gpu_sharing=alternate: a fleet outlives the learners of its runs
    baseline_gap: Gap | None  # of its engines and a learner on the checkpoint, for the runs that come after

    def receivers(self) -> Sequence[SyncTarget]:
        """The workers that have started and can be reached."""

    def ask(self, receiver: Any, submit: Callable[[Any], Any], what: str) -> Coroutine[Any, Any, Any]:
        """submit(handle) on it. Raises MissedSync when it died or raised, LearnerLost when a bucket is gone."""

    def has_weights(self, receiver: Any, version: int) -> None: ...

    def missed(self, receiver: Any, reason: str, *, late: bool = False) -> None:
        """late: it may hang. It is no receiver until it has answered something."""


@dataclass(kw_only=True)
class Version:
    """What is needed to bring one version to a worker, and what that took so far."""

    number: int
    made_at: int  # the learner's policy_version: nothing can be sent again once that is another
    shapes: Shapes
    probe: np.ndarray  # [N] int32, the tokens that a worker with these weights must score as the learner does
    probe_logprobs: np.ndarray | None = None  # [N - 1] float32, the learner's, computed once
    scores: dict[str, np.ndarray] = field(default_factory=dict)  # of the probe, by the worker's name
    before: "Version | None" = None  # the version sent before, without its buckets
    held: list[Any] = field(default_factory=list)  # references to its buckets; none with ipc and nccl
    verified: list[SyncTarget] = field(default_factory=list)  # who has it
    missed: dict[str, str] = field(default_factory=dict)  # name of a worker -> why it missed it the last time
    num_calls: int = 1  # of workers and of the learner; the first was `announce`
    stages: dict[str, float] = field(default_factory=dict)  # seconds of work, of the slowest worker

    def took(self, stage: str, seconds: float) -> None:
        self.stages[stage] = self.stages.get(stage, 0.0) + seconds


@dataclass
class Group:
    """With nccl: who met the last time, and has not parted since."""

    participants: Sequence[SyncTarget] = ()
    rendezvous: Rendezvous | None = None


@dataclass
class Round:
    """One try to bring a version to a participants. Who dies, is late or disagrees drops out."""

    learner: WeightSource
    fleet: EngineFleet
    config: LearnerConfig
    version: Version
    participants: list[SyncTarget]  # that have all that was sent so far
    deadline: float  # of time.monotonic, for all of it
    group: Group
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # what is of another is not loaded, however late it comes

    @property
    def _broadcasts(self) -> bool:
        """Return whether weights are broadcast and cannot be sent again: then no worker finishes if one refused."""
        return self.config.sync_transport == "nccl" and not self.config.is_replayable

    async def deliver(self) -> list[float]:
        """All buckets to the participants; returns the probe gap of each worker that verified to have them."""
        version, engine = self.version, self.fleet.config
        aboard = BUCKETS_ABOARD if self.config.is_replayable else 1  # the next one takes the memory of the one before
        tasks: list[asyncio.Future[Any]] = []
        try:
            await self._timed(
                "open",
                lambda w: w.open_update.remote(self.id, version.number, engine.dtype, version.shapes),
                "the start of a weight sync",
                timeout_s=engine.health.probe_timeout_s * engine.health.max_failures,  # who takes longer hangs
            )
            async with aclosing(self._buckets()) as buckets:
                async for ref in buckets:
                    tasks.append(asyncio.ensure_future(self._load(ref)))
                    if len(tasks) >= aboard:
                        await tasks[-aboard]
            tasks.append(asyncio.ensure_future(self._expected()))  # scored while the engines load what is left
            await asyncio.gather(*tasks[:-1])
            await self._timed("close", lambda w: w.close_update.remote(self.id), "the end of a weight sync")
            return await self._prove(tasks[-1])
        except BaseException as error:
            self._drop_all(f"got half a sync, which broke off: {str(error) or type(error).__name__}")
            raise
        finally:
            await cancel_all(tasks)

    async def _timed(self, stage: str, submit: Callable[[Any], Any], what: str, **timeout: float) -> None:
        started = time.monotonic()
        await self._each(submit, what, **timeout)
        self.version.took(stage, time.monotonic() - started)

    async def _load(self, ref: Any) -> None:
        """One bucket into the workers: each answers with its seconds by stage."""
        answers = await self._each(lambda w: w.load_bucket.remote(self.id, ref), "a bucket of weights")
        for stage in answers[0][1] if answers else ():
            self.version.took(stage, max(seconds[stage] for _, seconds in answers))

    async def _buckets(self) -> AsyncGenerator[Any, None]:
        """What is held, else the learner's, held where they can be; participants are dropped if it continued meanwhile.

        Whether the workers still listen makes no difference to it: the ranks are in the middle of one call.
        """
        version = self.version
        if version.held:
            for ref in version.held:
                yield ref
            return
        rendezvous, joining = await self._meet() if self._broadcasts else (None, [])
        version.num_calls += 1
        full = self.config.sync_verify == "full"
        stream = self.learner.stream_weights(self.fleet.config.dtype, full=full, rendezvous=rendezvous)
        try:
            while (ref := await asyncio.to_thread(next, stream, None)) is not None:
                await asyncio.gather(*joining)
                if self.config.is_replayable:
                    version.held.append(ref)
                yield ref
        finally:
            _close(stream)
            await cancel_all(joining)
        if self.learner.policy_version != version.made_at:
            self._drop_all(f"was sent version {version.number} when the learner went on")

    async def _meet(self) -> tuple[Rendezvous, list["asyncio.Future[Any]"]]:
        """Where this round's group meets, and the engines on their way there; the learner must now go as well.

        Those who are still together from the round before need not meet again.
        """
        if self.group.rendezvous is not None and self.group.participants == self.participants:
            return self.group.rendezvous, []
        self.version.num_calls += 1
        host, port = await asyncio.to_thread(self.learner.address)
        gpus = self.fleet.config.tensor_parallel  # of an engine: each is a rank, and rank 0 the learner's
        ranks = {receiver.handle: 1 + index * gpus for index, receiver in enumerate(self.participants)}
        members = ("the learner", *(receiver.name for receiver in self.participants for _ in range(gpus)))
        rendezvous = Rendezvous(id=self.id, host=host, port=port, members=members)
        self.group.participants, self.group.rendezvous = list(self.participants), rendezvous
        what = "the rendezvous with the learner"
        joining = self._each(lambda w: w.join_group.remote(self.id, rendezvous, ranks[w]), what)
        return rendezvous, [asyncio.ensure_future(joining)]

    async def _expected(self) -> np.ndarray:
        """[N - 1] float32: the learner's logprobs of the probe, computed once. Call it when all buckets are out."""
        if self.version.probe_logprobs is None:
            self.version.num_calls += 1
            self.version.probe_logprobs = await asyncio.to_thread(self.learner.probe_logprobs, self.version.probe)
        return self.version.probe_logprobs

    async def _prove(self, expected: "asyncio.Future[np.ndarray]") -> list[float]:
        started, gaps = time.monotonic(), []
        answers = await self._each(lambda w: w.score.remote(self.version.probe), "the probe")
        logprobs = await expected
        for receiver, scores in answers:
            gap = gap_between(scores, logprobs)
            if wrong := self._wrong(receiver, scores, logprobs, gap):
                self._drop(receiver, f"does not compute what the learner computes: {wrong}")
                continue
            gaps.append(gap.largest)
            self.version.scores[receiver.name] = scores
            self.version.verified.append(receiver)
            self.fleet.has_weights(receiver, self.version.number)
        self.version.took("verify", time.monotonic() - started)
        return gaps

    def _wrong(self, receiver: SyncTarget, scores: np.ndarray, logprobs: np.ndarray, gap: Gap) -> str:
        baseline_gap, before = self.fleet.baseline_gap, self.version.before
        wrong = why_refused(gap, floor=self.config.probe_floor(self.fleet.config), baseline_gap=baseline_gap)
        if not wrong and baseline_gap and before and receiver.name in before.scores:
            assert before.probe_logprobs is not None
            if is_stuck((before.scores[receiver.name], scores), (before.probe_logprobs, logprobs), baseline_gap):
                return f"it answers the probe as with version {before.number}, to the bit, and the learner does not"
        return wrong and f"on the probe of {len(self.version.probe)} tokens {wrong}"

    async def agree(self) -> Gap | None:
        """Return the gap between workers and learner on the checkpoint that both loaded; None if no worker answers."""
        answers = await self._each(lambda w: w.score.remote(self.version.probe), "the probe of the checkpoint")
        logprobs = await self._expected()
        gaps = [gap_between(scores, logprobs) for _, scores in answers]
        return max(gaps, key=lambda gap: gap.median, default=None)

    async def _each(
        self, submit: Callable[[Any], Any], what: str, *, timeout_s: float = math.inf
    ) -> list[tuple[SyncTarget, Any]]:
        """submit(handle) on all of the participants -> answers of those that gave one; the others are dropped.

        All have until the round's deadline and at most timeout_s; once the first has answered, or in a broadcast
        refused, the others have `grace_s`.
        """
        started, requests = time.monotonic(), dict[asyncio.Future[Any], SyncTarget]()
        until = min(self.deadline, started + timeout_s)
        self.version.num_calls += len(self.participants)
        for receiver in self.participants:
            receiver.syncing = True  # now: set by the task, it might come after the end of the sync
            requests[asyncio.ensure_future(self.fleet.ask(receiver, submit, what))] = receiver
        answers, pending = [], set(requests)
        try:
            while pending:
                left_s = max(0.0, until - time.monotonic())
                done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for task in done:
                    try:
                        answers.append((requests[task], task.result()))
                    except MissedSync as error:
                        self._drop(requests[task], str(error))
                if answers or self._broadcasts:
                    took_s = time.monotonic() - started
                    until = min(until, started + took_s + grace_s(took_s))
            for task in pending:
                reason = f"is late: {what} took it more than {time.monotonic() - started:.3g} s"
                self._drop(requests[task], reason, late=True)
        finally:
            await cancel_all([*requests])
        return answers

    def _drop_all(self, reason: str) -> None:
        for receiver in list(self.participants):
            self._drop(receiver, reason)

    def _drop(self, receiver: SyncTarget, reason: str, *, late: bool = False) -> None:
        """Go on without it. A worker that has two buckets aboard fails twice and is dropped once."""
        if receiver in self.participants:
            self.participants.remove(receiver)
            self.group.rendezvous = None
            self.version.missed[receiver.name] = reason
            self.fleet.missed(receiver, reason, late=late)


def grace_s(first_s: float) -> float:
    """Seconds that are left to the others when the first one took first_s."""
    return max(GRACE_S, GRACE_RATIO * first_s)


def _close(stream: Generator[Any, None, None]) -> None:
    """Here and now: left to the garbage collector, the stream would be ended after Ray is."""
    try:
        stream.close()
    except ValueError:  # cancelled while a thread waits in it for the next bucket: it ends with the process
        return
