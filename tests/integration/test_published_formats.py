"""Two PPO steps on each of the published formats: a user's files as they are, real engines, a real learner.

Policy and reward model have random weights, but for a head that prefers two letters: the quotes of one character that
guided decoding makes the reward model write then occur in a response, and there is something to learn from.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import random_model

from jobs.common.cli import StopFlag
from jobs.common.fleets import Fleets
from jobs.train_policy.policy_data import read_data
from jobs.train_policy.policy_training import PolicyTraining
from t2g.config import PolicyJob, StyleConfig, loading
from t2g.feedback.card import CARD_FILE, make_card, write_card
from t2g.tasks.base import get_task

DATA = Path(__file__).parents[1] / "data"
CONFIGS = Path(__file__).parents[2] / "configs"
NUM_STEPS = 2
WINDOW = 1536
REWARD_ENGINE = {
    "max_model_len": 2048, "max_new_tokens": 200, "max_critique_chars": 16, "max_spans": 2, "max_quote_chars": 1,
    "memory_gib": 1.5, "gpus": 0, "dtype": "float32", "workers": 1, "cpus": 0.5,
}  # fmt: skip


def letter_model(folder: Path, seed: int) -> Path:
    """The logits of a and e are 12 and -12 times one value of the last hidden state, whose mean square is 1."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    random_model(folder, "llama", seed=seed)
    first, second = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["a", "e"])
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"].zero_()
    head[first, 0] = 12
    head[second, 0] = -12
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The policy, and a reward model for each of the formats that have one."""
    folder = tmp_path_factory.mktemp("models")
    models = {"policy": letter_model(folder / "policy", seed=1)}
    for name, task in (("slf5k", "summarization"), ("ultrafeedback", "qa")):
        models[name] = letter_model(folder / name, seed=2)
        write_card(models[name], make_card(get_task(task), StyleConfig()))
    return models


@pytest.fixture(scope="module")
def fleets(cluster: None) -> Iterator[Fleets]:
    """One rollout engine for the three runs, since they have one policy."""
    with Fleets() as fleets:
        yield fleets


def overrides(models: dict[str, Path], run: Path, data: Path) -> list[str]:
    """What a laptop changes of a config that is made for eight GPUs."""
    role = {"workers": 1, "cpus": 0.5, "gpus": 0, "dtype": "float32", "memory_gib": 1.5}
    rollout = role | {"max_model_len": WINDOW, "max_new_tokens": 24, "prompts_per_step": 4, "samples_per_prompt": 2}
    learner = role | {"tokens_per_microbatch": 2 * WINDOW, "num_epochs": 1}
    values: dict[str, Any] = {
        "run.root": str(run),
        "model.policy": str(models["policy"]),
        "data.path": str(data),
        "num_steps": NUM_STEPS,
        "cluster.object_store_gib": 0.1,
    }
    values |= {f"rollout.{key}": value for key, value in rollout.items()}
    values |= {f"learner.{key}": value for key, value in learner.items()}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


@pytest.mark.slow  # an engine or two and a learner group each
@pytest.mark.parametrize(
    ("task", "file", "source"),
    [
        ("slf5k", "slf5k.json", "reward_model"),
        ("ultrafeedback", "ultrafeedback.json", "reward_model"),
        ("kodcode", "kodcode.jsonl", "program"),
    ],
)
def test_two_steps(
    task: str,
    file: str,
    source: str,
    models: dict[str, Path],
    fleets: Fleets,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from transformers import AutoModelForCausalLM

    requests = [*overrides(models, tmp_path, DATA / file), f"feedback.source={source}"]
    if source == "reward_model":
        requests += [f"feedback.reward_model={models[task]}"]
        requests += [f"feedback.engine.{key}={json.dumps(value)}" for key, value in REWARD_ENGINE.items()]
    if task == "kodcode":
        requests.append("feedback.sandbox.tests=separate")  # auto leaves out records whose solution has a seeded fault
    config = loading.load(PolicyJob, CONFIGS / task / "policy.yaml", requests)
    data = read_data(config)
    assert len(data.prompts) >= 12

    rollouts, feedback = fleets.for_policy(config, data.task)
    training = PolicyTraining(config=config, data=data, rollouts=rollouts, feedback=feedback, stop=StopFlag())
    summary = training.run()

    assert CARD_FILE not in caplog.text  # nothing is said of a model that answers what it is asked for
    assert summary is not None
    assert (summary["steps"], summary["samples"]) == (NUM_STEPS, NUM_STEPS * 8)
    lines = [json.loads(line) for line in (config.run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    assert len(steps) == NUM_STEPS
    for step in steps:
        assert step[f"feedback/source/{source}"] == 1.0
        assert step["feedback/failed_share"] == 0.0
        assert step["sync/probe_gap"] < 1e-3
        # The shipped configs sample a step ahead: only the first step's samples are of the weights that it trains.
        assert abs(step["gap/logprob_mean"]) < (1e-4 if step["step"] == 1 else 1e-1)
        assert math.isfinite(step["policy/loss"])
    assert any(step["tokens/neutral_share"] < 1 for step in steps)
    before, after = (
        AutoModelForCausalLM.from_pretrained(path) for path in (models["policy"], config.run.folder / "policy")
    )
    assert any(not weight.equal(after.get_parameter(name)) for name, weight in before.named_parameters())
    samples = [json.loads(line) for line in (config.run.folder / "samples.jsonl").read_text().splitlines()]
    if source == "program":  # live: the sandbox ran what the policy wrote
        assert samples
        assert all(sample["feedback"]["execution"]["passed"] is False for sample in samples)
