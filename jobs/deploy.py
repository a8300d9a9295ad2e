"""Check, render, submit, scale and stop runs on a cluster; look at the cluster.

    python -m jobs.deploy submit --config configs/own/policy.yaml run.root=/mnt/runs run.name=own
    python -m jobs.deploy status --run own --root /mnt/runs
    python -m jobs.deploy scale --run own --root /mnt/runs --rollouts 3
    python -m jobs.deploy stop --address http://127.0.0.1:8265 --run own

submit, stop and doctor speak to the cluster at --address (http://HOST:8265; else that of RAY_ADDRESS, else the one on
this machine), and send the token where RAY_AUTH_MODE=token. status and scale need only the run's folder.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

from jobs.common.cli import program_name, run_to_exit_code
from t2g.config import ClusterConfig, ProcessConfig
from t2g.config.loading import load
from t2g.deploy import check_config, render_manifests, render_slurm
from t2g.deploy.check import path_warnings
from t2g.deploy.diagnosis import Unreachable, diagnose_cluster
from t2g.deploy.image_contents import image_warnings
from t2g.deploy.manifests import mount_of
from t2g.deploy.status import format_status
from t2g.deploy.submission import JOBS, Submission, read_config, submission, uploaded_path
from t2g.errors import UserError
from t2g.report.run_page import SUMMARY_FILE
from t2g.resources.preflight import Findings, preflight
from t2g.runs.control import TargetSizes, now, read_status, write_target_sizes
from t2g.runs.progress import log_duration

INSPECTION_TIMEOUT_S = 60.0  # for all nodes together
NODES_TIMEOUT_S = 600.0  # from the start of Ray's head to its last node
JOB_SERVERS = ("http://", "https://")


def submit(arguments: argparse.Namespace) -> int:
    """Upload the code, start the run, follow its log. Ctrl-C stops the run and waits for its checkpoint."""
    from actors.cluster.job_server import JobServer, wait_for_nodes

    root = Path.cwd()
    config = read_config(arguments.job_kind, arguments.config, arguments.overrides, root)
    raise_findings(preflight(config))
    job = submission(arguments.job_kind, config, uploaded_path(arguments.config, root), arguments.overrides)
    if arguments.nodes:
        wait_for_nodes(arguments.address, arguments.nodes, timeout_s=NODES_TIMEOUT_S)
    with JobServer.connect(arguments.address) as server:
        for job_id in server.running_attempts(config.run.name):
            raise UserError(f"run {config.run.name} goes on as job {job_id}: stop it first, or take another run.name")
        job_id = server.submit(job, root)
        print(f"job {job_id}: submitted; its run folder is {config.run.folder}", flush=True)
        return 0 if arguments.no_wait else server.follow(job_id, job.stop_wait_s)


def status(arguments: argparse.Namespace) -> int:
    """Print the status of a run and its age."""
    folder = arguments.root / arguments.run
    run_status = read_status(folder)
    done = (folder / SUMMARY_FILE).exists()
    text = format_status(arguments.run, run_status, done=done, now=now())
    print(run_status.model_dump_json(indent=1) if arguments.json else text)
    return 0


def scale(arguments: argparse.Namespace) -> int:
    """Change the number of workers of a running job, which follows within seconds."""
    requested = TargetSizes(rollouts=arguments.rollouts, rewards=arguments.rewards)
    target_sizes = write_target_sizes(arguments.root / arguments.run, requested)
    sizes = ", ".join(f"{number} {field}" for field, number in target_sizes.model_dump(exclude_none=True).items())
    print(f"run {arguments.run} has the target {sizes}")
    return 0


def stop(arguments: argparse.Namespace) -> int:
    """Stop a run on a cluster, and wait for its checkpoint."""
    from actors.cluster.job_server import JobServer

    with JobServer.connect(arguments.address) as server:
        attempts = server.running_attempts(arguments.run)
        if not attempts:
            raise UserError(f"--run: no job of run {arguments.run} is alive on this cluster")
        for job_id, wait_s in attempts.items():
            print(f"stopping job {job_id}: it has {wait_s:.0f} s to leave a checkpoint", flush=True)
            with log_duration(f"stopping job {job_id}"):
                print(f"job {job_id}: {server.stop(job_id, wait_s)}")
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Print each problem of a cluster; return exit code 2 if there is any."""
    address = arguments.address or os.environ.get("RAY_ADDRESS") or "auto"
    if address.startswith(JOB_SERVERS):
        return _doctor_as_job(arguments)
    import ray

    from actors.cluster.nodes import find_unreachable, inspect_nodes, pending_groups
    from actors.cluster.placement import connect

    config = None
    shared = None
    roles: Mapping[str, ProcessConfig] = {}
    require: Sequence[str] = ()
    if arguments.config:
        config = load(JOBS[arguments.job_kind].schema, arguments.config, arguments.overrides)
        shared = config.run.root
        feedback_sections = [*config.feedback_sections.values()]
        if config.task == "code" and feedback_sections:
            require = feedback_sections[0].sandbox.require
    connect(ClusterConfig(address=address), {})
    try:
        nodes = inspect_nodes(shared, require, timeout_s=INSPECTION_TIMEOUT_S)
        pending = pending_groups()
        unreachable: Sequence[Unreachable] = ()
        if config:
            roles = config.roles()
            unreachable = find_unreachable(roles, timeout_s=INSPECTION_TIMEOUT_S)
        problems = diagnose_cluster(nodes, pending, roles, shared, unreachable)
    finally:
        ray.shutdown()
    hint = "" if config else "; labels and storage need --config"
    print(f"{len(nodes)} nodes, {len(problems)} findings{hint}")
    for sentence in problems:
        print(f"- {sentence}")
    return 2 if problems else 0


def _doctor_as_job(arguments: argparse.Namespace) -> int:
    """Run the same command on the head of the cluster."""
    from actors.cluster.job_server import JobServer

    root = Path.cwd()
    job_arguments = ["doctor"]
    if arguments.config:
        path = uploaded_path(arguments.config, root)
        job_arguments += ["--config", str(path), "--job", arguments.job_kind]
    job = Submission(name="doctor", arguments=("jobs.deploy", *job_arguments, *arguments.overrides))
    with JobServer.connect(arguments.address) as server:
        job_id = server.submit(job, root)
        return server.follow(job_id, job.stop_wait_s)


def check(arguments: argparse.Namespace) -> int:
    """Print what a run needs of a cluster, and what cannot work; exit code 1 if something cannot."""
    schema = JOBS[arguments.job_kind].schema
    # With `auto` each process gets a GPU of its own, and the defaults of what the machine would decide.
    config = load(schema, arguments.config, arguments.overrides, find_resources=lambda address: {"GPU": inf})
    problems, text = check_config(config, gpu=arguments.gpu, preflight_findings=preflight(config))
    print(text)
    try:
        load(schema, arguments.config, arguments.overrides, find_resources=None)
    except UserError as error:
        print(f"warning: t2g deploy render refuses this config: {error}")
    return 1 if problems else 0


def render(arguments: argparse.Namespace) -> int:
    """Print manifests for KubeRay, or a batch script for Slurm, made from the run's config."""
    if arguments.target == "slurm":
        return _render_slurm(arguments)
    if arguments.patch:
        raise UserError("--patch was removed: kustomize patches the manifests, see docker/kuberay/kustomization.yaml")
    config = load(JOBS[arguments.job_kind].schema, arguments.config, arguments.overrides, find_resources=None)
    if "root" in config.run.model_fields_set:  # a relative one means nothing on a pod
        config = read_config(arguments.job_kind, arguments.config, arguments.overrides, Path.cwd(), find_resources=None)
    findings = preflight(config)
    path_problems = list(path_warnings(config, mount_of(config)))
    if arguments.target != "claim":
        raise_findings(findings, *path_problems)
    if arguments.target == "rayjob":
        for text in image_warnings(config, arguments.config):
            print(f"warning: {text}", file=sys.stderr)
    options = ("target", "job_kind", "cpu", "image", "overrides")
    render_options = {name: getattr(arguments, name) for name in options}
    print(render_manifests(config, config_path=str(arguments.config), **render_options), end="")
    return 0


def _render_slurm(arguments: argparse.Namespace) -> int:
    if arguments.image or arguments.cpu:
        raise UserError("--image, --cpu: a Slurm job runs in the environment of its folder, without an image")
    root = Path.cwd()
    config = read_config(arguments.job_kind, arguments.config, arguments.overrides, root, find_resources=None)
    raise_findings(preflight(config))
    file = uploaded_path(arguments.config, root)
    options = {name: getattr(arguments, name) for name in ("job_kind", "sbatch", "overrides")}
    print(render_slurm(config, config_path=str(file), **options), end="")
    return 0


def raise_findings(findings: Findings, *problems: str) -> None:
    """Raise UserError for findings that no machine can run; a cluster may have what this machine lacks."""
    if wrong := [*findings.wrong, *problems]:
        raise UserError("\n".join(wrong))


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser with its subcommands."""
    top = argparse.ArgumentParser(
        prog=program_name("jobs.deploy"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    subparsers: dict[str, argparse.ArgumentParser] = {}
    for run in (check, render, submit, status, scale, stop, doctor):
        name = run.__name__
        subparsers[name] = commands.add_parser(name, help=run.__doc__, description=run.__doc__, allow_abbrev=False)
        subparsers[name].set_defaults(command=run)
    _add_shared_options(subparsers)
    _add_own_options(subparsers)
    return top, subparsers


def _add_shared_options(commands: dict[str, argparse.ArgumentParser]) -> None:
    """Add the options that several subcommands have."""
    for name in ("check", "render", "submit", "doctor"):
        commands[name].add_argument("--config", type=Path, required=name != "doctor", metavar="FILE", help="the run's")
        commands[name].add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the file")
    for name in ("check", "render", "submit", "doctor"):
        commands[name].add_argument(
            "--job", "--stage", dest="job_kind", choices=[*JOBS], default="policy", help="what the config is of; policy"
        )
    for name in ("submit", "stop", "doctor"):
        commands[name].add_argument("--address", metavar="URL", help="of the cluster: http://HOST:8265")
    for name in ("status", "scale", "stop"):
        commands[name].add_argument("--run", required=True, metavar="NAME", help="run.name")
    for name in ("status", "scale"):
        commands[name].add_argument("--root", type=Path, default=Path("runs"), metavar="FOLDER", help="run.root")


def _add_own_options(commands: dict[str, argparse.ArgumentParser]) -> None:
    """Add the options of single subcommands."""
    commands["submit"].add_argument("--no-wait", action="store_true", help="return as soon as the job is accepted")
    commands["submit"].add_argument("--nodes", type=int, metavar="N", help="wait until the cluster has N nodes")
    commands["status"].add_argument("--json", action="store_true", help="status.json as it is")
    commands["scale"].add_argument("--rollouts", type=int, metavar="N", help="rollout workers")
    commands["scale"].add_argument("--rewards", type=int, metavar="M", help="reward workers")
    commands["check"].add_argument(
        "--gpu", default="A100-80GB", metavar="NAME", help="or GiB, that the run will have; A100-80GB"
    )

    render_parser = commands["render"]
    render_parser.add_argument("--image", metavar="NAME", help="other than the project's own")
    render_parser.add_argument("--target", choices=("rayjob", "raycluster", "claim", "slurm"), default="rayjob")
    render_parser.add_argument(
        "--sbatch", action="append", default=[], metavar="[ROLE:]OPTION", help="of sbatch, for slurm: --partition=gpu"
    )
    render_parser.add_argument("--patch", help=argparse.SUPPRESS)  # removed
    render_parser.add_argument("--cpu", action="store_true", help="for the CPU image, without GPUs")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code.

    0: done; 1: `check` found a problem; 2: user error; 3: timeout; 130: stopped; otherwise the exit code of the run.
    """
    command_line = list(sys.argv[1:] if argv is None else argv)
    top, commands = parsers()
    command = commands.get(command_line[0]) if command_line else None
    # Only a subcommand's own parser finds key=value before and behind options.
    arguments = command.parse_intermixed_args(command_line[1:]) if command else top.parse_args(command_line)
    interrupted = "interrupted; a submitted job goes on, unless its stop was requested before"
    return run_to_exit_code(top.prog, lambda: arguments.command(arguments), interrupted)


if __name__ == "__main__":
    sys.exit(main())
