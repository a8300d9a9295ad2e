import dataclasses
from pathlib import Path

import pytest

from t2g.config import RoleConfig
from t2g.deploy.diagnosis import Node, PendingGroup, Unreachable, diagnose_cluster, why_pending

GIB = 2**30
VERSIONS = {"python": "3.11.9", "ray": "2.60.0"}
HEAD = Node(name="head", labels={}, resources={"CPU": 4, "memory": 8 * GIB}, versions=VERSIONS, sees_file=True)
LEARNER = Node(
    name="learner-0", labels={"rl/role": "learner"}, resources={"CPU": 16, "GPU": 8, "memory": 64 * GIB},
    versions=VERSIONS, sees_file=True,
)  # fmt: skip
NODES = (HEAD, LEARNER)


def group(*bundles: dict[str, float], selector: dict[str, str] | None = None) -> PendingGroup:
    return PendingGroup(name="x", bundles=bundles, selectors=tuple(selector or {} for _ in bundles))


def test_a_sound_cluster_has_no_findings() -> None:
    role = RoleConfig(labels={"rl/role": "learner"})
    assert diagnose_cluster(NODES, [], {"learner": role, "rollout": RoleConfig()}, Path("/mnt/runs")) == []


@pytest.mark.parametrize(
    ("pending", "why"),
    [
        (
            group({"GPU": 1}, selector={"rl/role": "rollout"}),
            "no node has the labels {'rl/role': 'rollout'}; add such a node,",
        ),
        (group({"GPU": 9}), "a bundle needs 9 GPU, and the largest node has 8 GPU"),
        (group({"GPU": 1}, {"TPU": 1}), "a bundle needs 1 TPU, and the largest node has 0 TPU"),
        (
            group({"memory": 128 * GIB}, selector={"rl/role": "learner"}),
            "a bundle needs 128.0 GiB of memory, and the largest node with the labels {'rl/role': 'learner'} "
            "has 64.0 GiB of memory",
        ),
        (
            group({"CPU": 2, "GPU": 8}),
            "the nodes that could hold it are in use (2 CPU, 8 GPU); add one, or wait until another run ends",
        ),
        (group({"CPU": 2}, selector={"rl/role": "!rollout"}), "the nodes that could hold it are in use (2 CPU)"),
    ],
)
def test_why_a_group_waits(pending: PendingGroup, why: str) -> None:
    assert why_pending(pending, NODES).startswith(why)


def test_no_single_node_may_have_what_the_nodes_together_have() -> None:
    many = Node(name="many", labels={}, resources={"CPU": 64}, versions=VERSIONS)
    assert why_pending(group({"CPU": 32, "GPU": 1}), (LEARNER, many)) == (
        "no single node has all that a bundle needs (32 CPU, 1 GPU)"
    )


def test_each_fault_is_one_sentence() -> None:
    old = Node(
        name="old", labels={}, resources={"CPU": 4}, versions={"python": "3.11.9", "ray": "2.59.0"}, sees_file=False
    )
    deaf = Node(name="deaf", labels={}, resources={"CPU": 4}, versions={}, fault="it did not answer within 60 s")
    bare = dataclasses.replace(HEAD, name="bare", sandbox="generated code cannot be isolated")
    role = RoleConfig(labels={"rl/role": "rollout"})
    assert diagnose_cluster((*NODES, old, deaf, bare), [group({"CPU": 99})], {"rollout": role}, Path("/mnt/runs")) == [
        "node deaf could not be inspected: it did not answer within 60 s",
        "node bare: generated code cannot be isolated",
        "ray differs between nodes: 2.59.0 on old; 2.60.0 on head, learner-0, bare; use the same image on all nodes",
        "no node has the labels {'rl/role': 'rollout'} of rollout.labels: start one with `ray start --labels`, "
        "or check that the autoscaler adds such a node when a run requests it",
        "placement group x is pending: a bundle needs 99 CPU, and the largest node has 16 CPU",
        "/mnt/runs is not shared: a file that another node wrote there is not visible on old; "
        "mount the same volume on all nodes, or put run.root on a shared volume",
    ]


def test_unreachable_pairs_are_reported() -> None:
    unreachable = [Unreachable(source="gpu-0", target="learner-0", reason="port 4711 of 10.0.0.2: timed out")]
    (sentence,) = diagnose_cluster(NODES, [], {}, None, unreachable)
    assert sentence.startswith("node gpu-0 does not reach node learner-0: port 4711 of 10.0.0.2: timed out; ")


def test_a_missing_package_of_a_node_is_reported() -> None:
    bare = Node(name="bare", labels={}, resources={}, versions={"python": "3.11.9"})
    assert diagnose_cluster((HEAD, bare), [], {}, None) == [
        "ray differs between nodes: 2.60.0 on head; none on bare; use the same image on all nodes"
    ]


@pytest.mark.parametrize(("error_s", "words"), [(4.8, "4.8 s ahead of"), (-61.0, "61.0 s behind")])
def test_a_wrong_clock_is_reported_with_its_direction(error_s: float, words: str) -> None:
    wrong = dataclasses.replace(LEARNER, clock_error_s=error_s)
    (sentence,) = diagnose_cluster((HEAD, wrong), [], {}, None)
    assert sentence.startswith(f"the clock of node learner-0 is {words} that of this node")
    assert diagnose_cluster((HEAD, dataclasses.replace(LEARNER, clock_error_s=error_s / 100)), [], {}, None) == []


def test_shared_memory_below_the_object_store_is_reported() -> None:
    resources = LEARNER.resources | {"object_store_memory": 2 * GIB}
    small = dataclasses.replace(LEARNER, resources=resources, shared_bytes=64 * 2**20)
    (sentence,) = diagnose_cluster((HEAD, small), [], {}, None)
    assert sentence.startswith("node learner-0: /dev/shm has 0.06 GiB, and Ray's object store there has 2.00 GiB")
    for shared_bytes in (None, 2 * GIB):  # none: another system's way to share memory
        assert diagnose_cluster((HEAD, dataclasses.replace(small, shared_bytes=shared_bytes)), [], {}, None) == []


@pytest.mark.parametrize(("answer", "error_s"), [(99.0, -1.0), (100.0, 0), (103.0, 0), (105.5, 2.5)])
def test_the_error_of_a_clock_is_bounded_by_the_times_of_question_and_answer(answer: float, error_s: float) -> None:
    from actors.cluster.nodes import bound_clock_error

    assert bound_clock_error(100.0, answer, 103.0) == error_s
