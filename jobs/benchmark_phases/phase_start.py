"""The start of a run: a process of its own, Ray, engines, reward engine and ranks, until its first step is done."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from actors.engines.server import run_process
from jobs.benchmark_phases.phase_step import loop_job
from jobs.benchmark_phases.timer import Bench, Comparison, Done, Record, cpu_seconds, cpu_since
from t2g.config import loading, with_overrides
from t2g.errors import RunStopped
from t2g.feedback.card import make_card, write_card
from t2g.tasks.base import SPARSE, get_task

SMALL = {"num_steps": 1, "rollout.prompts_per_step": 1, "rollout.samples_per_prompt": 2}  # the step hardly counts
PARTS = {"driver_s": "starting Ray ...", "ray_s": "starting Ray: ", "load_s": "loading", "step_s": "step 1"}


def judge(prompt: str, response: str) -> tuple[str, list[str], list[str]]:
    """Praise the first character."""
    return "The first character is good.", [response[:1]], []


async def measure(bench: Bench) -> list[Record]:
    model = bench.models.fixed
    write_card(model, make_card(get_task("prompts"), SPARSE))
    # The reward model has random weights: it is loaded and gets no request.
    feedback = {
        "source": "jobs.benchmark_phases.phase_start:judge",
        "align": "reward_model",
        "reward_model": str(model),
        "engine": bench.config.reward_engine,
    }
    data = bench.config.run.folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": prompt.prompt_text}) + "\n" for prompt in bench.models.prompts]
    data.write_text("".join(lines))
    changes = {"run.name": "start", "data.path": str(data), "feedback": feedback, **SMALL}
    job = with_overrides(loop_job(bench), changes)
    file = bench.config.run.folder / "start.yaml"
    file.write_text(loading.to_yaml(job))
    sides = {"t2g": partial(start, file, job.run.folder)}
    comparison = Comparison(name="start, to the first step", unit="starts", sides=sides)
    return [await bench.measure(comparison)]


async def start(file: Path, folder: Path) -> Done:
    """Make one step in a new process; return the seconds until the last line of each part."""
    shutil.rmtree(folder, ignore_errors=True)
    return await run_timed([sys.executable, "-m", "jobs.train_policy", "--config", str(file)])


async def run_timed(command: list[str]) -> Done:
    """Return `time_lines` of a command, which ends when this call is cancelled."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    started = time.monotonic()
    with run_process(command, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        return await asyncio.to_thread(time_lines, process, started)


def time_lines(process: subprocess.Popen[bytes], started: float) -> Done:
    """Return the seconds of each of PARTS, which ends with the last line of the process that begins so.

    Args:
        started: When the process was started: on a busy machine this call begins later.

    Raises:
        RunStopped: The process failed.
    """
    ends: dict[str, float] = {}
    lines: list[str] = []
    cpu_s = 0.0
    before = cpu_seconds()
    for raw_line in process.stdout or ():
        line = raw_line.decode(errors="replace")
        lines.append(line.strip())
        reached = [part for part, begin in PARTS.items() if line.startswith(begin)]
        if reached:
            ends[reached[0]] = time.monotonic() - started
            cpu_s = cpu_since(before)
    process.wait()
    if process.returncode or [*ends] != [*PARTS]:
        raise RunStopped(f"a start ended with exit code {process.returncode}: {lines[-1:]}")
    more: dict[str, float] = {}
    previous_end = 0.0
    for part, end in ends.items():
        more[part] = end - previous_end
        previous_end = end
    more |= {"first_step_s": ends["step_s"], "first_step_cpu_s": cpu_s}
    return Done(amount=1, more=more)
