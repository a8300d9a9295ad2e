"""Paths and windows of artifacts are those of their files before the config of a job exists."""

from pathlib import Path

import pytest

from t2g.config import CompareJob, DemoJob, PolicyJob, loading
from t2g.config.artifacts import find_artifacts, is_made_later, load_demo
from t2g.errors import UserError

DEMO = "run: {name: world}\nworld: {num_facts: 10}\n"
JOB = """\
artifacts: demo.yaml
model: {policy: "${artifacts}/base/model"}
data: {path: ["${artifacts}/world/train.jsonl", own.jsonl]}
feedback: {source: reward_model, reward_model: "${artifacts}/reward/model"}
rollout: {max_new_tokens: 90}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "demo.yaml").write_text(DEMO)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def load(folder: Path, *overrides: str) -> PolicyJob:
    return loading.load(PolicyJob, folder / "job.yaml", overrides, environ={}, cwd=folder)


def test_a_config_has_the_folder_and_the_windows_of_its_artifacts(folder: Path) -> None:
    job = load(folder)
    artifacts = folder / "runs" / "world"
    assert find_artifacts(job) == artifacts
    assert job.model.policy == str(artifacts / "base" / "model")
    assert job.data.paths == (str(artifacts / "world" / "train.jsonl"), "own.jsonl")
    assert (job.rollout.max_new_tokens, job.rollout.max_model_len) == (90, 256), "a window that is set stays"
    assert (job.feedback.engine.max_model_len, job.feedback.engine.max_spans) == (768, 24)
    assert is_made_later(job.model.policy, artifacts)
    assert not is_made_later("own.jsonl", artifacts)


def test_each_source_of_several_has_the_windows(folder: Path) -> None:
    sources = "{facts: {source: program}, style: {reward_model: '${artifacts}/reward/model'}}"
    (folder / "job.yaml").write_text(
        JOB.replace("feedback: {source: reward_model,", "feedback: {").split("feedback:")[0]
    )
    job = load(folder, f"feedback.sources={sources}")
    engines = [source.engine for source in job.feedback_sections.values()]
    assert [engine.max_model_len for engine in engines] == [768, 768]


def test_a_job_that_shares_gpus_uses_artifacts_of_a_written_config(folder: Path) -> None:
    """As jobs.gpu_check does: a written config has every default, and so learner.sync_transport=store."""
    demo = loading.load(DemoJob, folder / "demo.yaml", [], environ={}, cwd=folder)
    file = loading.write(demo, folder / "written")
    shared = ["cluster.gpu_sharing=split", "rollout.gpus=0.6", "learner.gpus=0.4", "feedback={source: program}"]
    job = load(folder, f"artifacts={file}", *shared)
    assert job.learner.sync_transport == "ipc"
    loaded_demo = load_demo(job)
    assert loaded_demo is not None
    assert (loaded_demo.cluster.gpu_sharing, loaded_demo.learner.sync_transport) == ("none", "store")


def test_the_root_of_the_job_is_that_of_its_artifacts(folder: Path) -> None:
    root = folder / "a: b"
    job = load(folder, f'run.root="{root}"')
    demo = load_demo(job)
    assert demo is not None
    assert demo.run.folder == root / "world"
    assert job.model.policy == str(root / "world" / "base" / "model")


def test_a_written_config_is_read_without_the_file_of_its_artifacts(folder: Path) -> None:
    job = load(folder)
    written = loading.write(job, folder / "run")
    (folder / "demo.yaml").unlink()
    assert loading.load(PolicyJob, written, environ={}, cwd=folder) == job


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["artifacts=nowhere.yaml"], "nowhere.yaml: the config cannot be read"),
        (["artifacts=null"], r"model\.policy=\$\{artifacts\}/base/model: .* set artifacts"),
        (["artifacts=nowhere.yaml", "num_step=3"], r"num_step is unknown"),
        (["artifacts=own.yaml"], r"own.yaml:1: world\.facts is unknown"),
    ],
)
def test_artifacts_that_cannot_be_resolved_are_refused(folder: Path, overrides: list[str], sentence: str) -> None:
    (folder / "own.yaml").write_text("world: {facts: 3}\n")
    with pytest.raises(UserError, match=sentence):
        load(folder, *overrides)


def test_a_comparison_has_them_too(folder: Path) -> None:
    job = loading.load(CompareJob, folder / "job.yaml", ["eval_data={path: x}"], environ={}, cwd=folder)
    assert job.model.policy == str(folder / "runs" / "world" / "base" / "model")
