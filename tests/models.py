"""Random-weight model folders of the architectures that users bring, small enough for a test."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from t2g.tasks.tiny.assets import build_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

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
BYTE_VOCABULARY = 300
BYTE_EOS = 256
WINDOWED = ["sliding_attention", "full_attention"]  # of a model's two layers
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"tie_word_embeddings": False, "sliding_window": None},
    "gemma2": {"sliding_window": 256, "query_pre_attn_scalar": 32},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 32, "layer_types": WINDOWED},
    "gemma4_text": {
        "sliding_window": 16, "layer_types": WINDOWED, "global_head_dim": 32, "hidden_size_per_layer_input": 0,
    },
    "phi3": {"tie_word_embeddings": False, "sliding_window": None},
    "olmo2": {"tie_word_embeddings": False},
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "cohere2": {"sliding_window": 256, "layer_types": WINDOWED, "logit_scale": 0.5},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.08, "dropout": 0.1, "tie_word_embeddings": True},
    "gpt_neox": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "tie_word_embeddings": False,
    },
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    },
}  # fmt: skip
WITHOUT_HEAD_DIM = ("qwen2", "phi3", "olmo2", "granite", "opt", "gpt_neox")  # hidden_size / num_attention_heads


def random_model(folder: Path, architecture: str = "llama", *, seed: int = 0) -> Path:
    """A two-layer model of 64 wide with its byte-level tokenizer and chat template; returns `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = build_tokenizer(folder, SENTENCES, vocab_size=320)
    shared = {key: value for key, value in SHARED.items() if key != "head_dim" or architecture not in WITHOUT_HEAD_DIM}
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shared,
        **ARCHITECTURES[architecture],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name in sorted(model.state_dict().keys() & dict(model.named_buffers()).keys()):  # persistent ones
            buffer = model.get_buffer(name)
            buffer += 0.5 * torch.rand_like(buffer)
    model.save_pretrained(folder)
    return folder


def bigram_model(folder: Path, follows: Mapping[str, str]) -> Path:
    """A model that writes `follows[c]` after the character c, and has no preference after any other; returns `folder`.

    Where guided decoding forbids what follows, every token that it allows is as good.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    random_model(folder, "llama")
    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].zero_()
    head = weights["lm_head.weight"].zero_()
    embedding[:, 0] = 1.0  # what comes before leaves no trace: the layers add nothing to the last token's embedding
    for place, (character, following) in enumerate(follows.items(), start=1):
        embedding[ids(character)] = torch.eye(embedding.shape[1])[place]
        head[ids(following), place] = 5.0  # 40 nats behind the norm
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def byte_llama(folder: Path, seed: int, *, spread: float = 0.3) -> "LlamaForCausalLM":
    """A random two-layer Llama with tied embeddings and a tokenizer of bytes, kept in `folder`.

    Its vocabulary is no multiple of 64: vLLM pads it, and loads it only at the end of a sync.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=BYTE_VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, initializer_range=spread, tie_word_embeddings=True,
        bos_token_id=BYTE_EOS, eos_token_id=BYTE_EOS,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    assert fast.eos_token_id == BYTE_EOS
    fast.save_pretrained(folder)
    return model
