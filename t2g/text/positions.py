"""Whether an engine can hold a model: as many positions, and its heads on several GPUs."""

import os
from pathlib import Path
from typing import Any

from t2g.errors import UserError

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's CPU attention
ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def check_positions(model: str, revision: str | None, key: str, max_model_len: int) -> None:
    """UserError, naming `key`, for a window of more tokens than the model has positions: vLLM refuses it, but not
    before its engine has started.

    Silent where the config is not on this machine, stretches its positions or names another maximum: that arithmetic is
    vLLM's; and where its own switch allows more.
    """
    config = _text_config(model, revision)
    if config is None:
        return
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    known = getattr(config, "max_position_embeddings", None)
    stretched = rope.get("rope_type", rope.get("type", "default")) not in ("default", "llama3")
    if known is None or stretched or getattr(config, "model_max_length", None) or os.environ.get(ALLOWED):
        return
    if max_model_len > known:
        raise UserError(f"{key}={max_model_len}, and {model} knows {known} positions; lower it")


def check_heads(model: str, revision: str | None, key: str, gpus: int) -> None:
    """UserError, naming `key`, for a number of GPUs over which vLLM cannot spread an engine of the model. Silent where
    the config is not on this machine."""
    config = _text_config(model, revision) if gpus > 1 else None
    if config is not None:
        heads = config.num_attention_heads
        if why := find_uneven_heads(heads, getattr(config, "num_key_value_heads", None) or heads, gpus):
            raise UserError(f"{key}={gpus}: {model} has {why}; take a number that divides them")


def check_head_size(model: str, revision: str | None, key: str) -> None:
    """UserError, naming `key`, for heads of a size that vLLM's CPU kernels do not have. Silent where the config is not
    on this machine."""
    config = _text_config(model, revision)
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None) or (heads and config.hidden_size // heads)
    if size and size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        raise UserError(f"{key}={model}: its heads have a size of {size}, and on a CPU engines know {sizes}")


def find_uneven_heads(heads: int, kv_heads: int, gpus: int) -> str:
    """What cannot be cut into `gpus` equal parts; "" where all can. A key-value head may be on several GPUs.

    >>> find_uneven_heads(32, 8, 3), find_uneven_heads(32, 8, 16)
    ('32 attention heads', '')
    """
    if heads % gpus:
        return f"{heads} attention heads"
    return f"{kv_heads} key-value heads" if kv_heads % gpus and gpus % kv_heads else ""


def _text_config(model: str, revision: str | None) -> Any:
    """Of the files on this machine; None where there are none."""
    from transformers import AutoConfig

    source = {"revision": None if Path(model).is_dir() else revision, "local_files_only": True}
    try:
        return AutoConfig.from_pretrained(model, **source, trust_remote_code=False).get_text_config()
    except (OSError, ValueError):
        return None
