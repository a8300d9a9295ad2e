"""A rendered batch script on three hosts, which are namespaces of this machine; stand-ins are Slurm's own programs.

Ray, the ranks and the job server are real; the engines are stubs, as in `test_several_hosts`.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from heads import until
from network_hosts import Host, Network, find_left, find_obstacle, make_network
from test_several_hosts import NUM_STEPS, RUN_S, SETTINGS, write_inputs

from t2g.config import PolicyJob, loading
from t2g.deploy import render_slurm

OBSTACLE = find_obstacle()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(OBSTACLE), reason=f"no hosts of their own here: {OBSTACLE}")]

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
START_S = 300  # start of Ray on all nodes
SHM_MIB = 2304  # the head's object store is 2 GiB
JOB = str(os.getpid())
NODES = {"0": ["head"], "1": ["learner"], "2": ["rollout"]}
PROGRAMS = {
    "srun": f'exec {sys.executable} {TESTS}/slurm_nodes.py srun "$@"',
    "scontrol": 'echo "$@" >> "$T2G_REQUEUED"',
    # The driver of the run has stubs for engines.
    "python": f"""
if [[ "$1 $2" == "-m jobs.train_policy" ]]; then
  shift 2
  exec {sys.executable} {TESTS}/stub_run.py "$@"
fi
exec {sys.executable} "$@"
""",
}


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """The nodes of a job; each has a stand-in for slurmd."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    hosts = [host for group in NODES.values() for host in group]
    addresses = {host: f"10.77.0.{number}" for number, host in enumerate(hosts, start=1)}
    nodes = dict[str, list[str]]()
    for group, names in NODES.items():
        nodes[group] = [addresses[name] for name in names]
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = plain | {
        "PATH": path,
        "PYTHONPATH": f"{TESTS}:{ROOT}",
        "RAY_worker_niceness": "0",
        "SLURM_JOB_ID": JOB,
        "T2G_REQUEUED": str(tmp_path / "requeued"),
        "T2G_NODES": json.dumps(nodes),
    }
    own_folders = [Path(f"/tmp/t2g-{JOB}-{component}") for component in NODES]  # each node has its own /tmp
    for folder in own_folders:
        folder.mkdir()
    with make_network(tmp_path, environ) as network:
        for number, name in enumerate(hosts, start=1):
            host = network.add(name, number, shm_mib=SHM_MIB)
            for folder in own_folders:
                host.run("mount", "-t", "tmpfs", "tmpfs", folder, timeout_s=30)
            host.python(TESTS / "slurm_nodes.py", "slurmd")
        yield network
        namespaces = network.list_namespaces()
    for folder in own_folders:
        folder.rmdir()
    assert find_left(namespaces) == []


def write_job(folder: Path) -> Path:
    """Write the batch script next to a copy of its config."""
    write_inputs(folder)
    code = folder / "code"
    config_file = code / "configs" / "policy.yaml"
    config_file.parent.mkdir(parents=True)
    config_file.write_text((ROOT / "configs" / "own" / "policy.yaml").read_text())
    overrides = [
        *SETTINGS.strip().splitlines(),
        "rollout.workers=1",
        "cluster.object_store_gib=0.1",
        "cluster.placement_timeout_s=120",
        f"cluster.env={{PYTHONPATH: '{TESTS}:{ROOT}'}}",
        "learner.labels={rl/role: learner}",
        "rollout.labels={rl/role: rollout}",
        f"model.policy={folder / 'policy'}",
        f"data.path={folder / 'prompts.jsonl'}",
        f"run.root={folder / 'runs'}",
        "run.name=own",
    ]
    config = loading.load(PolicyJob, config_file, overrides, environ={}, cwd=code)
    script = code / "job.sh"
    script.write_text(render_slurm(config, config_path="configs/policy.yaml", overrides=overrides))
    return script


def start_job(head: Host, script: Path) -> "subprocess.Popen[bytes]":
    """Start the batch script on the first node, as Slurm does, with its process id in a file."""
    command = f"echo $$ > {script.parent.parent}/pid; cd {script.parent}; exec bash {script}"
    return head.start("bash", "-c", command)


def test_a_job_stops_at_a_checkpoint_near_its_end_and_goes_on_when_it_is_queued_again(
    network: Network, tmp_path: Path
) -> None:
    """Without labels that fit its selectors the run would find no place."""
    script = write_job(tmp_path)
    metrics = tmp_path / "runs" / "own" / "metrics.jsonl"
    head = network.hosts["head"]
    job = start_job(head, script)

    def read_steps() -> list[int]:
        with suppress(FileNotFoundError):
            lines = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
            return [line["step"] for line in lines if line["step"] > 0]
        return []

    def has_two_steps() -> bool:
        assert job.poll() is None, head.logs.read_text()[-6000:]
        return len(read_steps()) >= 2

    until(has_two_steps, "two steps", timeout_s=START_S + RUN_S, log=head.logs)
    head.run("kill", "-USR1", (tmp_path / "pid").read_text().strip(), timeout_s=10)
    assert job.wait(timeout=RUN_S) == 130, head.logs.read_text()[-6000:]
    assert (tmp_path / "requeued").read_text() == f"requeue {JOB}\n"
    stopped_after = len(read_steps())
    assert 2 <= stopped_after < NUM_STEPS

    assert start_job(head, script).wait(timeout=RUN_S) == 0, head.logs.read_text()[-6000:]
    assert read_steps() == list(range(1, NUM_STEPS + 1))
    assert (tmp_path / "requeued").read_text() == f"requeue {JOB}\n", "a run that has finished is not queued again"
    output = head.logs.read_text()
    starts = output.split("job own: submitted")[1:]
    assert len(starts) == 2
    for start in starts:
        job_log = re.split("job own: (?:STOPPED|SUCCEEDED)", start)[0]  # nodes that lose Ray's head write errors later
        assert "Traceback" not in job_log
