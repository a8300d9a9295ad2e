"""Check item by item whether the pipeline works on the GPU of this machine.

    python -m jobs.gpu_check --out <absolute folder>

All figures go into gpu_check.json. An item runs other jobs as a user would, each in a process of its own. Inputs are
configs/tiny/{policy,gpu_check}.yaml, from which the jobs make a world of posts, a policy and a reward model, and a
model of half a billion random weights. Where there is no GPU, what can runs on the CPU, and the JSON says so.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.common.cli import print_outputs
from t2g.concurrency import run_with_background
from t2g.config import DemoJob, PolicyJob, ShapeConfig, loading, with_overrides
from t2g.deploy.check import check_config
from t2g.errors import RunStopped
from t2g.files import write_json
from t2g.interfaces import Sampling
from t2g.metrics import FAILED_SHARE, SFT_LOSS
from t2g.resources.machine import check_machine
from t2g.runs.progress import log_duration
from t2g.runs.versions import collect_versions
from t2g.types import Prompt

if TYPE_CHECKING:
    from actors.engines.rollout import RolloutFleet

CONFIGS = Path("configs")
POLICY = CONFIGS / "tiny" / "policy.yaml"
ARTIFACTS = CONFIGS / "tiny" / "gpu_check.yaml"
SFT = CONFIGS / "own" / "sft.yaml"
BFLOAT16 = [f"{section}.dtype=bfloat16" for section in ("rollout", "feedback.engine", "learner")]
ONE_EACH = ("learner.workers=1", "rollout.workers={min: 1, max: 1}", "feedback.source=program")
AS_SHIPPED = ("cluster.gpu_sharing=split", "rollout.enforce_eager=false")  # as the GPU configs: compiled, with graphs
SHARED = ("rollout.gpus=0.6", "learner.gpus=0.4", "learner.memory_gib=6")
ADAPTERS = (
    "rollout.gpus=0.6",
    "rollout.memory_gib=8",
    "learner.gpus=0.4",
    "learner.memory_gib=8",
    "learner.lora={r: 16, alpha: 32}",
    "learner.gradient_checkpointing=true",
)
ONE_AND_A_HALF_BILLION = ShapeConfig(  # Qwen2.5-1.5B
    hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2
)
WHOLE = ("rollout.gpus=1", "learner.gpus=1")
FIGURES = re.compile(rf"(sync|speed|time|learner|policy|critic|sft|importance)/|{FAILED_SHARE}")
LOSS_RATIO = 2e-3  # difference of float32 losses, summed in another order, after a few dozen updates
ON_CPU = "no GPU: run on the CPU"

Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Machine:
    out: Path
    gpus: int
    timeout_s: float

    def job(self, name: str, job: str, config: Path, *overrides: str) -> list[Figures]:
        """Return the metrics per step of a job in `out`/name; raise RunStopped if it fails or misses the deadline."""
        command = [sys.executable, "-m", f"jobs.{job}", "--config", str(config)]
        command += [f"run.root={self.out}", f"run.name={name}", "run.resume=never", "log.trackers=[]", *overrides]
        log = self.out / f"{name}.log"
        try:
            with log.open("w") as stderr:
                code = subprocess.call(command, stdout=subprocess.DEVNULL, stderr=stderr, timeout=self.timeout_s)
        except subprocess.TimeoutExpired as late:
            raise RunStopped(f"jobs.{job} did not end within {self.timeout_s:g} s") from late
        if code:
            lines = log.read_text(errors="replace").strip().splitlines()
            raise RunStopped(lines[-1] if lines else f"exit code {code}")

        steps: list[Figures] = []
        metrics_file = self.out / name / "metrics.jsonl"
        for line in metrics_file.read_text(encoding="utf-8").splitlines():
            metrics = json.loads(line)
            steps.append({key: value for key, value in metrics.items() if FIGURES.match(key)})
        return steps

    def write_artifacts_config(self) -> Path:
        """Write and return the job that makes the artifacts, with engines on the GPU if there is one."""
        job = loading.load(DemoJob, ARTIFACTS)
        if self.gpus:
            engines = {
                "rollout.gpus": 0.4,
                "rollout.dtype": "bfloat16",
                "reward_engine.gpus": 0.4,
                "reward_engine.dtype": "bfloat16",
            }
            job = with_overrides(job, engines)
        return loading.write(job, self.out / "artifacts-config")

    def policy(self, name: str, *overrides: str) -> Figures:
        """Make two steps of PPO; return the last one, and the gap of engine and learner on the checkpoint."""
        job_overrides = (f"artifacts={self.write_artifacts_config()}", "num_steps=2", "eval.num_prompts=16", *overrides)
        steps = self.job(name, "train_policy", POLICY, *job_overrides)
        probe = (self.out / name / "probe.json").read_bytes()
        return steps[-1] | {"probe_gap_nats": json.loads(probe)}


def collect_last_output(logs: Path = Path("/tmp/ray/session_latest/logs")) -> Iterator[str]:
    """Return the logs of each process of the last Ray session, which say why an engine did not start."""
    for file in sorted(logs.glob("worker-*.err")):
        yield f"{file.name}:"
        yield from file.read_text(errors="replace").splitlines()[-60:]


def world(machine: Machine) -> Figures:
    """Make the artifacts, run PPO, and a reward model with guided decoding."""
    share = ("rollout.gpus=0.3", "learner.gpus=0.4", "feedback.engine.gpus=0.3", "learner.workers=1", *BFLOAT16)
    on_gpu = share if machine.gpus else ()
    figures = machine.policy("world", "learner.sync_transport=store", *on_gpu)
    if figures[FAILED_SHARE] > 0.5:
        raise RunStopped(f"guided answers: {figures[FAILED_SHARE]:.0%} are no feedback")
    return figures


def rank(machine: Machine) -> Figures:
    """Compare supervised losses of a rank in float32 with those of a rank on the CPU."""
    artifacts = machine.out / "artifacts"
    overrides = (
        "task=tiny",
        f"model.policy={artifacts / 'base/model'}",
        f"data.path={artifacts / 'world/train.jsonl'}",
    )
    overrides += ("data.limit=400", "sft.num_epochs=1", "sft.optim.lr=1e-3", "sft.max_length=192", "sft.batch_size=32")
    overrides += ("sft.dtype=float32",)
    on_cpu = machine.job("rank-cpu", "train_sft", SFT, *overrides, "sft.gpus=0")
    here = machine.job("rank-here", "train_sft", SFT, *overrides, f"sft.gpus={min(machine.gpus, 1)}")

    apart: list[float] = []
    for cpu_step, step in zip(on_cpu, here, strict=True):
        ratio = step[SFT_LOSS] / cpu_step[SFT_LOSS]
        apart.append(abs(ratio - 1))
    if max(apart) > LOSS_RATIO:
        raise RunStopped(f"a loss is {max(apart):.2g} of its size away from that on the CPU")
    return {"losses_apart": max(apart), **here[-1]}


def engine(machine: Machine) -> Figures:
    """Measure an engine that joins its outputs, and an engine with vLLM's own scheduler.

    Tokens/s of an engine called without its fleet, and through it; then it is killed, and its successor serves.
    """
    from jobs.common.fleets import Fleets, on_cluster
    from jobs.train_policy.policy_data import read_data

    artifacts = machine.out / "artifacts"
    inputs = (
        f"model.policy={artifacts / 'base/model'}",
        f"data.path={artifacts / 'world/train.jsonl'}",
        "eval_data=null",
    )
    on_gpu = ("rollout.gpus=1", "rollout.dtype=bfloat16") if machine.gpus else ()
    overrides = [*inputs, "artifacts=null", "feedback.reward_model=null", "feedback.source=program", *on_gpu]
    job = loading.load(PolicyJob, POLICY, overrides)
    prompts = read_data(job).prompts[:64]
    figures: Figures = {}
    with on_cluster(job):
        for name, join_outputs in (("joined", True), ("token_by_token", False)):
            rollout = job.rollout.model_copy(update={"join_outputs": join_outputs})
            with Fleets() as fleets:
                fleet = fleets.rollouts(job.model, rollout, job)
                measuring = measure(fleet, prompts)
                figures[name] = asyncio.run(run_with_background(measuring, fleet.supervise()))
    return figures


async def measure(fleet: "RolloutFleet", prompts: Sequence[Prompt]) -> Figures:
    import ray

    sampling = Sampling(num_samples=4, temperature=1.0, max_new_tokens=48, seed=1)

    async def rate(request: Callable[[Prompt], Awaitable[Any]]) -> float:
        started = time.monotonic()
        groups = await asyncio.gather(*map(request, prompts))
        responses = chain.from_iterable(groups)
        num_tokens = sum(len(response.response_ids) for response in responses)
        return num_tokens / (time.monotonic() - started)

    async def bare(prompt: Prompt) -> Any:
        request = prompt.prompt_id, prompt.prompt_ids, sampling
        sample = partial(first.handle.sample.remote, *request)
        return await asyncio.gather(*map(sample, range(sampling.num_samples)))

    first = fleet.serving()[0]
    figures: Figures = {}
    figures["compiling_tokens_per_s"] = await rate(bare)
    figures["bare_tokens_per_s"] = await rate(bare)
    figures["fleet_tokens_per_s"] = await rate(lambda prompt: fleet.sample(prompt, sampling))
    killed = time.monotonic()
    ray.kill(first.handle)
    while not [worker for worker in fleet.serving() if worker is not first]:
        await asyncio.sleep(0.5)  # the fleet's supervision has the deadline
    return figures | {"successor_s": time.monotonic() - killed}


def half_a_billion(machine: Machine) -> Figures:
    """Measure weight sync by ipc, speed and memory of a real size, against the estimates of `t2g.resources.memory`."""
    import torch

    from jobs.benchmark_phases.random_models import make_model

    model = make_model(ShapeConfig(), machine.out / "half-a-billion-model", seed=1)
    sized = (*ONE_EACH, *SHARED, *BFLOAT16, "cluster.gpu_sharing=split", f"model.policy={model}")
    gpu_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    job = loading.load(PolicyJob, POLICY, [*sized])
    _, text = check_config(job, gpu=f"{gpu_gib:.1f}")
    return machine.policy("half-a-billion", *sized) | {"expected": text.splitlines()}


def ipc(machine: Machine) -> Figures:
    return machine.policy("ipc", *ONE_EACH, *SHARED, *BFLOAT16, "cluster.gpu_sharing=split")


def compiled(machine: Machine) -> Figures:
    return machine.policy("compiled", *ONE_EACH, *SHARED, *BFLOAT16, *AS_SHIPPED)


def adapters(machine: Machine) -> Figures:
    """Train adapters on 1.5 billion random weights with a compiled engine, as configs/own/one_gpu.yaml does."""
    from jobs.benchmark_phases.random_models import make_model

    model = make_model(ONE_AND_A_HALF_BILLION, machine.out / "adapters-model", seed=1)
    sized = (*ONE_EACH, *BFLOAT16, *AS_SHIPPED, *ADAPTERS, f"model.policy={model}")
    return machine.policy("adapters", *sized)


def alternate(machine: Machine) -> Figures:
    return machine.policy("alternate", *ONE_EACH, *WHOLE, "cluster.gpu_sharing=alternate", *BFLOAT16)


def nccl(machine: Machine) -> Figures:
    return machine.policy("nccl", *ONE_EACH, *WHOLE, *BFLOAT16)


ITEMS: dict[str, tuple[int, Callable[[Machine], Figures]]] = {  # GPUs without which there is nothing to run
    "world": (0, world),
    "rank": (0, rank),
    "engine": (0, engine),
    "ipc": (1, ipc),
    "compiled": (1, compiled),
    "adapters": (1, adapters),
    "alternate": (1, alternate),
    "half_a_billion": (1, half_a_billion),
    "nccl": (2, nccl),
}


def answer(item: str, machine: Machine) -> Figures:
    needed, run = ITEMS[item]
    if machine.gpus < needed:
        return {"item": item, "answer": "not run", "why": f"needs {needed} GPUs, and {machine.gpus} are here"}
    started = time.monotonic()
    result: Figures = {"item": item, "on": "GPU" if machine.gpus else ON_CPU}
    try:
        result |= {"answer": "yes", "figures": run(machine)}
    except Exception as error:  # noqa: BLE001 - an error of one item does not stop the others
        result |= {"answer": "no", "why": f"{type(error).__name__}: {error}"}
        output = "\n".join(collect_last_output())
        (machine.out / f"{item}-workers.log").write_text(output)
    return result | {"seconds": round(time.monotonic() - started, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and of gpu_check.json")
    parser.add_argument("--items", nargs="+", choices=ITEMS, default=[*ITEMS], help="by default all; world comes first")
    parser.add_argument("--timeout-s", type=float, default=900, help="of each job")
    arguments = parser.parse_args(argv)
    import torch

    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = Machine(out=arguments.out.absolute(), gpus=torch.cuda.device_count(), timeout_s=arguments.timeout_s)
    gpus = list(map(torch.cuda.get_device_name, range(machine.gpus)))
    answers: list[Figures] = []
    result: Figures = {
        "gpus": gpus or ON_CPU,
        "versions": collect_versions(),
        "machine": {check.name: check.describe() for check in check_machine(machine.out, os.environ)},
        "date": time.strftime("%Y-%m-%d"),
        "items": answers,
    }
    for item in arguments.items:
        with log_duration(item):
            answered = answer(item, machine)
            answers.append(answered)
        reason = answered.get("why") or answered.get("on")
        print(f"{item}: {answered['answer']}, {reason}", flush=True)
        write_json(machine.out / "gpu_check.json", result)
    print_outputs(numbers=machine.out / "gpu_check.json")
    has_failed = any(answered["answer"] == "no" for answered in answers)
    return 3 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
