"""What the KubeRay operator refuses beyond its schema, written down again (its validation of RayJob and RayCluster).

Each rule gives sentences about what is wrong; all together say nothing of a manifest that the operator takes.
"""

import re
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
SUBMISSION_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
OWN_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")


def broken_rules(main: Json) -> list[str]:
    spec = main["spec"]
    broken = [*_name_rules(main)]
    if main["kind"] == "RayJob":
        broken += [*_job_rules(spec), *_deletion_rules(spec)]
        if "rayClusterSpec" not in spec:
            return broken
        spec = spec["rayClusterSpec"]
    groups = spec.get("workerGroupSpecs", [])
    broken += [*_cluster_rules(spec, groups)]
    for name, group in [("head", spec["headGroupSpec"]), *((g["groupName"], g) for g in groups)]:
        broken += [f"{name}: {sentence}" for sentence in _group_rules(spec, group)]
    return broken


def _name_rules(main: Json) -> Iterator[str]:
    name = main["metadata"]["name"]
    longest = 47 if main["kind"] == "RayJob" else 53
    if len(name) > longest:
        yield f"the name is longer than {longest} characters"
    if not NAME.fullmatch(name):
        yield "the name is no DNS label"


def _job_rules(spec: Json) -> Iterator[str]:
    mode = spec.get("submissionMode", "K8sJobMode")
    if mode not in SUBMISSION_MODES:
        yield "submissionMode is unknown"
    if spec.get("backoffLimit", 0) < 0:
        yield "backoffLimit is negative"
    if mode == "InteractiveMode" and spec.get("backoffLimit", 0) > 0:
        yield "backoffLimit and InteractiveMode exclude each other"
    if mode == "SidecarMode" and ("submitterPodTemplate" in spec or "submitterConfig" in spec):
        yield "SidecarMode has no submitter of its own"
    if "rayClusterSpec" not in spec and not spec.get("clusterSelector"):
        yield "there is neither rayClusterSpec nor clusterSelector"
    if spec.get("activeDeadlineSeconds", 1) <= 0:
        yield "activeDeadlineSeconds is not positive"


def _deletion_rules(spec: Json) -> Iterator[str]:
    shutdown = spec.get("shutdownAfterJobFinishes", False)
    strategy = spec.get("deletionStrategy")
    if spec.get("suspend") and not shutdown:
        yield "a job that can be suspended needs shutdownAfterJobFinishes"
    if spec.get("ttlSecondsAfterFinished", 0) < 0:
        yield "ttlSecondsAfterFinished is negative"
    if spec.get("ttlSecondsAfterFinished", 0) > 0 and not shutdown:
        yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"
    if strategy is not None and shutdown and strategy.get("deletionRules"):
        yield "deletionRules and shutdownAfterJobFinishes exclude each other"


def _cluster_rules(spec: Json, groups: list[Json]) -> Iterator[str]:
    names = [group["groupName"] for group in groups]
    if len(set(names)) < len(names):
        yield "two groups have one name"
    for group in groups:
        if not 0 <= group["minReplicas"] <= group.get("replicas", 0) <= group["maxReplicas"]:
            yield f"{group['groupName']}: minReplicas <= replicas <= maxReplicas does not hold"
        if spec.get("enableInTreeAutoscaling") and group.get("suspend"):
            yield f"{group['groupName']}: suspend and autoscaling exclude each other"
    version = tuple(int(part) for part in spec.get("rayVersion", "0").split("."))
    if spec.get("authOptions", {}).get("mode") == "token" and version < (2, 52, 0):
        yield "token authentication needs rayVersion 2.52.0 or newer"
    v2 = spec.get("autoscalerOptions", {}).get("version") == "v2"
    head_env = [entry["name"] for entry in spec["headGroupSpec"]["template"]["spec"]["containers"][0].get("env", [])]
    if v2 and "RAY_enable_autoscaler_v2" in head_env:
        yield "the autoscaler's version is given twice"


def _group_rules(spec: Json, group: Json) -> Iterator[str]:
    pod = group["template"]["spec"]
    params = group.get("rayStartParams", {})
    if not pod.get("containers"):
        yield "there is no container"
    if group.get("resources") and any(params.get(name) for name in OWN_RESOURCES):
        yield "resources stand in rayStartParams as well"
    if "labels" in params:
        yield "labels stand in rayStartParams"
    for key, value in group.get("labels", {}).items():
        if not (LABEL_KEY.fullmatch(key) and LABEL_VALUE.fullmatch(value)):
            yield f"{key}={value} is no label"
    v2 = spec.get("autoscalerOptions", {}).get("version") == "v2"
    if v2 and pod.get("restartPolicy", "Never") != "Never":
        yield "restartPolicy is not Never"
