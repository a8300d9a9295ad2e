"""Check item by item whether the pipeline works on the GPU of this machine.

    python -m jobs.gpu_check --out <absolute folder>

All figures go into gpu_check.json. An item runs other jobs as a user would, each in a process of its own. Inputs are
configs/tiny/{policy,gpu_check}.yaml, from which the jobs make a world of posts, a policy and a reward model, and a
model of half a billion random weights. Where there is no GPU, what can runs on the CPU, and the JSON says so.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.common.cli import print_outputs
from t2g.concurrency import run_with_background
from t2g.config import DemoJob, PolicyJob, ShapeConfig, loading, with_overrides
from t2g.deploy.check import check_config
from t2g.errors import RunStopped
from t2g.files import write_json
from t2g.interfaces import Sampling
from t2g.runs.progress import log_duration
from t2g.runs.versions import collect_versions
from t2g.types import Prompt

if TYPE_CHECKING:
    from actors.engines.rollout import RolloutFleet

POLICY, STAGES, SFT = (Path("configs") / name for name in ("tiny/policy.yaml", "tiny/gpu_check.yaml", "own/sft.yaml"))
BFLOAT16 = [f"{section}.dtype=bfloat16" for section in ("rollout", "feedback.engine", "learner")]
ONE_EACH = ("learner.workers=1", "rollout.workers={min: 1, max: 1}", "feedback.source=program")
AS_SHIPPED = ("cluster.gpu_sharing=split", "rollout.enforce_eager=false")  # of the GPU configs: compiled, with graphs
SHARED = ("rollout.gpus=0.6", "learner.gpus=0.4", "learner.memory_gib=6")
FIGURES = re.compile(r"(sync|speed|time|learner|policy|critic|engine|sft|importance)/|feedback/failed_share")
LOSS_RATIO = 2e-3  # of a float32 loss, summed in another order, after a few dozen updates
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
        command += [f"run.root={self.out}", f"run.name={name}", "run.resume=never", "log.tensorboard=false", *overrides]
        log = self.out / f"{name}.log"
        try:
            with log.open("w") as stderr:
                code = subprocess.call(command, stdout=subprocess.DEVNULL, stderr=stderr, timeout=self.timeout_s)
        except subprocess.TimeoutExpired as late:
            raise RunStopped(f"jobs.{job} did not end within {self.timeout_s:g} s") from late
        if code:
            raise RunStopped((log.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"])[-1])
        lines = (self.out / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [{key: value for key, value in json.loads(line).items() if FIGURES.match(key)} for line in lines]

    def stages(self) -> Path:
        """Return the job that makes the world, with engines on the GPU if there is one."""
        place = {"gpus": 0.4, "dtype": "bfloat16"} if self.gpus else {}
        engines = {f"{role}.{key}": value for role in ("rollout", "reward_engine") for key, value in place.items()}
        return loading.write(with_overrides(loading.load(DemoJob, STAGES), engines), self.out / "stages-config")

    def policy(self, name: str, *overrides: str) -> Figures:
        """Make two steps of PPO; return the last one, and the gap of engine and learner on the checkpoint."""
        given = (f"artifacts={self.stages()}", "num_steps=2", "eval.num_prompts=16", *overrides)
        steps = self.job(name, "train_policy", POLICY, *given)
        return steps[-1] | {"probe_gap_nats": json.loads((self.out / name / "probe.json").read_bytes())}


def collect_last_output(logs: Path = Path("/tmp/ray/session_latest/logs")) -> Iterator[str]:
    """Return the logs of each process of the last Ray session, which say why an engine did not start."""
    for file in sorted(logs.glob("worker-*.err")):
        yield from (f"{file.name}:", *file.read_text(errors="replace").splitlines()[-60:])


def world(machine: Machine) -> Figures:
    """Run the stages, PPO, and a reward model with guided decoding."""
    share = ("rollout.gpus=0.3", "learner.gpus=0.4", "feedback.engine.gpus=0.3", "learner.workers=1", *BFLOAT16)
    figures = machine.policy("world", "learner.sync_transport=store", *(share if machine.gpus else ()))
    if figures["feedback/failed_share"] > 0.5:
        raise RunStopped(f"guided answers: {figures['feedback/failed_share']:.0%} are no feedback")
    return figures


def rank(machine: Machine) -> Figures:
    """Compare supervised losses of a rank in float32 with those of a rank on the CPU."""
    stages = machine.out / "stages"
    given = ("task=tiny", f"model.policy={stages / 'base/model'}", f"data.path={stages / 'world/train.jsonl'}")
    given += ("data.limit=400", "sft.num_epochs=1", "sft.optim.lr=1e-3", "sft.max_length=192", "sft.batch_size=32")
    runs = [
        machine.job(f"rank-{where}", "train_sft", SFT, *given, "sft.dtype=float32", f"sft.gpus={gpus}")
        for where, gpus in (("cpu", 0), ("here", min(machine.gpus, 1)))
    ]
    apart = [abs(here["sft/loss"] / there["sft/loss"] - 1) for there, here in zip(*runs, strict=True)]
    if max(apart) > LOSS_RATIO:
        raise RunStopped(f"a loss is {max(apart):.2g} of its size away from that on the CPU")
    return {"losses_apart": max(apart), **runs[1][-1]}


def engine(machine: Machine) -> Figures:
    """Measure an engine that joins its outputs, and an engine with vLLM's own scheduler.

    Tokens/s of an engine called without its fleet, and through it; then it is killed, and its successor serves.
    """
    from jobs.common.fleets import Fleets, on_cluster
    from jobs.common.policy_runs import read_data

    stages = machine.out / "stages"
    given = (f"model.policy={stages / 'base/model'}", f"data.path={stages / 'world/train.jsonl'}", "eval_data=null")
    on_gpu = ("rollout.gpus=1", "rollout.dtype=bfloat16") if machine.gpus else ()
    job = loading.load(PolicyJob, POLICY, [*given, "artifacts=null", "feedback.source=program", *on_gpu])
    prompts, figures = read_data(job).prompts[:64], Figures()
    with on_cluster(job):
        for name, join_outputs in (("joined", True), ("token_by_token", False)):
            rollout = job.rollout.model_copy(update={"join_outputs": join_outputs})
            with Fleets() as fleets:
                fleet = fleets.rollouts(job.model, rollout, job)
                figures[name] = asyncio.run(run_with_background(measure(fleet, prompts), fleet.supervise()))
    return figures


async def measure(fleet: "RolloutFleet", prompts: Sequence[Prompt]) -> Figures:
    import ray

    sampling = Sampling(num_samples=4, temperature=1.0, max_new_tokens=48, seed=1)

    async def rate(ask: Callable[[Prompt], Awaitable[Any]]) -> float:
        started = time.monotonic()
        groups = await asyncio.gather(*map(ask, prompts))
        return sum(len(r.response_ids) for group in groups for r in group) / (time.monotonic() - started)

    async def bare(prompt: Prompt) -> Any:
        request = prompt.prompt_id, prompt.prompt_ids, sampling
        return await asyncio.gather(*(first.handle.sample.remote(*request, i) for i in range(sampling.num_samples)))

    first = fleet.serving()[0]
    figures = {figure: await rate(bare) for figure in ("compiling_tokens_per_s", "bare_tokens_per_s")}
    figures["fleet_tokens_per_s"] = await rate(lambda prompt: fleet.sample(prompt, sampling))
    killed = time.monotonic()
    ray.kill(first.handle)
    while not [member for member in fleet.serving() if member is not first]:
        await asyncio.sleep(0.5)  # the fleet's care beside this has the deadline
    return figures | {"successor_s": time.monotonic() - killed}


def half_a_billion(machine: Machine) -> Figures:
    """Measure weight sync by ipc, speed and memory of a real size, beside the estimates of `t2g.resources.memory`."""
    import torch

    from jobs.stopwatch.random_models import make_model

    model = make_model(ShapeConfig(), machine.out / "half-a-billion-model", seed=1)
    sized = (*ONE_EACH, *SHARED, *BFLOAT16, "cluster.gpu_sharing=split", f"model.policy={model}")
    gpu_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    _, text = check_config(loading.load(PolicyJob, POLICY, [*sized, "artifacts=null"]), gpu=f"{gpu_gib:.1f}")
    return machine.policy("half-a-billion", *sized) | {"expected": text.splitlines()}


ITEMS: dict[str, tuple[int, Callable[[Machine], Figures]]] = {  # GPUs without which there is nothing to run
    "world": (0, world),
    "rank": (0, rank),
    "engine": (0, engine),
    "ipc": (1, lambda machine: machine.policy("ipc", *ONE_EACH, *SHARED, *BFLOAT16, "cluster.gpu_sharing=split")),
    "compiled": (1, lambda machine: machine.policy("compiled", *ONE_EACH, *SHARED, *BFLOAT16, *AS_SHIPPED)),
    "alternate": (1, lambda machine: machine.policy("alternate", *ONE_EACH, "rollout.gpus=1", "learner.gpus=1",
                                                    "cluster.gpu_sharing=alternate", *BFLOAT16)),
    "half_a_billion": (1, half_a_billion),
    "nccl": (2, lambda machine: machine.policy("nccl", *ONE_EACH, "rollout.gpus=1", "learner.gpus=1", *BFLOAT16)),
}  # fmt: skip


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
        (machine.out / f"{item}-workers.log").write_text("\n".join(collect_last_output()))
    return result | {"seconds": round(time.monotonic() - started, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and of gpu_check.json")
    parser.add_argument("--items", nargs="+", choices=ITEMS, default=[*ITEMS], help="by default all; world comes first")
    parser.add_argument("--timeout-s", type=float, default=900, help="of each job")
    given = parser.parse_args(argv)
    import torch

    given.out.mkdir(parents=True, exist_ok=True)
    machine = Machine(out=given.out.absolute(), gpus=torch.cuda.device_count(), timeout_s=given.timeout_s)
    gpus = [torch.cuda.get_device_name(i) for i in range(machine.gpus)]
    result: Figures = {
        "gpus": gpus or ON_CPU,
        "versions": collect_versions(),
        "date": time.strftime("%Y-%m-%d"),
        "items": [],
    }
    for item in given.items:
        with log_duration(item):
            result["items"].append(found := answer(item, machine))
        print(f"{item}: {found['answer']}, {found.get('why') or found.get('on')}", flush=True)
        write_json(machine.out / "gpu_check.json", result)
    print_outputs(numbers=machine.out / "gpu_check.json")
    return 0 if all(found["answer"] != "no" for found in result["items"]) else 3


if __name__ == "__main__":
    sys.exit(main())
