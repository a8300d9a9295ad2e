"""Does it fit? Numbers by hand."""

import os
from pathlib import Path

import pytest

from actors.cluster.placement import Supply, cgroup_cpus, cgroup_free_bytes, connect, describe_shortfall, this_machine
from t2g.config import ClusterConfig, RoleConfig
from t2g.errors import UserError

ROLES = {
    "rollout": RoleConfig(workers=2, cpus=0.5, memory_gib=1.5),
    "learner": RoleConfig(workers=1, cpus=1, memory_gib=3),
}


def test_roles_that_fit_exactly_fit() -> None:
    assert describe_shortfall(ROLES, Supply(cpus=2, gpus=0, memory_gib=6)) is None


def test_what_is_missing_is_said_with_every_part() -> None:
    assert describe_shortfall(ROLES, Supply(cpus=2, gpus=0, memory_gib=4)) == (
        "6 GiB of memory needed (rollout 2 x 1.5, learner 1 x 3), 4 free; lower workers or memory_gib"
    )
    assert describe_shortfall(ROLES, Supply(cpus=1, gpus=0, memory_gib=4)) == (
        "2 CPUs needed (rollout 2 x 0.5, learner 1 x 1), 1 free; lower workers or cpus"
    )
    roles = {"rollout": RoleConfig(gpus=1)}
    assert describe_shortfall(roles, Supply(cpus=9, gpus=0, memory_gib=9)) == (
        "1 GPUs needed (rollout 1 x 1), 0 free; lower workers or gpus"
    )


def test_a_container_has_what_its_group_has_left(tmp_path: Path) -> None:
    assert cgroup_cpus(tmp_path) is None and cgroup_free_bytes(tmp_path) is None  # version 1, or no group
    for name, text in {
        "cpu.max": "150000 100000\n", "memory.max": "1000\n", "memory.current": "700\n",
        "memory.stat": "anon 500\nfile 200\ninactive_file 120\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    assert cgroup_cpus(tmp_path) == 1.5
    assert cgroup_free_bytes(tmp_path) == 1000 - 700 + 120
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_cpus(tmp_path) is None and cgroup_free_bytes(tmp_path) is None


def test_this_machine_has_no_more_cores_than_this_process_may_use() -> None:
    assert 1 <= this_machine(0.0).cpus <= len(os.sched_getaffinity(0))
    assert this_machine(0.5).memory_gib < this_machine(0.0).memory_gib


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
