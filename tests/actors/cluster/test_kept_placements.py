"""Who has a placement group when, on a table of Ray's by hand; on real nodes in tests/integration."""

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_bench import job

from actors.cluster import kept_placements, placement
from actors.cluster.kept_placements import KeptPlacements, is_intact
from jobs.common.cli import StopFlag
from jobs.train_policy import policy_training
from jobs.train_policy.policy_training import PolicyTraining
from t2g.config import RoleConfig, with_overrides
from t2g.errors import LearnerLost, RunStopped, UserError

ROLE = RoleConfig(workers=2)
UNPLACED = "f" * 56


class RayTables:
    """Ray's tables of nodes and placement groups, for one group on nodes a and b of this machine."""

    def __init__(self, port: int) -> None:
        self.table: dict[str, Any] = {"state": "CREATED", "bundles_to_node_id": {0: "a", 1: "b"}}
        self.nodes = [{"NodeID": name, "Alive": True, "NodeManagerAddress": "127.0.0.1"} for name in ("a", "b")]
        for node in self.nodes:
            node["NodeManagerPort"] = port
        self.reserved: list[str] = []
        self.removed: list[Any] = []

    def reserve(self, roles: Any, timeout_s: float) -> list[Any]:
        self.reserved += roles
        return [object()]


@pytest.fixture
def ray_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayTables]:
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        ray_tables = RayTables(raylet.getsockname()[1])
        monkeypatch.setattr(kept_placements, "placement_group_table", lambda group: ray_tables.table)
        monkeypatch.setattr(kept_placements, "remove_placement_group", ray_tables.removed.append)
        monkeypatch.setattr(kept_placements, "ray", SimpleNamespace(nodes=lambda: ray_tables.nodes))
        monkeypatch.setattr(kept_placements, "POLL_S", 0.01)
        monkeypatch.setattr(placement, "reserve", ray_tables.reserve)
        yield ray_tables


def test_a_group_is_intact_once_every_bundle_has_a_node_that_answers(ray_tables: RayTables) -> None:
    group: Any = None
    assert is_intact(group)

    ray_tables.table["state"] = "RESCHEDULING"
    assert not is_intact(group)
    ray_tables.table["state"] = "CREATED"

    ray_tables.nodes[1]["Alive"] = False
    assert not is_intact(group)
    ray_tables.nodes[1]["Alive"] = True

    with socket.socket() as closed:  # Ray takes the node for alive, and its raylet is gone
        closed.bind(("127.0.0.1", 0))
        ray_tables.nodes[1]["NodeManagerPort"] = closed.getsockname()[1]
        assert not is_intact(group)


def test_a_section_is_reserved_once_and_given_back_once(ray_tables: RayTables) -> None:
    placements = KeptPlacements()
    first = placements.take("learner", ROLE, timeout_s=1)
    assert placements.take("learner", ROLE, timeout_s=1) is first
    critic = placements.take("learner.critic_ranks", ROLE, timeout_s=1)
    assert ray_tables.reserved == ["learner", "learner.critic_ranks"]
    assert ray_tables.removed == []
    placements.close()
    placements.close()
    assert sorted(map(id, ray_tables.removed)) == sorted([id(first), id(critic)])


def test_a_group_that_stays_broken_is_refused_with_what_is_free_and_what_waits(
    ray_tables: RayTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    placements = KeptPlacements()
    group = placements.take("learner", ROLE, timeout_s=1)
    ray_tables.table = {
        "state": "RESCHEDULING", "name": "learner #1a", "bundles": {0: {"CPU": 0.5}, 1: {"CPU": 0.5}},
        "bundles_to_node_id": {0: "a", 1: UNPLACED},
    }  # fmt: skip
    for node in ray_tables.nodes:
        node.update(NodeName=f"host-{node['NodeID']}", Resources={"CPU": 4})
    monkeypatch.setattr(placement, "ray", SimpleNamespace(nodes=lambda: ray_tables.nodes))
    monkeypatch.setattr(placement, "available_resources_per_node", lambda: {"b": {"CPU": 1.5}})
    monkeypatch.setattr(placement, "placement_group_table", lambda: {"1a": ray_tables.table})
    sentence = (
        r"^no place within 0\.05 s for 2 of 2 learner workers: each needs .*\. "
        r"Free: host-b has 1\.5 of 4 CPUs, .*; host-a has 0 of 4 CPUs, .*\. "
        r"Waiting: learner for 1 of 2 x 0\.5 CPUs, 0 GPUs and 0\.0 GiB\. Lower workers"
    )
    with pytest.raises(UserError, match=sentence):
        placements.take("learner", ROLE, timeout_s=0.05)
    ray_tables.table["state"] = "CREATED"
    ray_tables.table["bundles_to_node_id"][1] = "b"
    assert placements.take("learner", ROLE, timeout_s=1) is group


def test_a_run_keeps_them_over_restarts_and_gives_them_back_with_the_last(
    ray_tables: RayTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []

    def train(
        training: PolicyTraining,
        steering: Any,
        placements: KeptPlacements,
        trackers: Any,
        *,
        lost_at: float | None,
    ) -> None:
        group = placements.take("learner", ROLE, timeout_s=1)
        assert ray_tables.removed == []
        taken.append(group)
        raise LearnerLost("learner rank 1 died")

    monkeypatch.setattr(PolicyTraining, "_train", train)
    monkeypatch.setattr(policy_training, "begin_folder", lambda config: None)
    run = {"run.root": str(tmp_path), "run.name": "kept", "learner.max_restarts": 2}
    config = with_overrides(job(), run)
    fleets: Any = {"rollouts": SimpleNamespace(), "feedback": SimpleNamespace(fleet=None)}
    training = PolicyTraining(config=config, data=None, stop=StopFlag(), **fleets)  # type: ignore[arg-type]
    with pytest.raises(RunStopped, match=r"allows no other start$"):
        training.run()
    assert len(taken) == 3
    assert set(map(id, taken)) == {id(taken[0])}
    assert ray_tables.removed == [taken[0]]
