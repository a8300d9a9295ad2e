"""Weights from the learner group into every rollout engine: sent by version, checked by hashes, proved by a probe.

The way of one version: the learner announces names and shapes and streams buckets (`buckets`), every worker
hands them to its engine (`engines.engine`), and each then scores the same 64 tokens and must agree with the learner,
since vLLM does not notice a bad sync. A worker that dies, is late or disagrees drops out of the round, and nobody
waits for it: it is STALE, and catches up with the same buckets (`actors.weights.bucket_source`).
"""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from actors.weights.bucket_source import BucketSource, Version, WeightOwner
from actors.weights.buckets import num_bytes
from t2g.concurrency import end
from t2g.config import LearnerConfig
from t2g.errors import MissedSync, RunStopped
from t2g.types import WeightSyncResult

PROBE_TOKENS = 64
PROBE_SEED = 20250522
BUCKETS_ABOARD = 2  # in a worker at once: one is copied while the engine core loads the other
GRACE_S = 30.0  # that the others have, at the least, once the first worker has answered
GRACE_RATIO = 3.0  # of the first one's time, where that is more
RECEIVER_POLL_S = 0.2


class Receiver(Protocol):
    """A rollout worker as the fleet knows it."""

    name: str
    handle: Any


class EngineFleet(Protocol):
    """What a weight sync needs of `actors.engines.rollout.RolloutFleet`."""

    vocab_size: int
    dtype: str
    max_model_len: int
    tensor_parallel: int  # GPUs of an engine
    open_timeout_s: float  # an engine that takes longer to pause hangs

    def receivers(self) -> Sequence[Receiver]:
        """The workers that have started and can be reached."""
        ...

    def ask(self, receiver: Any, submit: Callable[[Any], Any], what: str) -> Coroutine[Any, Any, Any]:
        """submit(handle) on it. Raises MissedSync when it died or raised, LearnerLost when a bucket is gone."""
        ...

    def has_weights(self, receiver: Any, version: int) -> None: ...

    def missed(self, receiver: Any, reason: str, *, late: bool = False) -> None:
        """late: it may hang. It is no receiver until it has answered something."""
        ...


class Round:
    """One version on its way to several workers at once. `crew` are those that have all that was sent so far."""

    def __init__(
        self, fleet: EngineFleet, crew: Sequence[Receiver], *, timeout_s: float, grace_s: float, together: bool
    ) -> None:
        """together: a broadcast, which nobody finishes when one has refused."""
        self.fleet, self.crew, self.grace_s, self.together = fleet, list(crew), grace_s, together
        self.deadline = time.monotonic() + timeout_s
        self.id = uuid.uuid4().hex  # what belongs to another round is not loaded, however late it comes
        self.num_calls = 0
        self.missed: dict[str, str] = {}  # name of a worker -> why

    def drop(self, receiver: Receiver, reason: str, *, late: bool = False) -> None:
        """Go on without it. A worker that has two buckets aboard fails twice and is dropped once."""
        if receiver in self.crew:
            self.crew.remove(receiver)
            self.missed[receiver.name] = reason
            self.fleet.missed(receiver, reason, late=late)

    async def each(
        self, submit: Callable[[Any], Any], what: str, *, timeout_s: float = math.inf
    ) -> list[tuple[Receiver, Any]]:
        """submit(handle) on all of the crew -> answers of those that gave one; the others are dropped.

        All have until the round's deadline and at most timeout_s; once the first has answered, the others have three
        times its time, and at least `grace_s`; in a broadcast, once the first has answered or refused.
        """
        started = time.monotonic()
        crew, until = list(self.crew), min(self.deadline, started + timeout_s)
        self.num_calls += len(crew)
        asked = {asyncio.ensure_future(self.fleet.ask(receiver, submit, what)): receiver for receiver in crew}
        answers, pending = [], set(asked)
        try:
            while pending:
                left_s = max(0.0, until - time.monotonic())
                done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for task in done:
                    try:
                        answers.append((asked[task], task.result()))
                    except MissedSync as error:
                        self.drop(asked[task], str(error))
                if answers or self.together:
                    took_s = time.monotonic() - started
                    until = min(until, started + took_s + max(self.grace_s, GRACE_RATIO * took_s))
            for task in pending:
                words = f"is late: {what} took it more than {time.monotonic() - started:.3g} s"
                self.drop(asked[task], words, late=True)
        finally:
            await end([*asked])
        return answers


class WeightSync:
    """Implements `t2g.interfaces.WeightSync`."""

    def __init__(
        self, learner: WeightOwner, fleet: EngineFleet, config: LearnerConfig, *, grace_s: float = GRACE_S
    ) -> None:
        self._learner, self._fleet, self._config, self._grace_s = learner, fleet, config, grace_s
        self._aboard = BUCKETS_ABOARD if config.keeps_buckets else 1  # the next one takes the memory of the one before
        self._probe = probe_ids(fleet.vocab_size, min(PROBE_TOKENS, fleet.max_model_len - 1))
        self._source = BucketSource(learner, config, fleet.dtype, self._probe, gpus_per_engine=fleet.tensor_parallel)
        self._held: Version | None = None
        self._held_s = 0.0  # that its push took
        self._lock = asyncio.Lock()  # of push and catch_up
        self._pushing = False  # or about to
        self._catching_up: tuple[Round, asyncio.Future[list[float]]] | None = None

    async def push(self, policy_version: int) -> WeightSyncResult:
        """Send to all workers there are, once more whole when none of them got it; returns when one or more have it.

        Waits where no worker is up, and for none that catches up from what is held: it gets this version. Raises
        RunStopped when nobody has it within learner.step_timeout_s, or after two tries, with every worker's reason,
        and LearnerLost as `catch_up`.
        """
        self._pushing = True
        if self._catching_up is not None and self._config.keeps_buckets:  # else the ranks are in the middle of it
            round_, delivery = self._catching_up
            round_.crew.clear()  # nobody missed anything
            delivery.cancel()
            del round_, delivery  # cancelled, they keep the buckets that they were to send
        try:
            return await self._push(policy_version)
        finally:
            self._pushing = False

    async def _push(self, policy_version: int) -> WeightSyncResult:
        async with self._lock:
            started = time.monotonic()
            self._held = None  # frees the object store for what comes
            version = Version(number=policy_version, metas=await asyncio.to_thread(self._learner.announce))
            costs, reasons = Costs(), dict[str, str]()
            for source in (self._source.first, self._source.again):
                round_ = self._round(await self._some_receivers())
                gaps = await self._deliver(version, source(version, round_), round_, costs)
                self._held = version
                reasons |= round_.missed
                self._held_s = time.monotonic() - started
                if gaps:
                    proved = {receiver.name for receiver in version.proved}
                    return WeightSyncResult(
                        policy_version=policy_version,
                        seconds=self._held_s,
                        bytes=num_bytes(version.metas, self._fleet.dtype),
                        probe_gap=max(gaps),
                        stages=costs.stages,
                        num_calls=costs.num_calls + version.num_calls,
                        missed=tuple(sorted(reasons.keys() - proved)),
                    )
        words = "; ".join(f"{name} {reason}" for name, reason in sorted(reasons.items()))
        raise RunStopped(f"no rollout worker got version {policy_version} of the weights, sent twice: {words}")

    async def catch_up(self, receiver: Receiver) -> None:
        """Bring a STALE worker the last version that was pushed; the fleet hears of the outcome.

        Does nothing before the first push, which reaches every worker, nor to a worker that a push has reached since,
        nor where a push waits or the learner is needed and has gone on. What is held it gets with a push's grace.
        Raises LearnerLost as the learner does, and when what is held was lost with the node of rank 0.
        """
        async with self._lock:
            held = self._held
            if held is None or self._pushing or receiver in held.proved or not self._source.can_send_again(held):
                return
            patience_s = max(self._grace_s, GRACE_RATIO * self._held_s) if self._config.keeps_buckets else math.inf
            round_ = self._round([receiver], patience_s)
            delivery = asyncio.ensure_future(self._deliver(held, self._source.again(held, round_), round_, Costs()))
            self._catching_up = round_, delivery
            try:
                (outcome,) = await asyncio.gather(delivery, return_exceptions=True)
            finally:
                self._catching_up = None
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):  # by a push
                raise outcome

    def _round(self, crew: Sequence[Receiver], timeout_s: float = math.inf) -> Round:
        return Round(
            self._fleet,
            crew,
            timeout_s=min(timeout_s, self._config.step_timeout_s),
            grace_s=self._grace_s,
            together=self._config.sync_transport == "nccl",
        )

    async def _some_receivers(self) -> Sequence[Receiver]:
        deadline = time.monotonic() + self._config.step_timeout_s
        while not (receivers := self._fleet.receivers()):
            if time.monotonic() > deadline:
                raise RunStopped(f"no rollout worker was up for weights within {self._config.step_timeout_s:g} s")
            await asyncio.sleep(RECEIVER_POLL_S)
        return receivers

    async def _deliver(
        self, version: Version, buckets: AsyncGenerator[Any, None], round_: Round, costs: "Costs"
    ) -> list[float]:
        """All buckets to the crew; returns the probe gap of each worker that proved to have them."""
        loading: list[asyncio.Future[Any]] = []
        expected: list[asyncio.Future[Any]] = []  # one: the learner scores while the engines load what is left
        started = time.monotonic()

        def load(ref: Any) -> "asyncio.Future[Any]":
            return asyncio.ensure_future(
                round_.each(lambda w: w.load_bucket.remote(round_.id, ref), "a bucket of weights")
            )

        try:
            await round_.each(
                lambda w: w.open_update.remote(round_.id, version.number, self._fleet.dtype, version.metas),
                "the start of a weight sync",
                timeout_s=self._fleet.open_timeout_s,
            )
            costs.add("open", time.monotonic() - started)
            async with aclosing(buckets):
                async for ref in buckets:
                    loading.append(load(ref))
                    if len(loading) >= self._aboard:
                        costs.loaded(await loading.pop(0))
            expected.append(asyncio.ensure_future(self._source.expected(version)))
            while loading:
                costs.loaded(await loading.pop(0))
            started = time.monotonic()
            await round_.each(lambda w: w.close_update.remote(round_.id), "the end of a weight sync")
            costs.add("close", time.monotonic() - started)
            return await self._prove(version, expected[0], round_, costs)
        except BaseException as error:
            for receiver in list(round_.crew):
                round_.drop(receiver, f"got half a sync, which broke off: {str(error) or type(error).__name__}")
            raise
        finally:
            costs.num_calls += round_.num_calls
            await end([*loading, *expected])

    async def _prove(
        self, version: Version, expected: "asyncio.Future[np.ndarray]", round_: Round, costs: "Costs"
    ) -> list[float]:
        started, tolerance, gaps = time.monotonic(), self._config.probe_tolerance, []
        answers = await round_.each(lambda w: w.score.remote(self._probe), "the probe")
        logprobs = await expected
        for receiver, scores in answers:
            gap = probe_gap(scores, logprobs)
            if gap <= tolerance:
                gaps.append(gap)
                version.proved.append(receiver)
                self._fleet.has_weights(receiver, version.number)
            else:
                round_.drop(
                    receiver,
                    f"does not compute what the learner computes: {gap:.3g} nats apart on the probe of "
                    f"{len(self._probe)} tokens; at most learner.probe_tolerance={tolerance:g} is allowed",
                )
        costs.add("verify", time.monotonic() - started)
        return gaps


@dataclass(kw_only=True)
class Costs:
    """What a push took, by stage: seconds of work, of the slowest worker."""

    num_calls: int = 0
    stages: dict[str, float] = field(default_factory=dict)

    def add(self, stage: str, seconds: float) -> None:
        self.stages[stage] = self.stages.get(stage, 0.0) + seconds

    def loaded(self, answers: Sequence[tuple[Receiver, dict[str, float]]]) -> None:
        """One bucket in the workers: each answers with its seconds by stage."""
        for stage in answers[0][1] if answers else ():
            self.add(stage, max(seconds[stage] for _, seconds in answers))


def probe_ids(vocab_size: int, num_tokens: int) -> np.ndarray:
    """[N] int32: the same random tokens in every sync of every run with this vocabulary."""
    return np.random.default_rng(PROBE_SEED).integers(0, vocab_size, num_tokens, dtype=np.int32)


def probe_gap(engine: np.ndarray, learner: np.ndarray) -> float:
    """Largest |engine - learner| over the probe, nats; inf when a value is NaN or infinite: no bound would catch it.

    >>> probe_gap(np.array([-1.0, -2.0]), np.array([-1.0, -2.5])), probe_gap(np.array([np.nan]), np.array([-1.0]))
    (0.5, inf)
    """
    gap = float(np.max(np.abs(engine - learner)))
    return gap if np.isfinite(gap) else float("inf")
