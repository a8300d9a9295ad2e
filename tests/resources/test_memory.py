"""Memory estimates against numbers worked out by hand, and against what transformers and autograd really make."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensor_memory import TensorMemory
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, masking_utils

from t2g.algo import head
from t2g.algo.head import install_chunked_head
from t2g.algo.logprobs import Rows
from t2g.config import LearnerConfig, LoRAConfig, ObjectiveConfig, RoleConfig, RolloutConfig, with_overrides
from t2g.resources import memory
from t2g.resources.memory import GIB
from t2g.resources.model_shape import LLAMA_3_8B, ModelShape, find_shape, shape_of
from t2g.types import TrainSequence

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "head_dim": 32,
}
TOY = ModelShape(
    hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=4, intermediate_size=16,
    vocab_size=100,
)  # fmt: skip
# A layer of TOY: q and o 8 x 8 each, k and v 8 x 4 each, MLP 3 x 8 x 16, norms 2 x 8.
TOY_LAYER = 2 * 64 + 2 * 32 + 384 + 16
TOY_BACKBONE = 800 + 2 * TOY_LAYER + 8
CRITIC = ObjectiveConfig(advantages="gae")
NO_CRITIC = ObjectiveConfig(advantages="group")


def small(family: type, layers: int, **changes: Any) -> Any:
    config = family(**SMALL, num_hidden_layers=layers, **changes)
    config._attn_implementation = "sdpa"
    return config


def test_an_8b_by_hand() -> None:
    assert LLAMA_3_8B.numel == 8_030_261_248  # as its model card has it
    assert LLAMA_3_8B.layer_numel == 218_112_000
    assert LLAMA_3_8B.kv_bytes(2) == 128 * 1024
    assert LLAMA_3_8B.saved_bytes(2) == 200_704


def test_a_toy_by_hand() -> None:
    assert (TOY.layer_numel, TOY.backbone_numel, TOY.numel) == (592, 1992, 2792)
    assert (TOY_LAYER, TOY_BACKBONE) == (592, 1992)
    assert TOY.kv_bytes(4) == 2 * 2 * 1 * 4 * 4
    assert TOY.lora_numel(3) == 2 * 3 * ((8 + 8) * 2 + (8 + 4) * 2 + (8 + 16) * 3)


@pytest.mark.parametrize(
    "config",
    [
        small(LlamaConfig, 2),
        small(LlamaConfig, 2, tie_word_embeddings=True),
        small(Qwen2Config, 2),
        small(Qwen3Config, 2),
    ],
    ids=["llama", "tied", "qwen2", "qwen3"],
)
def test_parameters_are_those_of_the_real_model(config: Any) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape_of(config.to_dict()).numel == sum(p.numel() for p in model.parameters())


def saved_bytes(config: Any, dtype: torch.dtype, *, checkpointing: bool, tokens: int = 128) -> int:
    """What autograd keeps of `tokens` tokens, weights left out."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    storages: dict[int, torch.Tensor] = {}  # by storage, which lives as long as the tensor is here

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids = torch.zeros(2, tokens // 2, dtype=torch.long, device=model.device)
        output = model.model(input_ids=ids, use_cache=False)
    assert output.last_hidden_state.requires_grad
    return sum(t.untyped_storage().nbytes() for pointer, t in storages.items() if pointer not in weights)


@pytest.mark.parametrize(("dtype", "b"), [(torch.bfloat16, 2), (torch.float32, 4)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_what_autograd_keeps(dtype: torch.dtype, b: int, checkpointing: bool) -> None:
    configs = [small(LlamaConfig, layers) for layers in (3, 1)]
    three, one = (saved_bytes(config, dtype, checkpointing=checkpointing) for config in configs)
    difference = three - one
    shapes = [shape_of(config.to_dict()) for config in configs]
    three, one = (memory.activation_bytes(s, 128, itemsize=b, checkpointing=checkpointing) for s in shapes)
    assert difference == pytest.approx(three - one, rel=0.02)


LLAMA_70B = LlamaConfig(
    hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672,
    vocab_size=128256,
)  # fmt: skip
QWEN_1_5B = Qwen2Config(
    hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, intermediate_size=8960,
    vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "numel", "token_bytes"),
    [
        # 2 x 8 x h + 4 x (q + kv) + 8 x i: of a token and a layer in bfloat16
        (LlamaConfig(**LLAMA_3_8B.model_dump()), 8_030_261_248, 65_536 + 20_480 + 114_688),
        (QWEN_1_5B, 1_543_714_304, 24_576 + 7_168 + 71_680),
        (LLAMA_70B, 70_553_706_496, 131_072 + 36_864 + 229_376),
    ],
    ids=["llama-8b", "qwen-1.5b", "llama-70b"],
)
def test_the_shapes_that_are_used(config: Any, numel: int, token_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes alone: every weight, and what autograd keeps of 64 tokens in one layer."""
    shape = shape_of(config.to_dict())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == shape.numel == numel
    states = memory.states_bytes([(numel, numel)], ranks=8, itemsize=2)
    assert states == {"weights": numel / 4, "gradients": numel / 2, "optimizer": 1.5 * numel}

    config._attn_implementation = "sdpa"
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda _: None)  # it would ask for values
    saved = []
    for config.num_hidden_layers in (2, 1):
        with FakeTensorMode():
            saved.append(saved_bytes(config, torch.bfloat16, checkpointing=False, tokens=64))
    assert shape.saved_bytes(2) == token_bytes
    assert saved[0] - saved[1] == pytest.approx(64 * token_bytes, rel=0.02)


def test_logits_are_chunked_as_by_the_head() -> None:
    assert memory.CHUNK_TOKENS == head.CHUNK_TOKENS


def test_states_under_zero_3() -> None:
    whole = [(1000, 1000)]
    assert memory.states_bytes(whole, ranks=4, itemsize=2) == {"weights": 500, "gradients": 1000, "optimizer": 3000}
    assert memory.states_bytes(whole, ranks=4, itemsize=4) == {"weights": 1000, "gradients": 1000, "optimizer": 3000}
    assert memory.states_bytes([(1000, 0)], ranks=2, itemsize=2) == {"weights": 1000, "gradients": 0, "optimizer": 0}
    assert memory.states_bytes([*whole, (1000, 0)], ranks=2, itemsize=2)["weights"] == 2000


def test_a_rank_holds_policy_reference_and_critic() -> None:
    learner = LearnerConfig(workers=2, dtype="bfloat16")
    assert memory.learner_models(TOY, learner, CRITIC) == [(2792, 2792), (2792, 0), (1992, 1992)]
    adapters = TOY.lora_numel(3)
    lora = with_overrides(learner, {"lora": LoRAConfig(r=3)})
    assert memory.learner_models(TOY, lora, NO_CRITIC) == [(2792 + adapters, adapters)]
    apart = with_overrides(learner, {"critic_ranks": RoleConfig(workers=4)})
    assert memory.learner_models(TOY, apart, CRITIC) == [(2792, 2792), (2792, 0)]
    assert memory.critic_models(TOY) == [(1992, 1992)]


def test_a_pass_over_a_microbatch() -> None:
    learner = LearnerConfig(workers=1, dtype="bfloat16")

    def parts(learner: LearnerConfig) -> dict[str, float]:
        return memory.estimate_rank(TOY, [(2792, 2792)], learner, ranks=1, tokens=10).parts

    one = 2 * 8 * 8 + 4 * (8 + 4) + 8 * 16  # of a token and a layer
    assert parts(learner)["activations"] == 10 * 2 * one
    assert parts(learner)["gathered"] == 2 * (2792 + 2 * 800) + 4 * 3 * 50_000_000
    assert parts(learner)["optimizer"] == 12 * 2792
    checkpointed = with_overrides(learner, {"gradient_checkpointing": True})
    assert parts(checkpointed)["activations"] == 10 * (2 * 16 + one)
    assert memory.logits_bytes(TOY, learner, tokens=2000) == 12 * 1024 * 100
    assert memory.logits_bytes(TOY, learner, tokens=10) == 12 * 10 * 100
    full = ObjectiveConfig(kl_estimator="full")
    assert memory.logits_bytes(TOY, learner, tokens=2000, objective=full) == (42 * 1024 + 2 * 2000) * 100


def test_copied_keys_of_shared_prompts_by_hand() -> None:
    """Two responses of 30 tokens to a prompt of 70: a row of 130 tokens has copies for 200, of 2 heads of 4."""
    rollout = RolloutConfig(samples_per_prompt=2, max_model_len=100, max_new_tokens=30)
    shared = LearnerConfig(share_prompts=True)
    checkpointed = with_overrides(shared, {"gradient_checkpointing": True})
    copied: dict[str, float] = {}
    for name, learner in (("none", LearnerConfig()), ("all", shared), ("one layer", checkpointed)):
        copied[name] = memory.shared_keys_bytes(TOY, learner, rollout, tokens=130, itemsize=2)
    layer = 200 * 2 * 2 * 8
    assert copied == pytest.approx({"none": 0, "all": 2 * layer, "one layer": layer})
    fit = memory.estimate_rank(TOY, [(2792, 2792)], shared, ranks=1, tokens=130, shared_keys=copied["all"])
    assert fit.parts["shared_keys"] == copied["all"]


@pytest.mark.parametrize(
    ("name", "objective", "dtype"),
    [
        ("llama", None, "bfloat16"),
        ("llama", ObjectiveConfig(), "float32"),
        ("llama", ObjectiveConfig(kl_estimator="full"), "bfloat16"),
        ("gemma2", None, "float32"),  # it caps its logits, so that all exist at once
    ],
    ids=["supervised", "ppo", "full_kl", "gemma2"],
)
def test_logits_bytes_equal_the_peak_of_a_pass(name: str, objective: ObjectiveConfig | None, dtype: Any) -> None:
    """Of all tensors that have a column for each token of the vocabulary, forward and backward."""
    vocabulary = 512
    num_tokens = 3 * head.CHUNK_TOKENS
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = AutoConfig.for_model(name, **SMALL | small, num_hidden_layers=1, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    assert install_chunked_head(model) == (name == "llama")
    ids = np.zeros((num_tokens // 64, 65), np.int32)
    sequences = [TrainSequence(prompt_ids=i[:1], response_ids=i[1:], weights=np.ones(64)) for i in ids]
    rows = Rows(sequences, torch.device("cpu"))
    with TensorMemory(min_numel=head.CHUNK_TOKENS * vocabulary, last_dim=vocabulary) as used:
        full = objective is not None and objective.kl_estimator == "full"
        reference = torch.zeros(num_tokens, vocabulary, dtype=getattr(torch, dtype)) if full else None
        outputs = rows.token_outputs(model, 0.6, entropy=objective is not None, ref_logits=reference)
        sum(
            column.sum() for column in (outputs.logprobs, outputs.entropy, outputs.full_kl) if column is not None
        ).backward()
    shape = shape_of(config.to_dict())
    learner = LearnerConfig(dtype=dtype)
    expected = memory.logits_bytes(shape, learner, tokens=num_tokens, objective=objective)
    assert (0.7 if name == "gemma2" else 0.97) * expected < used.peak_bytes < 1.01 * expected


def test_offload_moves_the_states_to_the_host() -> None:
    learner = LearnerConfig(workers=2, dtype="bfloat16", offload="cpu")
    models = memory.learner_models(TOY, learner, CRITIC)
    parts = memory.estimate_rank(TOY, models, learner, ranks=2, tokens=10).parts
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (0, 0, 0)
    loaded = 2 * (2792 + 2792 + 1992)
    states = memory.states_bytes(models, ranks=2, itemsize=2)
    stays = 2 * states["weights"] + 2 * states["gradients"] + states["optimizer"]
    assert memory.host_bytes(TOY, learner, CRITIC) == loaded + stays


def test_an_engine_by_hand() -> None:
    engine = RolloutConfig(dtype="bfloat16", gpus=1, max_model_len=1536, max_num_seqs=64)
    fit = memory.estimate_engine(LLAMA_3_8B, engine, sequences=100, gpu_bytes=80 * GIB)
    assert fit.num_sequences == 64  # max_num_seqs
    # A step of 8,192 tokens: 2 x 8192 x (3 x 4096 + 2 x (4096 + 1024) + 3 x 14336) = 1 GiB; 64 rows of logits.
    assert fit.parts["activations"] == GIB + 64 * 128_256 * 14
    assert fit.fitting == 271  # (68 - 14.957 - 1.107 - 1) GiB / .1875 GiB
    assert fit.parts["cache"] == 64 * 0.1875 * GIB
    assert fit.cache == pytest.approx((68 - 14.957 - 1.107 - 1) * GIB, rel=1e-4)
    two = memory.estimate_engine(LLAMA_3_8B, with_overrides(engine, {"gpus": 2}), sequences=1, gpu_bytes=80 * GIB)
    assert (two.num_sequences, two.parts["weights"]) == (1, 8_030_261_248)
    assert two.fitting == 627  # (68 - 7.479 - .594 - .107 - 1) GiB / .09375 GiB
    small_gpu = memory.estimate_engine(LLAMA_3_8B, engine, sequences=1, gpu_bytes=16 * GIB)
    assert small_gpu.fitting == 0


@pytest.mark.parametrize(
    ("arguments", "checkpoint", "layer_bytes"),
    [
        ({"quantization": "fp8"}, {}, 1.0),
        ({"quantization": "int8_per_channel_weight_only"}, {}, 1.0),
        ({}, {"quant_method": "fp8"}, 1.0),
        ({"quantization": "awq_marlin"}, {"quant_method": "awq", "bits": 4, "group_size": 128}, 0.51953125),
        ({}, {"quant_method": "gptq", "bits": 8, "group_size": -1}, 1 + 24 / 4096 / 8),
        ({"quantization": "nobody_knows"}, {}, 2.0),
    ],
)
def test_quantized_weights_of_an_engine(arguments: Any, checkpoint: Any, layer_bytes: float) -> None:
    engine = RolloutConfig(dtype="bfloat16", gpus=1, max_model_len=1536, engine_args=arguments)
    shape = LLAMA_3_8B.model_copy(update={"quantization_config": checkpoint})
    fit = memory.estimate_engine(shape, engine, sequences=1, gpu_bytes=80 * GIB)
    layers = 32 * 218_112_000
    assert fit.parts["weights"] == 2 * (8_030_261_248 - layers) + layer_bytes * layers
    beside = sum(fit.parts.values()) - fit.parts["cache"]
    assert fit.fitting == int((0.85 * 80 - beside / GIB) / 0.1875)


def test_a_cache_of_fp8_holds_twice_as_much() -> None:
    engine = RolloutConfig(dtype="bfloat16", gpus=1, max_model_len=1536, engine_args={"kv_cache_dtype": "fp8_e5m2"})
    assert memory.estimate_engine(LLAMA_3_8B, engine, sequences=1, gpu_bytes=80 * GIB).fitting == 535


@pytest.mark.parametrize(("max_num_seqs", "sizes"), [(512, 51), (256, 51), (64, 3 + 16), (4, 3 + 1), (1, 2)])
def test_graphs_of_an_engine_are_counted_for_each_size_and_layer(max_num_seqs: int, sizes: int) -> None:
    engine = RolloutConfig(dtype="bfloat16", gpus=1, max_num_seqs=max_num_seqs, enforce_eager=False)
    fit = memory.estimate_engine(LLAMA_3_8B, engine, sequences=1, gpu_bytes=80 * GIB)
    assert fit.parts["graphs"] == sizes * 32 * 400 * 1024
    without = with_overrides(engine, {"enforce_eager": True})
    eager = memory.estimate_engine(LLAMA_3_8B, without, sequences=1, gpu_bytes=80 * GIB)
    assert eager.parts["graphs"] == 0
    assert eager.cache - fit.cache == fit.parts["graphs"]


def test_one_version_of_the_weights_lies_in_the_object_store() -> None:
    learner = LearnerConfig(lora=LoRAConfig(r=3))
    assert memory.store_bytes(TOY, LearnerConfig(), itemsize=2) == 2 * 2792
    assert memory.store_bytes(TOY, learner, itemsize=2) == 2 * TOY.lora_numel(3)
    assert memory.store_bytes(TOY, with_overrides(learner, {"sync_adapters": False}), itemsize=2) == 2 * 2792


def test_two_buckets_are_lent_by_ipc_alone() -> None:
    """The embedding of an 8B is a bucket of its own, 128256 x 4096."""
    shared = LearnerConfig(sync_transport="ipc", gpus=0.4)
    assert memory.ipc_buffer_bytes(LLAMA_3_8B, shared, itemsize=2) == 2 * 2 * 525_336_576
    assert memory.ipc_buffer_bytes(TOY, shared, itemsize=2) == 2 * 64 * 2**20
    for others in ({"sync_transport": "nccl"}, {"sync_transport": "store"}, {"lora": LoRAConfig(r=3)}):
        assert memory.ipc_buffer_bytes(LLAMA_3_8B, with_overrides(shared, others), itemsize=2) == 0
    turns = memory.estimate_rank(TOY, [(2792, 2792)], shared, ranks=1, tokens=10, ipc_buffers=7)
    engine = RolloutConfig(gpus=1)
    assert turns.parts["ipc_buffers"] == 7
    assert memory.coresident_bytes(turns, engine, sharing="alternate", gpu_bytes=80 * GIB)["rollout"] == (
        4 * 2792 + 2 * 7 + memory.OTHER_BYTES
    )


def test_shapes_are_found_without_a_network(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 3, **SMALL}))
    shape = find_shape(str(tmp_path))
    assert shape is not None
    assert (shape.num_hidden_layers, shape.hidden_size, shape.num_key_value_heads) == (3, 256, 2)
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
    numbers = {"model_type": "llama", "num_hidden_layers": 3, "quantization_config": quantization, **SMALL}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    shape = find_shape(str(tmp_path))
    assert shape is not None and shape.quantization_config["group_size"] == 64
    assert find_shape("meta-llama/Llama-3.1-8B-Instruct") == LLAMA_3_8B
    assert find_shape("nobody/has-this") is None


def test_experts_are_not_taken_for_a_dense_model() -> None:
    numbers = {"model_type": "mixtral", "num_hidden_layers": 2, **SMALL}
    assert shape_of(numbers) is not None
    assert shape_of(numbers | {"num_local_experts": 8}) is None
    assert shape_of({"model_type": "gpt2", "n_embd": 768}) is None
