"""Random-weight model folders of the architectures that users bring, small enough for a test."""

from pathlib import Path

from t2g.tasks.tiny_assets import build_tokenizer

SENTENCES = ("My name is José.", "I bought a phone.", "It always hums.", "Say what is wrong.", "東京 🎧 naïve")
SHARED = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "bos_token_id": None,
}
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"tie_word_embeddings": False, "sliding_window": None},
    "gemma2": {"sliding_window": 256, "query_pre_attn_scalar": 32},
}


def random_model(folder: Path, architecture: str = "llama", *, seed: int = 0) -> Path:
    """A two-layer model of 64 wide with its byte-level tokenizer and chat template; returns `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = build_tokenizer(folder, SENTENCES, vocab_size=320)
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **{key: value for key, value in SHARED.items() if not (architecture == "qwen2" and key == "head_dim")},
        **ARCHITECTURES[architecture],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder
