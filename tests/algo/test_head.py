from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensor_memory import TensorMemory
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from t2g.algo.head import CHUNK_TOKENS, ChunkedHead, TokenRequest, install_chunked_head
from t2g.algo.logprobs import Rows
from t2g.types import TrainSequence

SHAPE = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.5, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


def tiny_model(architecture: str, *, seed: int = 0, **fields: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(architecture, **SHAPE | fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


class Doubling(LlamaForCausalLM):
    """What no list of models and settings would hold."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output


TRANSFORMING = {
    "gemma2": lambda: tiny_model("gemma2", final_logit_softcapping=30.0),
    "granite": lambda: tiny_model("granite", logits_scaling=8.0),
    "cohere": lambda: tiny_model("cohere", logit_scale=0.0625),
    "doubling": lambda: Doubling(AutoConfig.for_model("llama", **SHAPE)).eval(),
}


@pytest.mark.parametrize("name", TRANSFORMING)
def test_models_that_transform_logits_keep_them_whole(name: str) -> None:
    model = TRANSFORMING[name]()
    head = model.get_output_embeddings()
    ids = torch.arange(8)[None]
    before = model(ids).logits
    assert not install_chunked_head(model)
    assert model.get_output_embeddings() is head
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}),
        ("phi", {}),  # its head has a bias
    ],
)
def test_the_model_is_otherwise_the_same(architecture: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Names, ties, plain logits, and what save_pretrained writes."""
    model = tiny_model(architecture, **fields)
    ids = torch.arange(8)[None]
    before = model(ids).logits
    names = [name for name, _ in model.named_parameters()]
    assert install_chunked_head(model)
    assert not install_chunked_head(model)  # once is enough
    assert isinstance(model.lm_head, ChunkedHead)
    assert [name for name, _ in model.named_parameters()] == names
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings
    assert torch.equal(model(ids).logits, before)
    model.save_pretrained(tmp_path, state_dict={name: p.detach().clone() for name, p in model.named_parameters()})
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")(ids).logits, before)


def rows_of(sequences: list[np.ndarray]) -> Rows:
    """The first token of each is its prompt."""
    train_sequences = [
        TrainSequence(prompt_ids=ids[:1], response_ids=ids[1:], weights=np.ones(len(ids) - 1)) for ids in sequences
    ]
    return Rows(train_sequences, torch.device("cpu"))


def losses_and_gradients(model: PreTrainedModel, rows: Rows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    outputs = rows.token_outputs(model, 0.6, entropy=True)
    weights = torch.linspace(-1, 1, len(outputs.logprobs))
    total = (outputs.logprobs * weights).sum() + (outputs.entropy * weights.square()).sum()
    model.zero_grad()
    total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("layers_checkpointed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_whole_logits(frozen_head: bool, layers_checkpointed: bool, tied: bool) -> None:
    """Over two chunks and a bit; LoRA freezes the head, gradient checkpointing computes the layers again."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 64, 100) for _ in range(2 * CHUNK_TOKENS // 100 + 1)]
    rows = rows_of(sequences)
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    if frozen_head:
        model.lm_head.weight.requires_grad_(False)
    total, gradients = losses_and_gradients(model, rows)
    assert install_chunked_head(model)
    if layers_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    chunked_total, chunked = losses_and_gradients(model, rows)
    torch.testing.assert_close(chunked_total, total)
    assert chunked.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (chunked[name] - gradient).norm() < 1e-5 * gradient.norm() + 1e-5, name


@pytest.mark.parametrize("frozen_head", [False, True])
def test_the_logits_of_a_batch_never_exist_at_once(frozen_head: bool) -> None:
    """A plain head makes [T, V] and keeps several of them for the backward pass; this one a few chunks, of 16."""
    tokens = 16 * CHUNK_TOKENS
    vocabulary = 512
    chunk = CHUNK_TOKENS * vocabulary
    model = tiny_model("llama", vocab_size=vocabulary, num_hidden_layers=1)
    if frozen_head:
        model.lm_head.weight.requires_grad_(False)
    rows = rows_of(list(np.random.default_rng(0).integers(0, vocabulary, (tokens // 8, 8))))
    with TensorMemory(min_numel=chunk) as whole:
        losses_and_gradients(model, rows)
    assert whole.largest_numel == tokens * vocabulary
    assert install_chunked_head(model)
    with TensorMemory(min_numel=chunk) as chunked:
        losses_and_gradients(model, rows)
    assert chunked.largest_numel == chunk
    assert chunked.peak_bytes < 2 * tokens * vocabulary < whole.peak_bytes / 4


def test_a_request_ends_with_its_block() -> None:
    head = ChunkedHead(torch.nn.Linear(4, 6))
    next_ids = torch.zeros(4, dtype=torch.long)
    request = TokenRequest(
        positions=torch.tensor([0, 3, 4, 5]), next_ids=next_ids, temperature=1.0, entropy=False, ref_logits=None
    )
    with head.serve_request(request):
        assert head(torch.zeros(2, 3, 4)).shape == (1, 4, 1)  # of its places alone
    with pytest.raises(RuntimeError), head.serve_request(request):
        head(torch.zeros(2, 3, 5))  # fails in the middle of it
    assert head(torch.zeros(2, 3, 4)).shape == (2, 3, 6)
