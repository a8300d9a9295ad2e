"""A user's own run on the real stack: Ray, a vLLM policy, a vLLM reward model, two ZeRO-3 ranks, SIGTERM and resume."""

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
DEADLINE_S = 240
NUM_STEPS = 6


def command(folder: Path, **overrides: object) -> list[str]:
    values = {
        "run.root": folder / "runs",
        "run.name": "own",
        "model.policy": folder / "policy",
        "data.path": folder / "prompts.jsonl",
        "eval_data": f"{{path: {folder / 'prompts.jsonl'}, limit: 4}}",
        "num_steps": NUM_STEPS,
        "rollout.prompts_per_step": 4,
        "rollout.samples_per_prompt": 2,
        "rollout.max_model_len": 128,
        "rollout.max_new_tokens": 16,
        "feedback.source": "reward_model",
        "feedback.reward_model": folder / "reward",
        "feedback.engine": "{max_model_len: 2048, max_new_tokens: 900, "
        "max_critique_chars: 24, max_spans: 1, max_quote_chars: 4}",
        "feedback.max_failed_share": 1.0,
        "learner.workers": 2,
        "eval.every": 2,
        "checkpoint.every": 3,
        **overrides,
    }
    return [
        sys.executable, "-m", "jobs.train_policy", "--config", "configs/own/policy.yaml",
        *(f"{key}={value}" for key, value in values.items()),
    ]  # fmt: skip


def start(arguments: list[str], log: Path) -> "subprocess.Popen[bytes]":
    environ = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"RAY_AUTH_MODE": "disabled"}
    return subprocess.Popen(arguments, cwd=ROOT, env=environ, stdout=log.open("ab"), stderr=subprocess.STDOUT)


def logged_steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    random_model(folder / "policy", "llama", seed=1)
    random_model(folder / "reward", "qwen2", seed=2)
    prompts = [{"prompt": f"Say what is wrong. It always hums, {i} times."} for i in range(6)]
    chats = [{"messages": [{"role": "user", "content": f"My name is José {i}."}], "note": "chat"} for i in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts + chats))
    return folder


def test_a_run_killed_by_sigterm_goes_on_with_the_same_command(folder: Path) -> None:
    run, log = folder / "runs" / "own", folder / "log.txt"
    process = start(command(folder), log)
    deadline = time.monotonic() + DEADLINE_S
    while 1 not in logged_steps(run):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=DEADLINE_S) == 143, log.read_text()[-4000:]
    done = logged_steps(run)
    assert done == list(range(len(done))) and 2 <= len(done) <= NUM_STEPS
    assert (run / "checkpoints" / f"step-{done[-1]:08d}" / "manifest.json").exists()
    assert not (run / "summary.json").exists()

    process = start(command(folder), log)
    assert process.wait(timeout=DEADLINE_S) == 0, log.read_text()[-4000:]
    assert logged_steps(run) == list(range(NUM_STEPS + 1))
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (NUM_STEPS, NUM_STEPS * 8)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(m["sync/probe_gap"] < 1e-3 and m["gap/logprob_mean"] < 1e-4 for m in metrics[1:])
    assert all(m["feedback/source/reward_model"] == 1.0 for m in metrics[1:])
    report = (run / "report.html").read_text()
    assert "http://" not in report and "https://" not in report

    from transformers import AutoModelForCausalLM

    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (folder / "policy", run / "policy"))
    moved = [name for name, p in before.named_parameters() if not p.equal(after.get_parameter(name))]
    labelled = any(m["tokens/unlabelled_share"] < 1 for m in metrics[1:])
    assert bool(moved) == labelled  # a random reward model seldom quotes: without a label not a bit may move

    started = time.monotonic()
    assert start(command(folder), log).wait(timeout=60) == 0  # finished: says so at once
    assert time.monotonic() - started < 30
    changed = start(command(folder, **{"objective.lam": 0.5}), log)
    assert changed.wait(timeout=60) == 2
    assert "objective.lam (0.95 -> 0.5)" in log.read_text()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"model.policy": "/no/such/model"}, "/no/such/model"),
        ({"learner.workers": 400}, "CPUs needed"),
        ({"rollout.max_model_len": 20}, "tokens and the window holds 4 beside the response"),
        ({"feedback.source": "no.such:critic"}, "feedback.source=no.such:critic cannot be imported"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence_within_a_minute(
    folder: Path, tmp_path: Path, overrides: dict[str, object], sentence: str
) -> None:
    log = tmp_path / "log.txt"
    process = start(command(folder, **{"run.name": "bad", **overrides}), log)
    assert process.wait(timeout=60) == 2, log.read_text()[-4000:]
    said = log.read_text()
    assert sentence in said and "Traceback" not in said, said
