"""Adapters put in, merged and kept, on the architectures that users bring."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import ARCHITECTURES, random_model
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from actors.learner import lora
from t2g.config import LoRAConfig, ModelConfig
from t2g.errors import UserError
from t2g.text.tokenizer import load_tokenizer

CONFIG = LoRAConfig(r=3, alpha=6)
DENSE = [name for name in ARCHITECTURES if "moe" not in name]
IDS = torch.arange(40).reshape(2, 20)


def base_folder(folder: Path, architecture: str) -> Path:
    if architecture != "gpt2":
        return random_model(folder, architecture)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, initializer_range=0.1,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("architecture", ["gpt2", *DENSE])  # of GPT-2 a weight is [in, out]
def test_merged_and_kept_adapters_compute_what_was_trained(architecture: str, tmp_path: Path) -> None:
    folder = base_folder(tmp_path / "base", architecture)
    torch.manual_seed(0)
    model = load(folder)
    base = load(folder)
    lora.add_adapters(model, CONFIG, ModelConfig(policy=str(folder), revision="r1"), dropout=0.5)
    assert torch.equal(logits(model), logits(base))  # B starts at 0

    named = dict(model.named_parameters())
    adapters = {lora.adapter_name(name): p for name, p in named.items() if p.requires_grad}
    assert None not in adapters
    assert all(lora.adapter_name(name) is None for name, p in named.items() if not p.requires_grad)
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.normal_(std=0.2)
    trained = logits(model.eval())
    assert (trained - logits(base)).abs().max() > 0.1
    with lora.adapters_off(model):
        assert torch.equal(logits(model), logits(base))
    assert torch.equal(logits(model), trained)
    assert all(p.requires_grad == (lora.adapter_name(name) is not None) for name, p in named.items())

    sources = lora.map_weight_sources(named)
    assert sources.keys() == dict(base.named_parameters()).keys()
    merged = {}
    for name, parameters in sources.items():
        merged[name] = lora.checkpoint_weight(model, name, [named[n] for n in parameters])
    same = {name for name, weight in base.named_parameters() if torch.equal(weight, merged[name])}
    matrices = {name for name, parameters in sources.items() if len(parameters) == 3}
    assert same == merged.keys() - matrices
    assert not any("embed" in name or "head" in name or "wte" in name for name in matrices)
    base.load_state_dict(merged, strict=False)  # tied weights have one name
    torch.testing.assert_close(logits(base), trained, atol=1e-4, rtol=1e-4)

    lora.write_adapter(model, {name: p.detach() for name, p in adapters.items()}, tmp_path / "adapter")
    adapter_model = PeftModel.from_pretrained(load(folder), tmp_path / "adapter")
    torch.testing.assert_close(logits(adapter_model), trained, atol=1e-6, rtol=1e-6)
    assert adapter_model.peft_config["default"].base_model_name_or_path == str(folder)


def test_every_linear_layer_but_the_head_has_an_adapter(tmp_path: Path) -> None:
    model = load(random_model(tmp_path))
    lora.add_adapters(model, CONFIG, ModelConfig(policy=str(tmp_path)), dropout=0)
    under = {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert under == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 2 * 3 * (4 * (64 + 64) + 3 * (64 + 96))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "glm4_moe"])  # the second has shared experts and a dense layer
def test_blocks_with_experts_have_no_adapters(architecture: str, tmp_path: Path) -> None:
    """peft would adapt the experts in a form that has no dropout, and that is neither sent nor merged."""
    model = load(random_model(tmp_path, architecture))
    lora.add_adapters(model, CONFIG, ModelConfig(policy=str(tmp_path)), dropout=0.5)
    under = {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert under == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_adapters_of_experts_are_refused_for_engines_on_cpus(tmp_path: Path) -> None:
    dense = random_model(tmp_path / "dense")
    mixture = random_model(tmp_path / "mixture", "qwen3_moe")
    lora.check_adapters(CONFIG, ModelConfig(policy=str(dense)), cpu_engines=True)
    lora.check_adapters(CONFIG, ModelConfig(policy=str(mixture)))
    with pytest.raises(UserError, match=r"mixture of experts.*set learner\.sync_adapters=false"):
        lora.check_adapters(CONFIG, ModelConfig(policy=str(mixture)), cpu_engines=True)


def test_an_unknown_form_of_adapter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = random_model(tmp_path)
    monkeypatch.setattr(lora, "find_targets", lambda model: ["model.embed_tokens"])
    with pytest.raises(UserError, match=r"peft adapts model\.embed_tokens .* as a Embedding"):
        lora.check_adapters(CONFIG, ModelConfig(policy=str(folder)))


def test_merge_worked_by_hand() -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    a = torch.tensor([[1.0, -1.0]])
    b = torch.tensor([[1.0], [0.0], [2.0]])
    expected = torch.tensor([[1.5, 1.5], [3.0, 4.0], [6.0, 5.0]])
    assert torch.equal(lora.merged_weight(weight, a, b, 0.5), expected)
    assert weight[0, 0] == 1


def test_a_bfloat16_merge_rounds_once() -> None:
    """1 + 2^-9 + 2^-9: added one after the other in bfloat16, which ends at 2^-7, both would vanish."""
    weight = torch.tensor([[1.0]], dtype=torch.bfloat16)
    a = torch.tensor([[2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    b = torch.tensor([[0.5, 0.5]], dtype=torch.bfloat16)
    merged = lora.merged_weight(weight, a, b, 2.0)
    assert merged.dtype == torch.bfloat16
    assert float(merged) == 1 + 2**-7


def test_a_bias_under_an_adapter_keeps_its_name() -> None:
    factors = ("q.lora_A.default.weight", "q.lora_B.default.weight")
    assert lora.map_weight_sources(["head.weight", "q.base_layer.weight", "q.base_layer.bias", *factors]) == {
        "head.weight": ("head.weight",),
        "q.weight": ("q.base_layer.weight", *factors),
        "q.bias": ("q.base_layer.bias",),
    }


def test_an_adapter_is_merged_into_the_base_that_it_names(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = random_model(tmp_path / "base", "llama")
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(load(base), config)
    model.save_pretrained(tmp_path / "adapter")
    lora.merge_adapter(tmp_path / "adapter", tmp_path / "merged", "float32")
    assert (logits(load(tmp_path / "merged")) - logits(model.eval())).abs().max() < 1e-4
    assert (logits(model) - logits(load(base))).abs().max() > 1e-2
    assert (tmp_path / "merged" / "tokenizer.json").exists()
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(UserError, match="save the adapter in that format"):
        lora.merge_adapter(tmp_path / "adapter", tmp_path / "again", "float32")


def resize_base(base: Path) -> tuple[Any, Any]:
    """Return the base with rows for two new tokens, and its tokenizer with these tokens and a template of its own."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>", "<|done|>"]})
    tokenizer.chat_template = "{% for m in messages %}<|tool|>{{ m.content }}<|done|>{% endfor %}"
    model = load(base)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return model, tokenizer


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # with a head of its own, and a tied one
def test_a_merged_adapter_has_its_own_tokens_and_template(architecture: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = random_model(tmp_path / "base", architecture)
    model, tokenizer = resize_base(base)
    config = LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False, base_model_name_or_path=str(base))
    tuned = get_peft_model(model, config)
    tuned.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    tokenizer.save_pretrained(tmp_path / "adapter")
    lora.merge_adapter(tmp_path / "adapter", tmp_path / "merged", "float32")

    merged = load_tokenizer(str(tmp_path / "merged"))
    assert merged.chat_template == tokenizer.chat_template
    assert merged("<|done|>")["input_ids"] == [len(tokenizer) - 1]
    ids = torch.arange(len(tokenizer))[None, -40:]
    expected, actual = (each(ids).logits for each in (tuned.eval(), load(tmp_path / "merged")))
    assert (expected - actual).abs().max() < 1e-4


def test_an_adapter_whose_tokens_have_no_rows_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = random_model(tmp_path / "base", "llama")
    _, tokenizer = resize_base(base)
    get_peft_model(load(base), LoraConfig(r=3, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    lora.merge_adapter(tmp_path / "adapter", tmp_path / "merged", "float32")
    with pytest.raises(UserError, match=r"2 tokens without a row in the model, such as '<|done|>'"):
        load_tokenizer(str(tmp_path / "merged"))
