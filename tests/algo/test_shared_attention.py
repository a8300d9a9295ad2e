"""Rows with one copy of each prompt have the numbers and gradients of a row for each sequence."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

from t2g.algo import shared_attention
from t2g.algo.critic import Critic
from t2g.algo.head import install_chunked_head
from t2g.algo.logprobs import Rows
from t2g.types import TrainSequence

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.5, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "gemma3": Gemma3TextConfig(**SMALL),  # its window is longer than these sequences
}


def make_models(name: str) -> tuple[Any, Any]:
    """Return a model with transformers' eager attention, and the same with ours."""
    models = []
    for attention in ("eager", shared_attention.register()):
        config = type(CONFIGS[name])(**CONFIGS[name].to_dict())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            models.append(AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval())
    plain, ours = models
    return plain, ours


def make_sequences() -> list[TrainSequence]:
    """Return responses to three prompts, not in their order; one response is empty."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 60, length) for length in (3, 17, 1)]
    sequences = []
    for prompt, length in ((0, 6), (1, 2), (0, 0), (0, 1), (2, 5), (1, 9)):
        response_ids = rng.integers(1, 60, length)
        weights = rng.normal(size=length)
        sequences.append(TrainSequence(prompt_ids=prompts[prompt], response_ids=response_ids, weights=weights))
    return sequences


def value_and_gradient(model: Any, rows: Rows) -> tuple[torch.Tensor, list[torch.Tensor]]:
    logprobs = rows.token_outputs(model, 0.7).logprobs
    loss = (logprobs * rows.column("weights")).sum()
    return logprobs.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_numbers_and_gradients_are_those_of_separate_rows(name: str, checkpointing: bool) -> None:
    plain, ours = make_models(name)
    expected, expected_gradient = value_and_gradient(plain, Rows(make_sequences(), CPU))
    install_chunked_head(ours)
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
        ours.train()
    logprobs, gradient = value_and_gradient(ours, Rows(make_sequences(), CPU, share_prompts=True))
    torch.testing.assert_close(logprobs, expected)
    for grad, expected_grad in zip(gradient, expected_gradient, strict=True):
        assert (grad - expected_grad).norm() < 1e-5 * expected_grad.norm() + 1e-5


def test_the_attention_without_groups_is_causal() -> None:
    plain, ours = make_models("llama")
    rows = Rows(make_sequences(), CPU)
    torch.testing.assert_close(rows.logits(ours), rows.logits(plain))


def test_each_token_passes_through_the_model_once() -> None:
    _, ours = make_models("llama")
    lengths: list[int] = []
    ours.model.layers[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    with torch.no_grad():
        Rows(make_sequences(), CPU, share_prompts=True).token_outputs(ours, 1.0)
    assert lengths == [3 + 17 + 1 + 6 + 2 + 1 + 5 + 9]


def test_values_are_those_of_separate_rows() -> None:
    plain, ours = make_models("llama")
    values = []
    for model, share_prompts in ((plain, False), (ours, True)):
        critic = Critic(model.model)
        torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            values.append(Rows(make_sequences(), CPU, share_prompts=share_prompts).values(critic))
    torch.testing.assert_close(values[1], values[0])


@pytest.mark.parametrize("length", [1, 2, 31])
def test_short_segments_in_bfloat16(length: int) -> None:
    """A CPU's matrix products of a few bfloat16 tokens can crash on an illegal instruction; these do not."""
    plain, ours = make_models("llama")
    prompt_ids = np.full(length, 7)
    sequences = [
        TrainSequence(prompt_ids=prompt_ids, response_ids=np.full(number, 9), weights=np.ones(number))
        for number in (length, 1)
    ]
    expected = Rows(sequences, CPU).token_outputs(plain.bfloat16(), 1.0).logprobs
    logprobs, gradient = value_and_gradient(ours.bfloat16(), Rows(sequences, CPU, share_prompts=True))
    assert all(grad.isfinite().all() for grad in gradient)
    at_one = Rows(sequences, CPU, share_prompts=True).token_outputs(ours, 1.0).logprobs
    torch.testing.assert_close(at_one, expected, atol=0.1, rtol=0)
    assert logprobs.shape == (length + 1,)


def test_a_row_without_sequences_gives_zero_gradients() -> None:
    _, ours = make_models("llama")
    logprobs, gradient = value_and_gradient(ours, Rows([], CPU, share_prompts=True))
    assert logprobs.shape == (0,)
    assert not any(grad.any() for grad in gradient)
