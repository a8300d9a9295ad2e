"""Model folders into torch modules for training; the same rules in every learner. Called inside a rank's process."""

from typing import Any

import torch

from actors.cluster.fanout import first_line
from t2g.config import Dtype, ModelConfig
from t2g.errors import UserError
from t2g.text.tokenizer import load_tokenizer


def load_for_training(
    model: ModelConfig, *auto_classes: str, dtype: Dtype, on_gpu: bool
) -> tuple[Any, list[torch.nn.Module]]:
    """The tokenizer, and the model once for each name of a transformers class, whole and on the CPU.

    safetensors only, and no code of the model's. UserError names model.policy when it cannot be loaded.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # else each load reports that a critic has no lm_head
    source = {"revision": model.revision, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(model.policy, **source)
        capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)  # Gemma 2: sdpa would ignore it
        # On a CPU eager attention takes short rows at twice the speed of sdpa.
        attention = "sdpa" if on_gpu and not capped else "eager"
        weights = {"use_safetensors": True, "attn_implementation": attention, "dtype": getattr(torch, dtype)}
        classes = [getattr(transformers, name) for name in auto_classes]
        models = [cls.from_pretrained(model.policy, **source, **weights) for cls in classes]
    except (OSError, ValueError) as error:
        raise UserError(f"model.policy={model.policy!r} cannot be loaded: {first_line(error)}") from error
    return load_tokenizer(model.policy, model.revision), models


def checkpoint_layers(model: Any, source: ModelConfig, *, section: str) -> None:
    """Gradient checkpointing of every layer. UserError, naming the section, where the architecture has no such thing.

    model: a transformers PreTrainedModel.
    """
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"{section}.gradient_checkpointing is on, but transformers has none for the architecture "
            f"{model.config.model_type!r} of model.policy={source.policy!r}; switch it off"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
