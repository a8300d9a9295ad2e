"""DPO by TRL held against a loop written out: the same loss, the same weights. In this process, without Ray."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.learner.dpo import BETA, fit_dpo, split_batch
from t2g.config import LearnerConfig, LoRAConfig, ModelConfig, OptimConfig
from t2g.errors import RunStopped
from t2g.study.baselines import PreferencePair
from t2g.tasks.tiny.assets import build_model, build_tokenizer

LR = 3e-3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tokenizer = build_tokenizer(folder, ["red fox", "blue whale"], vocab_size=280)
    build_model(folder, tokenizer, num_layers=2, width=64, num_heads=2, mlp_width=96, window=64)
    return folder


def make_pairs(count: int = 6) -> list[PreferencePair]:
    """Of different lengths, so that rows are padded."""
    rng = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return rng.integers(5, 270, length).astype(np.int32)

    return [
        PreferencePair(prompt_ids=ids(3 + i % 3), chosen_ids=ids(2 + i % 4), rejected_ids=ids(5 - i % 3))
        for i in range(count)
    ]


def learner(**changes: Any) -> LearnerConfig:
    """One step a pass over all pairs, so that their order plays no part."""
    optim = OptimConfig(lr=LR, schedule="linear", max_grad_norm=0.5)
    return LearnerConfig(**{"policy": optim, "num_epochs": 2, "tokens_per_microbatch": 4096, **changes})


def run(base: Path, folder: Path, **changes: Any) -> tuple[dict[str, float], list[int]]:
    steps: list[int] = []
    metrics = fit_dpo(
        ModelConfig(policy=str(base)), learner(**changes), make_pairs(),
        batch_size=6, seed=1, out_folder=folder, on_step=steps.append,
    )  # fmt: skip
    return metrics, steps


def logprob(model: Any, pair: PreferencePair, response: np.ndarray) -> torch.Tensor:
    ids = torch.from_numpy(np.concatenate([pair.prompt_ids, response]).astype(np.int64))[None]
    logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logprobs[len(pair.prompt_ids) - 1 :].sum()


def margins(model: Any, pairs: Sequence[PreferencePair]) -> torch.Tensor:
    return torch.stack([logprob(model, p, p.chosen_ids) - logprob(model, p, p.rejected_ids) for p in pairs])


def dpo_written_out(base: Path) -> tuple[Any, list[float]]:
    """-log sigmoid(beta * (margin - margin of the base)), the mean over all pairs, in two steps of AdamW."""
    model = AutoModelForCausalLM.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=OptimConfig().betas, weight_decay=0.0)
    with torch.no_grad():
        reference = margins(model, make_pairs())
    losses = []
    for lr in (LR, LR / 2):  # linear: 1, 1/2
        optimizer.param_groups[0]["lr"] = lr
        loss = -torch.nn.functional.logsigmoid(BETA * (margins(model, make_pairs()) - reference)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


def assert_same_weights(folder: Path, expected: Any, tolerance: float) -> None:
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(found[name], weight, atol=tolerance, rtol=0, msg=name)


@pytest.mark.parametrize("token_budget", [4096, 20])
def test_training_is_the_papers_loss_on_the_sampled_ids_in_any_microbatches(
    base: Path, tmp_path: Path, token_budget: int
) -> None:
    """20 tokens a microbatch: one pair in each. A step of AdamW moves a weight by up to 3e-3."""
    metrics, steps = run(base, tmp_path / "out", tokens_per_microbatch=token_budget)
    expected, losses = dpo_written_out(base)
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6)
    assert metrics["loss"] == pytest.approx(losses[1], abs=1e-4)
    assert (metrics["steps"], steps) == (2, [1, 2])
    assert_same_weights(tmp_path / "out", expected, tolerance=2e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("red fox")["input_ids"] == AutoTokenizer.from_pretrained(base)("red fox")["input_ids"]


def test_adapters_are_merged_into_what_is_written(base: Path, tmp_path: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(base)
    run(base, tmp_path / "out", lora=LoRAConfig(r=4, alpha=64))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    changed = {n for n, w in after.state_dict().items() if not torch.equal(w, before.state_dict()[n])}
    assert changed
    assert all("proj" in name for name in changed)  # neither embedding, nor norms, nor head
    with torch.no_grad():
        assert margins(after, make_pairs()).mean() > margins(before, make_pairs()).mean() + 0.01


def test_gradient_checkpointing_changes_nothing(base: Path, tmp_path: Path) -> None:
    run(base, tmp_path / "out", gradient_checkpointing=True)
    assert_same_weights(tmp_path / "out", dpo_written_out(base)[0], tolerance=2e-4)


def test_a_loss_that_is_not_finite_stops_the_run(base: Path, tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="step 2"):
        run(base, tmp_path / "out", policy=OptimConfig(lr=1e30, schedule="constant"))


def test_a_batch_is_cut_by_its_longest_row() -> None:
    """Rows of at most 5 + 5 tokens: 20 a pair."""
    pair = PreferencePair(prompt_ids=np.zeros(5), chosen_ids=np.zeros(5), rejected_ids=np.zeros(2))
    assert split_batch([pair] * 48, 48, 240) == (12, 4)
    assert split_batch([pair] * 48, 48, 10**6) == (48, 1)
    assert split_batch([pair] * 48, 48, 1) == (1, 48)
    assert split_batch([pair] * 7, 5, 60) == (3, 2)  # 6 pairs a step: one more than asked
