"""The whole product, small, as a Ray job: world, base policy, annotation, reward model, PPO, table and report."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DEADLINE_S = 900
SMALL = (
    "world.num_train=160",
    "world.num_heldout=8",
    "policy_sft.num_epochs=1",
    "policy_sft.batch_size=32",
    "annotate=64",
    "reward_sft.num_epochs=2",
    "reward_sft.batch_size=32",
    "rollout.prompts_per_step=4",
    "reward_engine.max_critique_chars=40",
    "reward_engine.max_spans=2",
    "reward_engine.max_new_tokens=96",
    "eval.num_prompts=8",
    "num_steps=2",
    "arms=[span]",
)


def environment(home: Path) -> dict[str, str]:
    """A home of its own: `ray start` would else use, or leave behind, a token under the user's."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return inherited | {"HOME": str(home), "RAY_AUTH_MODE": "disabled", "PATH": f"{BIN}:{os.environ['PATH']}"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[str]:
    """Address of a head node of its own, for jobs; the node ends with the test."""
    port, dashboard_port = free_port(), free_port()
    head = subprocess.Popen(
        [BIN / "ray", "start", "--head", "--block", f"--port={port}", f"--dashboard-port={dashboard_port}",
         "--num-cpus=2", "--object-store-memory=200000000", "--disable-usage-stats"],
        env=environment(tmp_path), stdout=(tmp_path / "head.txt").open("wb"), stderr=subprocess.STDOUT, cwd=tmp_path,
    )  # fmt: skip
    address = f"http://127.0.0.1:{dashboard_port}"
    deadline = time.monotonic() + 120
    while subprocess.run(
        [BIN / "ray", "job", "list", "--address", address], env=environment(tmp_path), capture_output=True, check=False
    ).returncode:
        assert head.poll() is None and time.monotonic() < deadline, (tmp_path / "head.txt").read_text()
        time.sleep(0.5)
    yield address
    started = psutil.Process(head.pid).children(recursive=True)
    for process in [head, *started]:  # a head node that is asked takes half a minute
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    head.wait(timeout=60)


def submit(dashboard: str, home: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "ray", "job", "submit", "--address", dashboard, "--working-dir", ".", "--",
         "python", "-m", "jobs.demo", "--config", "configs/tiny/demo.yaml", *overrides],
        cwd=ROOT, env=environment(home), capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip


def test_the_demo_runs_as_a_ray_job(dashboard: str, tmp_path: Path) -> None:
    refused = submit(dashboard, tmp_path, *SMALL)
    assert refused.returncode != 0 and "run.root" in refused.stdout + refused.stderr  # relative: it would vanish

    done = submit(dashboard, tmp_path, f"run.root={tmp_path / 'runs'}", *SMALL)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    demo = tmp_path / "runs" / "demo"
    summary = json.loads((demo / "summary.json").read_text())
    assert set(summary["arms"]) == {"span"} and summary["samples"] == 2 * 4 * 2
    assert summary["policy"] == summary["arms"]["span"]
    assert 0.4 < summary["references"]["fact_f1"] < 0.75
    reward = summary["reward_model"]
    assert {"good_f1", "poor_f1", "parse_rate", "located_rate"} <= set(reward) and reward["num_records"] > 0
    assert summary["versions"]["ray"] and summary["timing"]["reward_s"] > 0
    records = [json.loads(line) for line in (demo / "annotated" / "train.jsonl").read_text().splitlines()]
    assert records and all(record["source"] == "program" for record in records)
    metrics = [json.loads(line) for line in (demo / "arms" / "span" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [0, 1, 2]
    assert all(m["feedback/source/reward_model"] == 1.0 and m["sync/probe_gap"] < 1e-3 for m in metrics[1:])
    assert "<span" in (demo / "report.html").read_text()
    assert "fact F1" in done.stdout

    again = submit(dashboard, tmp_path, f"run.root={tmp_path / 'runs'}", *SMALL)  # nothing is left to do
    assert again.returncode == 0 and "fact F1" in again.stdout
