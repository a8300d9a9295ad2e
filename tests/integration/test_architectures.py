"""The families of model that users bring: two steps of PPO, weight sync, and the export in plain transformers."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import random_model

from actors.engines.rollout import RolloutFleet
from actors.learner.learner import LearnerGroup
from jobs.common.cli import StopFlag
from jobs.common.fleets import Fleets
from jobs.train_policy.policy_data import PolicyData, read_data
from jobs.train_policy.policy_training import PolicyTraining
from t2g.config import PolicyJob
from t2g.data.prompts import make_prompts
from t2g.interfaces import FeedbackSource, Sampling
from t2g.runs.log import METRICS_FILE, read_records
from t2g.tasks.prompts_only import PromptsTask
from t2g.types import Rollout

MAX_GAP = 2e-4  # nats, float32, between the learner and transformers on the export, and between that and an engine
PROBE = np.arange(48, dtype=np.int32) * 5 + 3
FULL: dict[str, Any] = {"policy": {"lr": 1e-3}}
LORA: dict[str, Any] = {"policy": {"lr": 1e-2}, "lora": {"r": 4, "alpha": 16}}
MERGED = LORA | {"sync_adapters": False}
CRITIC = LORA | {"gradient_checkpointing": True, "critic_ranks": {"cpus": 0.25, "memory_gib": 1}}
DENSE = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma4_text", "phi3", "mistral", "olmo2", "granite", "opt",
    "gpt_neox", "cohere2",
)  # fmt: skip
EXPERTS = ("qwen3_moe", "glm4_moe")  # vLLM loads their adapters on GPUs only
CHECKPOINTED: dict[str, Any] = {"gradient_checkpointing": True}
QUICK = ("opt", LORA | CHECKPOINTED)  # positions are learned, linear layers have biases, and there is dropout
SLOW = [
    *((name, FULL) for name in (*DENSE, *EXPERTS)),
    *((name, LORA) for name in DENSE),
    ("opt", FULL | CHECKPOINTED),
    ("qwen3_moe", MERGED),
    ("qwen2", CRITIC),
]


def judge(prompt: str, response: str) -> tuple[str, list[str], list[str]]:
    """The first letter is good and the last one poor, each in half of the responses: equal ones would move nothing."""
    letters = response.strip()
    good = letters[:1] if letters and ord(letters[0]) % 2 else ""
    poor = letters[-1:] if len(letters) > 1 and ord(letters[-1]) % 2 else ""
    return "mixed", [good] if good else [], [poor] if poor else []


def job(folder: Path, learner: dict[str, Any]) -> PolicyJob:
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_model_len": 96, "max_new_tokens": 12}
    values = {
        "run": {"root": folder / "runs", "name": "shape"},
        "model": {"policy": str(folder / "model")},
        "data": {"path": str(folder / "prompts.jsonl")},
        "num_steps": 2,
        "rollout": rollout,
        "feedback": {"source": f"{__name__}:judge"},
        "learner": {"num_epochs": 1, **learner},
        "log": {"trackers": []},
    }
    return PolicyJob.model_validate(values)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished run, and what its learner and an engine computed at its end."""

    config: PolicyJob
    data: PolicyData
    probe_logprobs: np.ndarray  # of the learner
    rollouts: list[Rollout]  # of the engine with the last weights

    @property
    def policy(self) -> Path:
        return self.config.run.folder / "policy"


def train_family(folder: Path, architecture: str, learner: dict[str, Any]) -> Trained:
    random_model(folder / "model", architecture, seed=3)
    rows = [f'{{"prompt": "Say what is wrong. It always hums, {i} times."}}\n' for i in range(8)]
    (folder / "prompts.jsonl").write_text("".join(rows))
    config = job(folder, learner)
    data = read_data(config)
    probes: list[np.ndarray] = []

    def read_learner(_: RolloutFleet, __: FeedbackSource, learner: LearnerGroup) -> None:
        probes.append(learner.compute_probe_logprobs(PROBE))

    with Fleets() as fleets:
        rollouts, feedback = fleets.for_policy(config, data.task)
        training = PolicyTraining(
            config=config,
            data=data,
            rollouts=rollouts,
            feedback=feedback,
            stop=StopFlag(),
            on_finished=read_learner,
        )
        training.run()
        return Trained(
            config=config, data=data, probe_logprobs=probes[0], rollouts=sample(rollouts, data.tokenizer)
        )  # fmt: skip


def sample(rollouts: RolloutFleet, tokenizer: object) -> list[Rollout]:
    prompts = make_prompts([{"prompt": "My name is José."}], PromptsTask(), tokenizer, 80)
    sampling = Sampling(num_samples=4, temperature=1.0, max_new_tokens=12, seed=5)
    return asyncio.run(rollouts.sample(prompts[0], sampling))


def plain_logprobs(folder: Path, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """Of each token but the first, by transformers on a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    result = []
    for sequence in sequences:
        ids = torch.tensor(sequence, dtype=torch.long)[None]
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        result.append(logprobs[range(len(sequence) - 1), ids[0, 1:]].numpy())
    return result


def check_family(folder: Path, architecture: str, learner: dict[str, Any]) -> Trained:
    """Train two steps; hold the export against the learner, an engine with the last weights, and the base."""
    trained = train_family(folder, architecture, learner)
    steps = list(read_records(trained.config.run.folder / METRICS_FILE))
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["sync/probe_gap"] < MAX_GAP for row in steps)
    assert all(row["importance/p95"] == pytest.approx(1, abs=MAX_GAP) for row in steps)  # no dropout in an update

    sequences = [np.concatenate([r.prompt_ids, r.response_ids]) for r in trained.rollouts]
    by_folder = [plain_logprobs(p, [PROBE, *sequences]) for p in (trained.policy, folder / "model")]
    (probe, *after), (probe_before, *before) = by_folder
    np.testing.assert_allclose(trained.probe_logprobs, probe, atol=MAX_GAP)
    assert np.abs(probe - probe_before).max() > 10 * MAX_GAP
    for rollout, now, then in zip(trained.rollouts, after, before, strict=True):
        response = slice(len(rollout.prompt_ids) - 1, None)
        np.testing.assert_allclose(rollout.rollout_logprobs, now[response], atol=MAX_GAP)
        assert np.abs(now - then).max() > 10 * MAX_GAP
    return trained


@pytest.mark.usefixtures("cluster")
def test_a_family_trains_and_exports_what_was_trained(tmp_path: Path) -> None:
    check_family(tmp_path, *QUICK)


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow  # two engines and a learner group each
@pytest.mark.parametrize(("architecture", "learner"), SLOW)
def test_families_train_and_vllm_serves_the_export(architecture: str, learner: dict[str, Any], tmp_path: Path) -> None:
    trained = check_family(tmp_path, architecture, learner)
    config = trained.config
    exported = config.model.model_copy(update={"policy": str(trained.policy)})
    with Fleets() as fleets:
        served = sample(fleets.rollouts(exported, config.rollout, config), trained.data.tokenizer)
    assert [r.response_ids.tolist() for r in served] == [r.response_ids.tolist() for r in trained.rollouts]
