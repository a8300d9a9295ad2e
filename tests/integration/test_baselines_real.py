"""The three baselines on the real stack: vLLM engines of base, reviser and result, trained ranks. Random weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from jobs.common.cli import StopFlag
from jobs.common.fleets import Fleets
from jobs.train_policy.baseline_runs import run_baseline
from jobs.train_policy.policy_data import read_data
from jobs.train_policy.policy_results import load_finished_summary
from t2g.config import PolicyJob, WorldConfig
from t2g.runs.log import METRICS_FILE, read_records
from t2g.tasks.tiny.assets import build_model, build_tokenizers
from t2g.tasks.tiny.world import write_world

pytestmark = pytest.mark.slow  # seven engines


def make_responses_end(folder: Path, eos_token_id: int) -> None:
    """Let six of ten random responses end within 16 tokens; with 575 equally likely tokens few would.

    The logit of the end is 5 times one value of the last hidden state, whose mean square is 1.
    """
    weights = load_file(folder / "model.safetensors")
    end = weights["lm_head.weight"][eos_token_id].zero_()
    end[0] = 5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> PolicyJob:
    folder = tmp_path_factory.mktemp("world")
    paths = write_world(folder, WorldConfig(num_train=8, num_heldout=4, seed=1))
    tokenizer, _ = build_tokenizers(folder)
    build_model(
        folder / "policy", tokenizer, num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=96,
        max_position_embeddings=1024,
    )  # fmt: skip
    make_responses_end(folder / "policy", tokenizer.eos_token_id)
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 3, "max_model_len": 128, "max_new_tokens": 16}
    feedback = {"source": "program", "engine": {"max_model_len": 896, "max_new_tokens": 64}}
    learner = {"workers": 1, "memory_gib": 0.5, "num_epochs": 2, "policy": {"lr": 1e-3}}
    values = {
        "run": {"root": folder / "runs"},
        "task": "tiny",
        "model": {"policy": str(folder / "policy")},
        "data": {"path": str(paths["train"])},
        "eval_data": {"path": str(paths["heldout"])},
        "num_steps": 2,
        "rollout": rollout,
        "feedback": feedback,
        "learner": learner,
    }
    return PolicyJob.model_validate(values)


@pytest.fixture(scope="module")
def fleets(cluster: None) -> Iterator[Fleets]:
    with Fleets() as opened:
        yield opened


@pytest.mark.parametrize(("method", "samples"), [("reflection", 0), ("ilf", 24), ("dpo", 24)])
def test_a_baseline_runs_and_is_kept(job: PolicyJob, fleets: Fleets, method: str, samples: int) -> None:
    method_job = job.model_copy(update={"run": job.run.model_copy(update={"name": method})})
    data = read_data(method_job)
    feedback = fleets.feedback(method_job.feedback, data.task, method_job)
    summary = run_baseline(method_job, data, feedback, StopFlag(), procedure=method)
    assert (summary["steps"], summary["samples"]) == (2, samples)
    folder = method_job.run.folder
    first, last = read_records(folder / METRICS_FILE)
    assert (first["step"], last["step"]) == (0, 2)
    assert summary["base"]["score"] == first["eval/score"]
    assert summary["policy"]["score"] == last["eval/score"]
    assert (folder / "policy" / "model.safetensors").exists() == (method != "reflection")
    assert load_finished_summary(method_job, procedure=method, reviser=None) == summary
