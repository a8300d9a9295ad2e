"""KubeRay manifests (operator 1.7) from the config of the run they are for. Strings in, strings out.

Not here: secrets, which manifests only name, and whether the cluster has room. `docker/README.md` tells how to apply.
"""

import re
import shlex
from collections.abc import Sequence
from math import ceil
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml

from t2g.config import PolicyJob
from t2g.deploy.pods import PodGroup, pod_groups
from t2g.deploy.submission import Submission, training
from t2g.errors import UserError

Target = Literal["rayjob", "raycluster"]
Json = dict[str, Any]

RAY_VERSION = "2.60.0"
IMAGES = {False: "t2g:0.1.0", True: "t2g-cpu:0.1.0"}  # by `cpu`
HOME = "/opt/t2g"  # of the code in the image: the driver's working directory
SHARED = "/mnt/t2g"  # of the volume claim, in every pod
RUNS = f"{SHARED}/runs"
CLAIM = "t2g-data"
TOKEN_SECRET, TOKEN_KEY = "t2g-ray-token", "auth_token"  # the key's name is the operator's
HUB_SECRET, HUB_KEY = "t2g-huggingface", "token"
MAX_NAME = 47  # the operator appends to it

GIB = 2**30
DRAIN_S = 60  # a node that must go drains so long; the pod's grace is longer, else the kill wins
GRACE_S = 90
ROLLOUT_IDLE_S = 600  # longer than an engine's start, which a pod that went too early would cost again
IDLE_S = 300
BACKOFF_LIMIT = 3
NODE_GIB = 2  # raylet, agents and what they keep, beside the workers
SHM_GIB_PER_WORKER = 2  # an engine's arena of arriving weights, NCCL's buffers
HEAD_GIB, HEAD_STORE_GIB, HEAD_CPUS = 16, 2, 4  # the driver lives on the head
TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
AGENT_PORT = 52365
PROBE = {"httpGet": {"path": "/api/healthz", "port": AGENT_PORT}, "timeoutSeconds": 5}  # answers without the token
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "fsGroup": 1000,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def render_manifests(
    config: PolicyJob,
    *,
    config_path: str,
    target: Target,
    cpu: bool = False,
    image: str | None = None,
    overrides: Sequence[str] = (),
) -> str:
    """The volume claim and a RayJob (one shot, its retries resume) or RayCluster (for many `jobs.deploy submit`).

    config: of `config_path` with `overrides`, both of which the RayJob's driver reads again: config_path is relative to
    the repository, which the image holds, or lies on the claim. run.root is the claim's. cpu: nothing has a GPU.
    Raises UserError for what pods cannot do.
    """
    groups = pod_groups(config)
    if cpu and (on_gpu := [group.section for group in groups if group.gpus]):
        raise UserError(f"a CPU-only cluster has no GPUs, and {on_gpu[0]}.gpus is not 0")
    if config.learner.sync_transport == "ipc":
        raise UserError("learner.sync_transport=ipc: pods share no GPU, and engines have their own; take nccl or store")
    name, image = resource_name(config.run.name), image or IMAGES[cpu]
    job = driver(config, config_path, overrides)
    cluster = _cluster(config, groups, image, stop_wait_s=job.stop_wait_s)
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "20Gi" if cpu else "500Gi"}},
        },
    }
    kind, spec = ("RayJob", _job(cluster, job.entrypoint, image)) if target == "rayjob" else ("RayCluster", cluster)
    main = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    return _header(config_path, target, cpu, image, overrides) + yaml.dump_all(
        [claim, main], Dumper=_NoAliases, sort_keys=False, width=120
    )


def resource_name(run_name: str) -> str:
    """A name that Kubernetes and the operator take: "SLF5K.policy_2" -> "slf5k-policy-2", "7b" -> "t2g-7b"."""
    name = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    return (name if name[0].isalpha() else f"t2g-{name}")[:MAX_NAME].rstrip("-")


def driver(config: PolicyJob, config_path: str, overrides: Sequence[str]) -> Submission:
    """What the head runs: quoted for the submitter's shell, and `ray job submit` quotes it again for the head's.

    UserError for a config file that is on no pod.
    """
    path = PurePosixPath(config_path)
    if path.is_absolute() and not path.is_relative_to(SHARED):
        raise UserError(
            f"--config {config_path}: no pod has this file; give a path in the repository, such as "
            f"configs/slf5k/policy.yaml, or one under {SHARED}"
        )
    return training(config, Path(config_path), [*overrides, f"run.root={RUNS}"])


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _header(config_path: str, target: Target, cpu: bool, image: str, overrides: Sequence[str]) -> str:
    options = ["--target", target, *(["--cpu"] if cpu else []), *([] if image == IMAGES[cpu] else ["--image", image])]
    command = shlex.join(["python", "-m", "jobs.deploy", "render", "--config", config_path, *options, *overrides])
    lines = [
        f"Made by: {command}",
        f"The token comes from the Secret {TOKEN_SECRET} (key {TOKEN_KEY}), which must be there first.",
        "The claim holds runs and models: `kubectl delete -f` of this file would delete them too.",
    ]
    return "".join(f"# {line}\n" for line in lines)


def _job(cluster: Json, entrypoint: str, image: str) -> Json:
    return {
        "entrypoint": entrypoint,
        "submissionMode": "K8sJobMode",
        "backoffLimit": BACKOFF_LIMIT,  # each a new cluster, where the run goes on from its checkpoint on the claim
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "submitterPodTemplate": {
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "securityContext": POD_SECURITY,
                "containers": [
                    {
                        "name": "ray-job-submitter",
                        "image": image,
                        "env": _token_env(),
                        "securityContext": CONTAINER_SECURITY,
                        "resources": _resources(cpus=1, memory_gib=2),
                    }
                ],
            }
        },
        "rayClusterSpec": cluster,
    }


def _cluster(config: PolicyJob, groups: Sequence[PodGroup], image: str, *, stop_wait_s: int) -> Json:
    return {
        "rayVersion": RAY_VERSION,
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "upscalingMode": "Default",
            "idleTimeoutSeconds": IDLE_S,
            "securityContext": CONTAINER_SECURITY,
            # The head's pod mounts no token of its service account; only this container, which scales pods, gets one.
            "volumeMounts": [{"name": "autoscaler-token", "mountPath": TOKEN_FOLDER, "readOnly": True}],
            "resources": _resources(cpus=1, memory_gib=2),
        },
        "authOptions": {"mode": "token", "secretName": TOKEN_SECRET},  # for the operator and the autoscaler
        "headGroupSpec": _head(image, stop_wait_s),
        "workerGroupSpecs": [_worker_group(group, config, image) for group in groups],
    }


def _head(image: str, stop_wait_s: int) -> Json:
    container = _container("ray-head", image) | {
        "workingDir": HOME,
        "ports": [
            {"name": "gcs", "containerPort": 6379},
            {"name": "dashboard", "containerPort": 8265},
            {"name": "metrics", "containerPort": 8080},
        ],
        "resources": _resources(cpus=HEAD_CPUS, memory_gib=HEAD_GIB),
    }
    container["env"].append({"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(stop_wait_s)})  # for a last checkpoint
    token = {
        "name": "autoscaler-token",
        "projected": {
            "sources": [
                {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
            ]
        },
    }
    return {
        "rayStartParams": {
            "num-cpus": "0",  # no worker lands here
            "object-store-memory": str(HEAD_STORE_GIB * GIB),
            "dashboard-host": "0.0.0.0",  # the operator asks it about the job; it wants the token
        },
        "template": {"spec": _pod(container, shm_gib=HEAD_STORE_GIB + 1, volumes=[token])},
    }


def _worker_group(group: PodGroup, config: PolicyJob, image: str) -> Json:
    store_gib = config.cluster.object_store_gib
    shm_gib = ceil(store_gib + group.per_pod * SHM_GIB_PER_WORKER)
    memory_gib = ceil(group.per_pod * group.role.memory_gib + shm_gib + NODE_GIB)
    container = _container("ray-worker", image)
    container["resources"] = _resources(cpus=group.cpus + 1, memory_gib=memory_gib, gpus=group.gpus)
    spec = _pod(container, shm_gib=shm_gib)
    if group.gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    pods = group.pods
    return {
        "groupName": group.name,
        "replicas": pods.initial,
        "minReplicas": pods.min,
        "maxReplicas": pods.max,
        **({"idleTimeoutSeconds": ROLLOUT_IDLE_S} if group.elastic else {}),
        "labels": group.labels,
        # What Ray may give away: exactly what the workers ask for, so that no other one fits into the rest.
        "resources": {"CPU": str(group.cpus), "memory": str(group.per_pod * int(group.role.memory_gib * GIB))},
        "rayStartParams": {"object-store-memory": str(int(store_gib * GIB))},
        "template": {"spec": spec},
    }


def _pod(container: Json, *, shm_gib: int, volumes: Sequence[Json] = ()) -> Json:
    return {
        "restartPolicy": "Never",  # a pod that came back would be another Ray node under the same name
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "securityContext": POD_SECURITY,
        "containers": [container],
        "volumes": [
            {"name": "shared-mem", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_gib}Gi"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": CLAIM}},
            *volumes,
        ],
    }


def _container(name: str, image: str) -> Json:
    return {
        "name": name,
        "image": image,
        "env": [
            *_token_env(),
            {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": str(DRAIN_S)},
            {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
            {"name": "DO_NOT_TRACK", "value": "1"},
            {"name": "HF_HOME", "value": f"{SHARED}/huggingface"},
            {"name": "HF_TOKEN", "valueFrom": _secret(HUB_SECRET, HUB_KEY, optional=True)},
        ],
        "volumeMounts": [{"name": "shared-mem", "mountPath": "/dev/shm"}, {"name": "data", "mountPath": SHARED}],
        "securityContext": CONTAINER_SECURITY,
        "startupProbe": PROBE | {"periodSeconds": 5, "failureThreshold": 60},
        "livenessProbe": PROBE | {"periodSeconds": 10, "failureThreshold": 30},
        "readinessProbe": PROBE | {"periodSeconds": 10, "failureThreshold": 3},
    }


def _token_env() -> list[Json]:
    """Set here as well as by authOptions: under an operator that does not know those, nothing answers without it."""
    return [
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": _secret(TOKEN_SECRET, TOKEN_KEY)},
    ]


def _secret(name: str, key: str, *, optional: bool = False) -> Json:
    return {"secretKeyRef": {"name": name, "key": key} | ({"optional": True} if optional else {})}


def _resources(*, cpus: int, memory_gib: int, gpus: int = 0) -> Json:
    amounts = {"cpu": str(cpus), "memory": f"{memory_gib}Gi"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return {"requests": amounts, "limits": amounts}
