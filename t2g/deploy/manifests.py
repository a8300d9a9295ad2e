"""KubeRay manifests (operator 1.7) from the config of the run they are for. Strings in, strings out.

Not here: secrets, which manifests only name, and whether the cluster has room. `docker/README.md` tells how to apply.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from t2g.config import PolicyJob
from t2g.deploy.memory import store_gib
from t2g.deploy.pods import pod_groups
from t2g.deploy.submission import Submission, training
from t2g.errors import UserError

Target = Literal["rayjob", "raycluster"]

RAY_VERSION = "2.60.0"
IMAGES = {False: "t2g:0.1.0", True: "t2g-cpu:0.1.0"}  # by `cpu`
HOME = "/opt/t2g"  # of the code in the image: the driver's working directory
SHARED = "/mnt/t2g"  # of the volume claim, in every pod
SECRETS = {"token": "t2g-ray-token", "hub": "t2g-huggingface"}
MAX_NAME = 47  # the operator appends to it
HEAD_STORE_GIB = 2


def render_manifests(
    config: PolicyJob,
    *,
    config_path: str,
    target: Target,
    cpu: bool = False,
    image: str | None = None,
    overrides: Sequence[str] = (),
) -> str:
    """The volume claim, a policy for the network and a RayJob (one shot, its retries resume) or RayCluster (for many
    `jobs.deploy submit`).

    config: of `config_path` with `overrides`, both of which the RayJob's driver reads again: config_path is relative to
    the repository, which the image holds, or lies on the claim. run.root is the claim's. cpu: nothing has a GPU.
    Raises UserError for what pods cannot do.
    """
    groups = pod_groups(config)
    if cpu and (on_gpu := [group.section for group in groups if group.gpus]):
        raise UserError(f"a CPU-only cluster has no GPUs, and {on_gpu[0]}.gpus is not 0")
    if config.learner.sync_transport == "ipc":
        raise UserError("learner.sync_transport=ipc: pods share no GPU, and engines have their own; take nccl or store")
    image = image or IMAGES[cpu]
    job = driver(config, config_path, overrides)
    # YAML of values that were checked, not a page: nothing is to be escaped.
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, autoescape=False
    )
    text = templates.get_template("kuberay.yaml.j2").render(
        groups=groups, image=image, entrypoint=job.entrypoint, stop_wait_s=job.stop_wait_s,
        store_gib=store_gib(config), head_store_gib=HEAD_STORE_GIB,
        storage="20Gi" if cpu else "500Gi", claim="t2g-data", secrets=SECRETS,
        home=HOME, shared=SHARED, ray_version=RAY_VERSION, name=resource_name(config.run.name),
    )  # fmt: skip
    parts = yaml.safe_load(text)
    kind, spec = ("RayJob", parts["job"]) if target == "rayjob" else ("RayCluster", parts["cluster"])
    name = parts["network"]["metadata"]
    main = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": name, "spec": spec}
    return _header(config_path, target, cpu, image, overrides) + yaml.dump_all(
        [parts["claim"], parts["network"], main], Dumper=_NoAliases, sort_keys=False, width=120
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
    return training(config, Path(config_path), [*overrides, f"run.root={SHARED}/runs"])


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _header(config_path: str, target: Target, cpu: bool, image: str, overrides: Sequence[str]) -> str:
    options = ["--target", target, *(["--cpu"] if cpu else []), *([] if image == IMAGES[cpu] else ["--image", image])]
    command = shlex.join(["python", "-m", "jobs.deploy", "render", "--config", config_path, *options, *overrides])
    lines = [
        f"Made by: {command}",
        f"The token comes from the Secret {SECRETS['token']} (key auth_token), which must be there first.",
        "The claim holds runs and models: `kubectl delete -f` of this file would delete them too.",
    ]
    return "".join(f"# {line}\n" for line in lines)
