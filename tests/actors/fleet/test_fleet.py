"""Routing, deadlines and loss of workers, which live in this process; on real actors in tests/integration."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from fake_ray import Died, FakeRay
from fleet_worker import Unwilling, Worker, make_fleet
from ray.exceptions import ActorUnavailableError, ObjectLostError, RaySystemError, RuntimeEnvSetupError

from actors.engines import rollout
from actors.engines.rollout import RolloutFleet
from actors.fleet.admission import IdleClock
from actors.fleet.fleet import Fleet
from actors.fleet.fleet_worker import FleetWorker
from actors.fleet.health import Health, State
from t2g.config import EngineConfig, HealthConfig, WorkersConfig
from t2g.errors import LearnerLost, RunStopped, SamplingFailed, Stopped, UserError

HEALTH = HealthConfig(check_interval_s=0.2, check_timeout_s=1.0, max_failures=2, max_restarts=2)
CONFIG = EngineConfig(
    workers=WorkersConfig(initial=2, min=1, max=4), health=HEALTH, cpus=0.1, memory_gib=0.1, max_num_seqs=4,
    start_timeout_s=30, request_timeout_s=20,
)  # fmt: skip
PATIENCE_S = 20


class Mortal(Worker):
    def die(self) -> None:
        raise Died


class Hindered(Mortal):
    """Cannot start where the gate stands, and takes it away."""

    async def start(self) -> int:
        if self.gate.exists():
            self.gate.unlink()
            raise UserError("there is no room")
        return 42


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake = FakeRay()
    fake.take_place(monkeypatch)
    yield fake
    fake.stop()


@pytest.fixture
def begin(ray: FakeRay) -> Callable[..., Fleet]:
    def begin(config: EngineConfig = CONFIG, *, actor: type[Worker] = Mortal, gate: Path | None = None) -> Fleet:
        return make_fleet(ray.actor(actor), {"gate": gate}, config, placement_timeout_s=PATIENCE_S)

    return begin


def ready(fleet: Fleet) -> Fleet:
    fleet.wait_ready()
    assert fleet.started_with == 42
    name_them(fleet)
    return fleet


def name_them(fleet: Fleet) -> None:
    for worker in fleet.started():
        become(worker, worker.name)


@pytest.fixture
def fleet(begin: Callable[..., Fleet]) -> Fleet:
    return ready(begin())


def become(worker: FleetWorker, name: str, mood: str = "") -> None:
    worker.handle.become.remote(name, mood).future().result(timeout=PATIENCE_S)


def work(fleet: Fleet, *, seconds: float = 0.0, timeout_s: float = 20.0) -> Coroutine[Any, Any, str]:
    return fleet.call(lambda w: w.work.remote(seconds), timeout_s=timeout_s, what="work")


async def until(fleet: Fleet, holds: Callable[[], bool]) -> None:
    """Rounds of care until it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            fleet.tick()
            await asyncio.sleep(0.05)


def test_load_is_spread_and_never_above_what_an_engine_decodes_and_a_quarter_more(fleet: Fleet) -> None:
    async def run() -> list[str]:
        return await asyncio.gather(*(work(fleet, seconds=0.1) for _ in range(20)))

    answers = asyncio.run(run())
    assert sorted(set(answers)) == ["test worker 0", "test worker 1"]
    assert len(answers) == 20
    assert min(answers.count(name) for name in set(answers)) >= 5
    assert max(m.handle.instance.most for m in fleet.started()) == 5


def test_a_worker_that_dies_again_and_again_is_given_up_and_the_floor_stops_the_run(
    begin: Callable[..., Fleet],
) -> None:
    once = HEALTH.model_copy(update={"max_restarts": 1})
    fleet = ready(begin(CONFIG.model_copy(update={"workers": WorkersConfig(initial=1, max=4), "health": once})))

    async def run() -> None:
        while True:
            await until(fleet, lambda: len(fleet.serving()) == 1)
            fleet.serving()[0].handle.die()
            await until(fleet, lambda: not fleet.serving())

    losses = r"(test worker 0 died \(ActorDiedError: .*\)(; |$)){2}"
    with pytest.raises(RunStopped, match=rf"^no test worker is left, feedback\.engine\.workers\.min=1: {losses}"):
        asyncio.run(run())


def test_an_unanswered_request_fails_and_names_its_workers(fleet: Fleet) -> None:
    with pytest.raises(
        SamplingFailed, match=r"^work: no answer from test worker \d within 0\.3 s; no answer from test w"
    ):
        asyncio.run(work(fleet, seconds=60, timeout_s=0.3))
    with pytest.raises(SamplingFailed, match=r"^x: (test worker \d failed: .*cannot do it.*){3}$"):
        asyncio.run(fleet.call(lambda w: w.stumble.remote(), timeout_s=20, what="x"))
    with pytest.raises(UserError, match=r"^prompt 7 is rubbish$"):
        asyncio.run(fleet.call(lambda w: w.refuse.remote(), timeout_s=20, what="x"))


def test_a_late_worker_is_passed_over_until_it_answers(begin: Callable[..., Fleet]) -> None:
    patient = HEALTH.model_copy(
        update={"check_interval_s": 60, "check_timeout_s": PATIENCE_S}
    )  # none is on its way now
    fleet = ready(begin(CONFIG.model_copy(update={"health": patient})))
    first = fleet.started()[0]
    become(first, "zero", "deaf")

    async def run() -> list[list[str]]:
        late = await asyncio.gather(work(fleet, timeout_s=1), work(fleet, timeout_s=1))
        assert first.health.suspect and first in fleet.serving()
        passed_over = await asyncio.gather(*(work(fleet) for _ in range(4)))
        become(first, "zero")
        await until(fleet, lambda: not first.health.suspect)
        again = await asyncio.gather(*(work(fleet, seconds=0.1) for _ in range(4)))
        return [late, passed_over, sorted(again)]

    late, passed_over, again = asyncio.run(run())
    assert late == ["test worker 1"] * 2
    assert passed_over == ["test worker 1"] * 4
    assert again == ["test worker 1"] * 2 + ["zero"] * 2


def test_health_checks_find_a_hanging_worker_long_before_request_timeouts(fleet: Fleet) -> None:
    first = fleet.started()[0]
    become(first, "zero", "deaf")

    async def run() -> list[str]:
        requests = asyncio.gather(work(fleet, timeout_s=60), work(fleet, timeout_s=60))
        await until(fleet, lambda: first.health.state is State.DEAD)
        answers = await requests
        await until(fleet, lambda: len(fleet.serving()) == 2)
        return answers

    assert asyncio.run(run()) == ["test worker 1"] * 2
    assert first.health.reason == "did not answer a health check within 1 s"


def test_workers_join_and_leave_while_requests_go_on_and_no_call_waits_for_the_joiner(
    begin: Callable[..., Fleet], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    fleet = ready(begin(gate=gate))

    async def run() -> tuple[list[str], list[str]]:
        gate.unlink()
        fleet.set_target_size(4)
        await until(fleet, lambda: len(fleet.report()["workers"]) == 4)
        while_joining = await asyncio.gather(*(work(fleet) for _ in range(8)))
        assert len(fleet.serving()) == 2 and fleet.joining
        gate.touch()
        await until(fleet, lambda: len(fleet.serving()) == 4)
        name_them(fleet)
        requests = [asyncio.ensure_future(work(fleet, seconds=3.0)) for _ in range(8)]
        await until(fleet, lambda: all(m.load == 2 for m in fleet.serving()))
        fleet.set_target_size(1)
        await until(fleet, lambda: len(fleet.serving()) == 1)
        assert {w["state"] for w in fleet.report()["workers"]} == {"serving", "draining"}
        finished = await asyncio.gather(*requests)
        await until(fleet, lambda: len(fleet.report()["workers"]) == 1)
        return while_joining, finished

    while_joining, finished = asyncio.run(run())
    assert set(while_joining) == {"test worker 0", "test worker 1"}
    assert sorted(finished) == sorted(2 * [f"test worker {i}" for i in range(4)])
    assert fleet.metrics()["restarts"] == 0


def test_only_a_synced_worker_serves_and_a_failed_one_catches_up(
    begin: Callable[..., Fleet],
) -> None:
    fleet = ready(begin())
    brought: list[str] = []

    async def catch_up(worker: FleetWorker) -> None:
        brought.append(worker.name)
        fleet.record_verified(worker, 7)

    async def run() -> list[str]:
        first, second = fleet.serving()  # what they loaded
        first.syncing = second.syncing = True
        fleet.record_verified(second, 6)
        become(first, "zero", "late")
        requests = asyncio.gather(work(fleet), work(fleet))
        await asyncio.sleep(0.3)
        fleet.record_missed_sync(first, "died during a bucket")
        assert not first.syncing and not second.syncing, "the sync is over for both: they are checked again"
        answers = await requests  # at once, not when they are late
        assert [m.name for m in fleet.serving()] == ["test worker 1"]
        fleet.catch_up = catch_up
        fleet.set_target_size(3)
        await until(fleet, lambda: len(fleet.serving()) == 3)
        return answers

    assert asyncio.run(run()) == ["test worker 1"] * 2
    assert brought == ["test worker 0", "test worker 2"]
    assert [w["version"] for w in fleet.report()["workers"]] == [7, 6, 7]


def test_what_is_answered_in_a_sync_counts_once_the_weights_are_proved(fleet: Fleet) -> None:
    async def run() -> list[str]:
        first, second = fleet.serving()
        first.syncing = second.syncing = True
        requests = [asyncio.ensure_future(work(fleet)) for _ in range(2)]
        await asyncio.sleep(0.5)
        assert not any(request.done() for request in requests)
        fleet.record_missed_sync(first, "computes something else")
        fleet.record_verified(second, 7)
        return await asyncio.gather(*requests)

    assert asyncio.run(run()) == ["test worker 1"] * 2
    fleet.record_verified(fleet.started()[0], 7)
    assert asyncio.run(run()) == ["test worker 1"] * 2, "in another event loop as well"


def test_an_answer_is_delivered_at_once_and_survives_the_loss_of_its_worker(fleet: Fleet) -> None:
    delivered: list[str] = []

    def on_answer(answer: str) -> None:
        delivered.append(answer)
        if len(delivered) == 1:  # the other request is still running there
            next(worker for worker in fleet.serving() if worker.name == answer).handle.die()

    submits = [lambda w: w.work.remote(), lambda w: w.work.remote(0.0 if delivered else 30.0)]
    answers = asyncio.run(fleet.calls(submits, timeout_s=20, what="work", on_answer=on_answer))
    assert answers == delivered == ["test worker 0", "test worker 1"]


def test_an_answer_in_a_sync_is_delivered_once_the_weights_are_verified(fleet: Fleet) -> None:
    async def run() -> list[str]:
        first, second = fleet.serving()
        first.syncing = second.syncing = True
        delivered: list[str] = []
        submits = [lambda w: w.work.remote()]
        request = asyncio.ensure_future(fleet.calls(submits, timeout_s=20, what="work", on_answer=delivered.append))
        await asyncio.sleep(0.2)
        assert delivered == []
        fleet.record_missed_sync(first, "computes something else")
        fleet.record_verified(second, 7)
        assert await request == delivered
        return delivered

    assert asyncio.run(run()) == ["test worker 1"]


class LostAnswer:
    """As a reference to an answer that lay on a node that is gone."""

    def future(self) -> Future[str]:
        future: Future[str] = Future()
        future.set_exception(ObjectLostError("ab" * 28, None, ""))
        return future


def test_a_lost_answer_is_retried_elsewhere_and_costs_no_worker(fleet: Fleet) -> None:
    answers = iter([lambda worker: LostAnswer(), lambda worker: worker.work.remote()])
    answer = asyncio.run(fleet.call(lambda worker: next(answers)(worker), timeout_s=5, what="work"))
    first, second = fleet.serving()
    assert answer == second.name
    assert first.health.suspect
    assert first.restarts == second.restarts == 0


def test_many_requests_that_do_not_reach_a_worker_at_once_leave_it_to_its_health_checks(fleet: Fleet) -> None:
    """Which it answers here: until then requests wait, though it is the only one."""
    fleet.set_target_size(1)
    fleet.tick()
    (only,) = fleet.serving()

    async def run() -> str:
        for _ in range(3 * HEALTH.max_failures):
            fleet.record_failure(only, ActorUnavailableError("no route", b"\0" * 16))
        assert only.health.state is State.SERVING and only.health.suspect
        return await work(fleet)

    assert asyncio.run(run()) == only.name
    assert only.restarts == 0 and not only.health.suspect


def test_an_unreachable_worker_misses_the_next_weights(fleet: Fleet) -> None:
    first, second = fleet.serving()
    fleet.record_failure(first, ActorUnavailableError("no route", b"\0" * 16))
    for _ in range(3):
        assert RolloutFleet.begin_sync(fleet) == [second]
    assert first.health.state is State.STALE
    assert first.health.missed_syncs == 1


def test_workers_whose_learner_is_lost_again_and_again_get_no_requests_and_live(fleet: Fleet) -> None:
    first, second = fleet.serving()
    for _ in range(3 * HEALTH.max_failures):
        first.syncing = True
        fleet.record_aborted_sync(first, "the transfer was aborted: learner rank 1 died")
    assert fleet.started() == [first, second]
    assert fleet.serving() == [second]
    assert not first.syncing
    assert first.health.reason == "missed a weight sync (the transfer was aborted: learner rank 1 died)"


def test_an_unreachable_worker_is_replaced_in_a_gpu_switch(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "RELEASE_S", 0.01)
    first, second = fleet.serving()
    fleet.record_failure(first, ActorUnavailableError("no route", b"\0" * 16))
    asyncio.run(RolloutFleet.replace_unreachable(fleet))
    assert fleet.serving() == [first, second], "it answers again"
    become(first, "zero", "deaf")
    fleet.record_failure(first, ActorUnavailableError("no route", b"\0" * 16))
    asyncio.run(RolloutFleet.replace_unreachable(fleet))
    assert fleet.started() == [second]
    fleet.tick()
    (successor,) = [worker for worker in fleet._workers if worker is not second]
    assert (successor.name, successor.restarts) == (first.name, 1)


def test_a_worker_lost_between_catch_up_and_push_is_checked_and_gets_the_next_weights(
    fleet: Fleet,
) -> None:
    first, second = fleet.serving()

    async def run() -> None:
        fleet.record_missed_sync(first, "was behind")
        first.syncing = True
        fleet.record_failure(first, ActorUnavailableError("no route", b"\0" * 16))
        assert RolloutFleet.begin_sync(fleet) == [second]
        await until(fleet, lambda: RolloutFleet.begin_sync(fleet) == [first, second])

    asyncio.run(run())
    assert first.restarts == 0


def test_a_worker_that_timed_out_in_a_sync_gets_no_weights_until_it_passes_a_health_check(fleet: Fleet) -> None:
    first, second = fleet.serving()

    async def run() -> None:
        become(first, "zero", "deaf")
        fleet.record_missed_sync(first, "timed out", timed_out=True)
        assert RolloutFleet.begin_sync(fleet) == [second]
        become(first, "zero")
        await until(fleet, lambda: RolloutFleet.begin_sync(fleet) == [first, second])

    asyncio.run(run())
    assert first.health.state is State.STALE and first.restarts == 0


def test_no_worker_is_removed_during_a_weight_sync(fleet: Fleet) -> None:
    for worker in fleet.serving():
        worker.syncing = True
    fleet.set_target_size(1)
    fleet.tick()
    assert len(fleet.serving()) == 2
    fleet.record_missed_sync(fleet.serving()[0], "computes something else")
    fleet.tick()
    (left,) = fleet.started()
    assert left.syncing and left.health.state is State.SERVING


def test_care_after_a_learner_was_made_again_counts_anew(fleet: Fleet) -> None:
    """Nobody looked after the fleet meanwhile: neither was anybody started, nor is what was lost still lost."""
    fleet._failure = LearnerLost("rank 0 died")
    fleet._short_since = -1e9
    for worker in fleet.serving():
        fleet._apply_event(worker, "died", "with its node")

    async def run() -> None:
        care = asyncio.ensure_future(fleet.supervise())
        async with asyncio.timeout(PATIENCE_S):
            while sum(worker.restarts for worker in fleet.serving()) < 2 and not care.done():
                await asyncio.sleep(0.05)
        assert not care.done()
        care.cancel()

    asyncio.run(run())


def test_requests_supervise_an_unsupervised_fleet(fleet: Fleet) -> None:
    first = fleet.serving()[0]
    first.handle.die()

    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while sum(worker.restarts for worker in fleet.serving()) < 1:
                await work(fleet)
                await asyncio.sleep(0.05)

    asyncio.run(run())


def test_a_successor_that_cannot_start_at_first_is_started_again(begin: Callable[..., Fleet], tmp_path: Path) -> None:
    fleet = ready(begin(actor=Hindered, gate=tmp_path / "no room"))
    (tmp_path / "no room").touch()
    become(fleet.serving()[0], "zero", "mortal")

    async def run() -> None:
        assert await work(fleet) == "test worker 1"
        await until(fleet, lambda: len(fleet.serving()) == 2)

    asyncio.run(run())
    assert sorted(m.restarts for m in fleet.serving()) == [0, 2]


def test_an_engine_lost_while_ranks_have_its_gpu_is_replaced_once_they_leave_it(ray: FakeRay) -> None:
    """A start on a full GPU would fail, and use up the restart budget."""
    shared = {"role": "test", "actor": ray.actor(Mortal), "__init__": Fleet.__init__}
    config: Any = CONFIG.model_copy(update={"workers": WorkersConfig(initial=2, min=2, max=2)})
    fleet = ready(type("Shared", (RolloutFleet,), shared)({"gate": None}, config, placement_timeout_s=PATIENCE_S))
    fleet.gpu_user = "learner"
    fleet.serving()[0].handle.die()

    async def run() -> None:
        await until(fleet, lambda: len(fleet.started()) == 1)
        for _ in range(3):
            fleet.tick()
        assert not fleet.is_starting
        fleet.gpu_user = "engines"
        await until(fleet, lambda: len(fleet.serving()) == 2)

    asyncio.run(run())


@pytest.mark.parametrize("grows", [False, True])
def test_a_successor_without_a_process_yields_its_placement_unless_the_cluster_grows(
    fleet: Fleet, ray: FakeRay, grows: bool
) -> None:
    ray.places.is_ready = lambda group: False
    ray.places.may_grow = lambda: grows
    fleet.serving()[0].handle.die()

    def find_waiting() -> list[FleetWorker]:
        return [worker for worker in fleet._workers if worker.handle is None]

    async def run() -> None:
        await until(fleet, lambda: find_waiting() != [])
        (waiting,) = find_waiting()
        group = waiting.placement_group
        (serving,) = fleet.serving()
        fleet.yield_placements()
        assert ray.removed[1:] == ([] if grows else [group])
        assert serving.placement_group not in ray.removed

        fleet.tick()
        assert (waiting.placement_group is group) == grows
        ray.places.is_ready = lambda group: True
        await until(fleet, lambda: len(fleet.serving()) == 2)
        assert waiting.restarts == 1, "it costs no restart"

    asyncio.run(run())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_first_start_that_fails_before_any_other_is_tried_again(
    begin: Callable[..., Fleet], tmp_path: Path, workers: int
) -> None:
    (tmp_path / "no room").touch()
    config = CONFIG.model_copy(update={"workers": WorkersConfig(initial=workers)})
    fleet = begin(config, actor=Hindered, gate=tmp_path / "no room")
    fleet.wait_ready()
    assert sorted(m.restarts for m in fleet.serving()) == [0, 1][-workers:]
    assert fleet.expected == workers


class Failing(Worker):
    """Cannot start, and says another reason each time: how many workers began before it."""

    num_starts = 0

    async def start(self) -> int:
        type(self).num_starts += 1
        raise ValueError(f"start {type(self).num_starts} failed")


def test_first_starts_that_fail_use_up_the_restart_budget_and_the_last_error_is_raised(
    begin: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, "num_starts", 0)
    with pytest.raises(Exception, match="start 3 failed"):
        begin(CONFIG.model_copy(update={"workers": WorkersConfig()}), actor=Failing).wait_ready()
    assert Failing.num_starts == 1 + HEALTH.max_restarts


class Refused(Mortal):
    """Ray starts none while `refusals` are left, and answers for a worker in the mood "garbled" itself."""

    refusals = 0

    async def start(self) -> int:
        if type(self).refusals:
            type(self).refusals -= 1
            raise RuntimeEnvSetupError("no space left on device\nTraceback ...")
        return 42

    async def check_health(self) -> None:
        self.raise_if_garbled()

    async def work(self, seconds: float = 0.0) -> str:
        self.raise_if_garbled()
        return await super().work(seconds)

    def raise_if_garbled(self) -> None:
        if self.mood == "garbled":
            raise RaySystemError("the answer cannot be read")


def test_starts_that_ray_refuses_are_repeated_and_end_in_one_sentence(
    begin: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Refused, "refusals", 1)
    config = CONFIG.model_copy(update={"workers": WorkersConfig()})
    assert ready(begin(config, actor=Refused)).serving()[0].restarts == 1

    monkeypatch.setattr(Refused, "refusals", 100)
    reason = r"^test worker 0 could not start \(RuntimeEnvSetupError: no space left on device\)$"
    with pytest.raises(RunStopped, match=reason):
        begin(config, actor=Refused).wait_ready()


def test_a_worker_for_which_ray_answers_is_passed_over_and_replaced(begin: Callable[..., Fleet]) -> None:
    fleet = ready(begin(actor=Refused))
    first = fleet.serving()[0]
    become(first, "zero", "garbled")

    async def run() -> list[str]:
        answers = await asyncio.gather(*(work(fleet) for _ in range(4)))
        await until(fleet, lambda: first.health.state is State.DEAD)
        return answers

    assert asyncio.run(run()) == ["test worker 1"] * 4
    assert first.health.reason.startswith("failed a health check (RaySystemError: System error: the answer cannot")


def test_restarts_that_are_older_than_the_window_do_not_count(begin: Callable[..., Fleet]) -> None:
    """Each loss comes when the window has passed: with one restart the worker survives three losses."""
    health = HEALTH.model_copy(update={"max_restarts": 1, "restart_window_s": 0.3})
    fleet = ready(begin(CONFIG.model_copy(update={"workers": WorkersConfig(), "health": health})))

    async def lose(seconds: float) -> None:
        await asyncio.sleep(seconds)
        fleet.serving()[0].handle.die()
        await until(fleet, lambda: not fleet.serving())
        await until(fleet, lambda: len(fleet.serving()) == 1)

    for restarts in (1, 2, 3):
        asyncio.run(lose(0.4))
        assert fleet.serving()[0].restarts == restarts


def test_a_worker_that_was_given_up_comes_back_when_the_window_has_passed(begin: Callable[..., Fleet]) -> None:
    health = HEALTH.model_copy(update={"max_restarts": 1, "restart_window_s": 60.0})
    fleet = ready(begin(CONFIG.model_copy(update={"health": health})))  # two workers, of which one is enough

    async def run() -> None:
        for restarts in (0, 1):
            next(m for m in fleet.serving() if (m.name, m.restarts) == ("test worker 0", restarts)).handle.die()
            await until(fleet, lambda: len(fleet.serving()) == 1)
            await until(fleet, lambda: not fleet.joining)
        assert (fleet.expected, len(fleet.serving())) == (1, 1)
        report = fleet.report()
        rows = {w["name"]: (w["state"], w["restarts_left"]) for w in report["workers"]}
        assert rows == {"test worker 0": ("dead", 0), "test worker 1": ("serving", 1)}
        assert report["restart_window_s"] == 60.0
        short_window = health.model_copy(update={"restart_window_s": 0.01})
        fleet.config = fleet.config.model_copy(update={"health": short_window})
        await until(fleet, lambda: len(fleet.serving()) == 2)

    asyncio.run(run())
    assert fleet.expected == 2
    assert sorted(m.restarts for m in fleet.serving()) == [0, 2]


def test_a_run_without_serving_workers_stops_and_names_them(begin: Callable[..., Fleet]) -> None:
    async def in_vain(worker: FleetWorker) -> None: ...

    fleet = ready(begin())
    fleet.catch_up = in_vain
    fleet._replacement_timeout_s = 2.0
    for worker in fleet.serving():
        fleet.record_missed_sync(worker, "was behind")
    with pytest.raises(RunStopped, match=r"^no test worker became ready within .*=2: test worker 0 is stale; test wor"):
        asyncio.run(work(fleet))


def test_start_messages_reach_the_user_and_a_late_start_is_reported(
    begin: Callable[..., Fleet], tmp_path: Path
) -> None:
    unwilling = begin(actor=Unwilling)
    with pytest.raises(UserError, match=r"^model\.policy is no model$"):
        unwilling.wait_ready()
    late = begin(CONFIG.model_copy(update={"start_timeout_s": 1.0}), gate=tmp_path / "never")
    with pytest.raises(RunStopped, match=r"^no test worker is left, feedback\.engine\.workers\.min=1: "):
        late.wait_ready()


def test_a_stop_ends_the_wait_for_engines(begin: Callable[..., Fleet], tmp_path: Path) -> None:
    fleet = begin(gate=tmp_path / "never")
    with pytest.raises(Stopped):
        fleet.wait_ready(lambda: True)
    assert not fleet.is_ready


def test_idle_time_is_the_share_of_the_workers_without_a_request() -> None:
    clock = IdleClock()
    busy = FleetWorker("busy", None, CONFIG)
    idle = FleetWorker("idle", None, CONFIG)
    busy.load = 3
    idle.load = 0
    busy.health = idle.health = Health(since=0, state=State.SERVING)
    start = clock._at
    clock.account([busy, idle], start + 2)
    clock.account([idle], start + 3)
    assert clock.share([busy], start + 5) == pytest.approx((2 + 1) / (4 + 1 + 2))
    assert clock.share([busy], start + 6) == 0.0


def test_engines_report_their_stats_and_a_silent_one_delays_no_other(
    begin: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.fleet.fleet.MEASURE_S", 1.0)
    fleet = ready(begin())
    assert asyncio.run(fleet.engine_metrics()) == {"tokens_per_s": 50.0, "queued": 0, "cache_use": 0, "preemptions": 0}
    become(fleet.serving()[0], "zero", "deaf")
    assert asyncio.run(fleet.engine_metrics())["tokens_per_s"] == 50.0
    become(fleet.serving()[1], "one", "deaf")
    assert asyncio.run(fleet.engine_metrics()) == {}


def test_an_engine_with_less_room_gets_less(fleet: Fleet) -> None:
    """Half the cache, half the load: nine requests are three and six."""
    small, large = fleet.serving()
    small.handle.instance.cache_tokens = 320
    asyncio.run(fleet.engine_metrics())
    fleet._admission._room = 100

    async def run() -> list[int]:
        requests = [asyncio.ensure_future(work(fleet, seconds=0.2)) for _ in range(9)]
        async with asyncio.timeout(PATIENCE_S):
            while small.load + large.load < 9:
                await asyncio.sleep(0)
        loads = [small.load, large.load]
        await asyncio.gather(*requests)
        return loads

    assert asyncio.run(run()) == [3, 6]
