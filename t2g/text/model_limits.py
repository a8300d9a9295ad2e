"""Checks whether an engine can run a model, and a learner train it: positions, vocabulary, heads, attention."""

import os
from importlib.util import find_spec
from typing import Any

from t2g.errors import UserError
from t2g.text.model_config import load_local_config

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # supported by vLLM's CPU attention
ONE_TOKEN_MORE = ("cohere2", "cohere2_moe")  # see `check_sliding_window`
# Types of attention layers in transformers that differ in their window only.
WINDOWED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def check_positions(model: str, revision: str | None, key: str, max_model_len: int) -> None:
    """Check that the model has a position for each token of the window; vLLM would check it after the engine's start.

    Nothing is checked if the config is not on this machine, scales its positions or sets another maximum, which vLLM
    computes, or if vLLM's own switch (ALLOWED) permits more.

    Raises:
        UserError: The model has fewer positions than `key` requests.
    """
    config = _load_text_config(model, revision)
    num_positions = getattr(config, "max_position_embeddings", None)
    if num_positions is None or os.environ.get(ALLOWED):
        return
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    is_scaled = rope_type not in ("default", "llama3")
    has_other_maximum = getattr(config, "model_max_length", None)
    if is_scaled or has_other_maximum:
        return
    if max_model_len > num_positions:
        raise UserError(f"{key}={max_model_len}, and {model} knows {num_positions} positions; lower it")


def check_sliding_window(model: str, revision: str | None, key: str, max_model_len: int) -> None:
    """Check that engine and learner attend to the same tokens in the sliding layers of Cohere 2.

    There vLLM 0.32 attends to one token more than transformers, `sliding_window` + 1. Within the window both agree.

    Raises:
        UserError: A text of `key` tokens can be longer than the window.
    """
    config = _load_text_config(model, revision)
    if getattr(config, "model_type", "") not in ONE_TOKEN_MORE:
        return
    if max_model_len <= config.sliding_window:
        return
    raise UserError(
        f"{key}={max_model_len}: in {model} ({config.model_type}) vLLM's sliding layers attend to one token more than "
        f"those of transformers, which trains it, so that texts longer than {config.sliding_window} tokens get other "
        f"log-probabilities; lower it to {config.sliding_window}"
    )


def check_full_attention(model: str, revision: str | None, max_model_len: int) -> None:
    """Check that every layer attends to all earlier tokens, as `t2g.algo.shared_attention` does.

    Raises:
        UserError: The config caps attention logits, has other layers, or a window that a sequence can exceed.
    """
    config = _load_text_config(model, revision)
    uses_window = getattr(config, "use_sliding_window", True)
    sliding_window = getattr(config, "sliding_window", None) if uses_window else None
    window = sliding_window or getattr(config, "attention_chunk_size", None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    others = sorted(layer_types - WINDOWED_LAYERS)
    remedy = "set learner.share_prompts=false"
    reason = ""
    if window and max_model_len > window:
        reason = f"has layers that attend to {window} tokens, fewer than rollout.max_model_len={max_model_len}"
        remedy += f" or lower rollout.max_model_len to {window}"
    if others:
        reason = f"has layers of the type {others[0]}"
    if getattr(config, "attn_logit_softcapping", None):
        reason = "caps the logits of its attention"
    if reason:
        raise UserError(f"learner.share_prompts: {model} {reason}; {remedy}")


def check_vocabulary(tokenizer: Any, model: str, revision: str | None) -> None:
    """Check that the model has a row for each token that a text or its chat template can contain.

    A special token without a row that no template writes stays out of every prompt, as in published Gemma 3 models.
    Nothing is checked if the config is not on this machine.

    Raises:
        UserError: A token has no row: an engine and a rank would die at its first use.
    """
    config = _load_text_config(model, revision)
    num_rows = getattr(config, "vocab_size", None)
    if num_rows is None:
        return
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    written = {tokenizer.bos_token, tokenizer.eos_token}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    used: dict[str, int] = {}  # tokens without a row, and their ids
    for token, token_id in tokenizer.get_vocab().items():
        if token_id < num_rows:
            continue
        if token not in special or token in written or token in template:
            used[token] = token_id
    if used:
        token = max(used, key=lambda name: used[name])
        raise UserError(
            f"the tokenizer of {model} has {len(used)} tokens without a row in the model, such as {token!r} with id "
            f"{used[token]}; the model has {num_rows} rows: resize its embeddings (resize_token_embeddings) and "
            "save both, or use the tokenizer that the model was trained with"
        )


def check_vision(model: str, revision: str | None, key: str, *, is_trained: bool, has_engine: bool) -> None:
    """Check that a model of images and text can be trained and served as a model of text, if its config is here.

    Raises:
        UserError: Its files have other names than the text model that transformers trains; or vLLM's part for images
            lacks torchvision.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = load_local_config(model, revision)
    if getattr(config, "vision_config", None) is None:
        return
    architectures = config.architectures or ["a model of images and text"]
    stored = architectures[0]
    trained = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, stored)
    if is_trained and trained != stored:
        raise UserError(
            f"{key}={model} holds {stored}, a model of images and text; {trained}, the part that is trained, names its "
            "weights differently: save that part by AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER), "
            "the tokenizer beside it, and use FOLDER"
        )
    if has_engine and find_spec("torchvision") is None:
        raise UserError(
            f"{key}={model} holds {stored}, a model of images and text, and vLLM's processor for its images needs "
            "torchvision, which is not installed: take a checkpoint of text alone, or install the torchvision that "
            "fits the installed torch"
        )


def check_heads(model: str, revision: str | None, key: str, gpus: int) -> None:
    """Check that vLLM can shard the model over `gpus` GPUs, if its config is on this machine.

    Raises:
        UserError: The heads cannot be divided by the value of `key`.
    """
    if gpus <= 1:
        return
    config = _load_text_config(model, revision)
    if config is None:
        return
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    uneven = find_uneven_heads(heads, kv_heads, gpus)
    if uneven:
        raise UserError(f"{key}={gpus}: {model} has {uneven}; take a number that divides them")


def check_head_size(model: str, revision: str | None, key: str) -> None:
    """Check that vLLM's CPU kernels support the head size of the model, if its config is on this machine.

    Raises:
        UserError: They do not support the model of `key`.
    """
    config = _load_text_config(model, revision)
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None) or (heads and config.hidden_size // heads)
    if size and size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        raise UserError(
            f"{key}={model}: its head size {size} is not supported by vLLM on CPUs, which needs one of {sizes}"
        )


def find_uneven_heads(heads: int, kv_heads: int, gpus: int) -> str:
    """Return which heads cannot be divided equally among `gpus`, or "". A key-value head may be on several GPUs.

    >>> find_uneven_heads(32, 8, 3), find_uneven_heads(32, 8, 16)
    ('32 attention heads', '')
    """
    if heads % gpus:
        return f"{heads} attention heads"
    if kv_heads % gpus and gpus % kv_heads:
        return f"{kv_heads} key-value heads"
    return ""


def _load_text_config(model: str, revision: str | None) -> Any:
    """Return the text config of a model on this machine, None without its files."""
    config = load_local_config(model, revision)
    if config is None:
        return None
    return config.get_text_config()
