"""A trainer on a plain model: the mode of its updates, and the refusal of a model that is random in them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from actors.learner import zero3
from actors.learner.spec import LearnerSpec, Loss
from actors.learner.trainers import PolicyTrainer
from t2g.config import LearnerConfig, ModelConfig
from t2g.errors import UserError

IDS = np.arange(40, dtype=np.int32)


class PlainEngine:
    """A model with the parts of a ZeRO-3 engine that passes use."""

    device = torch.device("cpu")

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def __getattr__(self, name: str) -> Any:  # train, eval, get_output_embeddings
        return getattr(self.module, name)


def random_model(**fields: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.5, **fields,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def make_trainer(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, loss: Loss, *, has_checkpointing: bool
) -> PolicyTrainer:
    monkeypatch.setattr(zero3, "build_engine", lambda module, *_, **__: PlainEngine(module))
    if has_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    learner = LearnerConfig(gradient_checkpointing=has_checkpointing)
    spec = LearnerSpec(model=ModelConfig(policy="llama-folder"), learner=learner, loss=loss, num_updates=1, seed=1)
    return PolicyTrainer(spec, model, None, None, 1)


@pytest.mark.parametrize("has_checkpointing", [False, True])
@pytest.mark.parametrize(("loss", "has_dropout"), [("ppo", False), ("dpo", False), ("supervised", True)])
def test_only_supervised_updates_have_dropout(
    loss: Loss, has_dropout: bool, has_checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first minibatch of PPO has ratio 1 everywhere."""
    model = random_model(attention_dropout=0.4)
    trainer = make_trainer(monkeypatch, model, loss, has_checkpointing=has_checkpointing)
    evaluated = trainer.compute_probe_logprobs(IDS)
    seen = []

    def run_pass(*_: Any, **__: Any) -> Any:
        seen.append(trainer._probe_logprobs(IDS))
        return SimpleNamespace(metrics={}, grad_norm=1.0, lr=0.1)

    monkeypatch.setattr(zero3, "train_step", run_pass)
    trainer.update([[]], kl_coef=0.0, label="step 1")
    assert np.allclose(seen[0], evaluated, atol=1e-6) != has_dropout


def test_the_reference_under_lora_leaves_the_mode_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    trainer = make_trainer(monkeypatch, model, "ppo", has_checkpointing=True)
    trainer._enter_update_mode()
    before = [module.training for module in model.modules()]
    assert any(before) and not all(before)
    with trainer._reference():
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before


def test_randomness_of_an_unknown_kind_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that draws in training mode, by a number that no attribute holds."""
    forward = LlamaDecoderLayer.forward

    def random_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.nn.functional.dropout(forward(self, *args, **kwargs), 0.4, training=self.training)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", random_forward)
    make_trainer(monkeypatch, random_model(residual_dropout=0.4), "ppo", has_checkpointing=False)
    with pytest.raises(UserError, match="llama-folder") as refusal:
        make_trainer(monkeypatch, random_model(residual_dropout=0.4), "ppo", has_checkpointing=True)
    assert "residual_dropout" in str(refusal.value)
    assert "gradient_checkpointing" in str(refusal.value)
