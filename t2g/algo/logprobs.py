"""A microbatch as the input of a causal model, and the model's outputs by response token.

Every forward pass before an update and of a loss runs through `Rows`. The next-token shift happens here only: a
position predicts the token after it, and entry t of every result belongs to response token t.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from t2g.algo.head import ChunkedHead, TokenRequest, token_columns
from t2g.data.batching import EMPTY_TOKENS, make_rows
from t2g.data.shared_prompts import make_shared_row
from t2g.types import TokenSequence


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """Numbers of each response token's distribution, softmax(logits / temperature); [N] float32, nats."""

    logprobs: torch.Tensor  # logprobs of the sampled token
    entropy: torch.Tensor | None
    full_kl: torch.Tensor | None  # to the reference, over the whole vocabulary
    requested_logprobs: torch.Tensor | None  # [N, k], log-probabilities of the requested tokens
    top_ids: torch.Tensor | None  # [N, k] int32, the likeliest tokens


class Rows:
    """The sequences of a microbatch on a device; N counts their response tokens, in the order of the sequences."""

    def __init__(
        self, sequences: Sequence[TokenSequence], device: torch.device, *, share_prompts: bool = False
    ) -> None:
        """Select the columns that need logits: those with a response in some row; a `ChunkedHead` needs even fewer.

        Args:
            share_prompts: Whether equal prompts are computed once; the model needs the attention of
                `shared_attention`.
        """
        self.sequences = sequences
        self.device = device
        rows = make_shared_row(sequences) if share_prompts else make_rows(sequences)
        self._logit_index = torch.from_numpy(rows.logit_index).to(device)
        num_columns = rows.ids.shape[1]
        row, column = np.divmod(rows.logit_index, num_columns)
        columns = np.unique(column)
        if len(columns) < EMPTY_TOKENS:
            first_columns = np.arange(num_columns)[:EMPTY_TOKENS]
            columns = np.union1d(columns, first_columns)
        self._inputs: dict[str, Any] = {"input_ids": torch.from_numpy(rows.ids).to(device)}  # [S, L]
        if rows.positions is not None:
            self._inputs["position_ids"] = torch.from_numpy(rows.positions).to(device)
            self._inputs["prompt_groups"] = rows.groups
        self._kept_columns = torch.from_numpy(columns).to(device)
        padding = (0, max(0, EMPTY_TOKENS - len(rows.response_index)))  # the head gets at least EMPTY_TOKENS rows
        position = row * len(columns) + np.searchsorted(columns, column)
        self._positions = torch.from_numpy(np.pad(position, padding)).to(device)  # in [S * C], C columns
        self._next_ids = torch.from_numpy(np.pad(rows.ids.flat[rows.response_index], padding)).to(device)

    @property
    def sequence_ids(self) -> torch.Tensor:
        """Return the index of each token's sequence, [N] int64."""
        lengths = torch.tensor([len(sequence.response_ids) for sequence in self.sequences], dtype=torch.long)
        sequences = torch.arange(len(lengths))
        return sequences.repeat_interleave(lengths).to(self.device)

    def column(self, name: str) -> torch.Tensor:
        """Return a field of the sequences, [R] each, as one tensor [N] float32."""
        arrays = [getattr(sequence, name) for sequence in self.sequences]
        joined = np.concatenate([np.zeros(0), *arrays])
        return torch.tensor(joined, dtype=torch.float32, device=self.device)

    def matrix(self, name: str, width: int) -> torch.Tensor:
        """Return a field of the sequences, [R, width] each, as one tensor [N, width]."""
        arrays = [getattr(sequence, name) for sequence in self.sequences]
        joined = np.concatenate(arrays) if arrays else np.zeros((0, width), np.float32)
        return torch.from_numpy(joined).to(self.device)

    def logits(self, model: Any) -> torch.Tensor:
        """Return all logits at once, [N, V] of the model's dtype, padded to at least EMPTY_TOKENS rows."""
        logits = self._call(model).logits
        return logits.flatten(0, 1)[self._positions]

    def _call(self, model: Any) -> Any:
        return model(**self._inputs, logits_to_keep=self._kept_columns, use_cache=False)

    def token_outputs(
        self,
        model: Any,
        temperature: float,
        *,
        entropy: bool = False,
        entropy_gradient: bool = True,
        ref_logits: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
        top_k: int = 0,
    ) -> TokenOutputs:
        """Return the outputs of one differentiable call of the model; a `ChunkedHead` computes them in chunks.

        Args:
            entropy: Whether to compute the entropy.
            entropy_gradient: Whether the entropy is differentiable.
            ref_logits: The reference's `logits`, to compute the full KL.
            token_ids: [N, k], tokens whose log-probabilities to compute.
            top_k: Number of likeliest tokens to find.
        """
        if token_ids is not None:
            num_missing = len(self._positions) - len(token_ids)
            padding = (0, 0, 0, num_missing)
            token_ids = torch.nn.functional.pad(token_ids.long(), padding)
        request = TokenRequest(
            positions=self._positions,
            next_ids=self._next_ids,
            temperature=temperature,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
            ref_logits=ref_logits,
            token_ids=token_ids,
            top_k=top_k,
        )
        head = model.get_output_embeddings()
        if isinstance(head, ChunkedHead):
            with head.serve_request(request):
                columns = self._call(model).logits[0]
        else:
            columns = token_columns(self.logits(model), request)
        return _split_columns(columns[: len(self._logit_index)], request)

    def values(self, critic: Any) -> torch.Tensor:
        """Return the values [N] float32 of the states before the response tokens."""
        return critic(**self._inputs).flatten()[self._logit_index]


def _split_columns(columns: torch.Tensor, request: TokenRequest) -> TokenOutputs:
    """Return the columns of `token_columns` by their names."""
    numbers = iter(columns.unbind(-1))
    logprobs = next(numbers)
    entropy = next(numbers) if request.entropy else None
    full_kl = None if request.ref_logits is None else next(numbers)
    width = 0 if request.token_ids is None else request.token_ids.shape[1]
    requested_logprobs = [*islice(numbers, width)]
    top_ids = [*numbers]
    return TokenOutputs(
        logprobs=logprobs,
        entropy=entropy,
        full_kl=full_kl,
        requested_logprobs=torch.stack(requested_logprobs, dim=-1) if requested_logprobs else None,
        top_ids=torch.stack(top_ids, dim=-1).int() if request.top_k else None,
    )
