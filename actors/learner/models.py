"""Load model folders as torch modules for training, by the same rules in every learner; called in a rank's process."""

from typing import Any

import torch

from actors.cluster.fanout import first_line
from t2g.algo import shared_attention
from t2g.config import Dtype, ModelConfig
from t2g.errors import UserError
from t2g.resources.host_memory import MAX_EAGER_TOKENS
from t2g.text.policy_chat import load_policy_tokenizer

ABSENT = "_t2g_absent"  # attribute of a model: the names of weights and buffers that its files lack


def load_for_training(
    model: ModelConfig,
    *auto_classes: str,
    dtype: Dtype,
    on_gpu: bool,
    longest_row: int = 0,
    share_prompts: bool = False,
) -> tuple[Any, list[torch.nn.Module]]:
    """Return the tokenizer, and one full model on the CPU for each transformers class.

    Only safetensors are read, and no code of the model is run.

    Args:
        longest_row: Its tokens, 0 if unknown; on a CPU they decide the attention.
        share_prompts: Whether rows share prompts, which needs `shared_attention` whatever their length.

    Raises:
        UserError: model.policy cannot be loaded, or its attention cannot be exchanged.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # otherwise each load reports that a critic has no lm_head
    source = {"revision": model.revision, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(model.policy, **source)
        is_capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)  # Gemma 2: sdpa would ignore it
        is_faster_in_sdpa = on_gpu or longest_row > MAX_EAGER_TOKENS
        attention = "sdpa" if is_faster_in_sdpa and not is_capped else "eager"
        weights = {"use_safetensors": True, "attn_implementation": attention, "dtype": getattr(torch, dtype)}
        classes = [getattr(transformers, name) for name in auto_classes]
        models = [_load(cls, model.policy, **source, **weights) for cls in classes]
    except (OSError, ValueError, ImportError) as error:  # ImportError: a quantized model
        raise UserError(f"model.policy={model.policy!r} cannot be loaded: {first_line(error)}") from error
    if share_prompts:
        for loaded in models:
            _install_shared_attention(loaded, model)
    return load_policy_tokenizer(model), models


def _install_shared_attention(model: Any, source: ModelConfig) -> None:
    if not model.is_backend_compatible():
        raise UserError(
            f"learner.share_prompts is true, and transformers cannot exchange the attention of model.policy="
            f"{source.policy!r} ({model.config.model_type}); set learner.share_prompts=false"
        )
    model.set_attn_implementation(shared_attention.register())


def _load(auto_class: Any, policy: str, **options: Any) -> Any:
    model, info = auto_class.from_pretrained(policy, output_loading_info=True, **options)
    setattr(model, ABSENT, frozenset(info["missing_keys"]))
    return model


def checkpoint_layers(model: Any, source: ModelConfig, *, section: str) -> None:
    """Enable gradient checkpointing of every layer of a transformers PreTrainedModel.

    Raises:
        UserError: The architecture does not support it; the message names the config section.
    """
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"{section}.gradient_checkpointing is on, but transformers has none for the architecture "
            f"{model.config.model_type!r} of model.policy={source.policy!r}; switch it off"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
