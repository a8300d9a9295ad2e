"""jobs.deploy against a cluster of one node that wants a token.

Quicker tests have the parts: tests/actors/cluster/test_job_server.py submits, follows and stops on a fake server,
tests/actors/cluster/test_telemetry.py the metrics, tests/deploy/test_doctor.py the findings; test_demo_job.py runs a
job on a cluster that wants a token.
"""

import json
import re
import secrets
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from heads import START_S, Head, until
from models import random_model

from actors.cluster.telemetry import COUNTERS, GAUGES

ROOT = Path(__file__).parents[2]
RUN_S = 240  # of a run's engines and ranks
STUB = """
import signal, sys, time
from pathlib import Path

import ray
from ray.util.placement_group import placement_group

from actors.cluster.telemetry import COUNTERS, GAUGES, RayMetrics

ray.init(log_to_driver=False)
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
placement_group([{"CPU": 1}], bundle_label_selector=[{"rl/role": "rollout"}], name="rollout")
sink = RayMetrics("own")
print("working", flush=True)
step = 0
while not told:
    step += 1
    sink.log(step, dict.fromkeys([*GAUGES, *COUNTERS], 0.5))
    time.sleep(0.2)
time.sleep(5)  # longer than Ray waits for a stopped job by default
Path(__file__).with_name("left").touch()
print("left a checkpoint", flush=True)
"""
FUNCTION = "def judge(prompt, response):\n    return 'the first letter is fine', [(response[:1], 1)], []\n"
# What a run without a reward model and without held-out prompts must show on the metrics port.
SHOWN = {
    "ray_t2g_step", "ray_t2g_samples", "ray_t2g_reward_token_mean", "ray_t2g_kl_nats", "ray_t2g_entropy_nats",
    "ray_t2g_staleness_mean_updates", "ray_t2g_staleness_max_updates", "ray_t2g_learner_idle_share",
    "ray_t2g_rollout_idle_share", "ray_t2g_rollout_workers", "ray_t2g_buffered_samples",
    "ray_t2g_feedback_failed_share", "ray_t2g_step_seconds", "ray_t2g_sync_seconds", "ray_t2g_sync_bytes",
    "ray_t2g_tokens_per_second",
}  # fmt: skip


def scraped(head: Head) -> dict[str, float]:
    """Values of our metrics on Ray's metrics port by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{head.metrics_port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    matches = (re.match(r"(ray_t2g_\w+)\{.*\brun=\"own\".*\} (\S+)", line) for line in lines)
    return {match[1]: float(match[2]) for match in matches if match}


def strangers(head: Head) -> Iterator[dict[str, str]]:
    """Who has no token, and who has another."""
    bare = {name: value for name, value in head.environ.items() if not name.startswith("RAY_AUTH")}
    yield bare | {"RAY_AUTH_MODE": "disabled"}
    yield bare | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A working directory of its own with our code and a feedback function."""
    for package in ("t2g", "actors", "jobs", "configs"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "my_feedback.py").write_text(FUNCTION)
    return tmp_path


def submission(root: Path, **values: object) -> list[str]:
    """Words of a submit of the run `own`, without --address."""
    values = {
        "run.root": root, "run.name": "own", "data.path": root / "prompts.jsonl",
        "feedback.source": "my_feedback:judge",
        "model.policy": root / "policy", "eval_data": "null", "rollout.prompts_per_step": 4,
        "rollout.samples_per_prompt": 2, "rollout.max_model_len": 128, "rollout.max_new_tokens": 16,
        "rollout.workers": "{min: 1, max: 2}", "checkpoint.every": 1000, **values,
    }  # fmt: skip
    return ["submit", "--config", "configs/own/policy.yaml", *(f"{key}={value}" for key, value in values.items())]


@pytest.mark.slow  # a cluster, and six commands on it
def test_a_job_is_submitted_followed_stopped_and_refused_without_the_token(
    head: Head, project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("runs")
    log = head.folder / "stub.txt"
    program = project / "jobs" / "train_policy" / "__main__.py"
    program.write_text(STUB.replace("__file__", repr(str(root / "x"))))
    submit = [*submission(root), "--address", head.address]
    refused = partial(head.run, project, "jobs.deploy", *submit, code=2)
    with ThreadPoolExecutor() as pool:
        for output in pool.map(lambda stranger: refused(environ=stranger), strangers(head)):
            assert "the cluster refuses: Authentication" in output
    with head.started(project, "jobs.deploy", *submit, log=log) as process:
        until(lambda: {*SHOWN} <= scraped(head).keys(), "the metrics", timeout_s=START_S, log=log)
        gauges = scraped(head)
        assert gauges.keys() == {f"ray_{n}" for n in GAUGES.values()} | {f"ray_{n}_total" for n in COUNTERS.values()}
        assert gauges["ray_t2g_kl_nats"] == 0.5 and gauges["ray_t2g_dropped_samples_total"] >= 0.5
        again = head.run(project, "jobs.deploy", *submit, code=2)
        assert "run own goes on as job own: stop it first" in again
        until(lambda: "working" in log.read_text(), "the job's output", timeout_s=START_S, log=log)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=START_S) == 130, log.read_text()
    output = log.read_text()
    assert (root / "left").exists(), output  # no SIGKILL came before
    assert output.index("working") < output.index("stopping job own") < output.index("left a checkpoint")
    assert output.rstrip().endswith("job own: STOPPED")
    assert head.token not in output

    assert "job own-2: submitted" in head.run(project, "jobs.deploy", *submit, "--no-wait")
    doctor_output = head.run(
        ROOT, "jobs.deploy", "doctor", "--address", head.address, *submission(root)[1:],
        "learner.labels={rl/role: learner}", code=2,
    )  # fmt: skip
    assert "placement group rollout is pending: no node has the labels {'rl/role': 'rollout'}" in doctor_output
    assert "no node has the labels {'rl/role': 'learner'} of learner.labels" in doctor_output
    assert "1 nodes, 2 findings" in doctor_output
    assert [*root.glob(".doctor-*")] == []
    assert "job own-2: STOPPED" in head.run(project, "jobs.deploy", "stop", "--run", "own", "--address", head.address)
    assert "no job of run own is alive" in head.run(
        project, "jobs.deploy", "stop", "--run", "own", "--address", head.address, code=2
    )


@pytest.mark.slow
def test_a_run_is_submitted_scaled_stopped_and_submitted_again(
    head: Head, project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("runs")
    log = head.folder / "run.txt"
    random_model(root / "policy", "llama", seed=1)
    prompts = [{"prompt": f"Say what is wrong, {i}."} for i in range(12)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))

    def status() -> dict[str, Any]:
        """Read here: a process each time would take a core from the run."""
        path = root / "own" / "status.json"
        return json.loads(path.read_text()) if path.exists() else {"step": -1, "fleets": []}

    def serving() -> int:
        return sum(worker["state"] == "serving" for fleet in status()["fleets"] for worker in fleet["workers"])

    where = ("--address", head.address)
    with head.started(project, "jobs.deploy", *submission(root, num_steps=10_000), *where, log=log) as process:
        until(lambda: status()["step"] >= 1, "the first step", timeout_s=RUN_S, log=log)
        until(lambda: {*SHOWN} <= scraped(head).keys(), "the metrics", timeout_s=START_S, log=log)
        assert scraped(head)["ray_t2g_rollout_workers"] == 1
        head.run(project, "jobs.deploy", "scale", "--run", "own", "--root", root, "--rollouts", 2)
        until(lambda: serving() == 2, f"the second rollout worker {status()}", timeout_s=RUN_S, log=log)
        words = head.run(project, "jobs.deploy", "status", "--run", "own", "--root", root)
        assert "rollout: target size 2" in words and words.count("serving") == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=RUN_S) == 130, log.read_text()[-4000:]
    assert "stopped by SIGTERM: the same command goes on from here" in log.read_text()
    step = status()["step"]
    assert (root / "own" / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()

    fewer = {"num_steps": step + 2, "learner.schedule_steps": 10_000}
    with head.started(project, "jobs.deploy", *submission(root, **fewer), *where, log=log) as process:
        assert process.wait(timeout=RUN_S) == 0, log.read_text()[-4000:]
    log_text = log.read_text()
    assert f"going on after {step} of" in log_text and re.search(r"job own-\d+: SUCCEEDED", log_text)
    assert head.token not in log_text
    lines = [json.loads(line) for line in (root / "own" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, step + 3))
    assert json.loads((root / "own" / "summary.json").read_text())["steps"] == step + 2
