"""Fleets on real actors, where processes, places and lost objects matter; the rest is in tests/actors/fleet."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import ray
from fleet_worker import Rank, Unwilling, Worker, make_fleet

from actors.cluster.placement import check_placement
from actors.engines.rollout import RolloutFleet
from actors.fleet.fleet import Fleet
from actors.learner.learner import LearnerGroup
from actors.learner.spec import LearnerSpec
from jobs.common.fleets import start_learner
from t2g.config import EngineConfig, HealthConfig, LearnerConfig, ModelConfig, WorkersConfig
from t2g.errors import LearnerLost, SamplingFailed, UserError

CONFIG = EngineConfig(
    workers=WorkersConfig(initial=2, min=1, max=4), cpus=0.1, memory_gib=0.1, max_num_seqs=4,
    health=HealthConfig(check_interval_s=0.2, check_timeout_s=20, max_failures=2, max_restarts=2),
    start_timeout_s=30, request_timeout_s=20,
)  # fmt: skip
PATIENCE_S = 20

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def begin() -> Iterator[Callable[..., Fleet]]:
    """Fleets that are closed at the end, also of a test that failed: the next one needs their places."""
    begun: list[Fleet] = []

    def begin(config: EngineConfig = CONFIG, *, actor: type[Worker] = Worker) -> Fleet:
        begun.append(make_fleet(ray.remote(actor), {}, config, placement_timeout_s=PATIENCE_S))
        return begun[-1]

    yield begin
    for fleet in begun:
        fleet.close()


def ready(fleet: Fleet) -> Fleet:
    fleet.wait_ready()
    assert fleet.started_with == 42
    for worker in fleet.started():
        ray.get(worker.handle.become.remote(worker.name), timeout=PATIENCE_S)
    return fleet


@pytest.fixture
def fleet(begin: Callable[..., Fleet]) -> Fleet:
    return ready(begin())


def test_a_worker_of_our_own_cluster_is_as_important_as_its_driver() -> None:
    niceness = ray.remote(num_cpus=0)(lambda: os.nice(0))
    assert ray.get(niceness.remote(), timeout=PATIENCE_S) == os.nice(0)


def work(fleet: Fleet) -> Coroutine[Any, Any, str]:
    return fleet.call(lambda w: w.work.remote(), timeout_s=20.0, what="work")


async def until(fleet: Fleet, holds: Callable[[], bool]) -> None:
    """Rounds of care until it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            fleet.tick()
            await asyncio.sleep(0.05)


def test_a_health_check_does_not_wait_behind_thousands_of_requests(fleet: Fleet) -> None:
    worker = fleet.serving()[0].handle
    requests = [worker.work.remote(PATIENCE_S) for _ in range(2_000)]
    ray.get(worker.check_health.remote(), timeout=PATIENCE_S / 2)
    assert not ray.wait(requests, timeout=0)[0]


def test_a_dead_workers_requests_go_elsewhere_and_another_takes_its_place(fleet: Fleet) -> None:
    first = fleet.started()[0]
    ray.get(first.handle.become.remote("zero", "mortal"), timeout=PATIENCE_S)

    async def run() -> tuple[list[str], str]:
        answers = await asyncio.gather(*(work(fleet) for _ in range(4)))
        await until(fleet, lambda: len(fleet.serving()) == 2)
        return answers, await work(fleet)

    answers, _ = asyncio.run(run())
    assert answers == ["test worker 1"] * 4
    names = {w["name"]: (w["state"], w["restarts"]) for w in fleet.report()["workers"]}
    assert names == {"test worker 0": ("serving", 1), "test worker 1": ("serving", 0)}
    metrics = fleet.metrics()
    assert metrics["restarts"] == 1
    assert 0 < metrics["recovery_s"] < PATIENCE_S
    assert metrics["workers"] == 2
    assert "recovery_s" not in fleet.metrics()


def test_an_exception_of_a_worker_reaches_the_caller(fleet: Fleet, begin: Callable[..., Fleet]) -> None:
    with pytest.raises(SamplingFailed, match=r"^x: (test worker \d failed: .*cannot do it.*){3}$"):
        asyncio.run(fleet.call(lambda w: w.stumble.remote(), timeout_s=20, what="x"))
    with pytest.raises(UserError, match=r"^prompt 7 is rubbish$"):
        asyncio.run(fleet.call(lambda w: w.refuse.remote(), timeout_s=20, what="x"))
    with pytest.raises(SamplingFailed, match=r"^late: (no answer from test worker \d within 0\.3 s.*){3}$"):
        asyncio.run(fleet.call(lambda w: w.work.remote(60), timeout_s=0.3, what="late"))
    with pytest.raises(UserError, match=r"^model\.policy is no model$"):
        begin(actor=Unwilling).wait_ready()


class Ranks(LearnerGroup):
    actor = ray.remote(Rank)


@pytest.mark.parametrize(
    ("engine", "model", "error"),
    [
        (Unwilling, "any", r"^model\.policy is no model$"),
        (Worker, "refused", r"^model\.policy='refused' cannot be loaded$"),
        (Unwilling, "refused", r"^model\.policy is no model$"),
    ],
)
def test_of_engines_and_ranks_that_load_side_by_side_the_first_error_ends_all(
    engine: type[Worker], model: str, error: str, begin: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.common.fleets.LearnerGroup", Ranks)
    learner = LearnerConfig(workers=2, cpus=0.1, memory_gib=0.1)
    spec = LearnerSpec(model=ModelConfig(policy=model), learner=learner, num_updates=1, seed=1, loss="supervised")
    before = free_cpus()
    fleet = begin(actor=engine)
    with pytest.raises(UserError, match=error), start_learner(spec, fleet, placement_timeout_s=PATIENCE_S):
        raise AssertionError("nothing may start")
    fleet.close()
    deadline = time.monotonic() + PATIENCE_S
    while free_cpus() != pytest.approx(before):
        assert time.monotonic() < deadline, "a part was left running"
        time.sleep(0.1)


def test_a_worker_waiting_for_placement_blocks_no_other_and_can_leave(
    begin: Callable[..., Fleet],
) -> None:
    fleet = ready(begin(CONFIG.model_copy(update={"cpus": free_cpus() * 0.4})))

    async def run() -> None:
        fleet.set_target_size(3)
        for _ in range(10):
            fleet.tick()
            await work(fleet)
        assert [w["state"] for w in fleet.report()["workers"]] == ["serving", "serving", "starting"]
        fleet.set_target_size(2)
        fleet.tick()
        assert [w["state"] for w in fleet.report()["workers"]] == ["serving", "serving"]

    asyncio.run(run())


@ray.remote
class Owner:
    async def bucket(self) -> list[Any]:
        return [ray.put(b"weights" * 100_000)]


def test_a_bucket_that_went_with_its_owner_says_that_the_learner_is_lost(fleet: Fleet) -> None:
    """An argument that Ray lost; where it is lost with its node, Ray raises a sister of this error."""
    owner = Owner.remote()
    (ref,) = ray.get(owner.bucket.remote(), timeout=PATIENCE_S)
    ray.kill(owner)

    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S):
            worker = fleet.serving()[0]
            while True:  # until Ray has noticed
                await RolloutFleet.request(fleet, worker, lambda w: w.become.remote(ref), "a bucket of weights")
                await asyncio.sleep(0.5)

    with pytest.raises(LearnerLost, match=r"^a bucket of weights was lost with the node of learner rank 0$"):
        asyncio.run(run())
    assert len(fleet.serving()) == 2


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        (
            {"cpus": 1000},
            r"no place within 1 s for 1 of 1 test workers: each needs 1000 CPUs.* has [\d.]+ of \d+ CPUs",
        ),
        ({"labels": {"rl/role": "none"}}, r"on a node with labels \{'rl/role': 'none'\}"),
    ],
)
def test_what_has_no_place_is_refused_in_time(wish: dict[str, object], sentence: str) -> None:
    config = CONFIG.model_copy(update={"workers": WorkersConfig()} | wish)
    with pytest.raises(UserError, match=sentence):
        make_fleet(Worker, {}, config, placement_timeout_s=1)


def free_cpus() -> float:
    """Return the free CPUs once five readings agree: those of earlier tests come back late."""
    readings: list[float] = []
    deadline = time.monotonic() + 60
    while len(readings) < 5 or len(set(readings[-5:])) > 1:
        assert time.monotonic() < deadline, f"the free CPUs change: {readings}"
        readings.append(ray.available_resources()["CPU"])
        time.sleep(0.5)
    return readings[-1]


def test_roles_that_only_fit_one_after_the_other_are_refused_together_and_nothing_stays_taken() -> None:
    cpus = free_cpus()
    roles = {"rollout": EngineConfig(cpus=0.2, memory_gib=0.1), "learner": LearnerConfig(cpus=cpus, memory_gib=0.1)}
    with pytest.raises(UserError, match=r"no place within 2 s for 1 of 1 learner workers: each needs [\d.]+ CPUs"):
        check_placement(roles, timeout_s=2)
    check_placement(roles | {"learner": LearnerConfig(cpus=cpus - 0.2, memory_gib=0.1)}, timeout_s=10)
    check_placement({"learner": roles["learner"]}, timeout_s=10)
