"""Attention for rows in which several responses follow one copy of their prompt, see `t2g.data.shared_prompts`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from t2g.data.batching import PromptGroup

NAME = "t2g_shared_prompts"  # transformers' name for the attention


def register() -> str:
    """Make the attention known to transformers; return its name, for `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    return NAME


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    prompt_groups: Sequence[PromptGroup] = (),
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the outputs [1, L, H, D] of transformers' attention interface, and no attention weights.

    A prompt attends to itself, and a response to its prompt and to itself, both causally. Other options than the scale,
    as attention sinks, have no effect: `start_checks.check_shared_prompts` refuses models that need them.

    Args:
        query: [1, H, L, D]; `key` and `value` may have fewer heads.
        prompt_groups: The groups of the row. Without groups the attention is torch's causal one.
        options: Those of transformers' sdpa attention.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if not prompt_groups:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    lengths: list[int] = []
    for group in prompt_groups:
        lengths += [group.prompt_length, *group.response_lengths]
    num_repeats = query.shape[1] // key.shape[1]
    queries = query.split(lengths, dim=2)
    keys = repeat_kv(key, num_repeats).split(lengths, dim=2)
    values = repeat_kv(value, num_repeats).split(lengths, dim=2)
    segments = zip(queries, keys, values, strict=True)

    attend_causally = partial(_attend_causally, scale=options.get("scaling"))
    outputs: list[torch.Tensor] = []
    for group in prompt_groups:
        prompt_query, prompt_key, prompt_value = next(segments)
        outputs.append(attend_causally(prompt_query, prompt_key, prompt_value))
        for _ in group.response_lengths:
            response_query, response_key, response_value = next(segments)
            all_keys = torch.cat([prompt_key, response_key], dim=2)
            all_values = torch.cat([prompt_value, response_value], dim=2)
            outputs.append(attend_causally(response_query, all_keys, all_values))
    joined = torch.cat(outputs, dim=2)
    return joined.transpose(1, 2).contiguous(), None


def _attend_causally(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float | None
) -> torch.Tensor:
    """Return the attention of queries whose tokens are the last ones of the keys."""
    mask = causal_lower_right(query.shape[2], key.shape[2])
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
