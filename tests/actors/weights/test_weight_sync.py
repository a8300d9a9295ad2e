"""When a sync may be believed, who takes part in it, and who is waited for."""

import asyncio
import itertools
import json
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from actors.weights import round as rounds
from actors.weights.buckets import Bucket, Rendezvous, Shapes, make_bucket
from actors.weights.gpu_time_sharing import FleetGpuTimeSharing
from actors.weights.probe import Gap
from actors.weights.round import compute_grace_s
from actors.weights.sync import FleetWeightSync
from t2g.config import HealthConfig, LearnerConfig, LoRAConfig, RolloutConfig
from t2g.errors import Diverged, LearnerLost, MissedSync, RunStopped

NUM_BUCKETS = 3
SHAPES = {f"m{i}.weight": (2,) for i in range(NUM_BUCKETS)}
BUCKETS = [("bucket", i) for i in range(NUM_BUCKETS)]
DEADLINE_S = 60  # of what takes milliseconds on a machine that is not busy
CONFIG = LearnerConfig(step_timeout_s=DEADLINE_S)
HASTE = {"step_timeout_s": 3.0}


class Remote:
    """A worker method as Ray shows it."""

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self.remote = function


class FakeWorker:
    """Scores the probe by the sum of its weights. Deaf to one bucket in its first `deaf` rounds; in round `breaks[0]`
    it raises at bucket `breaks[1]`, or hangs there, or that bucket is `lost`."""

    def __init__(
        self,
        *,
        deaf: int = 0,
        breaks: tuple[int, int] = (0, 0),
        hangs: bool = False,
        hangs_at_open: bool = False,
        lost: bool = False,
        load_s: float = 0.02,
    ) -> None:
        self.load_s = load_s
        self.weights = [0.0] * NUM_BUCKETS
        self.deaf = deaf
        self.breaks = breaks
        self.hangs = hangs
        self.lost = lost
        self.hangs_at_open = hangs_at_open
        self.group = None
        self.scored = threading.Event()
        self.join_group = Remote(self._join)
        self.rounds = []
        self.log = []
        self.aboard = 0
        self.most_aboard = 0
        self.open_update = Remote(self._open)
        self.load_bucket = Remote(self._load)
        self.close_update = Remote(self._close)
        self.compute_logprobs = Remote(self._score)

    async def _open(self, round_id: str, version: int, dtype: str, shapes: Shapes) -> None:
        await asyncio.sleep(60 if self.hangs_at_open else 0)
        self.rounds.append(round_id)
        self.log.append(("open", version, dtype, len(shapes)))

    async def _join(self, round_id: str, rendezvous: Rendezvous, rank: int) -> None:
        """Returns once all are there, as NCCL does."""
        assert round_id == self.rounds[-1]
        self.log.append(("join", rendezvous.port, rank, len(rendezvous.members)))
        self.group = Group.at(rendezvous)
        await asyncio.to_thread(self.group.joined.wait, DEADLINE_S)

    async def _load(self, round_id: str, bucket: Bucket) -> dict[str, float]:
        assert round_id == self.rounds[-1]
        if self.group is not None and (gone := self.group.gone):
            raise ValueError(f"the broadcast was aborted: {gone} is gone")
        self.aboard += 1
        self.most_aboard = max(self.most_aboard, self.aboard)
        await asyncio.sleep(self.load_s)
        self.aboard -= 1
        if (len(self.rounds), bucket.index) == self.breaks:
            if self.group is not None:
                self.group.gone = "one"
            await asyncio.sleep(60 if self.hangs else 0)
            if self.lost:
                raise LearnerLost("a bucket of weights was lost with the node of learner rank 0")
            raise ValueError("the bytes are other bytes")
        self.log.append(("bucket", bucket.index))
        if not (bucket.index == 1 and len(self.rounds) <= self.deaf):
            self.weights[bucket.index] = float(bucket.tensors[0][0])
        return {"gather": bucket.gather_s, "copy_to_core": 0.25, "load": 0.5}

    async def _close(self, round_id: str) -> None:
        assert round_id == self.rounds[-1]
        assert self.aboard == 0
        self.log.append("close")

    async def _score(self, ids: np.ndarray) -> np.ndarray:
        self.scored.set()
        return np.full(len(ids) - 1, sum(self.weights), np.float32)


class FakeSyncWorker:
    def __init__(self, name: str, handle: FakeWorker) -> None:
        self.name = name
        self.handle = handle
        self.syncing = False
        self.version = None
        self.has_begun_update = False


class FakeFleet:
    """Who was late is no worker any more."""

    config = RolloutConfig(max_model_len=32, max_new_tokens=8, health=HealthConfig(check_timeout_s=0.5, max_failures=2))
    vocab_size = 50
    gpu_user = "engines"
    is_starting = False
    baseline_gap: Gap | None = None

    def __init__(self, **workers: FakeWorker) -> None:
        self.workers = [FakeSyncWorker(name, worker) for name, worker in workers.items()]
        self.heard: list[tuple[str, Any]] = []  # (name, version that it has, or why it missed it); workers race
        self.at_fault: list[str] = []  # names of the workers that missed a sync by themselves

    def describe_workers(self) -> str:
        return "w0 is starting" if self.is_starting else "w0 could not start (the GPU is gone)"

    def begin_sync(self) -> list[FakeSyncWorker]:
        return list(self.workers)

    async def request(self, worker: FakeSyncWorker, submit: Callable[[Any], Any], what: str) -> Any:
        assert worker.syncing
        try:
            return await submit(worker.handle)
        except ValueError as error:
            raise MissedSync(f"refused {what}: {error}") from error

    def record_verified(self, worker: FakeSyncWorker, version: int) -> None:
        worker.version = version
        self.heard.append((worker.name, version))

    def record_missed_sync(self, worker: FakeSyncWorker, reason: str, *, timed_out: bool = False) -> None:
        self.heard.append((worker.name, reason))
        self.at_fault.append(worker.name)
        if timed_out:
            self.workers = [other for other in self.workers if other is not worker]

    def record_aborted_sync(self, worker: FakeSyncWorker, reason: str) -> None:
        self.heard.append((worker.name, reason))


class Group:
    """The members of one rendezvous: complete once its engines and the learner are there."""

    groups: ClassVar[dict[int, "Group"]] = {}

    def __init__(self, size: int) -> None:
        self.joined = threading.Barrier(size)
        self.gone = ""

    @classmethod
    def at(cls, rendezvous: Rendezvous) -> "Group":
        return cls.groups.setdefault(rendezvous.port, cls(len(rendezvous.members)))


class FakeLearner:
    """Its weights are 1, 2, 4; `lost_at`: the bucket before which a rank dies. It updates itself after `updates_after`
    buckets."""

    ports = itertools.count()

    def __init__(
        self,
        *,
        lost_at: int | None = None,
        updates_after: int | None = None,
        scored: "threading.Event | None" = None,
    ) -> None:
        """scored: the probe is not answered before a worker was asked for it too. lost_at NUM_BUCKETS: in the probe."""
        self.lost_at = lost_at
        self.calls = []
        self.streaming = False
        self.scored = scored
        self.policy_version = 3
        self.updates_after = updates_after
        self.met = ""

    def address(self) -> tuple[str, int]:
        self.calls.append("address")
        return "learner", next(self.ports)

    def get_manifest(self) -> Shapes:
        assert threading.current_thread() is not threading.main_thread(), "the event loop must turn meanwhile"
        self.calls.append("get_manifest")
        return SHAPES

    def stream_weights(self, dtype: str, *, full: bool, rendezvous: Rendezvous | None) -> Iterator[Bucket]:
        self.calls.append("stream")
        self.streaming = True
        if rendezvous is not None and rendezvous.id != self.met:
            self.met = rendezvous.id
            Group.at(rendezvous).joined.wait(DEADLINE_S)
        try:
            for index, name in enumerate(SHAPES):
                self.policy_version += index == self.updates_after
                if index == self.lost_at:
                    raise LearnerLost("learner rank 1 died during stream_weights")
                tensor = np.full(2, 2.0**index, np.float32)
                yield make_bucket(index, [name], [tensor], full=full, started=time.monotonic())
        finally:
            self.streaming = False

    def compute_probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
        assert len(ids) == 31  # 64 do not fit into the window of 32, which needs room for one more
        self.calls.append("probe")
        if self.lost_at == NUM_BUCKETS:
            raise LearnerLost("learner rank 1 died during compute_probe_logprobs")
        assert self.scored is None or self.scored.wait(DEADLINE_S), "no worker was asked meanwhile"
        return np.full(len(ids) - 1, 7 + 1e-4, np.float32)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests with a worker that hangs: on a busy machine one that works would be late as well."""
    monkeypatch.setattr(rounds, "GRACE_S", 2.0)


def push(fleet: FakeFleet, learner: FakeLearner | None = None, *, config: LearnerConfig = CONFIG) -> Any:
    return asyncio.run(FleetWeightSync(learner or FakeLearner(), fleet, config).push(3))


ONCE = [("open", 3, "float32", 3), *BUCKETS, "close"]


def test_a_sync_sends_to_every_worker_and_reports_the_worst_gap() -> None:
    fleet = FakeFleet(w0=FakeWorker(), w1=FakeWorker())
    learner = FakeLearner()
    result = push(fleet, learner)
    assert [m.handle.log for m in fleet.workers] == [ONCE, ONCE]
    assert result.policy_version == 3
    assert result.bytes == 3 * 2 * 4
    assert result.missed == ()
    assert result.probe_gap == pytest.approx(1e-4, rel=1e-2)
    assert sorted(fleet.heard) == [("w0", 3), ("w1", 3)]
    assert learner.calls == ["get_manifest", "stream", "probe"]
    assert result.num_calls == 3 + 2 * (1 + 3 + 1 + 1)  # of each worker: open, three buckets, close, the probe
    assert result.timings["copy_to_core"] == 3 * 0.25
    assert result.timings["load"] == 3 * 0.5
    assert set(result.timings) == {"open", "gather", "copy_to_core", "load", "close", "verify", "pause"}


@pytest.mark.parametrize(("max_staleness", "num_gathered"), [(0, 0), (1, NUM_BUCKETS)])
def test_engines_with_requests_are_not_paused_for_the_gather(max_staleness: int, num_gathered: int) -> None:
    """Each of three buckets takes the learner 0.1 s, and the engine 0.02 s."""
    gathered: list[int] = []

    class Slow(FakeLearner):
        def stream_weights(self, dtype: str, **options: Any) -> Iterator[Bucket]:
            for bucket in super().stream_weights(dtype, **options):
                time.sleep(0.1)
                gathered.append(bucket.index)
                yield bucket

    class Worker(FakeWorker):
        async def _open(self, round_id: str, *manifest: Any) -> None:
            self.rounds.append(round_id)
            self.log.append(len(gathered))

    fleet = FakeFleet(w0=Worker())
    fleet.config = fleet.config.model_copy(update={"max_staleness": max_staleness})  # type: ignore[misc]
    result = push(fleet, Slow())
    assert fleet.workers[0].handle.log == [num_gathered, *BUCKETS, "close"]
    if max_staleness == 0:
        assert result.timings["pause"] >= 0.3
    else:
        assert result.seconds - result.timings["pause"] >= 0.3


def test_a_worker_has_at_most_two_buckets_aboard() -> None:
    fleet = FakeFleet(w0=FakeWorker(load_s=0.5))  # longer than a busy machine takes to send the next one
    push(fleet)
    assert fleet.workers[0].handle.most_aboard == 2


def test_a_worker_that_refuses_a_bucket_drops_out_and_the_others_go_on() -> None:
    fleet = FakeFleet(w0=FakeWorker(), w1=FakeWorker(breaks=(1, 1)))
    result = push(fleet)
    assert fleet.workers[0].handle.log == ONCE
    assert "close" not in fleet.workers[1].handle.log
    assert fleet.heard == [("w1", "refused a bucket of weights: the bytes are other bytes"), ("w0", 3)]
    assert result.missed == ("w1",)


@pytest.mark.usefixtures("_impatient")
def test_a_worker_that_hangs_is_waited_for_no_longer_than_the_grace() -> None:
    fleet = FakeFleet(w0=FakeWorker(), w1=FakeWorker(breaks=(1, 0), hangs=True))
    result = push(fleet)
    assert result.seconds < DEADLINE_S / 2 and result.missed == ("w1",)
    assert fleet.workers[0].handle.log == ONCE
    (name, reason), verified = fleet.heard
    assert name == "w1" and reason.startswith("timed out: a bucket of weights took more than ")
    assert verified == ("w0", 3)


@pytest.mark.parametrize("worker", [FakeWorker(hangs_at_open=True), FakeWorker(breaks=(1, 1), hangs=True)])
def test_an_only_engine_that_hangs_is_late_once_and_the_second_try_waits_for_its_successor(worker: FakeWorker) -> None:
    fleet = FakeFleet(w0=worker)

    async def replaced() -> Any:
        pushed = asyncio.create_task(FleetWeightSync(FakeLearner(), fleet, CONFIG.model_copy(update=HASTE)).push(3))
        async with asyncio.timeout(DEADLINE_S):
            while fleet.workers:
                await asyncio.sleep(0.05)
            fleet.workers.append(FakeSyncWorker("w0", FakeWorker()))
            return await pushed

    assert asyncio.run(replaced()).missed == ()
    (name, reason), verified = fleet.heard
    assert name == "w0" and reason.startswith("timed out: ") and verified == ("w0", 3)


def test_a_push_without_verified_workers_is_repeated_once_without_the_learner() -> None:
    fleet = FakeFleet(w0=FakeWorker(deaf=1), w1=FakeWorker(breaks=(1, 0)))
    learner = FakeLearner()
    result = push(fleet, learner)
    deaf, broken = (m.handle for m in fleet.workers)
    assert deaf.log == ONCE + ONCE
    assert broken.log[-len(ONCE) :] == ONCE
    assert len(set(deaf.rounds)) == 2
    assert learner.calls == ["get_manifest", "stream", "probe"]
    assert result.missed == ()
    assert sorted(heard for heard in fleet.heard if heard[1] == 3) == [("w0", 3), ("w1", 3)]


def test_a_run_whose_workers_are_all_wrong_twice_stops_with_their_reasons() -> None:
    fleet = FakeFleet(w0=FakeWorker(deaf=2), w1=FakeWorker(breaks=(2, 2), deaf=1))
    words = r"sent twice: w0 has other logprobs .* 2 nats.*probe_tolerance=0\.001.*; w1 refused a bucket"
    with pytest.raises(RunStopped, match=r"no rollout worker got version 3 of the weights, " + words):
        push(fleet)


def test_the_learner_and_the_workers_score_the_probe_at_the_same_time() -> None:
    worker = FakeWorker()
    assert push(FakeFleet(w0=worker), FakeLearner(scored=worker.scored)).missed == ()


def test_a_learner_lost_in_the_probe_verifies_no_worker() -> None:
    fleet = FakeFleet(w0=FakeWorker())
    with pytest.raises(LearnerLost, match="died during compute_probe_logprobs"):
        push(fleet, FakeLearner(lost_at=NUM_BUCKETS))
    assert fleet.heard == [("w0", "the transfer was aborted: learner rank 1 died during compute_probe_logprobs")]


@pytest.mark.parametrize("lost_at", [0, 2])
def test_a_learner_that_dies_leaves_every_worker_stale_and_no_stream_open(lost_at: int) -> None:
    fleet = FakeFleet(w0=FakeWorker(), w1=FakeWorker())
    learner = FakeLearner(lost_at=lost_at)
    with pytest.raises(LearnerLost, match="learner rank 1 died") as caught:
        push(fleet, learner)
    assert not learner.streaming, "while the error, which keeps every frame alive, is still held"
    del caught
    words = "the transfer was aborted: learner rank 1 died during stream_weights"
    assert sorted(fleet.heard) == [("w0", words), ("w1", words)]
    assert fleet.at_fault == []


def cancel_push(fleet: FakeFleet, learner: FakeLearner, *, after_s: float) -> None:
    """Cancel a push while the learner streams, and check that the stream is closed once the push has ended."""

    async def run() -> None:
        task = asyncio.create_task(FleetWeightSync(learner, fleet, CONFIG).push(3))
        while not learner.streaming:
            await asyncio.sleep(0.01)
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not learner.streaming

    asyncio.run(run())


def test_a_sync_that_is_cancelled_leaves_every_worker_stale_and_no_stream_open() -> None:
    fleet = FakeFleet(w0=FakeWorker(breaks=(1, 1), hangs=True))
    learner = FakeLearner()
    cancel_push(fleet, learner, after_s=0.2)
    assert fleet.heard == [("w0", "the transfer was aborted: CancelledError")]
    assert fleet.at_fault == []


def test_a_sync_that_is_cancelled_during_a_gather_waits_for_it_and_closes_the_stream() -> None:
    """An open stream would keep the learner locked."""

    class Slow(FakeLearner):
        def stream_weights(self, dtype: str, *, full: bool, rendezvous: Rendezvous | None) -> Iterator[Bucket]:
            for bucket in super().stream_weights(dtype, full=full, rendezvous=rendezvous):
                time.sleep(0.3)
                yield bucket

    cancel_push(FakeFleet(w0=FakeWorker()), Slow(), after_s=0.05)


def test_weights_that_are_not_finite_are_a_divergence() -> None:
    """Engines cannot verify them, and no worker is at fault."""

    class Broken(FakeLearner):
        def compute_probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
            return super().compute_probe_logprobs(ids) * np.float32(np.nan)

    with pytest.raises(Diverged, match="not finite at version 3"):
        push(FakeFleet(w0=FakeWorker()), Broken())


def test_a_late_joiner_catches_up_from_what_is_held() -> None:
    fleet = FakeFleet(w0=FakeWorker())
    learner = FakeLearner()
    joiner = FakeSyncWorker("w1", FakeWorker())

    async def joins() -> None:
        sync = FleetWeightSync(learner, fleet, CONFIG)
        await sync.catch_up(joiner)
        assert joiner.handle.log == [], "nothing was pushed yet"
        await sync.push(3)
        await sync.catch_up(joiner)
        await sync.catch_up(joiner)  # asked for twice: it has it

    asyncio.run(joins())
    assert joiner.handle.log == fleet.workers[0].handle.log == ONCE
    assert fleet.heard == [("w0", 3), ("w1", 3)]
    assert learner.calls == ["get_manifest", "stream", "probe"]


def test_a_joiner_whose_bucket_is_gone_says_that_the_learner_is_lost() -> None:
    fleet = FakeFleet(w0=FakeWorker())
    joiner = FakeSyncWorker("w1", FakeWorker(breaks=(1, 1), lost=True))

    async def joins() -> None:
        sync = FleetWeightSync(FakeLearner(), fleet, CONFIG)
        await sync.push(3)
        await sync.catch_up(joiner)

    with pytest.raises(LearnerLost, match=r"^a bucket of weights was lost with the node of learner rank 0$"):
        asyncio.run(joins())
    assert fleet.heard[-1][0] == "w1"
    assert "the transfer was aborted" in fleet.heard[-1][1]


def test_a_push_and_a_catch_up_alternate_and_a_joiner_gets_the_newer_version() -> None:
    fleet = FakeFleet(w0=FakeWorker())
    joiner = FakeSyncWorker("w1", FakeWorker())

    async def meet() -> None:
        sync = FleetWeightSync(FakeLearner(), fleet, CONFIG)
        await sync.push(3)
        await asyncio.gather(sync.push(4), sync.catch_up(joiner))

    asyncio.run(meet())
    assert joiner.handle.log[0] == ("open", 4, "float32", 3)


def test_an_engine_that_sleeps_is_brought_nothing_and_none_sleeps_while_it_is() -> None:
    fleet = FakeFleet(w0=FakeWorker())
    joiner = FakeSyncWorker("w1", FakeWorker())
    slept = list[list[Any]]()

    class Sleepers(FakeFleet):
        async def replace_unreachable(self) -> None: ...

        def started(self) -> list[FakeSyncWorker]:
            slept.append(list(joiner.handle.log))
            return []

    async def meet() -> None:
        sync = FleetWeightSync(FakeLearner(), fleet, CONFIG)
        turns = FleetGpuTimeSharing(sleepers := Sleepers(), timeout_s=5)
        turns.sending = sync.sending
        await sync.push(3)
        fleet.gpu_user = "learner"
        await sync.catch_up(joiner)
        assert joiner.handle.log == []
        fleet.gpu_user = "engines"
        await asyncio.gather(sync.catch_up(joiner), turns.switch_to("learner"))
        assert sleepers.gpu_user == "learner"
        assert slept == [joiner.handle.log]
        assert fleet.heard[-1] == ("w1", 3)

    asyncio.run(meet())


def test_a_push_takes_over_from_a_joiner_that_hangs_and_from_those_that_wait_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds, "GRACE_S", 60)
    fleet = FakeFleet(w0=FakeWorker())
    joiners = [FakeSyncWorker("w1", FakeWorker(hangs_at_open=True)), FakeSyncWorker("w2", FakeWorker())]

    async def meet() -> None:
        sync = FleetWeightSync(FakeLearner(), fleet, CONFIG)
        await sync.push(3)
        catching_up = [asyncio.create_task(sync.catch_up(joiner)) for joiner in joiners]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(DEADLINE_S / 2):
            await sync.push(4)
            await asyncio.gather(*catching_up)

    asyncio.run(meet())
    assert fleet.heard == [("w0", 3), ("w0", 4)], "and nobody missed a sync"


class Counted(FakeLearner):
    """Counts the buckets that are alive whenever it makes one more."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[weakref.ref[np.ndarray]] = []
        self.alive: list[int] = []

    def stream_weights(self, dtype: str, *, full: bool, rendezvous: Rendezvous | None) -> Iterator[Bucket]:
        for bucket in super().stream_weights(dtype, full=full, rendezvous=rendezvous):
            self.references += map(weakref.ref, bucket.tensors)
            self.alive.append(sum(reference() is not None for reference in self.references))
            yield bucket


@pytest.mark.parametrize("joins", [False, True])
def test_one_version_is_held_also_where_a_push_takes_over_from_a_joiner(
    joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would not fit into the object store that `t2g.resources.memory` asks for."""
    monkeypatch.setattr(rounds, "GRACE_S", 60)
    learner = Counted()
    fleet = FakeFleet(w0=FakeWorker())

    async def pushed() -> None:
        sync = FleetWeightSync(learner, fleet, CONFIG)
        await sync.push(3)
        joining = (
            asyncio.create_task(sync.catch_up(FakeSyncWorker("w1", FakeWorker(hangs_at_open=True)))) if joins else None
        )
        await asyncio.sleep(0.1)
        async with asyncio.timeout(DEADLINE_S / 2):
            await sync.push(4)
            if joining:
                await joining

    asyncio.run(pushed())
    assert learner.alive == [1, 2, 3, 1, 2, 3]


@pytest.mark.usefixtures("_impatient")
def test_a_joiner_has_no_more_time_than_it_would_have_in_a_push() -> None:
    fleet = FakeFleet(w0=FakeWorker())
    joiner = FakeSyncWorker("w1", FakeWorker(hangs_at_open=True))

    async def join() -> None:
        sync = FleetWeightSync(FakeLearner(), fleet, CONFIG)
        await sync.push(3)
        async with asyncio.timeout(DEADLINE_S / 2):
            await sync.catch_up(joiner)

    asyncio.run(join())
    (_, (name, reason)) = fleet.heard
    assert name == "w1" and reason.startswith("timed out: the start of a weight sync took more than ")


def test_a_push_waits_for_an_engine_that_starts_longer_than_a_step_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.weights.sync.TARGET_POLL_S", 0.01)
    fleet = FakeFleet()
    fleet.is_starting = True  # type: ignore[misc]

    async def start_late() -> None:
        sync = FleetWeightSync(FakeLearner(), fleet, LearnerConfig(step_timeout_s=0.05))
        waiting = asyncio.create_task(sync._wait_for_workers())
        await asyncio.sleep(0.15)
        fleet.is_starting = False  # type: ignore[misc]
        fleet.workers.append(FakeSyncWorker("w0", FakeWorker()))
        assert await waiting == fleet.workers

    asyncio.run(start_late())


def test_a_push_waits_for_the_first_worker_and_says_when_none_came() -> None:
    fleet = FakeFleet()

    async def late() -> None:
        sync = FleetWeightSync(FakeLearner(), fleet, CONFIG)
        pushed = asyncio.create_task(sync.push(3))
        await asyncio.sleep(0.1)
        fleet.workers.append(FakeSyncWorker("w0", FakeWorker()))
        assert (await pushed).policy_version == 3

    asyncio.run(late())
    impatient = LearnerConfig(step_timeout_s=0.3)
    reason = r"^no rollout worker was ready for weights within 0\.3 s: w0 could not start \(the GPU is gone\)$"
    with pytest.raises(RunStopped, match=reason):
        asyncio.run(FleetWeightSync(FakeLearner(), FakeFleet(), impatient).push(3))


NCCL, IPC = (CONFIG.model_copy(update={"sync_transport": transport}) for transport in ("nccl", "ipc"))
OPEN = ONCE[0]
REST = ONCE[1:]


def joins(worker: FakeWorker) -> list[tuple[int, int]]:
    """Rank and size of the groups that it joined."""
    return [entry[2:] for entry in worker.log if entry[0] == "join"]


@pytest.mark.usefixtures("_impatient")
def test_with_nccl_a_group_has_the_learner_and_the_participants_of_the_round() -> None:
    fleet = FakeFleet(w0=FakeWorker(), w1=FakeWorker(), w2=FakeWorker(hangs_at_open=True))
    learner = FakeLearner()
    first, second, hung = (m.handle for m in fleet.workers)
    result = push(fleet, learner, config=NCCL)
    assert [entry for entry in first.log if entry[0] != "join"] == ONCE
    assert first.log[1][0] == "join"
    assert joins(first) == [(1, 3)], "nobody waits for who hangs"
    assert joins(second) == [(2, 3)], "nobody waits for who hangs"
    assert joins(hung) == [], "nobody waits for who hangs"
    assert first.most_aboard == 1, "a bucket is broadcast when every engine has loaded the one before"
    assert learner.calls == ["get_manifest", "address", "stream", "probe"]
    assert result.missed == ("w2",)
    assert result.num_calls == 4 + 3 + 2 * (1 + 3 + 1 + 1)  # open; then of two: join, three buckets, close, the probe


def test_each_gpu_of_an_engine_is_a_rank_of_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of two GPUs: the learner is rank 0, an engine's GPUs count on from the rank that it is told."""
    fleet = FakeFleet(w0=FakeWorker(), w1=FakeWorker())
    monkeypatch.setattr(fleet, "config", fleet.config.model_copy(update={"gpus": 2}), raising=False)
    monkeypatch.setattr(
        Group, "at", classmethod(lambda cls, rendezvous: cls.groups.setdefault(rendezvous.port, cls(3)))
    )
    assert push(fleet, config=NCCL).missed == ()
    assert [joins(worker.handle) for worker in fleet.workers] == [[(1, 5)], [(3, 5)]]


def test_with_nccl_a_group_is_kept_for_the_same_participants_only() -> None:
    fleet = FakeFleet(w0=FakeWorker(), w1=FakeWorker())
    learner = FakeLearner()
    first, second = (worker.handle for worker in fleet.workers)

    async def pushes() -> None:
        sync = FleetWeightSync(learner, fleet, NCCL)
        await sync.push(3)
        await sync.push(4)
        assert joins(first) == [(1, 3)]
        assert joins(second) == [(2, 3)]
        assert learner.calls.count("address") == 1
        fleet.workers.append(FakeSyncWorker("w2", FakeWorker()))
        await sync.push(5)
        assert joins(first) == [(1, 3), (1, 4)]
        assert joins(fleet.workers[2].handle) == [(3, 4)]
        fleet.workers[1] = FakeSyncWorker("w1", FakeWorker())  # its successor, of the same name
        await sync.push(6)
        assert joins(first)[2:] == [(1, 4)]
        assert joins(fleet.workers[1].handle) == [(2, 4)]

    asyncio.run(pushes())
    assert [heard for heard in fleet.heard if heard[0] == "w0"] == [("w0", version) for version in (3, 4, 5, 6)]


def test_with_nccl_an_engine_that_is_lost_costs_the_round_and_the_next_has_a_group_without_it() -> None:
    fleet = FakeFleet(w0=FakeWorker(), w1=FakeWorker(breaks=(1, 1)))
    learner = FakeLearner()
    workers = list(fleet.workers)
    lose = fleet.record_missed_sync

    def record_missed_sync(worker: FakeSyncWorker, reason: str, *, timed_out: bool = False) -> None:
        lose(worker, reason, timed_out=timed_out)
        if worker.name == "w1":
            fleet.workers = workers[:1]  # it is dead

    fleet.record_missed_sync = record_missed_sync
    result = push(fleet, learner, config=NCCL)
    assert joins(workers[0].handle) == [(1, 3), (1, 2)]
    assert joins(workers[1].handle) == [(2, 3)]
    assert learner.calls == ["get_manifest", "address", "stream", "probe", "address", "stream"]
    assert result.missed == ("w1",)
    assert fleet.heard[-1] == ("w0", 3)
    assert ("w0", "refused a bucket of weights: the broadcast was aborted: one is gone") in fleet.heard


@pytest.mark.parametrize("config", [NCCL, IPC])
def test_half_a_sync_is_sent_again_by_the_learner_where_nothing_is_held(config: LearnerConfig) -> None:
    fleet = FakeFleet(w0=FakeWorker(breaks=(1, 0)))
    learner = FakeLearner()
    assert push(fleet, learner, config=config).missed == ()
    assert learner.calls.count("stream") == 2
    assert learner.calls.count("probe") == 1
    assert [entry for entry in fleet.workers[0].handle.log if entry[0] != "join"] == [OPEN, *ONCE]
    hopeless = FakeFleet(w0=FakeWorker(deaf=2))
    with pytest.raises(RunStopped, match="sent twice: w0 has other logprobs"):
        push(hopeless, config=config)


@pytest.mark.parametrize("config", [NCCL, IPC])
def test_a_late_joiner_has_the_learner_send_once_more(config: LearnerConfig) -> None:
    fleet = FakeFleet(w0=FakeWorker())
    learner = FakeLearner()
    joiner = FakeSyncWorker("w1", FakeWorker())

    async def join() -> None:
        sync = FleetWeightSync(learner, fleet, config)
        await sync.push(3)
        learner.policy_version = 4  # it has begun its next update
        await sync.catch_up(joiner)
        assert joiner.handle.log == [], "the weights of version 3 are no more"
        learner.policy_version = 3
        await sync.catch_up(joiner)

    asyncio.run(join())
    assert [entry for entry in joiner.handle.log if entry[0] != "join"] == ONCE
    assert fleet.heard == [("w0", 3), ("w1", 3)]
    assert learner.calls.count("stream") == 2
    assert learner.calls.count("probe") == 1
    assert joins(joiner.handle) == ([(1, 2)] if config is NCCL else [])
    assert len(joins(fleet.workers[0].handle)) <= 1, "who serves is not disturbed"


def test_a_joiner_does_not_serve_what_the_learner_sent_while_it_went_on() -> None:
    fleet = FakeFleet(w0=FakeWorker())
    joiner = FakeSyncWorker("w1", FakeWorker())
    learner = FakeLearner()

    async def join() -> None:
        sync = FleetWeightSync(learner, fleet, IPC)
        await sync.push(3)
        learner.updates_after = 2
        await sync.catch_up(joiner)

    asyncio.run(join())
    assert fleet.heard == [("w0", 3), ("w1", "received version 3 after the learner had updated its weights")]
    assert "close" not in joiner.handle.log


@pytest.mark.usefixtures("_impatient")
def test_with_nccl_an_engine_that_hangs_in_a_broadcast_has_no_more_time_once_another_broke_it_off() -> None:
    fleet = FakeFleet(w0=FakeWorker(breaks=(1, 1)), w1=FakeWorker(breaks=(1, 1), hangs=True))

    async def in_time() -> Any:
        async with asyncio.timeout(DEADLINE_S / 2):
            return await FleetWeightSync(FakeLearner(), fleet, NCCL).push(3)

    assert asyncio.run(in_time()).missed == ("w1",)
    assert [name for name, heard in fleet.heard if heard == 3] == ["w0"]


def test_a_worker_is_in_a_sync_from_its_request_on() -> None:
    """A task would set it later, perhaps after the end of the sync."""
    seen: list[bool] = []

    class Fleet(FakeFleet):
        def request(self, worker: FakeSyncWorker, submit: Callable[[Any], Any], what: str) -> Coroutine[Any, Any, None]:
            seen.append(worker.syncing)
            return asyncio.sleep(60)

    with pytest.raises(RunStopped):
        push(Fleet(w0=FakeWorker()), config=LearnerConfig(step_timeout_s=0.1))
    assert seen and all(seen)


def test_a_learner_lost_during_a_catch_up_is_reported_and_closes_its_stream() -> None:
    fleet = FakeFleet(w0=FakeWorker())
    joiner = FakeSyncWorker("w1", FakeWorker())
    learner = FakeLearner()

    async def join() -> None:
        sync = FleetWeightSync(learner, fleet, NCCL)
        await sync.push(3)
        learner.lost_at = 1
        with pytest.raises(LearnerLost, match="learner rank 1 died"):
            await sync.catch_up(joiner)

    asyncio.run(join())
    assert fleet.heard[-1] == ("w1", "the transfer was aborted: learner rank 1 died during stream_weights")
    assert not learner.streaming


class Loaded(FakeWorker):
    """Has computed since its start what the learner computes, but for `off`."""

    def __init__(self, off: float = 0.0) -> None:
        super().__init__()
        self.weights = [1.0, 2.0, 4.0 + off]


def first_push(baseline_file: Path, worker: FakeWorker, version: int = 0) -> FakeFleet:
    fleet = FakeFleet(w0=worker)
    asyncio.run(FleetWeightSync(FakeLearner(), fleet, CONFIG, baseline_file=baseline_file).push(version))
    return fleet


def test_the_gap_on_the_checkpoint_is_measured_before_anything_is_sent_and_kept_on_resume(tmp_path: Path) -> None:
    baseline_file = tmp_path / "probe.json"
    worker = Loaded()
    learner = FakeLearner()
    fleet = FakeFleet(w0=worker)
    asyncio.run(FleetWeightSync(learner, fleet, CONFIG, baseline_file=baseline_file).push(0))
    assert learner.calls == ["get_manifest", "probe"]
    assert worker.log == []
    assert fleet.heard == [("w0", 0)]
    written = json.loads(baseline_file.read_text())
    assert set(written) == {"largest", "p95", "median"}
    assert written["largest"] == pytest.approx(1e-4, rel=1e-2)
    resumed = first_push(baseline_file, FakeWorker(), version=3)
    assert resumed.baseline_gap == fleet.baseline_gap
    assert json.loads(baseline_file.read_text()) == written


def test_only_engines_without_the_files_weights_are_sent_version_0(tmp_path: Path) -> None:
    fleet = FakeFleet(w0=Loaded(), w1=FakeWorker())
    joiner = FakeSyncWorker("w2", Loaded())
    learner = FakeLearner()
    fleet.workers[1].version = 7  # of an earlier run
    wrong = FakeSyncWorker("w3", Loaded(off=0.5))

    async def join() -> Any:
        sync = FleetWeightSync(learner, fleet, CONFIG, baseline_file=tmp_path / "probe.json")
        result = await sync.push(0)
        learner.policy_version += 1  # the learner trains meanwhile
        for worker in (joiner, wrong):
            await sync.catch_up(worker)
        return result

    result = asyncio.run(join())
    assert [m.handle.log[1:] for m in (*fleet.workers, joiner)] == [[], ONCE[1:], []]
    assert result.bytes == 24
    assert fleet.heard[:3] == [("w0", 0), ("w1", 0), ("w2", 0)]
    assert "probe is 0.5 nats" in fleet.heard[3][1]


@pytest.mark.parametrize("learner", [{"lora": LoRAConfig()}, {"dtype": "bfloat16"}])
def test_version_0_is_sent_where_the_files_hold_other_weights(learner: dict[str, Any]) -> None:
    fleet = FakeFleet(w0=Loaded())
    asyncio.run(FleetWeightSync(FakeLearner(), fleet, CONFIG.model_copy(update=learner)).push(0))
    assert fleet.workers[0].handle.log[1:] == ONCE[1:]


def test_engines_that_a_lost_learner_left_paused_are_sent_the_weights_before_any_probe() -> None:
    """A paused engine does not answer a probe, and it has a part of the weights."""

    class Recording(Loaded):
        async def _score(self, ids: np.ndarray) -> np.ndarray:
            self.log.append("probe")
            return await super()._score(ids)

    fleet = FakeFleet(w0=Recording())
    config = CONFIG.model_copy(update={"dtype": "bfloat16"})
    with pytest.raises(LearnerLost):
        asyncio.run(FleetWeightSync(FakeLearner(lost_at=0), fleet, config).push(0))
    worker = fleet.workers[0].handle
    assert worker.log[:2] == ["probe", ("open", 0, "float32", 3)]

    worker.log.clear()
    result = asyncio.run(FleetWeightSync(FakeLearner(), fleet, config).push(0))
    assert worker.log == [("open", 0, "float32", 3), *BUCKETS, "close", "probe"]
    assert result.missed == ()


def test_the_next_run_on_engines_that_have_served_takes_their_measure(tmp_path: Path) -> None:
    fleet = first_push(tmp_path / "a.json", Loaded())
    fleet.workers[0].handle.weights[0] = 50.0  # what the first run trained
    asyncio.run(FleetWeightSync(FakeLearner(), fleet, CONFIG, baseline_file=tmp_path / "b.json").push(0))
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_engines_of_another_model_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    fleet = FakeFleet(w0=Loaded(off=0.5))
    with pytest.raises(RunStopped, match=r"different models: .* 0\.5 nats, above learner\.probe_tolerance=0\.001$"):
        asyncio.run(FleetWeightSync(FakeLearner(), fleet, CONFIG, baseline_file=tmp_path / "probe.json").push(0))
    assert fleet.workers[0].handle.log == []
    assert not (tmp_path / "probe.json").exists()


def test_a_missing_update_is_distinguished_from_a_small_one(tmp_path: Path) -> None:
    """The learner moves by a fifth of the tolerance: the gap alone would let version 0 pass for version 1."""

    class Moving(FakeLearner):
        def compute_probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
            return super().compute_probe_logprobs(ids) + np.float32(1.5e-4 * self.calls.count("stream"))

    fleet = FakeFleet(w0=Loaded())

    async def twice() -> None:
        sync = FleetWeightSync(Moving(), fleet, CONFIG, baseline_file=tmp_path / "probe.json")
        await sync.push(0)
        await sync.push(1)

    with pytest.raises(RunStopped, match=r"w0 .* are bitwise those of version 0"):
        asyncio.run(twice())


def test_the_others_have_half_a_minute_or_three_times_as_long_as_the_first() -> None:
    assert [compute_grace_s(first_s) for first_s in (1, 10, 20)] == [30, 30, 60]
