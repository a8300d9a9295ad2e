"""Render a batch script for Slurm from a run's config: a heterogeneous job with one component for each role.

The first component has Ray's head and the batch script itself. `t2g/guides/17-where-you-work.md` describes how to
submit it.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from t2g.config import JobConfig
from t2g.config.validation_errors import format_value
from t2g.deploy.manifests import HEAD_STORE_GIB, resource_name
from t2g.deploy.pods import PodGroup, pod_groups
from t2g.deploy.submission import submission
from t2g.errors import UserError
from t2g.resources.job_memory import store_gib
from t2g.resources.memory import GIB
from t2g.runs.control import STATUS_FILE

HEAD = "head"
HEAD_CPUS = 4
HEAD_GIB = 16  # the driver is on the head
RAY_START_S = 600  # as long as `submit` waits for nodes
STOP_MARGIN_S = 60  # from the signal to the stop request
MAX_SIGNAL_S = 65535  # limit in Slurm
OPTION = re.compile(r"(?:(\w+):)?(--[!-~ ]+)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Component:
    """One component of the job: equal nodes, with one Ray node each."""

    name: str
    nodes: int
    cpus: int
    memory_gib: int
    gpus: int = 0
    options: tuple[str, ...] = ()


def render_slurm(
    config: JobConfig,
    *,
    config_path: str,
    job_kind: str = "policy",
    sbatch: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> str:
    """Return a batch script that starts Ray on its nodes by role, submits the run and follows its log.

    A fleet has nodes for its most workers. Near its time limit the job stops at a checkpoint and is queued again,
    unless the run has made no step.

    Args:
        config: The config of `config_path` with `overrides`. The driver reads both again.
        config_path: Relative to the folder in which `sbatch` is called.
        sbatch: Options of each component, or after `ROLE:` of one.

    Raises:
        UserError: The run cannot work in a Slurm job, or an option is none.
    """
    if config.shares_gpus:
        raise UserError(f"cluster.gpu_sharing={config.cluster.gpu_sharing}: roles have their own nodes; set it to none")
    groups = pod_groups(config)
    components = plan_components(groups, store_gib(config), sbatch)
    job = submission(job_kind, config, Path(config_path), overrides)
    command = ["python", "-m", "jobs.deploy", "render", "--target", "slurm", "--config", config_path]
    if job_kind != "policy":
        command += ["--job", job_kind]
    for option in sbatch:
        command.append(f"--sbatch={option}")
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # it is a shell script; every text of the user goes through shlex.quote
    )
    signal_s = min(job.stop_wait_s + STOP_MARGIN_S, MAX_SIGNAL_S)
    num_nodes = sum(component.nodes for component in components)
    submitted = shlex.join(["--config", config_path, *overrides])
    keys = list(dict.fromkeys(server.key_env for server in config.servers()))  # wandb has a login of its own
    job_values = {"job_kind": job_kind, "submitted": submitted, "keys": keys, "signal_s": signal_s}
    run_name = config.run.name
    status = shlex.quote(str(config.run.folder / STATUS_FILE))
    names = {"name": resource_name(run_name), "run": shlex.quote(run_name), "status": status}
    store = {"store_bytes": round(store_gib(config) * GIB), "head_store_bytes": HEAD_STORE_GIB * GIB}
    return templates.get_template("slurm.sh.j2").render(
        header=_header([*command, *overrides], run_name),
        components=components,
        groups=groups,
        labels_of=_labels_of,
        num_nodes=num_nodes,
        ray_start_s=RAY_START_S,
        **names,
        **job_values,
        **store,
    )


def plan_components(groups: Sequence[PodGroup], store_gib: float, sbatch: Sequence[str]) -> list[Component]:
    """Return the head's component and one for each group.

    Args:
        store_gib: The object store of one node.
        sbatch: See `render_slurm`.

    Raises:
        UserError: An option is none, or names another role.
    """
    names = [HEAD, *(group.name for group in groups)]
    options = {name: list(_options_of(name, names, sbatch)) for name in names}
    components = [
        Component(name=HEAD, nodes=1, cpus=HEAD_CPUS, memory_gib=HEAD_GIB, options=tuple(options[HEAD])),
    ]
    for group in groups:
        component = Component(
            name=group.name,
            nodes=group.pods.max,
            cpus=group.cpus + 1,
            memory_gib=group.memory_gib(store_gib),
            gpus=group.gpus,
            options=tuple(options[group.name]),
        )
        components.append(component)
    return components


def _options_of(name: str, names: Sequence[str], sbatch: Sequence[str]) -> Iterator[str]:
    """Yield the options of one component: those of all first, so that its own win."""
    role_options: list[str] = []
    for text in sbatch:
        match = OPTION.fullmatch(text)
        if match is None or match[1] not in (None, *names):
            raise UserError(
                f"--sbatch: got {format_value(text)}, needs an option of sbatch such as --partition=gpu, or for one of "
                f"{', '.join(names)} as in {names[-1]}:--partition=gpu"
            )
        if match[1] is None:
            yield match[2]
        if match[1] == name:
            role_options.append(match[2])
    yield from role_options


def _labels_of(group: PodGroup) -> str:
    """Return the labels as `ray start` takes them, quoted."""
    pairs = [f"{key}={value}" for key, value in group.labels.items()]
    return shlex.quote(",".join(pairs))


def _header(command: Sequence[str], run_name: str) -> str:
    """Return the comment above the options. A value with a line break must not leave the comment."""
    remarks = (
        f"Made by: {shlex.join(command)}",
        "Submit it in the folder of the code, which all nodes see, with --time and the rest that your cluster wants.",
        f"To stop run {run_name} at a checkpoint: scancel --signal=TERM --batch JOB. The same sbatch resumes it.",
    )
    header = ""
    for remark in remarks:
        for line in remark.splitlines():
            header += f"# {line}\n"
    return header
