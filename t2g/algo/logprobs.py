"""Sequences on their way through a causal model, as rows, and back to their response tokens.

The one place where a microbatch meets a model, for the forward pass before an update and for every loss. The next-token
shift happens here and nowhere else: a position predicts the token that comes after it; entry t of every result is about
response token t itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from t2g.algo.head import ChunkedHead, TokenRequest, token_columns
from t2g.data.batching import EMPTY_TOKENS, make_rows
from t2g.types import Rollout, TrainSequence


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """Of the distribution that each response token was drawn from, softmax(logits / temperature); [N] float32, nats."""

    logprobs: torch.Tensor  # of the token
    entropy: torch.Tensor | None
    full_kl: torch.Tensor | None  # from the reference, over the whole vocabulary


class Rows:
    """The sequences of a microbatch on a device; N: their response tokens, one sequence after the other."""

    def __init__(self, sequences: Sequence[Rollout | TrainSequence], device: torch.device) -> None:
        """Columns in which no row has a response have no logits, and a `ChunkedHead` makes those of responses alone."""
        self.sequences, self.device = sequences, device
        ids, index = make_rows(sequences)
        self._before = torch.from_numpy(index - 1).to(device)  # where each response token is predicted, in [S * L]
        row, column = np.divmod(index - 1, ids.shape[1])
        columns = np.unique(column)
        if len(columns) < EMPTY_TOKENS:
            columns = np.union1d(columns, np.arange(ids.shape[1])[:EMPTY_TOKENS])
        self._inputs = {"input_ids": torch.from_numpy(ids).to(device)}  # [S, L]
        self._inputs["logits_to_keep"] = torch.from_numpy(columns).to(device)
        spare = (0, max(0, EMPTY_TOKENS - len(index)))  # a head has some rows where there is no response
        place = row * len(columns) + np.searchsorted(columns, column)
        self._places = torch.from_numpy(np.pad(place, spare)).to(device)  # in [S * C], C columns
        self._next_ids = torch.from_numpy(np.pad(ids.flat[index], spare)).to(device)

    @property
    def segment_ids(self) -> torch.Tensor:
        """[N] int64: whose response the token is in, by the place of the sequence."""
        lengths = torch.tensor([len(s.response_ids) for s in self.sequences], dtype=torch.long)
        return torch.arange(len(lengths)).repeat_interleave(lengths).to(self.device)

    def numbers(self, name: str) -> torch.Tensor:
        """A field of the sequences, [R] each, as one tensor [N] float32."""
        arrays = [getattr(sequence, name) for sequence in self.sequences]
        return torch.tensor(np.concatenate([np.zeros(0), *arrays]), dtype=torch.float32, device=self.device)

    def logits(self, model: Any) -> torch.Tensor:
        """[N, V] of the model's dtype, all at once; at least EMPTY_TOKENS rows."""
        return model(**self._inputs, use_cache=False).logits.flatten(0, 1)[self._places]

    def token_outputs(
        self, model: Any, temperature: float, *, entropy: bool = False, ref_logits: torch.Tensor | None = None
    ) -> TokenOutputs:
        """One call of the model, differentiable. With a `ChunkedHead` the logits never exist at once.

        entropy asks for it; ref_logits, the reference's `logits`, for the full KL.
        """
        request = TokenRequest(
            places=self._places,
            next_ids=self._next_ids,
            temperature=temperature,
            entropy=entropy,
            ref_logits=ref_logits,
        )
        head = model.get_output_embeddings()
        if isinstance(head, ChunkedHead):
            with head.answering(request):
                columns = model(**self._inputs, use_cache=False).logits[0]
        else:
            columns = token_columns(self.logits(model), request)
        found = iter(columns[: len(self._before)].unbind(-1))
        return TokenOutputs(
            logprobs=next(found),
            entropy=next(found) if entropy else None,
            full_kl=None if ref_logits is None else next(found),
        )

    def values(self, critic: Any) -> torch.Tensor:
        """[N] float32, of the state before each response token."""
        return critic(self._inputs["input_ids"]).flatten()[self._before]
