"""Which side has the GPUs, which side waits, and the error of an engine that does not wake up."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from actors.weights.gpu_time_sharing import FleetGpuTimeSharing
from t2g.errors import MissedSync, RunStopped


class Engine:
    """`log`: of engines and learner, in order."""

    def __init__(self, name: str, log: list[str], *, hangs_at: str = "", fails_at: str = "") -> None:
        self.name = name
        self.handle = self
        self.sleep = SimpleNamespace(remote=lambda: self._do("sleep", log, hangs_at, fails_at))
        self.wake_up = SimpleNamespace(remote=lambda: self._do("wake", log, hangs_at, fails_at))

    async def _do(self, what: str, log: list[str], hangs_at: str, fails_at: str) -> None:
        await asyncio.sleep(60 if what == hangs_at else 0.01)
        if what == fails_at:
            raise MissedSync(f"refused its {what}: CUDA out of memory")
        log.append(f"{self.name} {what}")


class Fleet:
    gpu_user = "engines"
    is_starting = False
    is_switching_gpus = False

    def __init__(self, *engines: Engine, unreachable: Sequence[Engine] = ()) -> None:
        self.engines = engines
        self.unreachable = unreachable
        self.was_switching: list[bool] = []

    def started(self) -> list[Engine]:
        return list(self.engines)

    async def replace_unreachable(self) -> None:
        self.engines = tuple(engine for engine in self.engines if engine not in self.unreachable)
        self.was_switching.append(self.is_switching_gpus)

    async def request(self, worker: Engine, submit: Callable[[Any], Any], what: str) -> Any:
        return await submit(worker)


class DyingFleet(Fleet):
    """A fleet whose worker is dead after a failed call."""

    async def request(self, worker: Engine, submit: Callable[[Any], Any], what: str) -> Any:
        try:
            return await super().request(worker, submit, what)
        except MissedSync:
            self.engines = tuple(engine for engine in self.engines if engine is not worker)
            raise


def share(fleet: Any, log: list[str], timeout_s: float = 5) -> FleetGpuTimeSharing:
    sharing = FleetGpuTimeSharing(fleet, timeout_s=timeout_s)
    sharing.release_s = 0
    sharing.learner = SimpleNamespace(
        offload_states=lambda: log.append("offload"), reload_states=lambda: log.append("reload")
    )
    return sharing


def take(which: FleetGpuTimeSharing, *order: Any) -> None:
    async def run() -> None:
        for user in order:
            await which.switch_to(user)

    asyncio.run(run())


def test_ranks_take_the_gpus_once_a_starting_engine_sleeps_too() -> None:
    log: list[str] = []
    fleet = Fleet(Engine("w0", log))

    async def run() -> None:
        fleet.is_starting = True
        switch = asyncio.ensure_future(share(fleet, log).switch_to("learner"))
        await asyncio.sleep(0.05)
        assert not log
        fleet.engines = (*fleet.engines, Engine("w1", log))
        fleet.is_starting = False
        await switch

    asyncio.run(run())
    assert sorted(log) == ["reload", "w0 sleep", "w1 sleep"]
    assert log[-1] == "reload"


def test_the_next_side_waits_until_the_other_side_has_left() -> None:
    log: list[str] = []
    fleet = Fleet(Engine("w0", log), Engine("w1", log))
    take(share(fleet, log), "engines", "learner", "learner", "engines", "engines")
    assert set(log[:2]) == {"w0 sleep", "w1 sleep"}
    assert log[2:4] == ["reload", "offload"]
    assert set(log[4:]) == {"w0 wake", "w1 wake"}


def test_engines_sleep_before_there_is_a_learner_and_the_next_learner_finds_them_so() -> None:
    log: list[str] = []
    fleet = Fleet(Engine("w0", log))
    take(FleetGpuTimeSharing(fleet, timeout_s=5), "learner")
    assert log == ["w0 sleep"] and fleet.gpu_user == "learner"
    take(share(fleet, log), "learner", "engines")
    assert log == ["w0 sleep", "offload", "w0 wake"]


def test_an_engine_that_cannot_be_reached_gives_up_its_gpu_before_the_ranks_take_it() -> None:
    log: list[str] = []
    reachable = Engine("w0", log)
    hanging = Engine("w1", log, hangs_at="sleep")
    fleet = Fleet(reachable, hanging, unreachable=[hanging])
    take(share(fleet, log), "learner", "engines")
    assert log == ["w0 sleep", "reload", "offload", "w0 wake"]
    assert fleet.was_switching == [True, True] and not fleet.is_switching_gpus


@pytest.mark.parametrize("dies_at", ["sleep", "wake"])
def test_an_engine_that_dies_in_the_switch_does_not_stop_the_run(dies_at: str) -> None:
    log: list[str] = []
    dying = Engine("w1", log, fails_at=dies_at)
    fleet = DyingFleet(Engine("w0", log), dying)
    sharing = share(fleet, log)
    take(sharing, "learner", "engines")
    assert [event for event in log if event.startswith("w0")] == ["w0 sleep", "w0 wake"]
    assert fleet.gpu_user == "engines" and dying not in fleet.started()


def test_after_an_engine_that_does_not_sleep_the_engines_still_have_the_gpus() -> None:
    """A checkpoint that follows must not take them for the ranks'."""
    log: list[str] = []
    fleet = Fleet(Engine("w0", log, hangs_at="sleep"))
    with pytest.raises(RunStopped, match=r"w0 timed out: its sleep took more than 0\.2 s$"):
        take(share(fleet, log, timeout_s=0.2), "learner")
    assert (fleet.gpu_user, fleet.is_switching_gpus, log) == ("engines", False, [])


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"hangs_at": "wake"}, r"w1 timed out: its wake-up took more than 0\.2 s$"),
        ({"fails_at": "wake"}, r"w1 refused its wake: CUDA out of memory$"),
    ],
)
def test_an_engine_that_does_not_wake_stops_the_run_with_its_name(how: dict[str, str], reason: str) -> None:
    log: list[str] = []
    fleet = Fleet(Engine("w0", log), Engine("w1", log, **how))
    with pytest.raises(RunStopped, match=r"cannot share their GPUs: " + reason):
        take(share(fleet, log, timeout_s=0.2), "learner", "engines")
    assert fleet.gpu_user == "learner"
