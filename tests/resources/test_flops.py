"""Model FLOPs by hand, and what a rank makes of them."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from actors.learner.learner import LearnerWorker
from actors.learner.spec import LearnerSpec
from t2g.config import LearnerConfig, LoRAConfig, ModelConfig
from t2g.resources.flops import peak_flops, train_flops
from t2g.resources.model_shape import LLAMA_3_8B, ModelShape
from t2g.types import TrainSequence

TOY = ModelShape(
    hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=4, intermediate_size=16,
    vocab_size=100,
)  # fmt: skip


def test_flops_by_hand() -> None:
    matrices = 2 * 592 + 100 * 8
    attention = 6 * 2 * 8 * (3 * 3 + 5 * 5)
    assert train_flops(TOY, [3, 5], has_head=True, frozen=False) == 6 * matrices * 8 + attention
    assert train_flops(TOY, [3, 5], has_head=True, frozen=True) == 4 * matrices * 8 + attention
    assert train_flops(TOY, [3, 5], has_head=False, frozen=False) == 6 * 2 * 592 * 8 + attention
    one = train_flops(LLAMA_3_8B, [1000], has_head=True, frozen=False)
    assert one == 6 * (32 * 218_112_000 + 128_256 * 4096) * 1000 + 6 * 32 * 4096 * 10**6


def test_an_unknown_device_has_no_peak() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA GeForce RTX 4090") is None


@pytest.mark.parametrize(("lora", "shares"), [(None, False), (LoRAConfig(), False), (None, True)])
def test_the_share_of_its_gpu_that_a_rank_used_in_an_update(
    lora: LoRAConfig | None, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In three microbatches; with shared prompts the two equal ones of a microbatch count once."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    role = LearnerConfig(workers=4, gpus=1, dtype="bfloat16", lora=lora, share_prompts=shares)
    spec = LearnerSpec(model=ModelConfig(policy=str(Path("m"))), learner=role, num_updates=1, seed=1)
    worker = LearnerWorker(spec, ["policy"], role, 0)
    module = SimpleNamespace(config=LlamaConfig(**TOY.model_dump()))
    worker.models["policy"] = SimpleNamespace(engine=SimpleNamespace(module=module))
    ids = np.zeros(2, np.int32)
    sequence = TrainSequence(prompt_ids=ids, response_ids=ids, weights=np.ones(2))
    count = partial(train_flops, TOY, has_head=True, frozen=lora is not None)
    flops = count([4, 4, 4, 4]) - (count([2]) if shares else 0)
    minibatches = [[[sequence, sequence], [sequence]], [[sequence], []]]
    assert worker._utilization("policy", minibatches, 0.5) == {"policy/mfu": pytest.approx(flops / 0.5 / 989e12)}
