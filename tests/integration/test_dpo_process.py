"""DPO on learner ranks: the written-out training's weights; and it ends on a stop, a missed deadline, no place."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dpo_pairs import make_pairs, margins
from learner_runs import SharedGroup
from sft_runs import make_base
from transformers import AutoModelForCausalLM

from actors.learner import dpo
from actors.learner.dpo import train_dpo
from actors.learner.trainers import DPO_BETA
from t2g.config import ClusterConfig, LearnerConfig, LoRAConfig, ModelConfig, OptimConfig
from t2g.errors import LearnerLost, UserError

CLUSTER = ClusterConfig(placement_timeout_s=5)
LR = 3e-3


pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def _shared(hosts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dpo, "LearnerGroup", partial(SharedGroup, hosts=hosts))


def train(base: Path, out_folder: Path, *, stop: bool = False, **changes: Any) -> tuple[Any, list[int]]:
    """One step a pass over all six pairs, so that their order plays no part; microbatches of one pair on two ranks."""
    fields = {
        "policy": OptimConfig(lr=LR, max_grad_norm=0.5), "num_epochs": 2, "memory_gib": 0.5, "cpus": 0.25,
        "workers": 2, "tokens_per_microbatch": 20, "step_timeout_s": 200,
    }  # fmt: skip
    steps: list[int] = []
    metrics = train_dpo(
        ModelConfig(policy=str(base)), LearnerConfig(**{**fields, **changes}), make_pairs(),
        cluster=CLUSTER, stop=lambda: stop, on_progress=steps.append, batch_size=6, seed=1, out_folder=out_folder,
    )  # fmt: skip
    return metrics, steps


def dpo_written_out(base: Path) -> tuple[Any, list[float]]:
    """-log sigmoid(beta * (margin - margin of the base)), the mean over all pairs, in two steps of AdamW."""
    model = AutoModelForCausalLM.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=OptimConfig().betas, weight_decay=0.0)
    with torch.no_grad():
        reference = margins(model, make_pairs())
    losses = []
    for lr in (LR, LR / 2):  # linear: 1, 1/2
        optimizer.param_groups[0]["lr"] = lr
        loss = -torch.nn.functional.logsigmoid(DPO_BETA * (margins(model, make_pairs()) - reference)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.usefixtures("_shared")
def test_it_trains_by_the_papers_loss_and_leaves_a_model_folder(base: Path, tmp_path: Path) -> None:
    """A step of AdamW moves a weight by up to 3e-3."""
    metrics, steps = train(base, tmp_path / "policy")
    assert (metrics.keys(), steps) == ({"loss", "accuracy", "margin", "grad_norm", "steps"}, [1, 2])
    expected, losses = dpo_written_out(base)
    assert metrics["loss"] == pytest.approx(losses[1], abs=1e-4)
    assert metrics["steps"] == 2
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict()
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(weights[name], weight, atol=2e-4, rtol=0, msg=name)
    assert {"tokenizer.json", "config.json"} <= {f.name for f in (tmp_path / "policy").iterdir()}


@pytest.mark.usefixtures("_shared")
def test_adapters_are_merged_into_what_is_written(base: Path, tmp_path: Path) -> None:
    """With layers computed again. The reference is the model before its adapters have moved."""
    metrics, _ = train(
        base, tmp_path / "policy", workers=1, lora=LoRAConfig(r=4, alpha=64), gradient_checkpointing=True
    )
    assert metrics["margin"] > 0.01
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (base, tmp_path / "policy"))
    changed = {n for n, w in after.state_dict().items() if not torch.equal(w, before.state_dict()[n])}
    assert changed and all("proj" in name for name in changed)  # neither embedding, nor norms, nor head
    with torch.no_grad():
        gained = margins(after, make_pairs()).mean() - margins(before, make_pairs()).mean()
    assert DPO_BETA * gained > metrics["margin"], "a step more"


@pytest.mark.usefixtures("_shared")
def test_a_stop_ends_it(base: Path, tmp_path: Path) -> None:
    assert train(base, tmp_path / "policy", stop=True, workers=1) == (None, [])


def test_a_late_rank_is_reported(base: Path, tmp_path: Path) -> None:
    with pytest.raises(LearnerLost, match="learner rank 0 timed out"):
        train(base, tmp_path / "policy", workers=1, step_timeout_s=0.1)


def test_a_model_that_cannot_be_loaded_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.policy"):
        train(tmp_path / "nothing", tmp_path / "policy", workers=1)


def test_without_a_place_it_says_what_it_needs(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 of 1 learner workers"):
        train(base, tmp_path / "policy", workers=1, cpus=1000)
