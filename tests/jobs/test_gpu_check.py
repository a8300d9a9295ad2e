"""What the command says of a machine: its jobs are replaced by files, their command lines are read by schemas."""

import asyncio
import inspect
import json
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from actors.engines.rollout import RolloutWorker
from jobs import gpu_check
from jobs.benchmark_phases import random_models
from t2g.config import DemoJob, PolicyJob, RolloutConfig, SFTJob, ShapeConfig, loading
from t2g.interfaces import Sampling
from t2g.resources.preflight import preflight
from t2g.types import Prompt

MACHINE = {"CPU": 16.0, "GPU": 2.0, "memory": 120 * 2**30}
SCHEMAS: dict[str, Any] = {"jobs.train_policy": PolicyJob, "jobs.train_sft": SFTJob}
ROOT = Path(__file__).resolve().parents[2]


class Jobs:
    """Each writes what a job leaves; `losses` are of supervised training, by its number of GPUs."""

    def __init__(self, **losses: float) -> None:
        self.configs: list[Any] = []
        self.losses = {"cpu": 1.0, "gpu": 1.0} | losses
        self.fails = False
        self.hangs = False

    def run(self, command: list[str], timeout: float, stderr: Any, **how: Any) -> int:
        _, _, job, _, config, *overrides = command
        if self.hangs:
            raise subprocess.TimeoutExpired(command, timeout)
        if self.fails:
            stderr.write("a warning\njobs.train_policy: no rollout worker is left\n")
            return 3
        job_config = loading.load(SCHEMAS[job], ROOT / config, overrides, environ={}, cwd=ROOT)
        assert preflight(job_config, MACHINE).wrong == [], "the job itself would not start"
        self.configs.append(job_config)
        job_config.run.folder.mkdir(parents=True)
        loss = self.losses["gpu" if isinstance(job_config, SFTJob) and job_config.sft.gpus else "cpu"]
        metrics = {"sft/loss": loss, "sync/load_s": 0.5, "feedback/failed_share": 0.1, "eval/score": 0.7}
        (job_config.run.folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
        (job_config.run.folder / "probe.json").write_text('{"largest": 0.1, "p95": 0.05, "median": 0.01}')
        return 0


def check(monkeypatch: pytest.MonkeyPatch, out: Path, jobs: Jobs, *items: str, gpus: int = 0) -> tuple[int, Any]:
    monkeypatch.setattr(gpu_check.subprocess, "call", jobs.run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    code = gpu_check.main(["--out", str(out), "--items", *items])
    return code, json.loads((out / "gpu_check.json").read_text())


def test_without_a_gpu_nothing_passes_on_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, report = check(monkeypatch, tmp_path, Jobs(), "world", "rank", "ipc", "alternate")
    world, rank, *others = report["items"]
    assert code == 0
    assert "GiB" in report["machine"]["memory"]
    assert report["gpus"] == world["on"] == rank["on"] == "no GPU: run on the CPU"
    assert world["answer"] == "yes" and world["figures"]["sync/load_s"] == 0.5
    assert world["figures"]["probe_gap_nats"]["p95"] == 0.05
    assert [item["answer"] for item in others] == ["not run", "not run"]
    assert "on" not in others[0]


def test_on_gpus_every_item_asks_for_what_it_is_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs = Jobs(gpu=1.001)
    code, report = check(monkeypatch, tmp_path, jobs, "world", "rank", "ipc", "compiled", "alternate", "nccl", gpus=2)
    assert code == 0
    assert {item["on"] for item in report["items"]} == {"GPU"}
    assert report["gpus"] == ["a GPU"] * 2
    world, on_cpu, on_gpu, *others = jobs.configs
    judge = world.feedback.engine
    assert (world.learner.sync_transport, world.feedback.source) == ("store", "reward_model")
    assert (judge.gpus, judge.dtype, judge.max_new_tokens) == (0.3, "bfloat16", 256), "the rest as in the file"
    demo = loading.load(DemoJob, world.artifacts, environ={})
    assert demo.rollout.gpus == demo.reward_engine.gpus == 0.4, "vLLM for GPUs has no CPU engines"
    assert world.rollout.gpus + world.learner.gpus + world.feedback.engine.gpus == pytest.approx(1), "on one GPU"
    assert (on_cpu.sft.gpus, on_gpu.sft.gpus) == (0, 1)
    assert on_cpu.sft.dtype == on_gpu.sft.dtype == "float32"
    assert [job.learner.sync_transport for job in others] == ["ipc", "ipc", "ipc", "nccl"]
    assert [job.cluster.gpu_sharing for job in others] == ["split", "split", "alternate", "none"]
    one_gpu = loading.load(PolicyJob, ROOT / "configs/own/one_gpu.yaml", environ={}, cwd=ROOT)
    assert not others[1].rollout.enforce_eager and not one_gpu.rollout.enforce_eager
    assert others[1].cluster.gpu_sharing == one_gpu.cluster.gpu_sharing
    assert all(job.rollout.dtype == job.learner.dtype == "bfloat16" for job in (world, *others))


def test_half_a_billion_has_the_memory_that_it_asks_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def without_weights(shape: ShapeConfig, folder: Path, *, seed: int) -> Path:
        with torch.device("meta"):
            monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda model, to: model.config.save_pretrained(to))
            model_folder = make_model(shape, folder, seed=seed)
        save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
        return model_folder

    make_model = random_models.make_model
    monkeypatch.setattr(random_models, "make_model", without_weights)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=24 * 2**30))
    jobs = Jobs()
    code, report = check(monkeypatch, tmp_path, jobs, "half_a_billion", gpus=1)
    (item,) = report["items"]
    (job,) = jobs.configs
    assert code == 0 and job.learner.sync_transport == "ipc"
    assert "estimated GiB on each GPU, of 24 (24.0):" in item["figures"]["expected"]


def test_adapters_are_trained_as_the_config_for_one_gpu_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shapes: list[ShapeConfig] = []

    def make_model(shape: ShapeConfig, folder: Path, *, seed: int) -> Path:
        shapes.append(shape)
        return folder

    monkeypatch.setattr(random_models, "make_model", make_model)
    jobs = Jobs()
    code, _ = check(monkeypatch, tmp_path, jobs, "adapters", gpus=1)
    (job,) = jobs.configs
    one_gpu = loading.load(PolicyJob, ROOT / "configs/own/one_gpu.yaml", environ={}, cwd=ROOT)
    assert code == 0
    assert job.learner.lora == one_gpu.learner.lora and job.learner.sync_transport == "ipc"
    assert job.learner.gradient_checkpointing and not job.rollout.enforce_eager
    assert (job.rollout.gpus, job.learner.gpus) == (one_gpu.rollout.gpus, one_gpu.learner.gpus)
    assert [shape.num_hidden_layers for shape in shapes] == [28]


def test_a_loss_that_is_another_one_is_a_no(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, report = check(monkeypatch, tmp_path, Jobs(gpu=1.01), "rank", gpus=1)
    assert code == 3
    assert report["items"][0]["answer"] == "no"
    assert "0.01 of its size" in report["items"][0]["why"]


def test_a_failed_or_hanging_job_reports_its_last_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs = Jobs()
    jobs.fails = True
    code, report = check(monkeypatch, tmp_path, jobs, "world")
    assert (code, report["items"][0]["why"]) == (3, "RunStopped: jobs.train_policy: no rollout worker is left")
    jobs.hangs = True
    assert "did not end within" in check(monkeypatch, tmp_path, jobs, "world")[1]["items"][0]["why"]


def test_the_last_output_of_engines_stays_with_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "worker-1.err").write_text("".join(f"{i}\n" for i in range(100)) + "ValueError: no room for a cache\n")
    (logs / "worker-2.out").write_text("of no interest\n")
    collect_last_output = gpu_check.collect_last_output
    monkeypatch.setattr(gpu_check, "collect_last_output", lambda: collect_last_output(logs))
    jobs = Jobs()
    jobs.fails = True
    check(monkeypatch, tmp_path / "out", jobs, "world")
    first, *others, last = (tmp_path / "out" / "world-workers.log").read_text().splitlines()
    assert (first, last) == ("worker-1.err:", "ValueError: no room for a cache")
    assert len(others) < 100
    assert (tmp_path / "out" / "world.log").read_text().startswith("a warning")


def test_an_engine_is_measured_with_joined_outputs_and_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed: list[bool] = []

    class Fleet:
        role = "rollout"
        is_ready = False

        def __init__(self, model: str, config: RolloutConfig, **place: Any) -> None:
            self.config = config

        def wait_ready(self, should_stop: Any) -> None: ...

        async def supervise(self) -> None:
            await asyncio.Event().wait()

        def close(self) -> None:
            closed.append(self.config.join_outputs)

    async def measure(fleet: Fleet, prompts: list[int]) -> dict[str, Any]:
        return {"joins": fleet.config.join_outputs, "prompts": prompts}

    monkeypatch.setattr("jobs.common.fleets.RolloutFleet", Fleet)
    monkeypatch.setattr("jobs.common.fleets.on_cluster", nullcontext)
    monkeypatch.setattr("jobs.train_policy.policy_data.read_data", lambda job: SimpleNamespace(prompts=[1, 2]))
    monkeypatch.setattr(gpu_check, "measure", measure)
    figures = gpu_check.engine(gpu_check.Machine(out=tmp_path, gpus=0, timeout_s=1))
    assert figures == {
        "joined": {"joins": True, "prompts": [1, 2]}, "token_by_token": {"joins": False, "prompts": [1, 2]}
    }  # fmt: skip
    assert closed == [True, False]


def test_an_engine_gets_supported_calls_and_its_successor_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[int] = []

    class Handle:
        def __init__(self) -> None:
            self.sample = SimpleNamespace(remote=self._sample)

        async def _sample(self, *arguments: Any) -> Any:
            bound = inspect.signature(RolloutWorker.sample).bind(None, *arguments)
            requests.append(bound.arguments["index"])
            return SimpleNamespace(response_ids=[1, 2, 3])

    class Fleet:
        def __init__(self) -> None:
            self.workers = [SimpleNamespace(handle=Handle())]

        def serving(self) -> list[Any]:
            return self.workers

        async def sample(self, prompt: Prompt, sampling: Sampling) -> list[Any]:
            return [await self.workers[0].handle.sample.remote(prompt.prompt_id, prompt.prompt_ids, sampling, 0)] * 4

    fleet = Fleet()

    def kill(handle: Any) -> None:
        assert handle is fleet.workers[0].handle
        fleet.workers = [SimpleNamespace(handle=Handle())]

    monkeypatch.setattr(ray, "kill", kill)
    prompts = [Prompt(prompt_id=str(i), prompt_ids=np.arange(3, dtype=np.int32), prompt_text="", task="") for i in "ab"]
    figures = asyncio.run(gpu_check.measure(fleet, prompts))  # type: ignore[arg-type]
    assert figures.keys() == {"compiling_tokens_per_s", "bare_tokens_per_s", "fleet_tokens_per_s", "successor_s"}
    assert sorted(requests[:8]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert figures["bare_tokens_per_s"] > 0
