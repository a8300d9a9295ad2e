"""Does it fit? Numbers by hand."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from actors.cluster import placement
from actors.cluster.placement import GIB, connect
from t2g.config import ClusterConfig, RoleConfig
from t2g.deploy.preflight import shortfall
from t2g.errors import UserError

ROLES = {
    "rollout": RoleConfig(workers=2, cpus=0.5, memory_gib=1.5),
    "learner": RoleConfig(workers=1, cpus=1, memory_gib=3),
}


def test_roles_that_fit_exactly_fit() -> None:
    assert shortfall(ROLES, {"CPU": 2, "memory": 6 * GIB}) is None


def test_what_is_missing_is_said_with_every_part() -> None:
    assert shortfall(ROLES, {"CPU": 2, "memory": 4 * GIB}) == (
        "6 GiB of memory needed (rollout 2 x 1.5, learner 1 x 3), 4 free; lower workers or memory_gib"
    )
    assert shortfall(ROLES, {"CPU": 1, "memory": 4 * GIB}) == (
        "2 CPUs needed (rollout 2 x 0.5, learner 1 x 1), 1 free; lower workers or cpus"
    )
    roles = {"rollout": RoleConfig(gpus=1)}
    assert shortfall(roles, {"CPU": 9, "memory": 9 * GIB}) == (
        "1 GPUs needed (rollout 1 x 1), 0 free; lower workers or gpus"
    )


def test_a_machine_too_small_is_refused_before_any_model_is_loaded_and_ray_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Any] = []
    here = {"CPU": 1, "memory": 4 * GIB}
    ray = SimpleNamespace(
        init=lambda **how: said.append(how), cluster_resources=lambda: here, shutdown=lambda: said.append("ended")
    )
    monkeypatch.setattr(placement, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(
        UserError, match=r"^this machine is too small: 2 CPUs needed \(rollout 2 x 0.5, learner 1 x 1\)"
    ):
        connect(ClusterConfig(object_store_gib=0.5), ROLES)
    how, end = said
    assert how["object_store_memory"] == GIB // 2 and end == "ended"
    assert how["num_cpus"] in (None, len(os.sched_getaffinity(0)))


def test_gpus_that_a_job_leaves_alone_are_said_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    have = {"CPU": 8, "GPU": 2, "memory": 64 * GIB}
    ray = SimpleNamespace(init=lambda **how: None, cluster_resources=lambda: have, shutdown=lambda: None)
    monkeypatch.setattr(placement, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    connect(ClusterConfig(), {"rollout": RoleConfig(gpus=1)})
    assert caplog.messages == []
    connect(ClusterConfig(), ROLES)
    assert caplog.messages == ["2 GPUs are there, and this job runs on CPUs: rollout.gpus=auto takes them"]


def test_ranks_of_a_node_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: Any = {"p": "b", "q": "a", "r": "b", "s": "a"}
    monkeypatch.setattr(placement, "placement_group_table", lambda place: {"bundles_to_node_id": {0: nodes[place]}})
    assert placement.by_node([*nodes]) == ["q", "s", "p", "r"]


def test_what_auto_is_told_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    ray = SimpleNamespace(
        init=lambda **how: said.append(how["address"]),
        cluster_resources=lambda: {"GPU": 2.0},
        shutdown=lambda: said.append("ended"),
    )
    monkeypatch.setattr(placement, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert placement.resources(None) == {"GPU": 2.0}
    assert said == ["head:6379", "ended"]


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("http://head:8265", r"is http://head:8265, where jobs are submitted; a driver needs .*HOST:6379"),
        ("127.0.0.1", r"cluster\.address: the Ray cluster at 127\.0\.0\.1 cannot be joined: "),
    ],
)
def test_an_address_that_no_driver_can_join_is_refused(address: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        connect(ClusterConfig(address=address), ROLES)
