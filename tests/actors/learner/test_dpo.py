"""DPO's loss held against a loop written out, and against TRL's own, in this process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dpo_pairs import make_pairs, margins
from models import random_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.learner.dpo import paired_sequences
from actors.learner.spec import LearnerSpec, Loss
from actors.learner.trainers import DPO_BETA, load_policy
from t2g.algo.logprobs import Rows
from t2g.algo.losses import dpo_loss
from t2g.config import LearnerConfig, ModelConfig
from t2g.data.batching import normalize_weights
from t2g.types import PairedSequence, TokenStats, TrainSequence

CPU = torch.device("cpu")


class ReferenceGroup:
    """What DPO asks of a learner group before its first step."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def forward(self, sequences: list[TrainSequence]) -> list[TokenStats]:
        logprobs = [Rows([s], CPU).token_outputs(self.model, 1.0).logprobs.numpy() for s in sequences]
        return [TokenStats(old_logprobs=x, ref_logprobs=x, values=x, entropy=x) for x in logprobs]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy and its reference, of other weights."""
    policy, reference = (random_model(tmp_path_factory.mktemp(name)) for name in ("policy", "reference"))
    moved = AutoModelForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        for weight in moved.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    moved.save_pretrained(policy)
    return policy, reference


def sequences(reference: Any) -> list[PairedSequence]:
    return paired_sequences(make_pairs(), ReferenceGroup(reference))


def our_loss(model: Any, both: tuple[PairedSequence, ...]) -> tuple[torch.Tensor, dict[str, float]]:
    rows = Rows(both, CPU)
    return dpo_loss(
        logprobs=rows.token_outputs(model, 1.0).logprobs, ref_logprobs=rows.column("ref_logprobs"),
        weights=rows.column("weights"), sequence_ids=rows.sequence_ids, num_pairs=len(both) // 2, beta=DPO_BETA,
    )  # fmt: skip


def test_value_and_gradient_are_the_papers_in_any_microbatches(folders: tuple[Path, Path]) -> None:
    model, reference = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    with torch.no_grad():
        before = margins(reference, make_pairs())
    gains = DPO_BETA * (margins(model, make_pairs()) - before)
    expected = -torch.nn.functional.logsigmoid(gains).mean()
    expected_grads = torch.autograd.grad(expected, list(model.parameters()))
    shares = normalize_weights(sequences(reference))
    parts = [our_loss(model, shares[i : i + 4]) for i in range(0, len(shares), 4)] + [our_loss(model, ())]
    total = sum(loss for loss, _ in parts)
    torch.testing.assert_close(total, expected)
    for name, value in (("accuracy", (gains > 0).float().mean()), ("margin", gains.mean())):
        assert sum(metrics[f"policy/{name}"] for _, metrics in parts) == pytest.approx(value.item(), abs=1e-6)
    for grad, expected_grad in zip(torch.autograd.grad(total, list(model.parameters())), expected_grads, strict=True):
        assert (grad - expected_grad).norm() < 1e-4 * expected_grad.norm() + 1e-6


def test_value_is_that_of_trl(folders: tuple[Path, Path], tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Trainer(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset  # TRL would encode texts

    model, reference = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    rows = []
    for pair in make_pairs():
        row = {name: ids.tolist() for name, ids in vars(pair).items()}
        rows.append(row)
    dataset = Dataset.from_list(rows)
    options = {"per_device_eval_batch_size": 6, "use_cpu": True, "bf16": False, "report_to": "none"}
    trainer = Trainer(
        model=model, ref_model=reference, train_dataset=dataset, eval_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(folders[0]),
        args=DPOConfig(output_dir=str(tmp_path), beta=DPO_BETA, max_length=None, disable_tqdm=True, **options),
    )  # fmt: skip
    theirs = trainer.evaluate()
    loss, metrics = our_loss(model.eval(), normalize_weights(sequences(reference)))
    assert abs(loss.item() - np.log(2)) > 0.01
    assert theirs["eval_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert theirs["eval_rewards/accuracies"] == pytest.approx(metrics["policy/accuracy"])
    assert theirs["eval_rewards/margins"] == pytest.approx(metrics["policy/margin"], rel=1e-3)


@pytest.mark.parametrize(("loss", "copies"), [("ppo", 1), ("dpo", 0), ("supervised", 0), ("none", 0)])
def test_only_ppo_asks_a_reference_while_it_trains(folders: tuple[Path, Path], loss: Loss, copies: int) -> None:
    """DPO has its numbers from the policy, before the first step: a second copy would lie idle."""
    model = ModelConfig(policy=str(folders[0]))
    spec = LearnerSpec(model=model, learner=LearnerConfig(), loss=loss, num_updates=1, seed=1)
    _, reference, _ = load_policy(spec, on_gpu=False)
    assert (reference is not None) == bool(copies)
