"""Packed sequences on their way through a causal model: as right-padded rows, and back in packed order.

The one place where a microbatch meets a model, for the forward pass before an update and for the losses alike.
"""

from dataclasses import dataclass
from typing import Any

import torch

from t2g.algo.head import ChunkedHead
from t2g.algo.logprobs import TokenRequest, shift_right, token_columns
from t2g.data.batching import padded_rows
from t2g.types import PackedTokens


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """Of the distribution that token i was drawn from, softmax(logits / temperature); all [T] float32, nats.

    0 at each sequence's first token, which was drawn from nothing.
    """

    logprobs: torch.Tensor  # of token i
    entropy: torch.Tensor | None
    full_kl: torch.Tensor | None  # from the reference, over the whole vocabulary


class Rows:
    """Packed sequences as right-padded rows on a device, and the way back to packed order."""

    def __init__(self, tokens: PackedTokens, device: torch.device) -> None:
        rows, index = padded_rows(tokens)
        self.input_ids = torch.from_numpy(rows).to(device)  # [S, L]
        self.index = torch.from_numpy(index).to(device)  # [T]
        self.segment_ids = torch.arange(rows.shape[0], device=device).repeat_interleave(rows.shape[1])  # [S * L]

    def logits(self, engine: Any) -> torch.Tensor:
        """[S * L, V] of the model's dtype, all at once."""
        return engine(input_ids=self.input_ids, use_cache=False).logits.flatten(0, 1)

    def token_outputs(
        self, engine: Any, temperature: float, *, entropy: bool = False, ref_logits: torch.Tensor | None = None
    ) -> TokenOutputs:
        """One call of the model, differentiable. With a `ChunkedHead` the logits never exist at once.

        entropy asks for it; ref_logits, the reference's `logits`, for the full KL.
        """
        request = TokenRequest(
            next_ids=torch.nn.functional.pad(self.input_ids[:, 1:], (0, 1)).flatten(),
            temperature=temperature,
            entropy=entropy,
            ref_logits=ref_logits,
        )
        head = engine.get_output_embeddings()
        if isinstance(head, ChunkedHead):
            with head.answering(request):
                columns = self.logits(engine)
        else:
            columns = token_columns(self.logits(engine), request)
        found = iter([shift_right(column, self.segment_ids)[self.index] for column in columns.unbind(-1)])
        return TokenOutputs(
            logprobs=next(found),
            entropy=next(found) if entropy else None,
            full_kl=None if ref_logits is None else next(found),
        )

    def values(self, critic: Any) -> torch.Tensor:
        """[T] float32, of the state before token i."""
        return shift_right(critic(self.input_ids).flatten(), self.segment_ids)[self.index]
