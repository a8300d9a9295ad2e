"""Engines and ranks share the same GPUs over time, on real Ray placement groups and processes.

The GPUs are Ray resources without hardware, and the actors only record the calls.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from tenant import Tenant

from actors.engines.rollout import RolloutFleet
from actors.learner.learner import LearnerGroup
from actors.learner.spec import LearnerSpec
from actors.weights.gpu_time_sharing import FleetGpuTimeSharing
from t2g.config import LearnerConfig, ModelConfig, RolloutConfig
from t2g.config.base_jobs import ENGINE_SHARE
from t2g.errors import RunStopped

NUM_GPUS = 2
SMALL = {"cpus": 0.1, "memory_gib": 0.1}


class Engines(RolloutFleet):
    actor = ray.remote(Tenant)


class Group(LearnerGroup):
    actor = ray.remote(Tenant)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # of the helper that the actors are
    ray.init(address="local", num_cpus=2, num_gpus=NUM_GPUS, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("gpus")
def test_each_gpu_alternates_between_an_engine_and_a_rank() -> None:
    workers = {"initial": NUM_GPUS, "min": NUM_GPUS}
    rollout = RolloutConfig(workers=workers, gpus=ENGINE_SHARE, **SMALL)
    learner = LearnerConfig(workers=NUM_GPUS, gpus=1 - ENGINE_SHARE, sync_transport="ipc", **SMALL)
    fleet = Engines("model", rollout, seed=1, placement_timeout_s=20, transport="ipc", can_sleep=True)
    fleet.wait_ready()
    turns = FleetGpuTimeSharing(fleet, timeout_s=10)
    asyncio.run(turns.switch_to("learner"))
    spec = LearnerSpec(model=ModelConfig(policy="model"), learner=learner, num_updates=1, seed=1, loss="supervised")
    turns.learner = group = Group(spec, placement_timeout_s=20)

    async def rounds() -> None:
        for user in ("engines", "learner", "engines"):
            await turns.switch_to(user)

    asyncio.run(rounds())
    engines = [worker.handle for worker in fleet.serving()]
    ranks = group.models["policy"].workers
    events = []
    for who, handles in (("engine", engines), ("rank", ranks)):
        logs = ray.get([handle.get_log.remote() for handle in handles])
        assert {gpu for gpu, _ in logs} == {str(i) for i in range(NUM_GPUS)}, f"one {who} on each GPU"
        for _, log in logs:
            events += [(at, f"{who} {what}") for at, what in log]
    events.sort()
    order = [
        "engine sleeps", "rank sleeps", "engine works", "engine sleeps", "rank works", "rank sleeps", "engine works",
    ]  # fmt: skip
    assert [what for _, what in events] == [what for what in order for _ in range(NUM_GPUS)]

    asyncio.run(turns.switch_to("learner"))
    ray.get(engines[1].nap.remote(60))
    impatient = FleetGpuTimeSharing(fleet, timeout_s=3)
    impatient.learner = group
    late = r"cannot share their GPUs: rollout worker 1 timed out: its wake-up took more than 3 s$"
    with pytest.raises(RunStopped, match=late):
        asyncio.run(impatient.switch_to("engines"))
    group.close()
    fleet.close()
