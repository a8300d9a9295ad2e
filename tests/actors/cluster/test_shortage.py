"""What is free by node and what waits for what, by hand."""

from typing import Any

from actors.cluster.shortage import describe_free, describe_waiting
from t2g.resources.memory import GIB


def node(name: str, cpus: float, alive: bool = True) -> dict[str, Any]:
    resources = {"CPU": cpus, "memory": 8 * GIB}
    return {"NodeID": f"id-{name}", "NodeName": name, "Alive": alive, "Resources": resources}


def group(name: str, state: str, *homes: str) -> dict[str, Any]:
    bundles = {index: {"CPU": 2.0, "memory": 3.0 * GIB} for index in range(len(homes))}
    return {"name": name, "state": state, "bundles": bundles, "bundles_to_node_id": dict(enumerate(homes))}


def test_the_freest_node_is_listed_first_and_a_lost_one_is_not() -> None:
    nodes = [node("b", 3), node("a", 3), node("lost", 64, alive=False)]
    available = {"id-a": {"CPU": 3.0, "memory": 8.0 * GIB}, "id-b": {"memory": 0.5 * GIB}}
    assert describe_free(nodes, available) == (
        "a has 3 of 3 CPUs, 0 of 0 GPUs and 8.0 of 8.0 GiB; b has 0 of 3 CPUs, 0 of 0 GPUs and 0.5 of 8.0 GiB"
    )


def test_many_nodes_are_counted() -> None:
    nodes = [node(f"n{index}", 1) for index in range(11)]
    described = describe_free(nodes, {})
    assert described.endswith("; and 3 others")
    assert described.count(" has ") == 8
    assert describe_free([], {}) == "nothing"


def test_only_bundles_without_a_node_wait() -> None:
    unplaced = "f" * 56
    groups = [
        group("learner #1a", "RESCHEDULING", "0a", unplaced),
        group("rollout #2b", "PENDING", ""),
        group("rollout #3c", "CREATED", "0a"),
        group("rollout #4d", "REMOVED", ""),
        group("", "PENDING", "", ""),
    ]
    needs = "2 CPUs, 0 GPUs and 3.0 GiB"
    assert describe_waiting(groups) == (
        f"learner for 1 of 2 x {needs}; rollout for 1 of 1 x {needs}; another job for 2 of 2 x {needs}"
    )
    assert describe_waiting(groups[2:4]) == "nothing"
