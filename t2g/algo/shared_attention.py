"""Attention for rows in which several responses follow one copy of their prompt, see `t2g.data.shared_prompts`."""

from collections.abc import Iterator, Sequence
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

    A prompt attends to itself, and a response to its prompt and to itself, both causally.

    Args:
        query: [1, H, L, D]; `key` and `value` may have fewer heads.
        prompt_groups: The groups of the row. Without groups the attention is torch's causal one.
        options: Those of transformers' sdpa attention.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if not prompt_groups:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    attend_causally = partial(_attend_causally, scale=options.get("scaling"))
    num_repeats = query.shape[1] // key.shape[1]
    lengths = [*_segment_lengths(prompt_groups)]
    queries = iter(query.split(lengths, dim=2))
    keys = iter(repeat_kv(key, num_repeats).split(lengths, dim=2))
    values = iter(repeat_kv(value, num_repeats).split(lengths, dim=2))
    outputs: list[torch.Tensor] = []
    for group in prompt_groups:
        prompt_key = next(keys)
        prompt_value = next(values)
        outputs.append(attend_causally(next(queries), prompt_key, prompt_value))
        for _ in group.responses:
            all_keys = torch.cat([prompt_key, next(keys)], dim=2)
            all_values = torch.cat([prompt_value, next(values)], dim=2)
            outputs.append(attend_causally(next(queries), all_keys, all_values))
    joined = torch.cat(outputs, dim=2)
    return joined.transpose(1, 2).contiguous(), None


def _segment_lengths(groups: Sequence[PromptGroup]) -> Iterator[int]:
    for group in groups:
        yield group.prompt
        yield from group.responses


def _attend_causally(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float | None
) -> torch.Tensor:
    """Return the attention of queries that are the last ones of the keys' tokens."""
    num_queries = query.shape[2]
    num_keys = key.shape[2]
    if num_queries == 0:
        return query
    if num_queries == num_keys:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    mask = causal_lower_right(num_queries, num_keys)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
