"""A user's own run as a user starts it: `configs/own/policy.yaml` on random models, in processes of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from models import random_model

ROOT = Path(__file__).parents[1]


def make_folder(folder: Path) -> Path:
    """A random policy and reward model, and twelve prompts; returns `folder`."""
    random_model(folder / "policy", "llama", seed=1)
    random_model(folder / "reward", "qwen2", seed=2)
    prompts = [{"prompt": f"Say what is wrong. It always hums, {i} times."} for i in range(6)]
    chats = [{"messages": [{"role": "user", "content": f"My name is José {i}."}], "note": "chat"} for i in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts + chats))
    return folder


def command(folder: Path, **overrides: object) -> list[str]:
    """Four prompts a step with two responses each, on engines and two ranks."""
    values = {
        "run.root": folder / "runs",
        "run.name": "own",
        "model.policy": folder / "policy",
        "data.path": folder / "prompts.jsonl",
        "rollout.prompts_per_step": 4,
        "rollout.samples_per_prompt": 2,
        "rollout.max_model_len": 128,
        "rollout.max_new_tokens": 16,
        "learner.workers": 2,
        **overrides,
    }
    return [
        sys.executable, "-m", "jobs.train_policy", "--config", "configs/own/policy.yaml",
        *(f"{key}={value}" for key, value in values.items()),
    ]  # fmt: skip


def read_example(model: Path) -> str:
    """Return the first run of the guide to Python, on this model."""
    guide = (ROOT / "t2g" / "guides" / "12-python.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(# first_run\.py\n.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    return example.replace("FOLDER", str(model))


def start(arguments: list[str], log: Path, cwd: Path = ROOT, **environ: str) -> "subprocess.Popen[bytes]":
    """Output goes behind what `log` holds."""
    job_environ = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"RAY_AUTH_MODE": "disabled"} | environ
    return subprocess.Popen(arguments, cwd=cwd, env=job_environ, stdout=log.open("ab"), stderr=subprocess.STDOUT)


def logged_steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []
