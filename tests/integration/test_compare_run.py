"""jobs.compare on the real stack with a user's model, data and feedback function: stopped, resumed, read again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from models import random_model

ROOT = Path(__file__).parents[2]
DEADLINE_S = 800
FUNCTION = """\
def judge(prompt, response):
    letters = "aeiou"
    good = [(c, 1) for c in letters if c in response]
    poor = [(c, 1) for c in "xyz" if c in response]
    return "vowels please", good, poor
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model(tmp_path / "policy", "llama", seed=1)
    prompts = [{"prompt": f"Say what is wrong. It always hums, {i} times."} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in prompts))
    (tmp_path / "vowels.py").write_text(FUNCTION)
    return tmp_path


def start(folder: Path, *overrides: str) -> "subprocess.Popen[bytes]":
    environ = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environ |= {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": f"{folder}:{environ.get('PYTHONPATH', '')}"}
    values = [
        f"run.root={folder / 'runs'}", f"model.policy={folder / 'policy'}", f"data.path={folder / 'prompts.jsonl'}",
        f"eval_data={{path: {folder / 'prompts.jsonl'}, limit: 4}}", "feedback.source=vowels:judge", "task=prompts",
        "artifacts=null", "feedback.reward_model=null", "num_steps=2", "eval.every=1", "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=2", "rollout.max_new_tokens=24", "compare.methods=[sft, scalar, grpo]",
        "compare.seeds=[1]", "compare.lr_grid=[1.0e-3]", "compare.reference_prompts=4", *overrides,
    ]  # fmt: skip
    command = [sys.executable, "-m", "jobs.compare", "--config", "configs/tiny/compare.yaml", *values]
    return subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=(folder / "log.txt").open("ab"), stderr=subprocess.STDOUT
    )


@pytest.mark.slow  # a minute and a half, of paths that have tests of their own
def test_a_comparison_goes_on_run_by_run(folder: Path) -> None:
    run = folder / "runs" / "compare"
    log = folder / "log.txt"
    process = start(folder)
    deadline = time.monotonic() + DEADLINE_S
    first = run / "methods" / "scalar-1" / "summary.json"
    while not first.exists():
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=DEADLINE_S) == 143, log.read_text()[-4000:]
    assert not (run / "compare.json").exists()
    written = first.stat().st_mtime_ns

    process = start(folder)
    assert process.wait(timeout=DEADLINE_S) == 0, log.read_text()[-4000:]
    assert first.stat().st_mtime_ns == written  # a finished run is not made again
    methods = json.loads((run / "compare.json").read_text())["methods"]
    assert list(methods) == ["sft", "scalar", "grpo"]
    curves = {name: figures["by_seed"]["1"]["curve"] for name, figures in methods.items()}
    assert len({curve["scores"][0] for curve in curves.values()}) == 1  # the base, on the same prompts and seeds
    assert all(curves[name]["samples"] == [0, 8, 16] for name in ("scalar", "grpo"))
    for name in ("scalar", "grpo"):
        targeting = methods[name]["by_seed"]["1"]["targeting"]
        assert targeting["praised"] != 0.0 and targeting["tokens"]["praised"] > 0
        assert methods[name]["step_seconds"] > 0
    log_text = log.read_text()
    assert "| grpo |" in log_text
    assert (run / "report.html").exists()
    assert (run / "curves.svg").exists()

    changed = start(folder, "objective.lam=0.5")
    assert changed.wait(timeout=DEADLINE_S) == 2, log.read_text()[-4000:]
    assert "objective.lam (1.0 -> 0.5)" in log.read_text()
