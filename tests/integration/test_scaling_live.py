"""1 -> 3 -> 1 rollout workers of a running job by the command line, on real engines: nobody stops for them."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import random_model
from own_runs import ROOT, command, start

DEADLINE_S = 800
NUM_STEPS = 400  # more than it comes to before it is told to stop


def status(run: Path) -> dict[str, Any]:
    path = run / "status.json"
    return json.loads(path.read_text()) if path.exists() else {"step": -1, "fleets": []}


def serving(run: Path) -> int:
    workers = [w for fleet in status(run)["fleets"] if fleet["role"] == "rollout" for w in fleet["workers"]]
    return sum(worker["state"] == "serving" for worker in workers) if len(workers) == requests(run) else -1


def requests(run: Path) -> int:
    return next(fleet["target_size"] for fleet in status(run)["fleets"] if fleet["role"] == "rollout")


def scale(root: Path, number: int) -> None:
    arguments = ["scale", "--run", "own", "--root", str(root), "--rollouts", str(number)]
    done = subprocess.run(
        [sys.executable, "-m", "jobs.deploy", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_workers_join_and_leave_a_running_job(tmp_path: Path) -> None:
    random_model(tmp_path / "policy", "llama", seed=1)
    (tmp_path / "my_feedback.py").write_text(
        "def judge(prompt, response):\n    return 'the first word is fine', response.split()[:1], []\n"
    )
    prompts = [{"prompt": f"Say what is wrong, {i}."} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    run = tmp_path / "runs" / "own"
    log = tmp_path / "log.txt"
    overrides = {
        "feedback.source": "my_feedback:judge", "feedback.engine": "{}", "eval_data": "null", "num_steps": NUM_STEPS,
        "rollout.workers": "{min: 1, max: 3}", "learner.workers": 1, "checkpoint.every": 50,
    }  # fmt: skip
    process = start(command(tmp_path, **overrides), log, PYTHONPATH=str(tmp_path))
    deadline = time.monotonic() + DEADLINE_S

    def until(holds: Callable[[], bool]) -> None:
        while not holds():
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)

    def three_more_steps() -> None:
        step = status(run)["step"]
        until(lambda: status(run)["step"] >= step + 3)

    until(lambda: status(run)["step"] >= 1 and serving(run) == 1)
    scale(tmp_path / "runs", 3)
    until(lambda: requests(run) == 3 and serving(run) == 3)
    three_more_steps()
    scale(tmp_path / "runs", 1)
    until(lambda: requests(run) == 1 and serving(run) == 1)
    three_more_steps()
    process.terminate()
    assert process.wait(timeout=120) == 143, log.read_text()[-4000:]

    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    sizes = [line["rollout/workers"] for line in metrics]
    assert (sizes[0], max(sizes), sizes[-1]) == (1, 3, 1)
    assert all(line["sync/probe_gap"] < 1e-3 and line["gap/logprob_mean"] < 1e-4 for line in metrics)
    assert all(line["dropped/samples"] == 0 and line["rollout/restarts"] == 0 for line in metrics)
