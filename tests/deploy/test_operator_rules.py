"""The operator's rules hold for the manifests, and each of them would see a break."""

from collections.abc import Callable
from copy import deepcopy

import pytest
from committed import FILES, cluster_spec, documents
from operator_rules import Json, broken_rules

BY_NAME = {file.stem: documents(file.read_text(encoding="utf-8"))[1] for file in FILES}


def job(**changes: object) -> Callable[[Json], object]:
    return lambda main: main["spec"].update(changes)


def group(number: int, **changes: object) -> Callable[[Json], object]:
    return lambda main: cluster_spec(main)["workerGroupSpecs"][number].update(changes)


def head_param(name: str, value: str) -> Callable[[Json], object]:
    return lambda main: cluster_spec(main)["headGroupSpec"]["rayStartParams"].update({name: value})


def named(name: str) -> Callable[[Json], object]:
    return lambda main: main["metadata"].update(name=name)


def without_cluster(main: Json) -> None:
    del main["spec"]["rayClusterSpec"]


def restart(main: Json) -> None:
    cluster_spec(main)["workerGroupSpecs"][0]["template"]["spec"]["restartPolicy"] = "Always"


def old_ray(main: Json) -> None:
    cluster_spec(main)["rayVersion"] = "2.51.1"


def head_resources(main: Json) -> None:
    cluster_spec(main)["headGroupSpec"]["resources"] = {"CPU": "4"}


def no_containers(main: Json) -> None:
    cluster_spec(main)["workerGroupSpecs"][0]["template"]["spec"]["containers"] = []


def same_names(main: Json) -> None:
    cluster_spec(main)["workerGroupSpecs"][1]["groupName"] = "learner"


def autoscaler_twice(main: Json) -> None:
    container = cluster_spec(main)["headGroupSpec"]["template"]["spec"]["containers"][0]
    container["env"].append({"name": "RAY_enable_autoscaler_v2", "value": "1"})


JOB_BREAKS: list[tuple[Json, str]] = [
    ({"submissionMode": "k8sJobMode"}, "submissionMode"),
    ({"backoffLimit": -1}, "backoffLimit is negative"),
    ({"submissionMode": "InteractiveMode"}, "backoffLimit and InteractiveMode"),
    ({"submissionMode": "SidecarMode"}, "SidecarMode"),
    ({"activeDeadlineSeconds": 0}, "activeDeadlineSeconds"),
    ({"shutdownAfterJobFinishes": False}, "ttlSecondsAfterFinished needs"),
    ({"ttlSecondsAfterFinished": -1}, "ttlSecondsAfterFinished is negative"),
    ({"suspend": True, "shutdownAfterJobFinishes": False, "ttlSecondsAfterFinished": 0}, "suspended"),
    ({"deletionStrategy": {"deletionRules": [{"policy": "DeleteCluster", "condition": {}}]}}, "deletionRules"),
]
GROUP_BREAKS: list[tuple[int, Json, str]] = [
    (0, {"minReplicas": 2}, "minReplicas <= replicas"),
    (1, {"suspend": True}, "suspend and autoscaling"),
    (0, {"labels": {"rl/role": "-x"}}, "no label"),
]
BREAKS: list[tuple[Callable[[Json], object], str]] = [
    (named("a" * 48), "longer than 47"),
    (named("7b-policy"), "no DNS label"),
    (without_cluster, "neither"),
    (head_param("labels", "rl/role=head"), "labels stand in"),
]
BREAKS += [(job(**changes), words) for changes, words in JOB_BREAKS]
BREAKS += [(group(number, **changes), words) for number, changes, words in GROUP_BREAKS]
BREAKS += [
    (head_resources, "resources stand in"),
    (no_containers, "no container"),
    (same_names, "one name"),
    (restart, "restartPolicy"),
    (old_ray, "2.52.0"),
    (autoscaler_twice, "given twice"),
]


@pytest.mark.parametrize("name", BY_NAME)
def test_the_operator_takes_what_we_render(name: str) -> None:
    assert broken_rules(BY_NAME[name]) == []


@pytest.mark.parametrize(("change", "words"), BREAKS, ids=[words for _, words in BREAKS])
def test_each_rule_sees_a_break(change: Callable[[Json], object], words: str) -> None:
    main = deepcopy(BY_NAME["rayjob"])
    change(main)
    broken = broken_rules(main)
    assert len(broken) == 1, broken
    assert words in broken[0]
