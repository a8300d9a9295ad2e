"""The batch script for Slurm: its components, its words in a shell, and its course with stand-ins for the programs."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from test_manifests import JOBS, load_for_cluster

from jobs import deploy
from t2g.config import PolicyJob, loading
from t2g.deploy import render_slurm
from t2g.errors import UserError
from t2g.runs.control import Status

ROOT = Path(__file__).resolve().parents[2]
TINY = "configs/tiny/policy.yaml"
SHELLCHECK = shutil.which("shellcheck") or shutil.which("shellcheck", path=Path(sys.executable).parent)
# Each records its command line. `srun` listens on the head's port and ends at SIGTERM. `submit` waits for the nodes, as
# the real one does: the script ends each srun after it. It ends after `stop`.
SRUN = """
for word; do [[ $word == --port=* ]] && port=${word#--port=}; done
while [[ -e $FOLDER/slow ]]; do sleep 0.05; done
exec PYTHON -c 'import socket, sys, time
if sys.argv[1:]: server = socket.create_server(("", int(sys.argv[1])))
time.sleep(60)' ${port:+"$port"}
"""
PYTHON = """
case $3 in
  submit) [[ -e $FOLDER/status-later ]] && mv $FOLDER/status-later $FOLDER/runs/tiny-policy/status.json
    until (( $(grep -ao 'ray start --block' $FOLDER/commands | wc -l) >= COMPONENTS )); do sleep 0.05; done
    until [[ -e $FOLDER/stopped || ! -e $FOLDER/waits ]]; do sleep 0.05; done
    [[ -e $FOLDER/stopped ]] && exit 130
    exit 0 ;;
  stop) touch $FOLDER/stopped ;;
esac
"""
PROGRAMS: dict[str, str | None] = {
    "srun": SRUN, "python": PYTHON, "scontrol": "", "ray": "", "hostname": "echo 127.0.1.1 127.0.0.2\n",
}  # fmt: skip


def policy(*overrides: str, file: str = TINY) -> PolicyJob:
    return loading.load(PolicyJob, ROOT / file, overrides, environ={}, cwd=ROOT)


def render(*overrides: str, **options: Any) -> str:
    return render_slurm(policy(*overrides), config_path=TINY, overrides=overrides, **options)


def components(script: str) -> list[dict[str, str]]:
    """Return the options of each component."""
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    options: list[dict[str, str]] = [{}]
    for line in lines:
        if line == "hetjob":
            options.append({})
            continue
        for word in shlex.split(line):
            name, _, value = word.partition("=")
            options[-1][name] = value
    return options


def started(commands: list[list[str]]) -> list[dict[str, str]]:
    """Return the options of each `ray start`, by component."""
    nodes: list[dict[str, str]] = []
    for words in commands:
        if words[0] != "srun":
            continue
        assert "ray start" in words[5]
        pairs = [word.removeprefix("--").partition("=") for word in words if word.startswith("--")]
        nodes.append({name: value for name, _, value in pairs})
    return sorted(nodes, key=lambda node: node["het-group"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], "Job"]]:
    """Start scripts, and end what a failed test leaves of them."""
    jobs: list[Job] = []

    def start_job(script: str) -> Job:
        jobs.append(Job(tmp_path, script))
        return jobs[-1]

    yield start_job
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)


class Job:
    """A batch script that runs with stand-ins, as a job whose ports no other test has."""

    def __init__(self, folder: Path, script: str) -> None:
        self.id = str(os.getpid())
        self.port = 20000 + os.getpid() % 120 * 100
        self._record = folder / "commands"
        self.folder = folder
        for name, body in PROGRAMS.items():
            if body is None:
                continue
            file = folder / "bin" / name
            file.parent.mkdir(exist_ok=True)
            text = body.replace("PYTHON", sys.executable).replace("$FOLDER", str(folder))
            text = text.replace("COMPONENTS", str(len(components(script))))
            # Bash writes what follows a line break separately: without the lock, records of programs that start at the
            # same time would mix.
            words = f"printf '%s\\0' {name} \"$@\" $'\\n' >&9"
            record = f"(flock 9; {words}) 9>> {self._record}\n" if name != "hostname" else ""
            file.write_text(f"#!/bin/bash\n{record}{text}")
            file.chmod(0o755)
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        environ = os.environ | {"PATH": path, "SLURM_JOB_ID": self.id, "OPENAI_API_KEY": "x", "RAY_ADDRESS": "other:1"}
        command = ["bash", "-c", script.replace("127\\.'", "127\\.0\\.1'")]  # the loopback is this network
        self.process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    def commands(self) -> list[list[str]]:
        text = self._record.read_text() if self._record.exists() else ""
        return [line.rstrip("\0").split("\0") for line in text.split("\n\0") if line]

    def wait_for(self, *words: str) -> None:
        """Wait until a command with these words was given."""
        deadline = time.monotonic() + 30
        while not any(set(words) <= set(command) for command in self.commands()):
            assert time.monotonic() < deadline and self.process.poll() is None, self.commands()
            time.sleep(0.02)

    def finish(self) -> int:
        output, _ = self.process.communicate(timeout=30)
        self.output = output
        return self.process.returncode


def test_components_are_the_head_and_the_roles_of_the_config() -> None:
    overrides = ("rollout.workers={min: 1, initial: 2, max: 3}", "learner.workers=2", "learner.memory_gib=3")
    script = render(*overrides, "cluster.object_store_gib=2")
    head, learner, rollout, reward = components(script)
    assert (head["--nodes"], head["--cpus-per-task"], head["--mem"]) == ("1", "4", "16G")
    # Two ranks of half a core and 3 GiB each, 2 GiB of object store, 2 x 2 GiB shared, and 2 GiB and a core for Ray.
    assert (learner["--nodes"], learner["--cpus-per-task"], learner["--mem"]) == ("1", "2", "14G")
    assert rollout["--nodes"] == "3", "of its most workers"
    assert reward["--nodes"] == "1"
    assert not any("--gres" in component for component in (head, learner, rollout, reward))
    assert " --nodes 6 --job policy" in script


def test_gpus_are_asked_for_where_they_are_used_and_time_is_left_for_a_checkpoint() -> None:
    overrides = ("data.path=/mnt/x.json", "learner.workers=16", "learner.step_timeout_s=700")
    overrides += ("cluster.object_store_gib=4",)  # else the shape of the model is looked up on the hub
    config = policy(*overrides, file="configs/slf5k/policy.yaml")
    script = render_slurm(config, config_path="configs/slf5k/policy.yaml", overrides=overrides)
    gpus = [component.get("--gres") for component in components(script)]
    assert gpus == [None, "gpu:8", "gpu:1", "gpu:1"]
    signal_name, _, seconds = components(script)[0]["--signal"].partition("@")
    assert signal_name == "B:USR1" and 700 < int(seconds) < 65536


def test_options_of_sbatch_are_for_all_components_or_one() -> None:
    sbatch = ["head:--partition=cpu", "--partition=gpu", "--time=24:00:00"]
    options = components(render(sbatch=sbatch))
    assert [component["--partition"] for component in options] == ["cpu", "gpu", "gpu", "gpu"]
    assert {component["--time"] for component in options} == {"24:00:00"}
    assert "--sbatch=head:--partition=cpu" in render(sbatch=sbatch).splitlines()[1]


@pytest.mark.parametrize("option", ["time=1", "--a\nrm -rf /", "critic:--time=1", "-t 1", "--a\u202e"])
def test_what_is_no_option_of_sbatch_is_refused(option: str) -> None:
    with pytest.raises(UserError, match=r"--sbatch: got .* needs an option of sbatch"):
        render(sbatch=[option])


def test_a_script_passes_bash_and_shellcheck_for_every_job(tmp_path: Path) -> None:
    for job_kind, (name, overrides, groups) in JOBS.items():
        file = f"configs/{name}"
        config = load_for_cluster(job_kind, file, overrides)
        script = render_slurm(config, config_path=file, job_kind=job_kind, overrides=[*overrides, "run.name=it's"])
        assert len(components(script)) == 1 + len(groups)
        (tmp_path / f"{job_kind}.sh").write_text(script)
    files = sorted(tmp_path.iterdir())
    for file in files:
        subprocess.run(["bash", "-n", file], check=True, timeout=30)
    if SHELLCHECK is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([SHELLCHECK, *files], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_the_script_starts_ray_by_role_and_submits_the_run(start: Callable[[str], Job]) -> None:
    values = ("run.name=own.1", "model.policy=/a b/$HOME", "learner.labels={pool: big}", "rollout.gpus=2")
    job = start(render(*values))
    assert job.finish() == 0, job.output
    commands = job.commands()
    head, learner, rollout, reward = started(commands)
    port = job.port
    assert (head["port"], head["dashboard-port"], head["node-ip-address"]) == (str(port), str(port + 1), "127.0.0.2")
    assert (head["num-cpus"], head["het-group"], "head" in head) == ("0", "0", True)
    assert [node["labels"] for node in (learner, rollout, reward)] == [
        "rl/role=learner,pool=big", "rl/role=rollout", "rl/role=reward",
    ]  # fmt: skip
    assert [node["het-group"] for node in (learner, rollout, reward)] == ["1", "2", "3"]
    assert (rollout["num-gpus"], learner["num-gpus"]) == ("2", "0")
    all_ports: list[str] = []
    for node in (head, learner, rollout, reward):
        all_ports += [value for name, value in node.items() if name.endswith("-port") or name == "port"]
    assert len(set(all_ports)) == len(all_ports) == 3 + 4 * 4
    for node in (learner, rollout, reward):
        assert node["address"] == f"127.0.0.2:{port}"
        assert int(node["cpus-per-task"]) == int(node["num-cpus"]) + 1
    url = f"http://127.0.0.1:{port + 1}"
    submit = ["-m", "jobs.deploy", "submit", "--address", url, "--nodes", "4", "--job", "policy", "--config", TINY]
    assert [words for words in commands if words[0] == "python"] == [["python", *submit, *values]]
    assert not any(words[0] == "scontrol" for words in commands)


@pytest.mark.parametrize(("sent", "again"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_stops_the_run_and_the_end_of_the_time_queues_it_again(
    tmp_path: Path, start: Callable[[str], Job], sent: signal.Signals, again: bool
) -> None:
    (tmp_path / "waits").touch()
    job = start(render())
    job.wait_for("submit")
    job.process.send_signal(sent)
    assert job.finish() == 130, job.output
    (stop,) = [words for words in job.commands() if "stop" in words]
    assert stop[-2:] == ["--run", "tiny-policy"]
    requeued = [words for words in job.commands() if words[0] == "scontrol"]
    assert requeued == ([["scontrol", "requeue", job.id]] if again else [])


@pytest.mark.parametrize(
    ("first_step", "last_step", "again"), [(None, 0, False), (None, 2, True), (2, 2, False), (2, 3, True)]
)
def test_a_run_is_queued_again_only_if_it_has_made_a_step(
    tmp_path: Path, start: Callable[[str], Job], first_step: int | None, last_step: int, again: bool
) -> None:
    """Otherwise --time is too short for a start and a step, and the job would be queued for ever."""
    script = render(f"run.root={tmp_path / 'runs'}")
    folder = tmp_path / "runs" / "tiny-policy"
    folder.mkdir(parents=True)

    def make_status(step: int) -> str:
        status = Status(step=step, num_steps=9, samples=5, updated=datetime.now(UTC))
        return status.model_dump_json(indent=1)

    if first_step is not None:
        (folder / "status.json").write_text(make_status(first_step))
    (tmp_path / "status-later").write_text(make_status(last_step))
    (tmp_path / "waits").touch()
    job = start(script)
    job.wait_for("submit")
    job.process.send_signal(signal.SIGUSR1)
    assert job.finish() == (130 if again else 3), job.output
    assert ("--time needs more than its start and a step take" in job.output) != again
    assert any(words[0] == "scontrol" for words in job.commands()) == again


def test_a_time_limit_that_is_too_short_does_not_queue_the_job_for_ever(
    tmp_path: Path, start: Callable[[str], Job]
) -> None:
    """Slurm sends the signal at once: here before Ray has started."""
    (tmp_path / "slow").touch()
    job = start(render())
    job.wait_for("srun")
    job.process.send_signal(signal.SIGUSR1)
    (tmp_path / "slow").unlink()
    assert job.finish() == 3, job.output
    assert "signal USR1 before the run was submitted; --time needs" in job.output
    assert not any(words[0] in ("python", "scontrol") for words in job.commands())


@pytest.mark.parametrize(
    ("program", "body", "sentence"),
    [
        ("hostname", "echo 127.0.1.1", "no IPv4 address besides the loopback"),
        ("ray", None, "has no ray: run make setup"),
    ],
)
def test_what_a_node_lacks_is_a_sentence(
    program: str, body: str | None, sentence: str, start: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROGRAMS, program, body)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    job = start(render())
    assert job.finish() in (1, 3)
    assert sentence in job.output
    assert job.commands() == []


def test_a_key_that_the_driver_needs_is_missed_at_once(start: Callable[[str], Job]) -> None:
    llm = "feedback={source: llm, llm: {url: 'https://h/v1', model: m, key_env: TEAM_KEY}}"
    job = start(render(llm))
    assert job.finish() == 1
    assert re.search("TEAM_KEY: is not set: export it before sbatch", job.output)
    assert job.commands() == []


def test_a_line_break_of_a_value_stays_in_the_comment_and_in_its_word(
    tmp_path: Path, start: Callable[[str], Job]
) -> None:
    value = "data.path=/x\ntouch broken"
    script = render_slurm(policy(), config_path=TINY, overrides=[value])
    job = start(script)
    assert job.finish() == 0, job.output
    assert not (tmp_path / "broken").exists()
    (submit,) = [words for words in job.commands() if "submit" in words]
    assert submit[-1] == value


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run.root=here"], "run.root: got 'here', but a Ray job needs an absolute path"),
        (["run.root=/r", "--image", "a/b"], "a Slurm job runs in the environment of its folder"),
        (["run.root=/r", "cluster.gpu_sharing=split"], "roles have their own nodes; set it to none"),
    ],
)
def test_what_cannot_run_in_a_slurm_job_is_a_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    sizes = ["rollout.gpus=0.6", "learner.gpus=0.4", "rollout.workers=1", "learner.workers=1"]
    assert deploy.main(["render", "--target", "slurm", "--config", TINY, *sizes, *words]) == 2
    assert sentence in capsys.readouterr().err
