"""Whether a model knows as many positions as its engine is to hold."""

import os
from pathlib import Path

ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def check_positions(model: str, revision: str | None, key: str, max_model_len: int) -> None:
    """UserError, naming `key`, for a window of more tokens than the model has positions: vLLM refuses it, but not
    before its engine has started.

    Silent where the config is not on this machine, stretches its positions or names another maximum: that arithmetic is
    vLLM's; and where its own switch allows more.
    """
    from transformers import AutoConfig

    from t2g.errors import UserError

    source = {"revision": None if Path(model).is_dir() else revision, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(model, **source, trust_remote_code=False).get_text_config()
    except (OSError, ValueError):
        return
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    known = getattr(config, "max_position_embeddings", None)
    stretched = rope.get("rope_type", rope.get("type", "default")) not in ("default", "llama3")
    if known is None or stretched or getattr(config, "model_max_length", None) or os.environ.get(ALLOWED):
        return
    if max_model_len > known:
        raise UserError(f"{key}={max_model_len}, and {model} knows {known} positions; lower it")
