"""A node is lost with a rank and an engine, and another comes: the learner gets its place back, on Ray's own books.

No model is loaded. Two nodes have room for one rank of two CPUs and one engine of one CPU each.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from fleet_worker import Telling, make_fleet
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from ray_nodes import start_patiently

from actors.cluster.kept_placements import KeptPlacements
from actors.cluster.placement import connect
from actors.fleet.fleet import Fleet
from actors.learner.ranks import Ranks
from t2g.config import ClusterConfig, EngineConfig, HealthConfig, RoleConfig, WorkersConfig
from t2g.errors import UserError

TESTS = str(Path(__file__).parents[1])
PATIENCE_S = 120
RANK = RoleConfig(workers=2, cpus=2, memory_gib=0.1)
ENGINE = EngineConfig(
    workers=WorkersConfig(initial=2, min=1, max=2), cpus=1, memory_gib=0.1,
    health=HealthConfig(check_interval_s=0.2, check_timeout_s=2, max_failures=2),
)  # fmt: skip
DETECTION = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as environ:
        environ.delenv("RAY_ADDRESS", raising=False)
        environ.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": DETECTION}
        cluster = start_patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
        connect(ClusterConfig(address=cluster.address), {})
        yield cluster
        ray.shutdown()
        cluster.global_state.disconnect()
        cluster.shutdown()


def add_node(nodes: Cluster, cpus: int) -> Any:
    return start_patiently(lambda: nodes.add_node(num_cpus=cpus, object_store_memory=2**27))


def start_ranks(placements: KeptPlacements, *, timeout_s: float) -> Ranks:
    class Rank:  # Ray sends a local class whole
        def __init__(self, role: RoleConfig, rank: int) -> None:
            self._rank = rank

        def where(self) -> str:
            return ray.get_runtime_context().get_node_id()

    return Ranks(
        ray.remote(Rank),
        section="learner",
        role=RANK,
        actor_name="rank",
        placements=placements,
        placement_timeout_s=timeout_s,
        environment={},
    )


def find_homes(ranks: Ranks) -> list[str]:
    """Return the node of each rank."""
    return ray.get([worker.where.remote() for worker in ranks.workers], timeout=PATIENCE_S)


def tick_until(fleet: Fleet, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        fleet.tick()
        time.sleep(0.1)


@pytest.mark.slow  # four nodes, and the detection of a lost one
def test_ranks_get_their_place_back_before_an_engine_that_was_lost_with_them(nodes: Cluster) -> None:
    lost_node = add_node(nodes, 3)
    kept_node = add_node(nodes, 3)
    placements = KeptPlacements()
    ranks = start_ranks(placements, timeout_s=PATIENCE_S)
    fleet = make_fleet(ray.remote(Telling), {}, ENGINE, placement_timeout_s=PATIENCE_S)
    try:
        fleet.wait_ready()
        assert sorted(find_homes(ranks)) == sorted([lost_node.node_id, kept_node.node_id])

        nodes.remove_node(lost_node, allow_graceful=False)
        tick_until(fleet, lambda: any(worker.handle is None for worker in list_workers(fleet)))
        ranks.close()
        fleet.yield_placements()
        error = (
            r"^no place within 8 s for 2 of 2 learner workers: each needs 2 CPUs.*"
            r"Free: .* has 0 of 3 CPUs.*Waiting: learner for 1 of 2 x 2 CPUs"
        )
        with pytest.raises(UserError, match=error):
            start_ranks(placements, timeout_s=8)

        small_node = add_node(nodes, 2)  # either a rank or engines
        ranks = start_ranks(placements, timeout_s=PATIENCE_S)
        assert sorted(find_homes(ranks)) == sorted([small_node.node_id, kept_node.node_id])

        new_node = add_node(nodes, 1)
        tick_until(fleet, lambda: len(fleet.serving()) == 2)
        engines = [ray.get(worker.starting)[0] for worker in fleet.serving()]
        assert sorted(engines) == sorted([kept_node.node_id, new_node.node_id])
    finally:
        ranks.close()
        placements.close()
        fleet.close()
    states = [group["state"] for group in placement_group_table().values()]
    assert set(states) == {"REMOVED"}


def list_workers(fleet: Fleet) -> list[Any]:
    return list(fleet._workers)
