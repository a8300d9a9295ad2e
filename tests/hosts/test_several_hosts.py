"""Runs on several hosts, which are namespaces of this machine: hosts that are lost, come back, or are cut off.

The ranks are real ZeRO-3, which speak gloo between hosts. The engines are stubs, whose samples follow from the seed,
but for one test with vLLM.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from heads import until
from models import random_model
from network_hosts import Host, HostError, Network, find_left, find_obstacle, list_namespaces, make_network
from stub_engines import PHASE, SAMPLED_ON, SLOW, SLOW_SYNC, Phase, describe_phase

OBSTACLE = find_obstacle()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(OBSTACLE), reason=f"no hosts of their own here: {OBSTACLE}")]

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).parent / "ray")
HEAD_PORT = 6379
START_TRIES = 4
JOIN_S = 120  # `ray start` on a busy machine
RUN_S = 600
RETURN_S = 20.0  # until a lost host is started again
RECOVERY_S = 120.0  # from its return to the next step
CUT_S = 15.0
NUM_STEPS = 6
NUM_PROMPTS = 8
# One sentence each. Ray names a host by its address.
DOCTOR_FACTS = (
    ("transformers differs", "0.1 on 10.77.0.3"),
    ("clock of node 10.77.0.3", "s ahead of"),
    ("node 10.77.0.3: /dev/shm has 0.03 GiB", "0.09 GiB"),
    ("is not shared", "not visible on 10.77.0.3;"),
    ("node 10.77.0.3 does not reach node 10.77.0.2", "open the ports"),
)
COMPARED_METRICS = ("policy/loss", "policy/grad_norm", "policy/kl", "reward/token_mean")
CONFIG = ROOT / "configs" / "own" / "policy.yaml"
STUB_RUN = (ROOT / "tests" / "stub_run.py",)
BY_ROLE = {
    "rollout.workers": "{min: 1, initial: 1, max: 1}",
    "learner.labels": "{rl/role: learner}",
    "rollout.labels": "{rl/role: rollout}",
}
# With one epoch an update is over before it is cut. An engine is given up later than TCP takes to send again what a cut
# has lost.
CUT_VALUES = BY_ROLE | {
    "learner.num_epochs": 20,
    "rollout.health": "{check_interval_s: 1, check_timeout_s: 10, max_failures: 6}",
}
MAX_GAP = 1e-3  # nats
SETTINGS = """
run.seed=3
eval_data=null
feedback.source=stub_run:judge
checkpoint.every=1
rollout.workers={min: 1, initial: 2, max: 2}
rollout.cpus=1
rollout.memory_gib=0.2
rollout.prompts_per_step=4
rollout.samples_per_prompt=2
rollout.max_model_len=128
rollout.max_new_tokens=16
rollout.health={check_interval_s: 1, check_timeout_s: 10, max_failures: 3}
learner.workers=2
learner.cpus=2
learner.memory_gib=0.5
learner.threads=1
learner.num_epochs=1
learner.sync_bucket_mib=0.05
learner.policy.lr=1.0e-3
learner.policy.schedule=constant
learner.probe_tolerance=1.0e+9
log.trackers=[]
"""


@pytest.fixture
def network(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Network]:
    """A head without processes of a run; the folder is shared by all hosts. The parameter: has it a dashboard."""
    dashboard = str(getattr(request, "param", False)).lower()
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ = plain | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}",
    }
    with make_network(tmp_path, environ) as network:
        head = network.add("head", 1)
        options = ("--head", f"--port={HEAD_PORT}", f"--node-ip-address={head.address}")
        start_ray(head, *options, f"--include-dashboard={dashboard}", "--num-cpus=0")
        yield network
        namespaces = network.list_namespaces()
    assert find_left(namespaces) == []


def start_ray(host: Host, *options: str) -> None:
    """Run `ray start`, again where Ray's own limit of 30 s was exceeded, as on a busy machine."""
    command = (RAY, "start", *options, "--object-store-memory=100000000", "--disable-usage-stats")
    for _ in range(START_TRIES - 1):
        with suppress(HostError):
            host.run(*command, timeout_s=JOIN_S)
            return
    host.run(*command, timeout_s=JOIN_S)


def add_worker(network: Network, name: str, number: int, cpus: int, role: str) -> None:
    """Start a host and its Ray."""
    join_ray(network, network.add(name, number), cpus, role)


def join_ray(network: Network, host: Host, cpus: int, role: str) -> None:
    join = f"--address={network.hosts['head'].address}:{HEAD_PORT}"
    memory = f"--memory={2**32}"
    start_ray(
        host, join, f"--node-ip-address={host.address}", f"--num-cpus={cpus}", memory, "--labels", f"rl/role={role}"
    )


def write_inputs(folder: Path) -> None:
    """Write a policy, with which sampling and a sync take three seconds each, and prompts."""
    random_model(folder / "policy", "llama", seed=1)
    (folder / "policy" / SLOW).touch()
    (folder / "policy" / SLOW_SYNC).touch()
    records = [{"prompt": f"Say what is wrong, {index}."} for index in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, records)))


class Run:
    """A run whose driver is on the head."""

    def __init__(self, network: Network, name: str, *, program: Sequence[object] = STUB_RUN, **values: object) -> None:
        shared = network.folder
        self.folder = shared / "runs" / name
        self.policy_folder = shared / "policy"
        if not self.policy_folder.exists():
            write_inputs(shared)
        self._head = network.hosts["head"]
        python_path = network.environ["PYTHONPATH"]
        settings: dict[str, object] = {
            "run.root": shared / "runs",
            "run.name": name,
            "num_steps": NUM_STEPS,
            "cluster.address": f"{self._head.address}:{HEAD_PORT}",
            "cluster.env": f"{{PYTHONPATH: '{python_path}'}}",
            "model.policy": self.policy_folder,
            "data.path": shared / "prompts.jsonl",
        }
        settings |= values
        self._num_steps = settings["num_steps"]
        words = [f"{key}={value}" for key, value in settings.items()]
        self._log = self._head.logs
        self.driver = self._head.python(*program, "--config", CONFIG, *SETTINGS.strip().splitlines(), *words)

    def metrics(self) -> list[dict[str, Any]]:
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_until(self, condition: Callable[[], bool], description: str) -> None:
        """Wait until a condition holds; fail if the run ends before."""

        def is_reached() -> bool:
            if condition():
                return True
            assert self.driver.poll() is None, self.read_log()[-6000:]
            return False

        until(is_reached, description, timeout_s=RUN_S, log=self._log)

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is logged."""
        self.wait_until(lambda: any(line["step"] >= step for line in self.metrics()), f"step {step}")

    def wait_for_phase(self, phase: Phase, version: int) -> None:
        """Wait until the engine, with this version of the policy, is in a phase."""
        expected = describe_phase(phase, version)
        self.wait_until(lambda: self.read_phase() == expected, expected)

    def read_phase(self) -> str:
        file = self.policy_folder / PHASE
        return file.read_text() if file.exists() else ""

    def read_log(self) -> str:
        return self._log.read_text()

    def kill_driver(self) -> None:
        """End the driver as the kernel does where memory is short."""
        self._head.run("pkill", "-KILL", "-f", f"run.name={self.folder.name}", timeout_s=JOIN_S)
        self.driver.wait(timeout=JOIN_S)

    def finish(self) -> list[dict[str, Any]]:
        """Wait for the end of the run; return its metrics, one line a step."""
        code = self.driver.wait(timeout=RUN_S)
        assert code == 0, self.read_log()[-6000:]
        metrics = self.metrics()
        assert [line["step"] for line in metrics if line["step"] > 0] == list(range(1, self._num_steps + 1))
        return metrics


def add_hosts_by_role(network: Network) -> None:
    """Start two hosts with room for a rank each, and one with room for an engine."""
    for number, name in enumerate(("a", "b"), start=2):
        add_worker(network, name, number, cpus=2, role="learner")
    add_worker(network, "c", 4, cpus=1, role="rollout")


@contextmanager
def cut_off(network: Network, name: str) -> Iterator[None]:
    network.cut(name)
    try:
        yield
    finally:
        network.connect(name)


def cut_for(network: Network, name: str, seconds: float) -> None:
    with cut_off(network, name):
        time.sleep(seconds)


def check_equal(metrics: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Check that two runs have the same numbers, which differ from step to step."""
    for line, expected_line in zip(metrics, expected, strict=True):
        for key in COMPARED_METRICS:
            assert line[key] == pytest.approx(expected_line[key], abs=1e-6), (line["step"], key)
    losses = {line["policy/loss"] for line in expected}
    assert len(losses) == len(expected)
    assert expected[-1]["policy/kl"] > 0


def check_nothing_lost(metrics: list[dict[str, Any]]) -> None:
    """Check that neither a rank nor an engine was replaced."""
    assert not any("recovery/learner_s" in line for line in metrics)
    assert not any(line.get("rollout/restarts", 0) for line in metrics)


def test_a_host_is_lost_with_a_rank_and_an_engine_and_the_run_goes_on_when_it_is_back(network: Network) -> None:
    """Two hosts have room for one rank and one engine each, and for nothing else."""
    for number, name in enumerate(("a", "b"), start=2):
        add_worker(network, name, number, cpus=3, role="both")
    run = Run(network, "lost")
    run.wait_for_step(2)
    network.kill("b")
    time.sleep(RETURN_S)
    add_worker(network, "b", 3, cpus=3, role="both")
    returned = time.monotonic()
    done = run.metrics()[-1]["step"]
    run.wait_for_step(done + 1)
    recovery_s = time.monotonic() - returned
    metrics = run.finish()
    print(f"{recovery_s:.0f} s from the host's return to the next step")
    assert recovery_s < RECOVERY_S
    assert sum("recovery/learner_s" in line for line in metrics) == 1
    assert sum(line.get("rollout/restarts", 0) for line in metrics) >= 1


def test_a_host_that_is_cut_off_changes_no_number(network: Network) -> None:
    """Ranks on two hosts, the engine on a third. Cut: in generation, before a sync, within one, in an update."""
    add_hosts_by_role(network)
    undisturbed = Run(network, "undisturbed", **CUT_VALUES).finish()
    run = Run(network, "cut", **CUT_VALUES)

    run.wait_for_phase("generating", 1)
    cut_for(network, "c", CUT_S)

    run.wait_for_phase("generated", 2)
    with cut_off(network, "c"):
        assert run.read_phase() == describe_phase("generated", 2), "the sync has begun"
        time.sleep(CUT_S)

    run.wait_for_phase("loading", 3)
    cut_for(network, "c", CUT_S)

    run.wait_for_phase("generated", 4)
    cut_for(network, "b", CUT_S)

    metrics = run.finish()
    by_step = {line["step"]: line for line in metrics}
    assert by_step[2]["time/generate_s"] > CUT_S
    assert by_step[3]["time/generate_s"] < CUT_S
    assert by_step[3]["time/learn_s"] < CUT_S
    assert by_step[3]["time/learn_s"] + by_step[3]["time/sync_s"] > CUT_S
    assert by_step[4]["time/sync_s"] > CUT_S
    assert by_step[5]["time/learn_s"] > CUT_S
    longest_s = max(line["time/step_s"] for line in metrics)
    print(f"a cut of {CUT_S:.0f} s costs up to {longest_s - by_step[1]['time/step_s']:.0f} s")
    check_nothing_lost(metrics)
    check_equal(metrics, undisturbed)


def test_a_run_whose_driver_was_killed_goes_on_with_the_same_numbers(network: Network) -> None:
    add_hosts_by_role(network)
    undisturbed = Run(network, "undisturbed", **CUT_VALUES).finish()
    run = Run(network, "killed", **CUT_VALUES)
    run.wait_for_step(3)
    run.kill_driver()
    log_length = len(run.read_log())
    metrics = Run(network, "killed", **CUT_VALUES).finish()
    assert re.search(rf"going on after [3-5] of {NUM_STEPS}", run.read_log()[log_length:])
    check_equal(metrics, undisturbed)


def test_a_host_that_joins_gets_an_engine_while_the_run_goes_on(network: Network) -> None:
    """Until it joins, the second engine has no place."""
    add_hosts_by_role(network)
    run = Run(network, "grown", num_steps=24, **BY_ROLE | {"rollout.workers": "{min: 1, initial: 1, max: 2}"})
    run.wait_for_step(1)
    command = (sys.executable, "-m", "jobs.deploy", "scale", "--run", "grown", "--root", run.folder.parent)
    network.hosts["head"].run(*command, "--rollouts", "2", timeout_s=JOIN_S)
    run.wait_for_step(3)
    assert run.metrics()[-1]["rollout/workers"] == 1
    add_worker(network, "d", 5, cpus=1, role="rollout")
    join_time = time.monotonic()
    run.wait_until((run.policy_folder / f"{SAMPLED_ON}d").exists, "responses of the second engine")
    print(f"{time.monotonic() - join_time:.0f} s from the host's join to a response of its engine")
    run.wait_until(lambda: run.metrics()[-1]["rollout/workers"] == 2, "a step of two engines")
    check_nothing_lost(run.finish())


def test_a_real_engine_on_a_host_of_its_own_trains_on_through_a_cut(network: Network) -> None:
    """vLLM on one host, ZeRO-3 on two; after each sync the probe compares their log-probabilities."""
    add_hosts_by_role(network)
    values = CUT_VALUES | {"rollout.memory_gib": 1, "rollout.kv_cache_gib": 0.1, "learner.probe_tolerance": MAX_GAP}
    run = Run(network, "real", program=("-m", "jobs.train_policy"), num_steps=4, **values)
    run.wait_for_step(1)
    cut_for(network, "c", CUT_S)
    metrics = run.finish()
    check_nothing_lost(metrics)
    trained = [line for line in metrics if line["step"] > 0]
    assert max(line["time/step_s"] for line in trained[1:]) > CUT_S, "the run was over before the cut"
    assert max(line["sync/probe_gap"] for line in trained) < MAX_GAP
    assert max(line["policy/kl"] for line in trained) > MAX_GAP, "the weights have not moved"


@pytest.mark.parametrize("network", [True], indirect=True)
def test_doctor_names_what_is_wrong_with_one_of_the_hosts(network: Network, tmp_path: Path) -> None:
    """Host b has another package, a fast clock, a small /dev/shm, no shared folder, and no way to host a."""
    runs = tmp_path / "runs"
    runs.mkdir()
    add_worker(network, "a", 2, cpus=2, role="learner")
    broken = network.add("b", 3, shm_mib=32)
    extra = tmp_path / "extra"
    package = extra / "transformers-0.1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 0.1\n")
    ahead = "import time\n_time = time.time\ntime.time = lambda: _time() + 5\n"
    (extra / "sitecustomize.py").write_text(ahead)
    broken.environ = network.environ | {"PYTHONPATH": f"{extra}:{network.environ['PYTHONPATH']}"}
    broken.run("mount", "-t", "tmpfs", "tmpfs", runs, timeout_s=JOIN_S)
    join_ray(network, broken, cpus=2, role="rollout")
    broken.run("ip", "route", "add", "prohibit", network.hosts["a"].address, timeout_s=JOIN_S)

    head = network.hosts["head"]
    options = ("--address", f"{head.address}:{HEAD_PORT}", "--config", CONFIG)
    labels = ("learner.labels={rl/role: learner}", "rollout.labels={rl/role: rollout}")
    command = (sys.executable, "-m", "jobs.deploy", "doctor", *options, f"run.root={runs}", *labels)
    with pytest.raises(HostError) as error:
        head.run(*command, timeout_s=RUN_S)
    sentences = [line for line in str(error.value).splitlines() if line.startswith("- ")]
    assert len(sentences) == 5, str(error.value)
    for sentence, facts in zip(sentences, DOCTOR_FACTS, strict=True):
        assert all(fact in sentence for fact in facts), sentence


def test_hosts_end_with_the_process_that_made_them(tmp_path: Path) -> None:
    """Also by Ctrl-C in a test, and by a signal that no program sees."""
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from network_hosts import make_network\n"
        "with make_network(Path(sys.argv[1]), dict(os.environ)) as network:\n"
        "    for number, name in enumerate(('a', 'b'), start=1):\n"
        "        network.add(name, number).start('sleep', 600)\n"
        "    print('made', flush=True)\n"
        "    time.sleep(600)\n"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        command = [sys.executable, "-c", program, str(tmp_path)]
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"made\n"
            children = psutil.Process(process.pid).children(recursive=True)
            namespaces = list_namespaces(child.pid for child in children)
            assert len(namespaces) == 3, "two hosts and a bridge"
            process.send_signal(sent)
            process.wait(timeout=30)
        _, left = psutil.wait_procs(children, timeout=30)
        assert left == []
        assert find_left(namespaces) == []
