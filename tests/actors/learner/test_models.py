"""How a model is loaded for training."""

from pathlib import Path

import pytest
import torch
from models import random_model
from transformers import FalconConfig, FalconForCausalLM

from actors.learner.models import MAX_EAGER_TOKENS, load_for_training
from t2g.algo import shared_attention
from t2g.config import ModelConfig
from t2g.errors import UserError


@pytest.mark.parametrize(
    ("on_gpu", "longest_row", "attention"),
    [
        (False, 0, "eager"),
        (False, MAX_EAGER_TOKENS, "eager"),
        (False, MAX_EAGER_TOKENS + 1, "sdpa"),
        (True, 0, "sdpa"),
    ],
)
def test_long_rows_and_gpus_have_sdpa_whose_numbers_are_those_of_eager_attention(
    tmp_path: Path, on_gpu: bool, longest_row: int, attention: str
) -> None:
    source = ModelConfig(policy=str(random_model(tmp_path)))
    how = {"dtype": "float32", "on_gpu": on_gpu, "longest_row": longest_row}
    _, (model, other) = load_for_training(source, *["AutoModelForCausalLM"] * 2, **how)  # type: ignore[arg-type]
    assert model.config._attn_implementation == attention
    other.set_attn_implementation("eager")
    ids = torch.arange(20).reshape(2, 10) + 5
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 7:] = 0
    with torch.no_grad():
        actual, expected = (m(input_ids=ids, attention_mask=mask).logits[mask.bool()] for m in (model, other))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_shared_prompts_replace_the_attention(tmp_path: Path) -> None:
    source = ModelConfig(policy=str(random_model(tmp_path)))
    _, (model,) = load_for_training(source, "AutoModelForCausalLM", dtype="float32", on_gpu=False, share_prompts=True)
    assert model.config._attn_implementation == shared_attention.NAME


def test_a_model_whose_attention_cannot_be_replaced_is_refused(tmp_path: Path) -> None:
    source = ModelConfig(policy=str(random_model(tmp_path)))
    config = FalconConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    FalconForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^learner\.share_prompts is true.*\(falcon\)"):
        load_for_training(source, "AutoModelForCausalLM", dtype="float32", on_gpu=False, share_prompts=True)
