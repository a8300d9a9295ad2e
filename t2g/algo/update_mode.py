"""The mode of a model in updates by PPO and DPO: it computes there what it computes in evaluation, without randomness.

With dropout, noise or sampled routing, ratios would differ from 1 before the first update. Evaluation mode has none of
them, whatever their names. Gradient checkpointing works in training mode only: there the layers alone, without the
modules in them, are in training mode, and their own random numbers are off.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch

RANDOM_WORDS = ("drop", "jitter", "noise")  # in the names of fields that make a forward pass random


def checkpointed_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that run under gradient checkpointing, which transformers does in training mode only."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    marked = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    layers = [module for module in marked if isinstance(module, GradientCheckpointingLayer)]
    return layers or marked  # an old architecture checkpoints in the module that has the layers


def enter_update_mode(model: torch.nn.Module) -> None:
    """Set evaluation mode, except of the modules of `checkpointed_modules`; call `disable_randomness` before."""
    model.eval()
    for module in checkpointed_modules(model):
        module.training = True


def disable_randomness(model: torch.nn.Module) -> None:
    """Set dropout and noise of `checkpointed_modules` to 0; their submodules stay, since they are in evaluation mode.

    A module in evaluation mode may use such a number without randomness, as Phi-MoE's router uses its jitter.
    """
    from transformers import PreTrainedConfig

    for module in checkpointed_modules(model):
        _set_zeros(module)
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config = copy.copy(module.config)  # Falcon's layer reads it; the model's own config is exported
            _set_zeros(module.config)


def _set_zeros(holder: Any) -> None:
    for name in find_random_fields(vars(holder)):
        setattr(holder, name, 0.0)


def find_random_fields(fields: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields above 0 that make a forward pass random.

    >>> find_random_fields({"attn_pdrop": 0.1, "layerdrop": 0.0, "router_jitter_noise": 0.01, "rms_norm_eps": 1e-6})
    ['attn_pdrop', 'router_jitter_noise']
    """
    random_fields = []
    for name, value in fields.items():
        is_positive = isinstance(value, float) and value > 0
        if is_positive and any(word in name for word in RANDOM_WORDS):
            random_fields.append(name)
    return random_fields
