"""Packed sequences on their way through a causal model: as right-padded rows, and back in packed order.

The one place where a microbatch meets a model, for the forward pass before an update and for the losses alike.
"""

from typing import Any

import torch

from t2g.algo.logprobs import shift_right, token_entropy, token_logprobs
from t2g.data.batching import padded_rows
from t2g.types import PackedTokens


class Rows:
    """Packed sequences as right-padded rows on a device, and the way back to packed order."""

    def __init__(self, tokens: PackedTokens, device: torch.device) -> None:
        rows, index = padded_rows(tokens)
        self.input_ids = torch.from_numpy(rows).to(device)  # [S, L]
        self.index = torch.from_numpy(index).to(device)  # [T]
        self.segment_ids = torch.arange(rows.shape[0], device=device).repeat_interleave(rows.shape[1])  # [S * L]

    def logits(self, engine: Any) -> torch.Tensor:
        """[S * L, V] of the model's dtype."""
        return engine(input_ids=self.input_ids, use_cache=False).logits.flatten(0, 1)

    def logprobs(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """[T] float32, entry i about token i."""
        return token_logprobs(logits, self.input_ids.flatten(), self.segment_ids, temperature)[self.index]

    def entropy(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """[T] float32, of the distribution token i was drawn from."""
        return token_entropy(logits, self.segment_ids, temperature)[self.index]

    def values(self, critic: Any) -> torch.Tensor:
        """[T] float32, of the state before token i."""
        return shift_right(critic(self.input_ids).flatten(), self.segment_ids)[self.index]
