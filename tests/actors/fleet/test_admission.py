"""How well admission fills engines: a fleet as it is, a clock that jumps, and engines of which only the slots are real.

A slot decodes one sample at a time, and a sample takes as long as it is long, whatever runs beside it; what finds no
slot waits inside the engine, as in vLLM's scheduler.
"""

import asyncio
import heapq
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_ray import FakeRay
from fleet_worker import Worker, make_fleet

from actors.fleet.admission import QUEUE, Admission
from actors.fleet.fleet import Fleet
from actors.fleet.fleet_worker import FleetWorker
from actors.fleet.health import Health, State
from t2g.config import EngineConfig, WorkersConfig

SLOTS = 64
GROUP = 8
MEAN_S = 100.0  # of a sample


class JumpingLoop(asyncio.SelectorEventLoop):
    """Where nothing is to be done, its clock is set to the time of what comes next."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now = 0.0
        look = self._selector.select

        def select(timeout: float | None = None) -> Any:
            self.now += timeout or 0.0
            return look(0 if timeout else timeout)

        self._selector.select = select

    def time(self) -> float:
        return self.now


class Slots:
    """An engine: `sample.remote(length)` ends `length` seconds after it has got one of SLOTS."""

    def __init__(self) -> None:
        self.free = SLOTS
        self.queue = deque[tuple[float, Future[None]]]()
        self.busy_s = 0.0
        self.most_queued = 0
        self.sample = SimpleNamespace(remote=self._submit)

    def _submit(self, length: float) -> SimpleNamespace:
        answer: Future[None] = Future()
        self.queue.append((length, answer))
        self._begin()
        self.most_queued = max(self.most_queued, len(self.queue))
        return SimpleNamespace(future=lambda: answer)

    def _begin(self) -> None:
        while self.free and self.queue:
            length, answer = self.queue.popleft()
            self.free -= 1
            asyncio.get_running_loop().call_later(length, self._end, length, answer)

    def _end(self, length: float, answer: Future[None]) -> None:
        self.free = self.free + 1
        self.busy_s = self.busy_s + length
        if not answer.cancelled():
            answer.set_result(None)
        self._begin()


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Fleet]]:
    fake = FakeRay()
    fake.take_place(monkeypatch)

    def begin(engines: int) -> Fleet:
        config = EngineConfig(workers=WorkersConfig(initial=engines), max_num_seqs=SLOTS)
        fleet = make_fleet(fake.actor(Worker), {}, config, placement_timeout_s=9)
        fleet.wait_ready()
        for worker in fleet.serving():
            worker.handle = Slots()
        return fleet

    yield begin
    fake.stop()


def jump(work: Callable[[JumpingLoop], Coroutine[Any, Any, None]]) -> float:
    """Seconds on the clock that `work` takes."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        loop = runner.get_loop()
        runner.run(work(loop))
        return loop.now


async def group(fleet: Fleet, lengths: Sequence[float]) -> None:
    requests = [lambda engine, length=length: engine.sample.remote(length) for length in lengths]
    await fleet.calls(requests, timeout_s=1e6, what="a group")


def exponential(seed: int, groups: int) -> np.ndarray:
    """[groups, GROUP]"""
    return np.random.default_rng(seed).exponential(MEAN_S, (groups, GROUP))


def test_with_a_backlog_that_never_ends_slots_are_in_use(begin: Callable[[int], Fleet]) -> None:
    fleet = begin(2)
    until = 20 * MEAN_S

    async def work(loop: JumpingLoop) -> None:
        requests = [asyncio.ensure_future(group(fleet, lengths)) for lengths in exponential(1, groups=640)]
        while loop.now < until:
            await asyncio.sleep(MEAN_S)
        assert fleet._admission.waiting, "the backlog must not end"
        for task in requests:
            task.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    engines = [worker.handle for worker in fleet.serving()]
    seconds = jump(work)
    in_use = sum(engine.busy_s for engine in engines) / (2 * SLOTS * seconds)
    print(f"slots in use: {in_use:.3f}")
    assert in_use >= 0.85
    assert max(engine.most_queued for engine in engines) <= QUEUE * SLOTS + GROUP
    assert [worker.load for worker in fleet.serving()] == [0, 0], "who is cancelled gives its room back"


def alone(lengths: np.ndarray, slots: int) -> float:
    """Seconds of one queue before all slots: each takes the next sample when it is free."""
    free_at = [0.0] * slots
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length)
    return max(free_at)


@pytest.mark.parametrize("engines", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_a_step_takes_no_longer_than_its_own_samples_do(begin: Callable[[int], Fleet], engines: int, seed: int) -> None:
    lengths = exponential(seed, 128)
    fleet = begin(engines)

    async def step(loop: JumpingLoop) -> None:
        await asyncio.gather(*(group(fleet, row) for row in lengths))

    share = alone(lengths.ravel(), engines * SLOTS) / jump(step)
    print(f"{engines} engines: {share:.3f} of what the samples allow")
    assert share >= 0.95


def test_a_request_cancelled_before_its_call_returns_its_slot() -> None:
    worker = FleetWorker("one", None, EngineConfig())  # type: ignore[arg-type]
    worker.health = Health(since=0, state=State.SERVING)

    async def care() -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        admission = Admission([worker], room=1, on_waiting=care)
        assert await admission.enter(3, avoid=None) is worker
        assert worker.load == 3
        second = asyncio.ensure_future(admission.enter(2, avoid=None))
        third = asyncio.ensure_future(admission.enter(1, avoid=None))
        await asyncio.sleep(0)
        for _ in range(3):
            admission.leave(worker)
        assert worker.load == 2
        second.cancel()
        assert (await asyncio.gather(second, third, return_exceptions=True))[1] is worker
        assert worker.load == 1 and not admission.waiting

    asyncio.run(run())


def test_a_free_slot_wakes_one_waiting_request_and_checks_one_worker() -> None:
    """With 256 workers and a thousand who wait, each end of a request would else cost a walk over all of either. (One
    who has nothing left to do is an idle worker, which is counted.)"""
    looked: list[str] = []

    class Watched(FleetWorker):
        @property
        def health(self) -> Health:
            looked.append(self.name)
            return self.__dict__["health"]

        @health.setter
        def health(self, value: Health) -> None:
            self.__dict__["health"] = value

    workers: list[FleetWorker] = [Watched(f"w{k}", None, EngineConfig()) for k in range(256)]  # type: ignore[arg-type]
    for worker in workers:
        worker.health = Health(since=0, state=State.SERVING)

    async def care() -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        admission = Admission(workers, room=2, on_waiting=care)
        woken = []

        async def one(number: int) -> None:
            await admission.enter(1, avoid=None)
            woken.append(number)

        tasks = [asyncio.ensure_future(one(number)) for number in range(512 + 1000)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(woken) == 512 and admission.waiting
        for step in range(3):
            looked.clear()
            admission.leave(workers[7])
            await asyncio.sleep(0)
            assert len(woken) == 513 + step, "first come, first served, and nobody else wakes"
            assert woken[-1] == 512 + step
            assert {*looked} == {"w7"}
        for task in tasks:
            task.cancel()

    asyncio.run(run())
