"""Policies evaluated on real engines: greedy twice is the same to the last character, and the whole job by itself."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import own_runs
import pytest
from models import byte_llama

from actors.engines.rollout import RolloutFleet
from jobs.common.cli import StopFlag
from jobs.evaluate.policy_evaluation import Evaluation
from t2g.config import ModelConfig, PolicyEvaluationJob

ROWS = [{"id": str(i), "post": f"post {i}", "ideal_human_summary": f"number {i} of eight"} for i in range(8)]


def data_of(tmp_path: Path) -> Path:
    path = tmp_path / "heldout.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def talking(folder: Path) -> Path:
    """The model of `folder`, with a chat template."""
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return folder


def responses(folder: Path, name: str) -> str:
    return (folder / "responses" / name / "responses.jsonl").read_text()


def test_two_greedy_policies_of_the_same_weights_differ_by_exactly_nothing(
    rollout_fleet: RolloutFleet, policy: Path, tmp_path: Path
) -> None:
    model = talking(shutil.copytree(policy, tmp_path / "model"))
    config = PolicyEvaluationJob.model_validate(
        {
            "run": {"root": tmp_path, "name": "e"},
            "task": "summarization",
            "policies": {name: {"policy": str(model)} for name in ("once", "again")},
            "data": {"path": str(data_of(tmp_path))},
            "rollout": {"temperature": 0, "max_model_len": 640, "max_new_tokens": 16},
        }
    )

    @contextmanager
    def serve(model: ModelConfig) -> Iterator[RolloutFleet]:
        yield rollout_fleet

    result = Evaluation(config).run(serve, StopFlag())
    assert sorted(responses(config.run.folder, "once")) == sorted(responses(config.run.folder, "again"))
    assert result["policies"]["once"]["words"]["value"] > 0
    assert {(one["value"], one["low"], one["high"]) for one in result["pairs"]} == {(0, 0, 0)}
    assert "Every pair ties" in result["warning"]


@pytest.mark.slow
def test_the_job_serves_one_policy_after_the_other_and_generates_nothing_twice(tmp_path: Path) -> None:
    for seed, name in enumerate(("base", "new")):
        byte_llama(tmp_path / name, seed=seed)
        talking(tmp_path / name)
    (tmp_path / "e.yaml").write_text("rollout: {max_model_len: 640, max_new_tokens: 16, kv_cache_gib: 0.1}")
    requests = [
        sys.executable, "-m", "jobs.evaluate", "--what", "policy", "--config", str(tmp_path / "e.yaml"),
        f"run.root={tmp_path}", "run.name=e", "task=summarization", f"data.path={data_of(tmp_path)}",
        *(f"policies.{name}.policy={tmp_path / name}" for name in ("base", "new")),
    ]  # fmt: skip

    def job() -> dict[str, str]:
        code = own_runs.start(requests, tmp_path / "log").wait(timeout=280)
        assert code == 0, (tmp_path / "log").read_text()
        return {name: responses(tmp_path / "e", name) for name in ("base", "new")}

    texts = job()
    assert "| new | base | rougeL |" in (tmp_path / "log").read_text()
    assert texts["base"] != texts["new"]
    assert {text.count("\n") for text in texts.values()} == {len(ROWS)}
    assert job() == texts
