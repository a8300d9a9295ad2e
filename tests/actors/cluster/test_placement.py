"""Does it fit? Numbers by hand."""

import json
import os
import re
import subprocess
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from actors.cluster import placement
from actors.cluster.placement import GIB, connect
from t2g.config import ClusterConfig, RoleConfig
from t2g.errors import UserError
from t2g.resources.preflight import shortfall

ROLES = {
    "rollout": RoleConfig(workers=2, cpus=0.5, memory_gib=1.5),
    "learner": RoleConfig(workers=1, cpus=1, memory_gib=3),
}


def test_roles_that_fit_exactly_fit() -> None:
    assert shortfall(ROLES, {"CPU": 2, "memory": 6 * GIB}) is None


def test_missing_inputs_are_reported_for_every_part() -> None:
    assert shortfall(ROLES, {"CPU": 2, "memory": 4 * GIB}) == (
        "6 GiB of memory needed (rollout 2 x 1.5, learner 1 x 3), 4 free; lower workers or memory_gib"
    )
    assert shortfall(ROLES, {"CPU": 1, "memory": 4 * GIB}) == (
        "2 CPUs needed (rollout 2 x 0.5, learner 1 x 1), 1 free; lower workers or cpus. Also "
        "6 GiB of memory needed (rollout 2 x 1.5, learner 1 x 3), 4 free; lower workers or memory_gib"
    )
    roles = {"rollout": RoleConfig(gpus=1)}
    assert shortfall(roles, {"CPU": 9, "memory": 9 * GIB}) == (
        "1 GPU needed (rollout 1 x 1), 0 free; lower workers or gpus"
    )


def test_a_machine_too_small_is_refused_before_any_model_is_loaded_and_ray_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    here = {"CPU": 1, "memory": 4 * GIB}
    ray = SimpleNamespace(
        init=lambda **how: calls.append(how),
        is_initialized=lambda: False,
        cluster_resources=lambda: here,
        shutdown=lambda: calls.append("ended"),
        nodes=list,
    )
    monkeypatch.setattr(placement, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(
        UserError, match=r"^this machine is too small: 2 CPUs needed \(rollout 2 x 0.5, learner 1 x 1\)"
    ):
        connect(ClusterConfig(object_store_gib=0.5), ROLES)
    how, end = calls
    assert how["object_store_memory"] == GIB // 2 and end == "ended"
    assert 1 <= how["num_cpus"] <= len(os.sched_getaffinity(0))


class SlowRay:
    """A Ray whose first starts time out, each with a process that it leaves."""

    def __init__(self, failures: int, message: str = "The current node timed out during startup. This could") -> None:
        self.failures = failures
        self.message = message
        self.left: list[subprocess.Popen[bytes]] = []

    def is_initialized(self) -> bool:
        return False

    def init(self, **_: Any) -> None:
        if len(self.left) < self.failures:
            self.left.append(subprocess.Popen(["sleep", "600"]))
            raise Exception(self.message)


def start_slowly(monkeypatch: pytest.MonkeyPatch, ray: SlowRay) -> list[bool]:
    """Start a cluster, and return which processes of the failed starts still run."""
    monkeypatch.setattr(placement, "ray", ray)
    try:
        placement._start(ClusterConfig())
        return [psutil.pid_exists(process.pid) for process in ray.left]
    finally:
        for process in ray.left:
            process.kill()
            process.wait()


def test_a_slow_start_of_ray_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = subprocess.Popen(["sleep", "600"])
    try:
        assert start_slowly(monkeypatch, SlowRay(1)) == [False]
        assert "Ray did not start within 30 s; it is started once more" in caplog.text
        with pytest.raises(UserError, match=r"^Ray did not start within 30 s for the second time, with a load of \d+"):
            start_slowly(monkeypatch, SlowRay(2))
        with pytest.raises(Exception, match="another error"):
            start_slowly(monkeypatch, SlowRay(1, "another error"))
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_folder_that_cannot_hold_rays_sockets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp/f\u00fcr mich")
    with pytest.raises(UserError, match=r"^TMPDIR=/tmp/f\u00fcr mich: Ray's sockets need a path of ASCII characters"):
        start_slowly(monkeypatch, SlowRay(0))
    monkeypatch.setenv("TMPDIR", "/tmp/long")
    long = "validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /tmp/long"
    with pytest.raises(UserError, match=r"^TMPDIR=/tmp/long: its path is too long"):
        start_slowly(monkeypatch, SlowRay(1, long))
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/rays")
    with pytest.raises(UserError, match=r"^RAY_TMPDIR=/tmp/rays: its path is too long"):
        start_slowly(monkeypatch, SlowRay(1, long))


def test_unused_gpus_are_reported_first(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    have = {"CPU": 8, "GPU": 2, "memory": 64 * GIB}
    node = {"Alive": True, "Resources": have, "Labels": {}}
    ray = SimpleNamespace(
        init=lambda **how: None, is_initialized=lambda: False, cluster_resources=lambda: have, nodes=lambda: [node]
    )  # fmt: skip
    monkeypatch.setattr(placement, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    connect(ClusterConfig(), {"rollout": RoleConfig(gpus=1)})
    assert caplog.messages == []
    connect(ClusterConfig(), ROLES)
    assert caplog.messages == ["Ray has 2 GPUs, and this job runs on CPUs: install the GPU packages: `make gpu`"]


def test_ranks_of_a_node_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: Any = {"bundles_to_node_id": {0: "b", 1: "a", 2: "b", 3: "a"}}
    monkeypatch.setattr(placement, "placement_group_table", lambda place: nodes)
    place: Any = None
    assert placement.order_bundles_by_gpu(place, RoleConfig(workers=4), timeout_s=1) == [1, 3, 0, 2]


@pytest.mark.parametrize("gpus", [[["9"], ["10"]], [["GPU-1a"], ["GPU-2b"]]])
def test_ranks_follow_the_order_of_gpus_also_by_uuid(monkeypatch: pytest.MonkeyPatch, gpus: list[list[str]]) -> None:
    nodes: Any = {"bundles_to_node_id": {0: "a", 1: "a"}}
    query = SimpleNamespace(options=lambda **how: SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr(placement, "placement_group_table", lambda place: nodes)
    monkeypatch.setattr(placement, "actor_options", lambda config, place, bundle: {})
    monkeypatch.setattr(placement, "collect", lambda requests, **names: [gpus[1], gpus[0]])
    monkeypatch.setattr(placement, "ray", SimpleNamespace(remote=lambda function: query))
    place: Any = None
    assert placement.order_bundles_by_gpu(place, RoleConfig(workers=2, gpus=1), timeout_s=1) == [1, 0]


@pytest.mark.parametrize(
    ("role", "sentence"),
    [
        (RoleConfig(gpus=2, memory_gib=4), None),
        (RoleConfig(gpus=3, memory_gib=4), "learner: no node has 0.5 CPUs, 3 GPUs and 4 GiB; "),
        (RoleConfig(gpus=2, cpus=5, memory_gib=4), "learner: no node has 5 CPUs, 2 GPUs and 4 GiB; "),
        (RoleConfig(gpus=2, memory_gib=4, labels={"a": "b"}), "learner: no node has .* on a node with labels"),
    ],
)
def test_a_worker_needs_one_node_that_has_all_of_it(role: RoleConfig, sentence: str | None) -> None:
    few_gpus = {"Resources": {"CPU": 8, "GPU": 1, "memory": 64 * GIB}, "Labels": {"a": "b"}}
    more = {"Resources": {"CPU": 4, "GPU": 2, "memory": 8 * GIB}, "Labels": {}}
    misfit = placement.describe_misfit({"learner": role}, [few_gpus, more])
    assert misfit is None if sentence is None else re.match(sentence, str(misfit))


@pytest.mark.parametrize(
    ("types", "second", "report", "grows"),
    [
        (["node_1", "node_2"], True, None, False),
        (["head", "workers"], True, None, True),
        (["node_1", "node_2"], False, {"node_1": 1, "node_2": 1}, False),
        (["node_1", "node_2"], False, {"head": 1, "workers": 1}, True),
        (["node_1", "node_2"], False, None, True),
    ],
    ids=["by hand", "second autoscaler", "by hand, first", "first autoscaler", "not known"],
)
def test_autoscaling_adds_nodes(
    monkeypatch: pytest.MonkeyPatch, types: Any, second: bool, report: Any, grows: bool
) -> None:
    nodes = [SimpleNamespace(ray_node_type_name=name) for name in types]
    context = SimpleNamespace(gcs_address="head:6379")
    ray = SimpleNamespace(get_runtime_context=lambda: context, nodes=lambda: [{"NodeID": "1"}, {"NodeID": "2"}])
    status = json.dumps({"time": 1, **({"autoscaler_report": {"active_nodes": report}} if report else {})})
    monkeypatch.setattr(placement, "ray", ray)
    monkeypatch.setattr(
        placement, "get_cluster_status", lambda address: SimpleNamespace(active_nodes=nodes[:1], idle_nodes=nodes[1:])
    )
    monkeypatch.setattr(placement, "is_autoscaler_v2", lambda fetch_from_server: second)
    monkeypatch.setattr(placement, "_internal_kv_get", lambda key: status.encode())
    assert placement.may_grow() is grows


@pytest.mark.parametrize(("affinity", "quota", "cores"), [(64, 2.0, 2), (3, 8.0, 3), (4, 0.5, 1)])
def test_cores_are_those_that_this_process_and_its_container_may_use(
    monkeypatch: pytest.MonkeyPatch, affinity: int, quota: float, cores: int
) -> None:
    """With a thread for each core of a node, a pod of two cores would wait for its quota most of the time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(affinity)})
    monkeypatch.setattr(placement, "get_num_cpus", lambda **how: quota)
    assert placement.resources("local")["CPU"] == cores


def test_auto_reads_the_resources_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    nodes = [
        {"Alive": True, "Resources": {"CPU": 4.0}},
        {"Alive": True, "Resources": {"CPU": 8.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
    ]
    ray = SimpleNamespace(
        init=lambda **how: calls.append(how["address"]),
        is_initialized=lambda: False,
        cluster_resources=lambda: {"GPU": 2.0, "CPU": 12.0},
        nodes=lambda: nodes,
        shutdown=lambda: calls.append("ended"),
    )
    monkeypatch.setattr(placement, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert placement.resources(None) == {"GPU": 2.0, "CPU": 8.0}, "of the largest node that lives"
    assert calls == ["head:6379", "ended"]


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("http://head:8265", r"is http://head:8265, where jobs are submitted; a driver needs .*HOST:6379"),
        ("127.0.0.1", r"cluster\.address or RAY_ADDRESS: the cluster at 127\.0\.0\.1 cannot be joined: "),
    ],
)
def test_an_address_that_no_driver_can_join_is_refused(address: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        connect(ClusterConfig(address=address), ROLES)
