"""One attempt to push a version of the weights from the learner, or from its stored buckets, to several workers.

With the transports ipc and nccl (`transports`) no buckets are stored: the learner sends again, while it still has that
version. A broadcast group is reused until a member leaves or joins, so that no member waits for a removed engine.
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
from actors.weights.probe import Gap, compute_gap, explain_refusal, is_stuck
from t2g.concurrency import cancel_all, finish_in_thread
from t2g.config import LearnerConfig, RolloutConfig
from t2g.errors import Diverged, MissedSync
from t2g.interfaces import GpuUser

MAX_BUCKETS_IN_FLIGHT = 2  # per worker: one is copied while the engine core loads the other
GRACE_S = 30.0  # minimum time for the other workers after the first answer
GRACE_RATIO = 3.0  # times the duration of the first answer, if that is longer
JOIN_GRACE_S = 160.0  # as GRACE_S, for the rendezvous: longer than NCCL has to connect (vllm_compat.transports)


class WeightSource(Protocol):
    """The learner group as a weight sync uses it. The calls block, and raise LearnerLost if a rank is lost."""

    policy_version: int  # it changes before the weights do

    def get_manifest(self) -> Shapes:
        """Return every parameter of the policy in sending order, without gathering any."""

    def address(self) -> tuple[str, int]:
        """Return a host and port for the rendezvous of the next `stream_weights`."""

    def stream_weights(self, dtype: str, *, full: bool, rendezvous: Rendezvous | None) -> Generator[Any, None, None]:
        """Yield references to the buckets of `plan_buckets`.

        Args:
            dtype: Type of the sent tensors, "float32" or "bfloat16".
            full: Whether each bucket has a hash of every tensor.
            rendezvous: With nccl, the rendezvous that the engines are joining. The learner then broadcasts a bucket
                without waiting for the next request.
        """

    def compute_probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
        """Return [N - 1] float32: log softmax(logits)[ids[t + 1]] after ids[: t + 1], at temperature 1.

        `Engine.compute_logprobs` returns the same quantity.
        """


class SyncWorker(Protocol):
    """A rollout worker of the fleet."""

    name: str
    handle: Any
    version: int | None  # version of its weights; None: those of the model's folder
    syncing: bool  # its engine is paused, until one of `EngineFleet.record_...` is called
    has_begun_update: bool  # whether a round has begun to change its weights: they are not those of the model's folder


class EngineFleet(Protocol):
    """The interface of `actors.engines.rollout.RolloutFleet` that a weight sync uses."""

    config: RolloutConfig
    vocab_size: int
    gpu_user: GpuUser  # with cluster.gpu_sharing=alternate; a fleet outlives the learners of its runs
    baseline_gap: Gap | None  # between its engines and a learner on the checkpoint; later runs reuse it

    @property
    def is_starting(self) -> bool:
        """Return whether a worker waits for its placement or loads its model."""

    def describe_workers(self) -> str:
        """Describe the lost workers with their reasons, and the state of the others."""

    def begin_sync(self) -> Sequence[SyncWorker]:
        """Return the workers that have started and can be reached."""

    def request(self, worker: Any, submit: Callable[[Any], Any], what: str) -> Coroutine[Any, Any, Any]:
        """Return the result of submit(handle).

        Raises:
            MissedSync: The worker died or raised an error.
            LearnerLost: A bucket is lost.
        """

    def record_verified(self, worker: Any, version: int) -> None:
        """Record that the worker verified this version."""

    def record_missed_sync(self, worker: Any, reason: str, *, timed_out: bool = False) -> None:
        """Record that the worker missed the sync.

        Args:
            timed_out: Whether it timed out. It takes part in no sync until it passes a check or answers a request.
        """

    def record_aborted_sync(self, worker: Any, reason: str) -> None:
        """Record that the sync ended for a reason that is not the worker's."""


@dataclass(kw_only=True)
class Version:
    """One version of the weights: what a push needs, and the outcome so far."""

    number: int
    learner_version: int  # the learner's policy_version: once it changes, this version cannot be gathered again
    shapes: Shapes
    probe: np.ndarray  # [N] int32, tokens of which engines and learner compute the logprobs
    learner_logprobs: np.ndarray | None = None  # [N - 1] float32, the learner's, computed once
    engine_logprobs: dict[str, np.ndarray] = field(default_factory=dict)  # by worker name
    previous: "Version | None" = None  # the version sent before, without its buckets
    buckets: list[Any] = field(default_factory=list)  # references; none with ipc and nccl
    verified: list[SyncWorker] = field(default_factory=list)  # the workers that have it
    missed: dict[str, str] = field(default_factory=dict)  # worker name -> why it missed the version the last time
    num_calls: int = 1  # calls of workers and of the learner; the first was `get_manifest`
    timings: dict[str, float] = field(default_factory=dict)  # seconds of work, of the slowest worker

    def add_seconds(self, name: str, seconds: float) -> None:
        self.timings[name] = self.timings.get(name, 0.0) + seconds


@dataclass
class BroadcastGroup:
    """The current process group of nccl."""

    workers: Sequence[SyncWorker] = ()
    rendezvous: Rendezvous | None = None


@dataclass
class Round:
    """One attempt to push a version. A worker that dies, times out or fails the probe drops out."""

    learner: WeightSource
    fleet: EngineFleet
    config: LearnerConfig
    version: Version
    workers: list[SyncWorker]  # the workers that have all buckets sent so far
    deadline: float  # in seconds of time.monotonic, for the whole round
    group: BroadcastGroup
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # workers refuse late calls of another round

    @property
    def _broadcasts(self) -> bool:
        """Return whether weights are broadcast and cannot be sent again: then no worker finishes if one refused."""
        return self.config.sync_transport == "nccl" and not self.config.is_replayable

    async def deliver(self) -> list[float]:
        """Send all buckets to the workers; return the probe gap of each worker that verified them."""
        version = self.version
        engine = self.fleet.config
        # Without replay the next bucket overwrites the memory of this one.
        max_in_flight = MAX_BUCKETS_IN_FLIGHT if self.config.is_replayable else 1
        tasks: list[asyncio.Future[Any]] = []
        try:
            if self.config.is_replayable and engine.max_staleness > 0 and not version.buckets:
                async for _ in self._buckets():  # the engines go on with their requests during the gather
                    pass

            def open_update(worker: Any) -> Any:
                return worker.open_update.remote(self.id, version.number, engine.dtype, version.shapes)

            for worker in self.workers:
                worker.has_begun_update = True
            paused = time.monotonic()
            await self._call_all_timed(
                "open",
                open_update,
                "the start of a weight sync",
                timeout_s=engine.health.check_timeout_s * engine.health.max_failures,  # a slower worker hangs
            )
            async with aclosing(self._buckets()) as buckets:
                async for ref in buckets:
                    tasks.append(asyncio.ensure_future(self._load(ref)))
                    if len(tasks) >= max_in_flight:
                        await tasks[-max_in_flight]

            # The learner computes its logprobs while the engines load the last buckets.
            learner_logprobs = asyncio.ensure_future(self._learner_logprobs())
            loads = tasks.copy()
            tasks.append(learner_logprobs)
            await asyncio.gather(*loads)
            await self._call_all_timed(
                "close", lambda worker: worker.close_update.remote(self.id), "the end of a weight sync"
            )
            version.add_seconds("pause", time.monotonic() - paused)
            return await self.verify(learner_logprobs)
        except BaseException as error:
            self._drop_all(f"the transfer was aborted: {str(error) or type(error).__name__}")
            raise
        finally:
            await cancel_all(tasks)

    async def _call_all_timed(self, name: str, submit: Callable[[Any], Any], what: str, **timeout: float) -> None:
        started = time.monotonic()
        await self._call_all(submit, what, **timeout)
        self.version.add_seconds(name, time.monotonic() - started)

    async def _load(self, ref: Any) -> None:
        """Have the workers load one bucket; each answers with its `timings`."""
        answers = await self._call_all(lambda worker: worker.load_bucket.remote(self.id, ref), "a bucket of weights")
        if not answers:
            return
        _, first_timings = answers[0]
        for name in first_timings:
            slowest_s = max(timings[name] for _, timings in answers)
            self.version.add_seconds(name, slowest_s)

    async def _buckets(self) -> AsyncGenerator[Any, None]:
        """Yield the stored buckets, or else stream them from the learner and store them if they are replayable.

        The stream continues when no worker is left, since the ranks are inside a collective call. All workers
        are dropped if the learner updated its weights meanwhile.
        """
        version = self.version
        if version.buckets:
            for ref in version.buckets:
                yield ref
            return
        rendezvous, joining = await self._form_group() if self._broadcasts else (None, [])
        version.num_calls += 1
        full = self.config.sync_verify == "full"
        stream = self.learner.stream_weights(self.fleet.config.dtype, full=full, rendezvous=rendezvous)
        try:
            while (ref := await finish_in_thread(next, stream, None)) is not None:
                await asyncio.gather(*joining)
                if self.config.is_replayable:
                    version.buckets.append(ref)
                yield ref
        finally:
            stream.close()  # now: the learner is locked until then
            await cancel_all(joining)
        if self.learner.policy_version != version.learner_version:
            self._drop_all(f"received version {version.number} after the learner had updated its weights")

    async def _form_group(self) -> tuple[Rendezvous, list["asyncio.Future[Any]"]]:
        """Return the rendezvous of this round, and the tasks of the engines that join it.

        The learner must join it next. A group whose members have not changed is reused, without tasks.
        """
        if self.group.rendezvous is not None and self.group.workers == self.workers:
            return self.group.rendezvous, []
        self.version.num_calls += 1
        host, port = await asyncio.to_thread(self.learner.address)
        gpus = self.fleet.config.tensor_parallel  # per engine: each GPU is a rank; rank 0 is the learner's
        ranks: dict[Any, int] = {}  # the first of each engine
        members = ["the learner"]
        for worker in self.workers:
            ranks[worker.handle] = len(members)
            members += [worker.name] * gpus
        rendezvous = Rendezvous(id=self.id, host=host, port=port, members=tuple(members))
        self.group.workers = list(self.workers)
        self.group.rendezvous = rendezvous

        def join_group(worker: Any) -> Any:
            return worker.join_group.remote(self.id, rendezvous, ranks[worker])

        joining = self._call_all(join_group, "the rendezvous with the learner", grace_s=JOIN_GRACE_S)
        return rendezvous, [asyncio.ensure_future(joining)]

    async def _learner_logprobs(self) -> np.ndarray:
        """Return the learner's logprobs of the probe, [N - 1] float32, computed once. Call it after the last bucket."""
        if self.version.learner_logprobs is None:
            self.version.num_calls += 1
            compute = self.learner.compute_probe_logprobs
            logprobs = await asyncio.to_thread(compute, self.version.probe)
            if not np.isfinite(logprobs).all():
                raise Diverged(f"the learner's logprobs of the probe are not finite at version {self.version.number}")
            self.version.learner_logprobs = logprobs
        return self.version.learner_logprobs

    async def verify(self, expected: "asyncio.Future[np.ndarray] | None" = None) -> list[float]:
        """Compare the logprobs of the workers with the learner's; return the gap of each worker that agrees.

        Args:
            expected: The learner's logprobs of the probe; None if the version has them.
        """
        started = time.monotonic()
        answers = await self._call_all(lambda worker: worker.compute_logprobs.remote(self.version.probe), "the probe")
        if expected is not None:
            await expected
        gaps = self.accept(answers)
        self.version.add_seconds("verify", time.monotonic() - started)
        return gaps

    def accept(self, answers: Sequence[tuple[SyncWorker, np.ndarray]]) -> list[float]:
        """Record each worker whose logprobs of the probe agree with the learner's; return their gaps."""
        gaps: list[float] = []
        learner = self.version.learner_logprobs
        assert learner is not None
        for worker, engine in answers:
            gap = compute_gap(engine, learner)
            mismatch = self._find_mismatch(worker, engine, learner, gap)
            if mismatch:
                self._drop(worker, mismatch)
                continue
            gaps.append(gap.largest)
            self.version.engine_logprobs[worker.name] = engine
            self.version.verified.append(worker)
            self.fleet.record_verified(worker, self.version.number)
        return gaps

    def _find_mismatch(self, worker: SyncWorker, engine: np.ndarray, learner: np.ndarray, gap: Gap) -> str:
        baseline_gap = self.fleet.baseline_gap
        tolerance = self.config.resolve_probe_tolerance(self.fleet.config)
        refusal = explain_refusal(gap, tolerance=tolerance, baseline_gap=baseline_gap)
        if refusal:
            return f"has other logprobs than the learner: {refusal}"

        previous = self.version.previous
        if baseline_gap and previous and worker.name in previous.engine_logprobs:
            assert previous.learner_logprobs is not None
            engine_pair = (previous.engine_logprobs[worker.name], engine)
            learner_pair = (previous.learner_logprobs, learner)
            if is_stuck(engine_pair, learner_pair, baseline_gap):
                return f"did not apply the new weights: its logprobs are bitwise those of version {previous.number}"
        return ""

    async def measure_baseline_gap(self) -> tuple[Gap | None, list[tuple[SyncWorker, np.ndarray]]]:
        """Measure the gap between engines and learner on the checkpoint.

        Returns:
            The gap, None if no engine answered; and each engine with its logprobs.
        """
        answers = await self._call_all(
            lambda worker: worker.compute_logprobs.remote(self.version.probe), "the probe of the checkpoint"
        )
        learner = await self._learner_logprobs()
        gaps = [compute_gap(engine, learner) for _, engine in answers]
        largest = max(gaps, key=lambda gap: gap.median, default=None)
        return largest, answers

    async def _call_all(
        self, submit: Callable[[Any], Any], what: str, *, timeout_s: float = math.inf, grace_s: float | None = None
    ) -> list[tuple[SyncWorker, Any]]:
        """Call submit(handle) on all workers; return the answers, and drop the workers without one.

        The timeout is the round's deadline and at most timeout_s. After the first answer, or the first refusal in a
        broadcast, the other workers have `compute_grace_s` seconds, at least grace_s (by default GRACE_S).
        """
        started = time.monotonic()
        until = min(self.deadline, started + timeout_s)
        self.version.num_calls += len(self.workers)
        requests: dict[asyncio.Future[Any], SyncWorker] = {}
        for worker in self.workers:
            worker.syncing = True  # set here: the task might start after the end of the sync
            request = asyncio.ensure_future(self.fleet.request(worker, submit, what))
            requests[request] = worker

        answers: list[tuple[SyncWorker, Any]] = []
        pending = set(requests)
        try:
            while pending:
                left_s = max(0.0, until - time.monotonic())
                done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for task in done:
                    worker = requests[task]
                    try:
                        answers.append((worker, task.result()))
                    except MissedSync as error:
                        self._drop(worker, str(error))
                if answers or self._broadcasts:
                    took_s = time.monotonic() - started
                    until = min(until, started + took_s + compute_grace_s(took_s, grace_s))
            for task in pending:
                took_s = time.monotonic() - started
                reason = f"timed out: {what} took more than {took_s:.1f} s"
                self._drop(requests[task], reason, timed_out=True)
        finally:
            await cancel_all([*requests])
        return answers

    def _drop_all(self, reason: str) -> None:
        """Continue without any worker, for a reason that is not theirs: a lost learner must not cost its engines."""
        for worker in list(self.workers):
            self._remove_from_round(worker, reason)
            self.fleet.record_aborted_sync(worker, reason)

    def _drop(self, worker: SyncWorker, reason: str, *, timed_out: bool = False) -> None:
        """Continue without this worker. A worker with two buckets in flight fails twice and is dropped once."""
        if worker in self.workers:
            self._remove_from_round(worker, reason)
            self.fleet.record_missed_sync(worker, reason, timed_out=timed_out)

    def _remove_from_round(self, worker: SyncWorker, reason: str) -> None:
        self.workers.remove(worker)
        self.group.rendezvous = None
        self.version.missed[worker.name] = reason


def compute_grace_s(first_s: float, least_s: float | None = None) -> float:
    """Return the seconds that the other workers have after the first one answered in first_s; least_s: else GRACE_S."""
    least_s = GRACE_S if least_s is None else least_s
    return max(least_s, GRACE_RATIO * first_s)
