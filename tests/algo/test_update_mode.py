from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from t2g.algo.update_mode import checkpointed_modules, disable_randomness, enter_update_mode, find_random_fields

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.5, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_dropout": 0.4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.4},
    "opt": {"dropout": 0.4, "attention_dropout": 0.4, "layerdrop": 0.4, "ffn_dim": 32, "word_embed_proj_dim": 32},
    "seed_oss": {"attention_dropout": 0.4, "residual_dropout": 0.4},
    "starcoder2": {"attention_dropout": 0.4, "residual_dropout": 0.4, "embedding_dropout": 0.4},
    "bloom": {"hidden_dropout": 0.4, "attention_dropout": 0.4},
    "falcon": {"hidden_dropout": 0.4, "attention_dropout": 0.4},
    "gpt_neox": {"hidden_dropout": 0.4, "attention_dropout": 0.4},
    "gpt_bigcode": {"resid_pdrop": 0.4, "embd_pdrop": 0.4, "attn_pdrop": 0.4},
    "gpt2": {"resid_pdrop": 0.4, "embd_pdrop": 0.4, "attn_pdrop": 0.4},
}
ARCHITECTURES["mixtral"] = EXPERTS | {"router_jitter_noise": 0.4}
ARCHITECTURES["phimoe"] = EXPERTS | {"input_jitter_noise": 0.4, "router_jitter_noise": 0.01}
IDS = torch.arange(48)[None] % 64


def random_model(architecture: str, fields: dict[str, Any]) -> PreTrainedModel:
    shape = {name: value for name, value in SHAPE.items() if (architecture, name) != ("falcon", "head_dim")}
    config = AutoConfig.for_model(architecture, **shape | fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # GPT-BigCode's module calls it
@pytest.mark.parametrize("with_checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_update_computes_what_evaluation_does(architecture: str, with_checkpointing: bool) -> None:
    """Bit for bit, with a gradient for every weight that has one in training mode."""
    model = random_model(architecture, ARCHITECTURES[architecture])
    with torch.no_grad():
        evaluated = model(IDS, use_cache=False).logits
        in_training = model.train()(IDS, use_cache=False).logits
    assert not torch.allclose(in_training, evaluated, atol=0.01)
    if with_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    disable_randomness(model)
    enter_update_mode(model)
    layers = checkpointed_modules(model)
    assert len(layers) == (2 if with_checkpointing else 0)
    assert [module for module in model.modules() if module.training] == layers

    updated = model(IDS, use_cache=False).logits
    assert torch.equal(updated, evaluated)
    updated.square().sum().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert all(".experts." in name or "gate" in name or "embed" in name for name in without), without


def test_layers_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient checkpointing saves memory in this mode, too."""
    model = random_model("llama", {})
    model.gradient_checkpointing_enable({"use_reentrant": False})
    enter_update_mode(model)
    calls = []
    forward = LlamaDecoderLayer.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0])
        return forward(*args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", counted)
    model(IDS, use_cache=False).logits.sum().backward()
    assert len(calls) == 2 * 2


def test_an_old_architecture_checkpoints_in_the_module_that_has_the_layers() -> None:
    model = torch.nn.ModuleDict({"encoder": torch.nn.Module(), "head": torch.nn.Module()})
    model["encoder"].gradient_checkpointing = True
    model["encoder"].layerdrop = 0.1
    disable_randomness(model)
    enter_update_mode(model)
    assert (model["encoder"].training, model["head"].training, model["encoder"].layerdrop) == (True, False, 0.0)


def test_fields_that_make_a_pass_random() -> None:
    fields = {"attn_pdrop": 0.1, "layerdrop": 0.0, "moe_jitter_eps": 0.01, "rms_norm_eps": 1e-6, "dropout": None}
    assert find_random_fields(vars(SimpleNamespace(**fields))) == ["attn_pdrop", "moe_jitter_eps"]
