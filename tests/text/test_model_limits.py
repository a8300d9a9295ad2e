import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import random_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from t2g.errors import UserError
from t2g.text import model_limits
from t2g.text.model_limits import (
    check_full_attention,
    check_heads,
    check_positions,
    check_sliding_window,
    check_vision,
    find_uneven_heads,
)
from t2g.text.tokenizer import load_tokenizer


def test_a_window_beyond_the_positions_is_refused_by_its_key(tmp_path: Path) -> None:
    model = str(random_model(tmp_path))  # 2048 positions
    check_positions(model, None, "rollout.max_model_len", 2048)
    with pytest.raises(UserError, match=rf"rollout.max_model_len=2049, and {model} knows 2048 positions; lower it"):
        check_positions(model, None, "rollout.max_model_len", 2049)


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
def test_positions_that_are_stretched_are_left_to_vllm(tmp_path: Path, kind: str) -> None:
    model = random_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0}
    (model / "config.json").write_text(json.dumps(config))
    check_positions(str(model), None, "rollout.max_model_len", 8192)


def test_a_model_that_names_another_maximum_is_left_to_vllm(tmp_path: Path) -> None:
    """As Command R's: 8,192 positions and a maximum of 131,072."""
    model = random_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_max_length": 131072}))
    check_positions(str(model), None, "rollout.max_model_len", 131072)


def test_vllms_own_switch_allows_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    check_positions(str(random_model(tmp_path)), None, "rollout.max_model_len", 4096)


def test_a_model_that_is_not_here_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*address: object) -> None:
        raise AssertionError("it made a request")

    monkeypatch.setattr("socket.socket.connect", connect)
    check_positions("somebody/elsewhere", None, "rollout.max_model_len", 10**6)


def test_gpus_that_do_not_divide_the_heads_are_refused_by_their_key(tmp_path: Path) -> None:
    model = str(random_model(tmp_path))  # 2 heads of attention, 2 of keys and values
    check_heads(model, None, "rollout.gpus", 2)
    check_heads("owner/has-this", None, "rollout.gpus", 3)
    with pytest.raises(UserError, match=rf"^rollout\.gpus=3: {model} has 2 attention heads; take a number"):
        check_heads(model, None, "rollout.gpus", 3)


@pytest.mark.parametrize(
    ("fields", "max_model_len", "reason"),
    [
        ({}, 9999, ""),
        ({"sliding_window": 64}, 64, ""),
        ({"sliding_window": 64}, 65, r"attend to 64 tokens, fewer than rollout\.max_model_len=65"),
        ({"sliding_window": 64, "use_sliding_window": False}, 65, ""),
        ({"attn_logit_softcapping": 50.0}, 65, "caps the logits of its attention"),
        (
            {"attention_chunk_size": 64},
            65,
            r"attend to 64 tokens, fewer than .*; .* or lower rollout\.max_model_len to 64",
        ),
        ({"layer_types": ["full_attention", "linear_attention"]}, 65, "has layers of the type linear_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 65, ""),
    ],
)
def test_shared_prompts_need_attention_to_all_tokens(
    fields: dict[str, Any], max_model_len: int, reason: str, tmp_path: Path
) -> None:
    model = random_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | fields))
    if not reason:
        check_full_attention(str(model), None, max_model_len)
        return
    with pytest.raises(UserError, match=rf"^learner\.share_prompts: {model} .*{reason}"):
        check_full_attention(str(model), None, max_model_len)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "gpus", "uneven"),
    [
        (32, 8, 8, ""), (32, 8, 16, ""), (32, 8, 3, "32 attention heads"), (24, 8, 6, "8 key-value heads"),
        (28, 4, 2, ""), (28, 4, 7, "4 key-value heads"), (64, 8, 64, ""),
    ],
)  # fmt: skip
def test_heads_are_cut_evenly_or_key_value_heads_are_copied(heads: int, kv_heads: int, gpus: int, uneven: str) -> None:
    assert find_uneven_heads(heads, kv_heads, gpus) == uneven


def add_token(model: Path, *, special: bool, template: str = "{{ messages[0].content }}") -> None:
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_tokens(["<|new|>"], special_tokens=special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)


@pytest.mark.parametrize(
    ("special", "template"), [(False, "{{ messages[0].content }}"), (True, "<|new|>{{ messages[0].content }}")]
)
def test_a_token_without_a_row_is_refused_before_anything_starts(special: bool, template: str, tmp_path: Path) -> None:
    model = random_model(tmp_path)
    num_rows = len(load_tokenizer(str(model)))
    add_token(model, special=special, template=template)
    with pytest.raises(UserError, match=rf"'<\|new\|>' with id {num_rows}; the model has {num_rows} rows") as refusal:
        load_tokenizer(str(model))
    assert "resize_token_embeddings" in str(refusal.value)


def test_a_special_token_that_no_prompt_has_needs_no_row(tmp_path: Path) -> None:
    """As the image token of Gemma 3's text models."""
    model = random_model(tmp_path)
    add_token(model, special=True)
    assert "<|new|>" in load_tokenizer(str(model)).get_vocab()


def test_texts_beyond_the_window_of_cohere_2_are_refused_with_the_reason(tmp_path: Path) -> None:
    """One token more in the sliding layers changes the log-probabilities of a text only beyond the window."""
    name = str(random_model(tmp_path, "cohere2"))
    check_sliding_window(name, None, "rollout.max_model_len", 256)
    with pytest.raises(UserError, match=r"^rollout.max_model_len=257: .*one token more.*lower it to 256$"):
        check_sliding_window(name, None, "rollout.max_model_len", 257)
    logits = []
    for window in (16, 17):
        model = AutoModelForCausalLM.from_pretrained(name, sliding_window=window)
        with torch.no_grad():
            logits.append(model(torch.arange(40)[None] * 5).logits[0])
    gaps = (logits[0] - logits[1]).abs().amax(-1)
    assert gaps[:16].max() < 1e-5 < 1e-3 < gaps[16:].min()


TEXT = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
VISION: dict[str, dict[str, object]] = {
    "gemma3": {"image_size": 28, "patch_size": 14, "num_hidden_layers": 1},
    "qwen3_5": {"depth": 1, "num_heads": 2, "out_hidden_size": 64},
}


def save_vision_model(folder: Path, architecture: str) -> Any:
    shared = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    text = TEXT | ({"layer_types": ["full_attention"]} if architecture == "qwen3_5" else {})
    config = AutoConfig.for_model(architecture, text_config=text, vision_config=shared | VISION[architecture])
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def test_a_vision_checkpoint_whose_text_part_has_other_names_is_not_trained(tmp_path: Path) -> None:
    """The way out that the message names works."""
    whole = save_vision_model(tmp_path / "whole", "qwen3_5")
    name = str(tmp_path / "whole")
    check_vision(name, None, "model.policy", is_trained=False, has_engine=False)
    with pytest.raises(UserError, match=rf"model.policy={name} holds Qwen3_5ForConditionalGeneration") as refusal:
        check_vision(name, None, "model.policy", is_trained=True, has_engine=False)
    assert "Qwen3_5ForCausalLM" in str(refusal.value)

    AutoModelForCausalLM.from_pretrained(name).save_pretrained(tmp_path / "text")
    check_vision(str(tmp_path / "text"), None, "model.policy", is_trained=True, has_engine=True)
    ids = torch.arange(20)[None]
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    torch.testing.assert_close(text(ids).logits, whole(input_ids=ids).logits)


def test_an_engine_of_a_vision_checkpoint_names_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_vision_model(tmp_path, "gemma3")
    check_vision(str(tmp_path), None, "model.policy", is_trained=True, has_engine=False)
    monkeypatch.setattr(model_limits, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"Gemma3ForConditionalGeneration.*torchvision"):
        check_vision(str(tmp_path), None, "model.policy", is_trained=True, has_engine=True)
    monkeypatch.setattr(model_limits, "find_spec", lambda name: name)
    check_vision(str(tmp_path), None, "model.policy", is_trained=True, has_engine=True)


def test_a_model_of_text_is_trained_and_served(tmp_path: Path) -> None:
    check_vision(str(random_model(tmp_path, "gemma2")), None, "model.policy", is_trained=True, has_engine=True)
