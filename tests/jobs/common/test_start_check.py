"""A dry run, and a start before Ray, refuse a folder that was made with other inputs."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from models import random_model

from jobs import benchmark
from jobs.common.cli import main
from jobs.common.run_folder import begin_folder, check_own_folder
from jobs.compare import __main__ as compare
from jobs.demo import __main__ as demo_job
from jobs.train_policy.policy_job import READ_DATA, check_start, run_training
from jobs.train_sft.supervised import MODEL
from t2g.config import (
    AnnotateJob,
    AnyJob,
    BenchmarkJob,
    CompareJob,
    DemoJob,
    EvaluateJob,
    PolicyEvaluationJob,
    PolicyJob,
    RewardJob,
    SFTJob,
    WorldConfig,
    loading,
    with_overrides,
)
from t2g.errors import UserError
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.identity import Identity, load_identity, save_identity, save_result

FUNCTIONS = "def judge(prompt, response): return '', [], []\n"
DATA = {"path": "data.jsonl"}
POLICY = {"model": {"policy": "model"}, "data": DATA, "feedback": {"source": "start_functions:judge"}}
REWARD_MODEL = {"feedback": {"reward_model": "reward"}}
TRAIN = POLICY | {"num_steps": 2}
COMPARE = TRAIN | {"eval_data": DATA}
SFT = {"model": {"policy": "model"}, "data": DATA}
SFT_PART = f"{MODEL}.part"
REWARD = SFT | {"eval_data": DATA}
CHECKS: dict[type[Any], Any] = {PolicyJob: check_start, CompareJob: compare.check_start}
# schema, config, file that binds the folder, changed key
JOBS: list[tuple[type[Any], dict[str, Any], str, str]] = [
    (PolicyJob, TRAIN, "config.yaml", "learner.policy.lr=0.5"),
    (CompareJob, COMPARE, "config.yaml", "rollout.temperature=0.5"),
    (SFTJob, SFT, SFT_PART, "sft.optim.lr=0.5"),
    (RewardJob, REWARD, MODEL, "sft.optim.lr=0.5"),
]
JOBS += [
    (AnnotateJob, {"data": DATA, "annotate": {"source": "program"}}, "journal.jsonl", "task=qa"),
    (EvaluateJob, {"data": DATA, **REWARD_MODEL}, "evaluation.json", "run.seed=7"),
    (PolicyEvaluationJob, {"data": DATA, "policies": {"base": {"policy": "m"}}}, "responses", "run.seed=7"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "start_functions.py").write_text(FUNCTIONS)
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "Why?"}) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def list_files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def change(config: AnyJob, change: str) -> AnyJob:
    key, value = change.split("=")
    return with_overrides(config, {key: yaml.safe_load(value)})


@pytest.mark.parametrize(("schema", "config", "binding", "changed"), JOBS)
def test_other_inputs_are_refused_and_nothing_is_written(
    folder: Path, schema: type[Any], config: dict[str, Any], binding: str, changed: str
) -> None:
    check = CHECKS.get(schema, check_own_folder)
    job = schema.model_validate(config | {"run": {"root": str(folder), "name": "own"}})
    check(job)
    save_identity(job.run.folder, Identity.from_config(job))
    other = change(job, changed)
    check(other)  # nothing binds the folder yet
    (job.run.folder / binding).touch()
    files = list_files(folder)
    check(job)
    with pytest.raises(UserError, match=changed.partition("=")[0]):
        check(other)
    assert list_files(folder) == files


def test_an_accepted_change_is_not_recorded(folder: Path) -> None:
    job = PolicyJob.model_validate(POLICY | {"run": {"root": str(folder), "name": "own"}})
    begin_folder(job)
    (folder / "data.jsonl").write_text(json.dumps({"prompt": "What?"}) + "\n")
    with pytest.raises(UserError, match=r"run\.accept=\[(.*)\]'? goes on") as refusal:
        check_start(job)
    accepted = str(refusal.value).partition("run.accept=[")[2].partition("]")[0]
    check_start(with_overrides(job, {"run.accept": [accepted]}))
    assert load_identity(job.run.folder).accepted == ()


def test_fewer_steps_than_are_done_are_no_other_inputs(folder: Path) -> None:
    job = PolicyJob.model_validate(POLICY | {"run": {"root": str(folder), "name": "own"}, "num_steps": 9})
    begin_folder(job)
    CheckpointStore(job.run.folder / "checkpoints", keep=1).write(9, lambda folder: None, {"step": 9})
    check_start(with_overrides(job, {"num_steps": 5}))
    with pytest.raises(UserError, match=r"learner\.schedule_steps \(9 -> 12\)"):
        check_start(with_overrides(job, {"num_steps": 12}))


def test_artifacts_of_a_demo_and_measurements(folder: Path) -> None:
    demo = DemoJob.model_validate({"run": {"root": str(folder), "name": "demo"}})
    world = demo.run.folder / "world"
    save_result(world, Identity.from_config(demo.world), "stage.json", {})
    demo_job.check_start(demo)
    with pytest.raises(UserError, match=r"world was made with other inputs: num_train"):
        demo_job.check_start(with_overrides(demo, {"world": WorldConfig(num_train=77)}))

    measured = BenchmarkJob.model_validate({"run": {"root": str(folder), "name": "benchmark"}})
    save_result(measured.run.folder, Identity.from_config(measured), "benchmark.json", {"phases": {}})
    benchmark.check_start(measured)
    with pytest.raises(UserError, match=r"other inputs: run\.seed"):
        benchmark.check_start(with_overrides(measured, {"run.seed": 7}))


@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_the_dry_run_says_what_the_start_says(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    def start_ray(**_: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", start_ray)
    random_model(folder / "model")
    file = folder / "policy.yaml"
    sizes = {"rollout": {"max_model_len": 128, "max_new_tokens": 16}}
    file.write_text(yaml.safe_dump(POLICY | sizes | {"run": {"root": str(folder), "name": "own"}}))
    begin_folder(loading.load(PolicyJob, file))
    argv = ["--config", str(file), "learner.policy.lr=0.5", *options]
    train = partial(main, PolicyJob, run_training, read=READ_DATA, check=check_start)
    assert train(argv=argv) == 2
    captured = capsys.readouterr()
    assert "nothing was found" not in captured.out
    expected = f"{folder / 'own'} was made with other inputs: learner.policy.lr (1e-06 -> 0.5)"
    assert expected in captured.err.splitlines()[-1]
    assert captured.err.endswith("No step was made in it: it can be removed\n")
    (folder / "own" / "metrics.jsonl").write_text("{}\n")
    assert train(argv=argv) == 2
    assert "can be removed" not in capsys.readouterr().err
    assert train(argv=["--config", str(file), "--dry-run"]) == 0
