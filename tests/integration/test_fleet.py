"""Routing, deadlines and loss of workers, with plain Ray actors in place of engines."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from actors.fleet import Fleet
from actors.placement import check_places, connect
from t2g.errors import RunStopped, UserError
from t2g.sections import ClusterConfig, EngineConfig, LearnerConfig

CONFIG = EngineConfig(workers=2, cpus=0.1, memory_gib=0.1, max_num_seqs=4, start_timeout_s=30)


@ray.remote
class Worker:
    """Answers with its number. Number 0 is the worker that misbehaves."""

    def __init__(self) -> None:
        self.number = 1
        self.open = self.most = 0
        self.ping_s = 0.0

    async def become(self, number: int) -> None:
        self.number = number

    async def ping(self) -> None:
        await asyncio.sleep(self.ping_s)

    async def start(self) -> int:
        return 42

    async def work(self, seconds: float = 0.0) -> int:
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(seconds)
        self.open -= 1
        return self.number

    async def busiest(self) -> int:
        return self.most

    async def die_if_first(self) -> int:
        if self.number == 0:
            os._exit(1)
        return self.number

    async def late_if_first(self) -> int:
        await asyncio.sleep(60 if self.number == 0 else 0)
        return self.number

    async def hang_if_first(self, seconds: float) -> int:
        """Number 0 answers neither this nor pings for so long."""
        self.ping_s = seconds if self.number == 0 else 0.0
        await asyncio.sleep(60 if self.number == 0 else 0)
        return self.number

    async def refuse(self) -> None:
        raise UserError("prompt 7 is rubbish")


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    connect(ClusterConfig(object_store_gib=0.1), {"test": CONFIG})
    yield
    ray.shutdown()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """The worker that is asked first misbehaves."""
    fleet = Fleet("test", Worker, (), CONFIG, placement_timeout_s=20)
    assert fleet.wait_ready() == 42
    ray.get(fleet.alive()[0].handle.become.remote(0), timeout=20)
    yield fleet
    fleet.close()


def test_load_is_spread_and_never_above_what_an_engine_takes(fleet: Fleet) -> None:
    async def run() -> list[int]:
        calls = [fleet.call(lambda w: w.work.remote(0.1), load=1, timeout_s=20, what="work") for _ in range(20)]
        return await asyncio.gather(*calls)

    answers = asyncio.run(run())
    assert len(answers) == 20 and min(answers.count(0), answers.count(1)) >= 5
    most = fleet.on_all(lambda w: w.busiest.remote(), timeout_s=20, what="count")
    assert max(most.values()) <= 4


def test_a_dead_workers_request_goes_to_another_and_then_there_is_none(fleet: Fleet) -> None:
    async def run(times: int) -> list[int]:
        return [
            await fleet.call(lambda w: w.die_if_first.remote(), load=1, timeout_s=20, what="x") for _ in range(times)
        ]

    assert asyncio.run(run(3)) == [1, 1, 1]
    (last,) = fleet.alive()
    ray.kill(last.handle)
    with pytest.raises(RunStopped, match=r"no test worker is left: test worker \d .*; test worker \d "):
        asyncio.run(run(1))


def test_a_late_worker_is_passed_over_and_two_late_ones_are_a_timeout(fleet: Fleet) -> None:
    async def twice() -> list[int]:
        call = fleet.call(lambda w: w.late_if_first.remote(), load=1, timeout_s=1, what="x")
        return [await call, await fleet.call(lambda w: w.work.remote(), load=1, timeout_s=20, what="y")]

    assert asyncio.run(twice())[0] == 1
    assert len(fleet.alive()) == 2
    with pytest.raises(TimeoutError, match=r"prompt 3: no answer in two tries of 0\.5 s"):
        asyncio.run(fleet.call(lambda w: w.work.remote(60), load=1, timeout_s=0.5, what="prompt 3"))
    started = time.monotonic()
    with pytest.raises(RunStopped, match=r"did not finish a bucket within 0\.5 s"):
        fleet.on_all(lambda w: w.work.remote(60), timeout_s=0.5, what="a bucket")
    assert time.monotonic() - started < 5


def test_a_late_worker_gets_no_request_until_it_answers_a_ping(fleet: Fleet) -> None:
    async def run(submit: Callable[[Any], Any]) -> list[int]:
        return await asyncio.gather(*(fleet.call(submit, load=1, timeout_s=2, what="x") for _ in range(4)))

    hanging_s = 4.0
    assert asyncio.run(run(lambda w: w.hang_if_first.remote(hanging_s))) == [1, 1, 1, 1]
    asked = time.monotonic()
    assert asyncio.run(run(lambda w: w.work.remote())) == [1, 1, 1, 1]
    time.sleep(max(0.0, hanging_s + 1 - (time.monotonic() - asked)))
    assert sorted(asyncio.run(run(lambda w: w.work.remote(0.1)))) == [0, 0, 1, 1]


def test_a_workers_user_error_arrives_as_it_was_said(fleet: Fleet) -> None:
    with pytest.raises(UserError, match=r"^prompt 7 is rubbish$"):
        asyncio.run(fleet.call(lambda w: w.refuse.remote(), load=1, timeout_s=20, what="x"))


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        (
            {"cpus": 1000},
            r"no place within 1 s for 1 of 1 test workers: each needs 1000 CPUs.*the cluster has \d+ CPUs",
        ),
        ({"labels": {"rl/role": "none"}}, r"on a node with labels \{'rl/role': 'none'\}"),
    ],
)
def test_what_has_no_place_is_refused_in_time(wish: dict[str, object], sentence: str) -> None:
    config = CONFIG.model_copy(update={"workers": 1} | wish)
    with pytest.raises(UserError, match=sentence):
        Fleet("test", Worker, (), config, placement_timeout_s=1)


def test_roles_that_only_fit_one_after_the_other_are_refused_together_and_nothing_stays_taken() -> None:
    cpus = ray.cluster_resources()["CPU"]
    roles = {"rollout": EngineConfig(cpus=0.2, memory_gib=0.1), "learner": LearnerConfig(cpus=cpus, memory_gib=0.1)}
    with pytest.raises(UserError, match=r"no place within 5 s for 1 of 1 learner workers: each needs \d+ CPUs"):
        check_places(roles, timeout_s=5)  # the places of the test before may still be on their way back
    check_places(roles | {"learner": LearnerConfig(cpus=cpus - 0.2, memory_gib=0.1)}, timeout_s=10)
    check_places({"learner": roles["learner"]}, timeout_s=10)


def test_a_machine_too_small_is_refused_before_ray_starts() -> None:
    with pytest.raises(UserError, match=r"^this machine is too small: 100000 GiB of memory needed \(test 1 x 100000\)"):
        connect(ClusterConfig(), {"test": EngineConfig(memory_gib=100_000)})
