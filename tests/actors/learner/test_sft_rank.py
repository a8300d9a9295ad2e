"""Padded and checkpointed in the installed transformers: the same loss, the same gradients."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from models import random_model
from tensor_memory import TensorMemory
from transformers import AutoModelForCausalLM

from actors.learner.spec import LearnerSpec
from actors.learner.trainers import load_policy, prepare
from t2g.algo import head
from t2g.algo.logprobs import Rows
from t2g.algo.losses import supervised_loss
from t2g.config import LearnerConfig, LoRAConfig, ModelConfig
from t2g.errors import UserError
from t2g.types import TrainSequence

CHECKPOINTED = LearnerSpec(
    model=ModelConfig(policy="m"), learner=LearnerConfig(gradient_checkpointing=True), loss="supervised",
    num_updates=1, seed=1,
)  # fmt: skip


def make_examples() -> list[TrainSequence]:
    rng = np.random.default_rng(3)
    examples = []
    for prompt, target in ((9, 5), (1, 30), (300, 2), (17, 17)):  # one is longer than Gemma's window of 256
        example = TrainSequence(
            prompt_ids=rng.integers(0, 300, prompt).astype(np.int32),
            response_ids=rng.integers(0, 300, target).astype(np.int32),
            weights=rng.uniform(1, 8, target).astype(np.float32),
        )
        examples.append(example)
    return examples


def rows_of(examples: list[TrainSequence]) -> Rows:
    return Rows(examples, torch.device("cpu"))


def loss_of(model: Any, rows: Rows) -> torch.Tensor:
    loss, metrics = supervised_loss(
        logprobs=rows.token_outputs(model, 1.0).logprobs, weights=rows.column("weights") / 100
    )
    assert loss.item() == metrics["policy/loss"]
    return loss


def loss_and_gradients(model: Any, microbatches: list[Rows]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    total = 0.0
    for rows in microbatches:
        loss = loss_of(model, rows)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_padded_equals_one_by_one(architecture: str, attention: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path, architecture)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    examples = make_examples()
    masks = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    expected, gradients = loss_and_gradients(model, [rows_of([example]) for example in examples])
    assert expected > 1
    loss, padded_gradients = loss_and_gradients(model, [rows_of(examples)])
    assert loss == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(padded_gradients, gradients, atol=1e-5, rtol=1e-4)
    if attention == "sdpa" and architecture != "gemma2":  # which has a window
        assert masks == [None] * 5  # of a row with a row: a GPU's flash attention takes none


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4, alpha=8)])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])  # the second has tied embeddings
def test_the_chunked_loss_equals_the_plain_loss_and_makes_no_whole_logits(
    architecture: str, lora: LoRAConfig | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value and gradients of the loaded model, in chunks of 8 tokens, against cross-entropy of whole logits."""
    monkeypatch.setattr(head, "CHUNK_TOKENS", 8)
    source = ModelConfig(policy=str(random_model(tmp_path, architecture)))
    learner = LearnerConfig(lora=lora)
    spec = LearnerSpec(model=source, learner=learner, loss="supervised", num_updates=1, seed=1)
    model, reference, _ = load_policy(spec, on_gpu=False)
    assert reference is None and isinstance(model.get_output_embeddings(), head.ChunkedHead)
    if lora is not None:  # at the start no gradient reaches the first factors: the second ones are 0
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    examples = make_examples()
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = torch.tensor(0.0)
    for example in examples:
        ids = torch.tensor([[*example.prompt_ids, *example.response_ids]], dtype=torch.int64)
        logits = model(ids).logits[0, len(example.prompt_ids) - 1 : -1]
        losses = torch.nn.functional.cross_entropy(logits, ids[0, len(example.prompt_ids) :], reduction="none")
        expected = expected + (losses * torch.from_numpy(example.weights)).sum() / 100
    expected_gradients = torch.autograd.grad(expected, trained)

    with TensorMemory(min_numel=1, last_dim=model.config.vocab_size) as logits:
        loss = loss_of(model, rows_of(examples))
        gradients = torch.autograd.grad(loss, trained)
    assert logits.largest_numel <= model.get_output_embeddings().weight.numel()  # 64 rows; the batch has 128 and more
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert expected_gradient.any()
        assert (gradient - expected_gradient).norm() < 1e-5 * expected_gradient.norm() + 1e-5


def test_loss_against_plain_cross_entropy(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_model(tmp_path), dtype=torch.float32)
    example = make_examples()[0]
    with torch.no_grad():
        ids = torch.tensor([[*example.prompt_ids, *example.response_ids]], dtype=torch.int64)
        logprobs = model(ids).logits.log_softmax(-1)[0]
        loss = loss_of(model, rows_of([example]))
    targets = zip(example.response_ids, example.weights, strict=True)
    expected = -sum(float(w * logprobs[len(example.prompt_ids) - 1 + t, i]) for t, (i, w) in enumerate(targets)) / 100
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_checkpointed_gradients_are_the_same(tmp_path: Path) -> None:
    random_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    rows = rows_of(make_examples())
    expected = loss_and_gradients(model.train(), [rows])
    prepare(model, CHECKPOINTED)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    loss, gradients = loss_and_gradients(model, [rows])
    assert len(calls) == 2  # forward, and once more in the backward pass
    assert loss == expected[0]
    torch.testing.assert_close(gradients, expected[1], atol=0, rtol=0)


def test_an_architecture_without_gradient_checkpointing_is_refused() -> None:
    model = SimpleNamespace(supports_gradient_checkpointing=False, config=SimpleNamespace(model_type="abc"))
    with pytest.raises(UserError, match=r"sft\.gradient_checkpointing .*'abc' of model\.policy='m'"):
        prepare(model, CHECKPOINTED)
