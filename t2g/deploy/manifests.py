"""Render KubeRay manifests (operator 1.7) from a run's config. Strings in, documents out.

Manifests only name secrets, and the cluster's capacity is not checked. `docker/README.md` describes how to apply them.
"""

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from t2g.config import JobConfig
from t2g.config.validation_errors import format_value
from t2g.deploy.pods import PodGroup, pod_groups
from t2g.deploy.submission import Submission, submission
from t2g.errors import UserError
from t2g.resources.job_memory import store_gib

Target = Literal["rayjob", "raycluster", "claim"]

RAY_VERSION = "2.60.0"
IMAGES = {False: "t2g:0.2.0", True: "t2g-cpu:0.2.0"}  # by `cpu`
HOME = "/opt/t2g"  # folder of the code in the image, and the driver's working directory
SHARED = "/mnt/t2g"  # mount path of the volume claim, unless run.root implies another one
SYSTEM_FOLDERS = (  # folders of the image: a volume mounted over one would hide it
    "bin", "boot", "dev", "etc", "lib", "lib64", "opt", "proc", "root", "run", "sbin", "sys", "tmp", "usr", "var",
)  # fmt: skip
SECRETS = {"token": "t2g-ray-token", "hub": "t2g-huggingface", "driver": "t2g-keys"}
MAX_NAME = 47  # the operator appends suffixes to the name
HEAD_STORE_GIB = 2
START_S = 3600  # until all pods run: nodes with GPUs may be bought first, and images pulled
HASH_DIGITS = 6  # at the end of a name that other runs could have


def render_manifests(
    config: JobConfig,
    *,
    config_path: str,
    target: Target,
    job_kind: str = "policy",
    cpu: bool = False,
    image: str | None = None,
    overrides: Sequence[str] = (),
) -> str:
    """Return the manifests of a target as YAML.

    rayjob is a single run, whose retries resume it. raycluster is a cluster for many `jobs.deploy submit`. Both come
    with a NetworkPolicy and a PodDisruptionBudget. claim is the volume claim that they mount and that outlives them.

    Args:
        config: The config of `config_path` with `overrides`. The RayJob's driver reads both again.
        config_path: Relative to the repository in the image, or absolute on the claim.
        cpu: For a cluster without GPUs.

    Raises:
        UserError: The run cannot work in pods.
    """
    if image is not None and not re.fullmatch(r"[\w.:/@-]+", image, re.ASCII):
        raise UserError(
            f"--image: got {format_value(image)}, needs the name of an image, such as registry.example/t2g:0.2.0"
        )
    groups = pod_groups(config)
    mount = mount_of(config)
    on_gpu = [group.section for group in groups if group.gpus]
    if cpu and on_gpu:
        raise UserError(f"a CPU-only cluster has no GPUs, and {on_gpu[0]}.gpus is not 0")
    if config.shares_gpus:
        raise UserError(f"cluster.gpu_sharing={config.cluster.gpu_sharing}: pods share no GPU; set it to none")

    job = make_driver_submission(job_kind, config, config_path, overrides)
    parts = _render_parts(config, groups, job, image=image or IMAGES[cpu], mount=mount, cpu=cpu)
    documents = _documents(parts, target)
    dumped = yaml.dump_all(documents, Dumper=_NoAliases, sort_keys=False, width=120, allow_unicode=True)

    options = ["--target", target]
    if job_kind != "policy":
        options += ["--job", job_kind]
    if cpu:
        options.append("--cpu")
    if image:
        options += ["--image", image]
    command = ["python", "-m", "jobs.deploy", "render", "--config", config_path, *options, *overrides]
    remarks = [f"Made by: {shlex.join(command)}", *_remarks(config, target)]
    header = ""
    for remark in remarks:
        for line in remark.splitlines():
            header += f"# {line}\n"
    return header + dumped


def _render_parts(
    config: JobConfig, groups: Sequence[PodGroup], job: Submission, *, image: str, mount: str, cpu: bool
) -> dict[str, Any]:
    """Return the parts of all documents by name, from the template."""
    # The output is YAML of validated values: HTML escaping would corrupt it.
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, autoescape=False
    )
    templates.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False,
        "sort_keys": True,
    }  # YAML joins no surrogates
    fixed = {"head_store_gib": HEAD_STORE_GIB, "secrets": SECRETS, "home": HOME, "ray_version": RAY_VERSION}
    command = {"entrypoint": job.entrypoint, "stop_wait_s": job.stop_wait_s, "metadata": job.metadata}
    text = templates.get_template("kuberay.yaml.j2").render(
        name=resource_name(config.run.name),
        **command,
        image=image,
        shared=mount,
        groups=groups,
        store_gib=store_gib(config),
        keys=keys_of(config),
        storage="20Gi" if cpu else "1Ti",  # three checkpoints of an 8B policy and critic take 520 GiB
        claim="t2g-data",
        start_s=START_S,
        **fixed,
    )
    return yaml.safe_load(text)


def _documents(parts: Mapping[str, Any], target: Target) -> list[dict[str, Any]]:
    """Return the documents of a target, in the order of the file."""
    if target == "claim":
        return [parts["claim"]]
    if target == "rayjob":
        kind = "RayJob"
        spec = parts["job"]
    else:
        kind = "RayCluster"
        spec = parts["cluster"]
    main = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": parts["network"]["metadata"], "spec": spec}
    return [parts["network"], parts["disruptions"], main]


def _remarks(config: JobConfig, target: Target) -> Iterator[str]:
    """Yield the prerequisites of the file, and how to delete what it creates."""
    if target == "claim":
        yield "Runs and models are on this claim; deleting it deletes them."
        return
    yield f"The token comes from the Secret {SECRETS['token']} (key auth_token), which must be there first."
    keys = keys_of(config)
    if keys:
        yield f"The Secret {SECRETS['driver']} must be there too, with {', '.join(keys)}."
    yield (
        f"To end it: python -m jobs.deploy stop --address http://127.0.0.1:8265 --run {config.run.name} (with kubectl "
        "port-forward to the head's service), which waits for a checkpoint, then kubectl delete -f of this file. The "
        "claim, of a file of its own (--target claim), stays."
    )


def keys_of(config: JobConfig) -> list[str]:
    """Return the environment variables with secrets that the driver needs."""
    names = [server.key_env for server in config.servers()]
    if "wandb" in config.log_options.trackers:
        names.append("WANDB_API_KEY")
    return list(dict.fromkeys(names))


def mount_of(config: JobConfig) -> str:
    """Return the mount path of the volume claim: SHARED if run.root is below it or unset, else run.root's parent.

    Raises:
        UserError: The mount would hide a system folder of the image.
    """
    root = config.run.root
    if "root" not in config.run.model_fields_set or root.is_relative_to(SHARED):
        return SHARED
    mount = root.parent
    if len(mount.parts) < 2 or mount.parts[1] in SYSTEM_FOLDERS:
        raise UserError(
            f"run.root={root}: the volume would be mounted at {mount}, over a folder of the image; take a "
            f"folder under {SHARED}, or for example /data/runs"
        )
    return str(mount)


def resource_name(run_name: str) -> str:
    """Return a valid Kubernetes name; a changed name ends with a hash, since other runs could have it.

    >>> resource_name("slf5k-policy"), resource_name("SLF5K.policy_2")
    ('slf5k-policy', 'slf5k-policy-2-a92e6d')
    """
    name = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    if not name[0].isalpha():
        name = f"t2g-{name}"
    if name == run_name and len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(run_name.encode()).hexdigest()[:HASH_DIGITS]
    kept_length = MAX_NAME - HASH_DIGITS - 1
    return f"{name[:kept_length].rstrip('-')}-{digest}"


def make_driver_submission(job_kind: str, config: JobConfig, config_path: str, overrides: Sequence[str]) -> Submission:
    """Return the job that the head runs.

    It is quoted for the submitter's shell; `ray job submit` quotes it again for the head's shell.

    Raises:
        UserError: The config file is on no pod.
    """
    path = PurePosixPath(config_path)
    mount = mount_of(config)
    if path.is_absolute() and not path.is_relative_to(mount):
        raise UserError(
            f"--config {config_path}: no pod has this file; give a path in the repository, such as "
            f"configs/slf5k/policy.yaml, or one under {mount}"
        )
    root = [] if "root" in config.run.model_fields_set else [f"run.root={mount}/runs"]
    return submission(job_kind, config, Path(config_path), [*overrides, *root])


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True
