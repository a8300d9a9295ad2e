"""The shapes of model that users bring: load, a step of PPO, weight sync, export, and vLLM on the export."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import random_model

from actors.engines.rollout import RolloutFleet
from jobs.common.cli import StopFlag
from jobs.common.fleets import Fleets
from jobs.common.policy_runs import read_data, train
from t2g.config import PolicyJob
from t2g.data.prompts import make_prompts
from t2g.interfaces import Sampling
from t2g.tasks.prompts_only import PromptsTask

MAX_GAP = 2e-4  # nats, float32, between the engine on the export and transformers on the same folder


def judge(prompt: str, response: str) -> tuple[str, list[str], list[str]]:
    """The first letter is good and the last one poor, each in half of the responses: equal ones would move nothing."""
    letters = response.strip()
    good = letters[:1] if letters and ord(letters[0]) % 2 else ""
    poor = letters[-1:] if len(letters) > 1 and ord(letters[-1]) % 2 else ""
    return "mixed", [good] if good else [], [poor] if poor else []


ADAPTERS = {
    "policy": {"lr": 1e-2},
    "lora": {"r": 4, "alpha": 16},
    "gradient_checkpointing": True,
    "critic_ranks": {"cpus": 0.25, "memory_gib": 1},
}


MERGED = {"policy": {"lr": 1e-2}, "lora": {"r": 4, "alpha": 16}, "sync_adapters": False}


def job(folder: Path, learner: dict[str, Any]) -> PolicyJob:
    return PolicyJob.model_validate(
        {
            "run": {"root": folder / "runs", "name": "shape"},
            "model": {"policy": str(folder / "model")},
            "data": {"path": str(folder / "prompts.jsonl")},
            "num_steps": 1,
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_model_len": 96, "max_new_tokens": 12},
            "feedback": {"source": f"{__name__}:judge"},
            "learner": {"policy": {"lr": 1e-3}, "num_epochs": 1, **learner},
            "log": {"tensorboard": False},
        }
    )


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow  # two engines and a learner group each
@pytest.mark.parametrize(
    ("architecture", "learner"),
    [
        *((name, {}) for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma4_text", "glm4_moe")),
        ("qwen2", ADAPTERS),
        ("qwen3_moe", MERGED),
    ],
)
def test_a_step_moves_the_policy_and_vllm_serves_the_export(
    architecture: str, learner: dict[str, Any], tmp_path: Path
) -> None:
    random_model(tmp_path / "model", architecture, seed=3)
    rows = [f'{{"prompt": "Say what is wrong. It always hums, {i} times."}}\n' for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    config = job(tmp_path, learner)
    data = read_data(config)
    with Fleets() as fleets:
        rollouts, feedback = fleets.for_policy(config, data.task)
        summary = train(config, data, rollouts, feedback, StopFlag())
        synced = sample(rollouts, config, data.tokenizer)
    assert summary is not None and summary["steps"] == 1

    exported = config.model.model_copy(update={"policy": str(config.run.folder / "policy")})
    with Fleets() as fleets:
        served = sample(fleets.rollouts(exported, config.rollout, config), config, data.tokenizer)
    assert [r.response_ids.tolist() for r in served] == [r.response_ids.tolist() for r in synced]
    after, before = (learnt_logprobs(Path(p), served) for p in (exported.policy, config.model.policy))
    for rollout, now, then in zip(served, after, before, strict=True):
        np.testing.assert_allclose(rollout.rollout_logprobs, now, atol=MAX_GAP)
        assert np.abs(now - then).max() > 10 * MAX_GAP


def sample(rollouts: RolloutFleet, config: PolicyJob, tokenizer: object) -> list:
    prompts = make_prompts([{"prompt": "My name is José."}], PromptsTask(), tokenizer, 80)
    sampling = Sampling(num_samples=4, temperature=1.0, max_new_tokens=12, seed=5)
    return asyncio.run(rollouts.sample(prompts[0], sampling))


def learnt_logprobs(folder: Path, rollouts: list) -> list[np.ndarray]:
    """Of each response's tokens, by transformers on a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    result = []
    for rollout in rollouts:
        ids = torch.tensor(np.concatenate([rollout.prompt_ids, rollout.response_ids]), dtype=torch.long)[None]
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        start = len(rollout.prompt_ids)
        result.append(logprobs[range(start - 1, ids.shape[1] - 1), ids[0, start:]].numpy())
    return result
