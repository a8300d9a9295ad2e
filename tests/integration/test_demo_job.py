"""The whole product, small, as a Ray job: world, base policy, annotation, reward model, PPO, table and report.

It loses its engine in PPO, and is started once more when nothing is left to do.
"""

import json
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
from heads import Head
from processes import title

from t2g.config import loading

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DEADLINE_S = 900
NUM_STEPS = 3
SMALL = (
    "world.num_train=160",
    "world.num_heldout=8",
    "policy_sft.num_epochs=1",
    "policy_sft.batch_size=32",
    "annotate=42",
    "reward_sft.num_epochs=2",
    "reward_sft.batch_size=32",
    "rollout.prompts_per_step=2",
    "reward_engine.max_critique_chars=19",  # below half a block of the grammar: no answer can reach the token limit
    "reward_engine.max_spans=0",  # a model of few steps quotes what no response holds, and such answers are dropped
    "eval.num_prompts=8",
    f"num_steps={NUM_STEPS}",
    "policy_sft.workers=1",
    "reward_sft.workers=1",
    "methods=[span]",
)


def demo(*overrides: str) -> str:
    return shlex.join(["python", "-m", "jobs.demo", "--config", "configs/tiny/demo.yaml", *overrides])


def kill_the_engine(head: Head, metrics: Path, done: threading.Event, died: list[psutil.Process]) -> None:
    """By SIGKILL, once the first step is logged."""
    while not (metrics.exists() and '"step": 1' in metrics.read_text()):
        if done.wait(0.05):
            return
    (engine,) = [p for p in psutil.Process(head.pid).children(recursive=True) if title(p).startswith("ray::RolloutW")]
    cores = [p for p in engine.children(recursive=True) if "EngineCore" in title(p)]
    engine.kill()
    died.extend([engine, *cores])


def test_the_demo_runs_as_a_ray_job_and_outlives_the_loss_of_its_engine(head: Head, tmp_path: Path) -> None:
    """With one engine: nobody else serves until it is replaced, and its successor gets the present weights."""
    runs = tmp_path / "runs"
    done = threading.Event()
    died = list[psutil.Process]()
    whole = demo(f"run.root={runs}", *SMALL)
    metrics = runs / "demo" / "methods" / "span" / "metrics.jsonl"
    chaos = threading.Thread(target=kill_the_engine, args=(head, metrics, done, died), daemon=True)
    chaos.start()
    submit = [BIN / "ray", "job", "submit", "--address", head.address, "--working-dir", ".", "--"]
    script = f"echo in: $PWD, ${{#{loading.JOB_ENV}}} characters; {whole} && {whole}"
    try:
        job = subprocess.run(
            [*submit, "bash", "-c", script],
            cwd=ROOT, env=head.environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
    finally:
        done.set()
        chaos.join(timeout=30)
    output = job.stdout + job.stderr
    assert job.returncode == 0, output[-4000:]
    # By these the config refuses a relative run.root, which would vanish with the job's folder.
    assert re.search(rf"^in: \S+{loading.UPLOAD_PREFIX}\S+, \d+ characters$", output, re.MULTILINE)
    assert ", 0 characters" not in output
    assert output.count("| fact F1 |") == 2, "the second start reads what is there"
    check_what_it_wrote(runs / "demo")
    check_its_loss(died, runs / "demo" / "methods" / "span")


def check_what_it_wrote(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["methods"]) == {"span"}
    assert summary["samples"] == NUM_STEPS * 2 * 4
    assert 0.4 < summary["references"]["fact_f1"] < 0.75
    reward = summary["reward_model"]
    assert {"good_f1", "poor_f1", "parse_rate", "located_rate"} <= set(reward)
    assert reward["num_records"] > 0
    assert summary["versions"]["ray"] and summary["timing"]["reward_s"] > 0
    records = read(folder / "annotated" / "train.jsonl")
    assert records and all(record["source"] == "program" for record in records)
    assert "<span" in (folder / "report.html").read_text()


def check_its_loss(died: list[psutil.Process], run_folder: Path) -> None:
    """The engine's core ended with it; every step has its samples, each once, and weights that the probe agrees on."""
    assert len(died) == 2
    assert not psutil.wait_procs(died, timeout=10)[1]
    metrics = read(run_folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [*range(NUM_STEPS + 1)]
    assert all(m["feedback/source/reward_model"] == 1.0 and m["sync/probe_gap"] < 1e-3 for m in metrics[1:])
    assert sum(m.get("rollout/restarts", 0) for m in metrics[1:]) == 1
    assert [m for m in metrics if 0 < m.get("rollout/recovery_s", 0) < DEADLINE_S]
    samples, dropped = (read(run_folder / name) for name in ("samples.jsonl", "dropped.jsonl"))
    trained = [s for s in samples if s["split"] == "train" and "token_rewards" in s]
    keys = [(s["step"], s["prompt_id"], s["sample_index"]) for s in trained + dropped]
    assert len(keys) == len(set(keys)) == NUM_STEPS * 2 * 4
    assert all("unparsable" in s["reason"] for s in dropped), "none for want of an engine"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
