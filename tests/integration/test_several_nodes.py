"""Two nodes with GPUs that only Ray's books have: places, environment, and who reaches whom."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from fleet_worker import Telling, make_fleet
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table, remove_placement_group
from ray_nodes import start_patiently

from actors.cluster.kept_placements import KeptPlacements
from actors.cluster.nodes import find_failed_connections, find_unreachable
from actors.cluster.placement import check_capacity, check_placement, connect, may_grow, reserve
from actors.learner.ranks import Ranks
from t2g.config import ClusterConfig, EngineConfig, RoleConfig, WorkersConfig
from t2g.errors import UserError

GPUS = 2  # of a node
TESTS = str(Path(__file__).parents[1])


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as environ:
        environ.delenv("RAY_ADDRESS", raising=False)
        environ.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))
        of_node = {"num_cpus": 4, "num_gpus": GPUS, "object_store_memory": 2**27, "include_dashboard": False}
        head = of_node | {"labels": {"rl/role": "learner"}}
        cluster = start_patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
        start_patiently(lambda: cluster.add_node(**of_node, labels={"rl/role": "rollout"}))
        env = {"NCCL_SOCKET_IFNAME": "eth0"}
        connect(ClusterConfig(address=cluster.address, env=env), {})
        yield cluster
        ray.shutdown()
        cluster.global_state.disconnect()
        cluster.shutdown()


def engine(gpus: float, workers: int = 1, **settings: Any) -> EngineConfig:
    return EngineConfig(
        workers=WorkersConfig(initial=workers), gpus=gpus, cpus=0.5, threads=3, memory_gib=0.1, **settings
    )


def test_an_engine_has_all_its_gpus_in_one_process_on_one_node_and_the_clusters_environment(nodes: Cluster) -> None:
    fleet = make_fleet(ray.remote(Telling), {}, engine(GPUS, workers=2), placement_timeout_s=30)
    try:
        fleet.wait_ready()
        reports = [ray.get(worker.starting) for worker in fleet.started()]
    finally:
        fleet.close()
    expected = {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "3"}
    for _, environ in reports:
        assert {name: environ.get(name) for name in expected} == expected
    assert len({node for node, _ in reports}) == len(reports) == 2


def test_no_engine_is_spread_over_nodes(nodes: Cluster) -> None:
    with pytest.raises(UserError, match=r"1 of 1 rollout workers: each needs 0\.5 CPUs, 3 GPUs and 0\.1 GiB"):
        check_placement({"rollout": engine(3)}, timeout_s=1)
    check_placement({"rollout": engine(1, workers=4)}, timeout_s=20)


def test_ranks_are_a_gang_in_order_of_node_and_gpu(nodes: Cluster) -> None:
    class Rank:
        def __init__(self, role: Any, rank: int) -> None:
            self.rank = rank

        def where(self) -> tuple[int, str, list[int]]:
            return self.rank, ray.get_runtime_context().get_node_id(), [int(gpu) for gpu in ray.get_gpu_ids()]

    def gang(workers: int) -> RoleConfig:
        return RoleConfig(workers=workers, gpus=1, cpus=0.5, memory_gib=0.1)

    (place,) = reserve({"learner": gang(GPUS)}, timeout_s=30)
    assert len({*placement_group_table(place)["bundles_to_node_id"].values()}) == 1, (
        "of two nodes with room it takes one"
    )
    remove_placement_group(place)
    placements = KeptPlacements()
    ranks = Ranks(
        ray.remote(Rank),
        section="learner",
        role=gang(GPUS + 1),
        actor_name="rank",
        placements=placements,
        placement_timeout_s=60,
        environment={},
    )
    try:
        reports = ray.get([rank.where.remote() for rank in ranks.workers], timeout=60)
    finally:
        ranks.close()
        placements.close()
    assert [rank for rank, _, _ in reports] == [0, 1, 2]
    assert len({node for _, node, _ in reports}) == 2
    assert [place[1:] for place in reports] == sorted(place[1:] for place in reports)


def test_what_no_node_will_ever_have_is_refused_at_once(nodes: Cluster) -> None:
    deadline = time.monotonic() + 30
    while may_grow():  # Ray's monitor tells of the nodes some seconds after the cluster's start
        assert time.monotonic() < deadline
        time.sleep(0.2)
    five = {"learner": RoleConfig(workers=2 * GPUS + 1, gpus=1)}
    started = time.monotonic()
    with pytest.raises(UserError, match=r"no autoscaler adds nodes, is too small: 5 GPUs needed \(learner 5 x 1\)"):
        check_capacity(five, nodes.address)
    with pytest.raises(UserError, match=r"is too small: rollout: no node has 0\.5 CPUs, 3 GPUs"):
        check_capacity({"rollout": engine(GPUS + 1)}, nodes.address)
    assert time.monotonic() - started < 20


def test_every_node_reaches_the_ports_of_those_with_ranks(nodes: Cluster) -> None:
    roles = {"learner": RoleConfig(labels={"rl/role": "learner"}), "rollout": engine(1, labels={"rl/role": "rollout"})}
    assert find_unreachable(roles, timeout_s=60) == []
    assert find_unreachable({"sft": RoleConfig(workers=2)}, timeout_s=60) == []
    assert find_unreachable({"feedback.engine": engine(1)}, timeout_s=60) == []
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        refused = find_failed_connections({"far": ("127.0.0.1", port)}, timeout_s=2)
    assert refused == {"far": f"port {port} of 127.0.0.1: Connection refused"}
