"""The tiny policy job is the demo's method span; artifacts are made once and refuse other settings."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from actors.cluster import placement
from configs import differing
from jobs.artifacts import demo_artifacts
from jobs.artifacts.demo_artifacts import demo_of, load_or_run, make_demo_artifacts, sft_job
from jobs.common.fleets import Fleets
from jobs.demo.__main__ import PURPOSES, method_job, run, select_facts, table
from t2g.config import DemoJob, Placement, PolicyJob, SFTJob, WorldConfig, loading
from t2g.errors import UserError

TINY = Path(__file__).parents[3] / "configs" / "tiny"


def test_the_tiny_policy_job_is_the_method_span_of_the_demo(tmp_path: Path) -> None:
    root = f"run.root={tmp_path}"
    job = loading.load(PolicyJob, TINY / "policy.yaml", [root])
    demo = demo_of(job)
    assert demo is not None and demo.run.root == tmp_path
    method = method_job(loading.load(DemoJob, TINY / "demo.yaml", [root]), "span")
    assert differing(job, method) == {"run.name", "run.root", "artifacts"}
    assert job.feedback.reward_model == str(tmp_path / "demo" / "reward" / "model")


def test_the_world_of_code_has_a_world_and_a_base_policy_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_artifacts, "train_supervised", lambda job, examples, title: {"examples": len(examples)})
    overrides = [f"run.root={tmp_path}", "world.num_train=8", "world.num_heldout=200"]
    demo = loading.load(DemoJob, TINY / "code.yaml", overrides)
    results = make_demo_artifacts(demo, Fleets())  # which starts none
    assert list(results) == ["world", "base"]
    assert results["base"]["examples"] == 8
    assert 0.05 < results["world"]["references_passed"] < 0.25  # .13 of a thousand
    assert (tmp_path / "code" / "world" / "policy" / "model.safetensors").exists()
    with pytest.raises(UserError, match="task=tiny_code has no reward model"):
        run(demo)


def test_the_artifacts_of_a_job_need_no_root_of_their_own(tmp_path: Path) -> None:
    root = tmp_path / "a: b"
    script = (
        "import pathlib, sys\nfrom jobs.artifacts.demo_artifacts import demo_of\n"
        "from t2g.config import PolicyJob, loading\n"
        "print(demo_of(loading.load(PolicyJob, pathlib.Path(sys.argv[1]), [sys.argv[2]])).run.folder)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script, TINY / "policy.yaml", f'run.root="{root}"'],
        env={**os.environ, loading.JOB_ENV: "{}"}, cwd=TINY.parents[1], capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    assert printed.stdout.strip() == str(root / "demo")


def test_the_folder_of_the_artifacts_stands_in_each_path_of_a_list(tmp_path: Path) -> None:
    overrides = [f"run.root={tmp_path}", "data.path=['${artifacts}/world/train.jsonl',own.jsonl]"]
    job = loading.load(PolicyJob, TINY / "policy.yaml", overrides)
    assert job.data.paths == (f"{tmp_path}/demo/world/train.jsonl", "own.jsonl")
    assert job.eval_data.path == f"{tmp_path}/demo/world/heldout.jsonl"


def test_artifacts_that_leave_it_open_are_made_on_the_gpus_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = tmp_path / "artifacts.yaml"
    artifacts.write_text("policy_sft: {gpus: auto, dtype: auto}\n")
    requests: list[Any] = []
    monkeypatch.setattr(placement, "resources", lambda address: requests.append(address) or {"GPU": 1})
    overrides = [f"run.root={tmp_path}", f"artifacts={artifacts}", "cluster.address=head:6379"]
    demo = demo_of(loading.load(PolicyJob, TINY / "policy.yaml", overrides))
    assert demo is not None
    assert (demo.policy_sft.gpus, demo.policy_sft.dtype) == (1, "bfloat16")
    assert requests == ["head:6379"]


def test_an_artifact_is_made_once_and_again_only_if_it_was_cut_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def make() -> dict[str, float]:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("killed")
        return {"records": 7.0}

    with pytest.raises(RuntimeError, match="killed"):
        load_or_run(tmp_path / "world", WorldConfig(seed=3), make)
    first = load_or_run(tmp_path / "world", WorldConfig(seed=3), make)
    assert load_or_run(tmp_path / "world", WorldConfig(seed=3), make) == first
    assert (len(calls), first["records"]) == (2, 7.0)
    assert first["seconds"] >= 0
    purpose = f"phase world: {demo_artifacts.PURPOSES['world']} ..."
    skipped = "phase world: kept, it took 0 s in an earlier start"
    assert capsys.readouterr().err.splitlines() == [purpose, purpose, "phase world: 0 s", skipped]
    with pytest.raises(UserError, match=r"world was made with other inputs: seed \(3 -> 4\)"):
        load_or_run(tmp_path / "world", WorldConfig(seed=4), make)


def test_a_demo_that_was_moved_goes_on_with_its_artifacts_and_no_other_contents(tmp_path: Path) -> None:
    def base(root: str, *overrides: str) -> SFTJob:
        return sft_job(loading.load(DemoJob, TINY / "demo.yaml", [f"run.root={tmp_path / root}", *overrides]))

    def make() -> dict[str, float]:
        calls.append(1)
        return {"loss": 0.5}

    calls: list[int] = []
    here = base("here")
    there = base("there")
    for file in (Path(here.model.policy) / "model.safetensors", Path(here.data.path)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    first = load_or_run(here.run.folder, here, make)
    (tmp_path / "here").rename(tmp_path / "there")
    assert load_or_run(there.run.folder, there, make) == first
    assert calls == [1]

    Path(there.data.path).write_text("{ }")
    with pytest.raises(UserError, match=r"base was made with other inputs: the content of data\.path") as error:
        load_or_run(there.run.folder, there, make)
    (token,) = re.findall(r"data:[0-9a-f]{16}", str(error.value))
    accepted = base("there", f"run.accept=[{token}]")
    assert load_or_run(accepted.run.folder, accepted, make) == load_or_run(there.run.folder, there, make) == first


def test_the_log_gives_the_purpose_of_every_phase() -> None:
    assert PURPOSES.keys() == set(get_args(Placement))
    assert demo_artifacts.PURPOSES.keys() == {"world", "base", "annotated", "reward", "reviser", "follower"}


def test_the_table_has_a_row_for_the_base_and_one_for_each_method() -> None:
    beside = {"fact_precision": 0.5, "fact_recall": 0.25, "repeated": 0.125, "length_mean": 15.0, "clauses": 4.0}

    def row(f1: float) -> dict[str, float]:
        return select_facts({"fact_f1": f1, **beside})

    text = table({"base": row(0.6), "methods": {"span": row(0.9), "scalar": row(0.7)}, "samples": 128, "steps": 2})
    rows = [re.split(r" *\| *", line.strip("| ")) for line in text.splitlines()]
    assert rows[2] == ["base", "0.600", "0.500", "0.250", "0.125", "15.0"]
    assert [row[:2] for row in rows[3:5]] == [["span", "0.900"], ["scalar", "0.700"]]
    assert text.endswith("128 sampled responses in each method, 2 steps")
