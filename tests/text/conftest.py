"""Small tokenizers of the shapes that real models have, trained on a few sentences."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GemmaTokenizer, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

TEXTS = [
    "The cat sat on the mat, and the hat is red.",
    "café naïve Zürich",
    "東京 is far. the the the",
    "  two  spaces ",
]


def _trained(pre_tokenizer: Any, alphabet: list[str], special: list[str], vocab_size: int) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return json.loads(tokenizer.to_str())["model"]


def _byte_level(kind: Callable[..., Any], end: str) -> Any:
    model = _trained(
        pre_tokenizers.ByteLevel(add_prefix_space=False), sorted(pre_tokenizers.ByteLevel.alphabet()), [end], 300
    )
    tokenizer = kind(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("two words", special=False)])
    return tokenizer


def _sentencepiece(kind: Callable[..., Any], special: list[str]) -> Any:
    special = [*special, "<unk>"]
    model = _trained(pre_tokenizers.Metaspace(split=False), [], special, 90)
    vocab = model["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    tokenizer = kind(vocab=vocab, merges=[tuple(merge) for merge in model["merges"]])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("two words", special=False)])
    return tokenizer


def _metaspace() -> Any:
    """The decoder of older T5- and XLNet-like files: no byte fallback, and the first token loses its metaspaces."""
    model = _trained(pre_tokenizers.Metaspace(), [], ["<unk>", "</s>"], 90)
    merges = [tuple(merge) for merge in model["merges"]]
    backend = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


_LLAMA_SPECIAL = ["<s>", "</s>"]
_GEMMA_SPECIAL = ["<pad>", "<eos>", "<bos>", "<mask>"]
_MAKERS: dict[str, Callable[[], Any]] = {
    "gpt2": partial(_byte_level, GPT2Tokenizer, "<|endoftext|>"),
    "qwen2": partial(_byte_level, Qwen2Tokenizer, "<|endoftext|>"),
    "llama": partial(_sentencepiece, LlamaTokenizer, _LLAMA_SPECIAL),
    "gemma": partial(_sentencepiece, GemmaTokenizer, _GEMMA_SPECIAL),
}
_MAKERS["metaspace"] = _metaspace


@pytest.fixture(scope="session", params=_MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return _MAKERS[request.param]()


@pytest.fixture(scope="session", params=["gpt2", "qwen2", "llama", "gemma"])
def any_text_tokenizer(request: pytest.FixtureRequest) -> Any:
    """One that can spell every text."""
    return _MAKERS[request.param]()


@pytest.fixture(scope="session")
def gpt2() -> Any:
    return _MAKERS["gpt2"]()


@pytest.fixture(scope="session")
def llama() -> Any:
    return _MAKERS["llama"]()


@pytest.fixture(scope="session")
def metaspace() -> Any:
    return _metaspace()
