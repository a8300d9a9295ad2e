"""Per-token log-probability, entropy and KL, and an output head that computes them in chunks instead of logits.

The logits of a whole batch then never exist at once. For 8 rows of 1,024 tokens and a vocabulary of 128,256 the logits
and their float32 softmax would need over 6 GB, more than all else in the pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from t2g.algo.kl import full_kl

CHUNK_TOKENS = 1024  # rows whose logits and float32 softmax exist at once


@dataclass(frozen=True, kw_only=True)
class TokenRequest:
    """N positions and the numbers to compute for them, of the distribution softmax(logits / temperature)."""

    positions: torch.Tensor  # [N] int64, into the flattened states of a batch
    next_ids: torch.Tensor  # [N] int64, the token after each position
    temperature: float
    entropy: bool  # whether to compute the entropy
    entropy_gradient: bool = True  # without it the backward pass of a metric is saved
    ref_logits: torch.Tensor | None  # [N, V] of the reference, to compute the KL over the whole vocabulary
    token_ids: torch.Tensor | None = None  # [N, k] int64, tokens whose log-probabilities to compute
    top_k: int = 0  # number of the likeliest tokens to find


def token_columns(
    states: torch.Tensor,
    request: TokenRequest,
    to_logits: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden,
) -> torch.Tensor:
    """Return [N, C] float32: the log-probability of next_ids, then what else is requested.

    In this order: entropy (1), full KL (1), log-probabilities of token_ids (k), ids of the top_k likeliest tokens (k).
    All but the ids are in nats; float32 holds ids below 2^24 exactly.

    Differentiable in states and in the parameters of to_logits; the entropy only with entropy_gradient. Tensors of the
    size of a chunk's logits exist for one chunk at a time; the backward pass computes them again.

    Args:
        states: [N, H] of any float type.
        to_logits: [C, H] -> [C, V] for C <= CHUNK_TOKENS rows; the identity if the states are logits.
    """

    def columns(
        chunk: torch.Tensor,
        next_ids: torch.Tensor,
        ref_logits: torch.Tensor | None,
        token_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        logits = to_logits(chunk).float()
        if request.temperature != 1:  # a division would be one more array of the logits' size
            logits = logits / request.temperature
        logprobs = logits.log_softmax(-1)
        numbers = [logprobs.gather(-1, next_ids[:, None])]
        if request.entropy:
            entropy_logprobs = logprobs if request.entropy_gradient else logprobs.detach()
            numbers.append(compute_entropy(entropy_logprobs)[:, None])
        if ref_logits is not None:
            scaled_ref_logits = ref_logits.float() / request.temperature
            numbers.append(full_kl(logits, scaled_ref_logits)[:, None])
        if token_ids is not None:
            numbers.append(logprobs.gather(-1, token_ids))
        if request.top_k:
            top_k = min(request.top_k, logprobs.shape[-1])
            numbers.append(logprobs.topk(top_k).indices.float())
        return torch.cat(numbers, dim=-1)

    chunks = states.split(CHUNK_TOKENS)  # with slices, each gradient would be as large as all states
    inputs = []
    for rows in (request.next_ids, request.ref_logits, request.token_ids):
        no_rows = [None] * len(chunks)
        inputs.append(no_rows if rows is None else rows.split(CHUNK_TOKENS))
    # A chunk draws no random numbers: its backward pass does not need to restore the generators.
    compute = partial(checkpoint, columns, use_reentrant=False, preserve_rng_state=False)
    columns_by_chunk = [compute(*rows) for rows in zip(chunks, *inputs, strict=True)]
    return torch.cat(columns_by_chunk)


def compute_entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """Return H = -sum_v p_v log p_v, nats, [...]. logprobs: [..., V], normalized.

    0 log 0 = 0 in value and gradient: a token of probability 0 has log-probability -inf, and 0 * inf would be NaN.

    >>> compute_entropy(torch.tensor([0.5, 0.5, 0.0]).log())
    tensor(0.6931)
    """
    probabilities = logprobs.exp()
    finite_logprobs = torch.where(probabilities > 0, logprobs, 0)
    return -(probabilities * finite_logprobs).sum(-1)


class ChunkedHead(torch.nn.Linear):
    """Replacement for an output layer, with the same parameters by the same names.

    Inside `serve_request`, the forward of hidden states [S, L, H] returns the `token_columns` [1, N, C] of the
    request's positions. Logits of other positions are not computed. All chunks belong to one call of the module: under
    ZeRO-3 they share one fetch of the weight, in the forward and in the backward pass.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)  # Linear's __init__ would create new weights
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self._request: TokenRequest | None = None

    @contextmanager
    def serve_request(self, request: TokenRequest) -> Iterator[None]:
        """Make calls of the block return the columns of `request`, whose positions index [S * L]."""
        self._request = request
        try:
            yield
        finally:
            self._request = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._request is None:
            return super().forward(hidden)
        states = hidden.flatten(0, 1)[self._request.positions]
        columns = token_columns(states, self._request, super().forward)
        return columns[None]


def install_chunked_head(model: Any) -> bool:
    """Replace a causal LM's output head by a `ChunkedHead`, in place; call it before `deepspeed.initialize`.

    A weight tied to the embeddings stays tied.

    Args:
        model: A transformers PreTrainedModel.

    Returns:
        False, without a change, if the head is not a linear layer or if the model changes the logits after it (Gemma 2
        caps them, Granite and Cohere scale them): the model would then change the per-token numbers.
    """
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or not _returns_head_output(model, head):
        return False
    model.set_output_embeddings(ChunkedHead(head))
    return True


class _BackboneOutput:
    """A backbone output that holds hidden states only, by name and by index."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


@torch.no_grad()
def _returns_head_output(model: Any, head: torch.nn.Linear) -> bool:
    """Return whether the model returns the head's output unchanged.

    Runs the model's own forward with a fake backbone and head, because no list of model types would be complete.
    """
    backbone = model.base_model
    if backbone is model:
        return False
    hidden = torch.zeros(1, 3, head.in_features, dtype=head.weight.dtype)
    logits = torch.tensor([[[-40.0], [-0.1], [7.0]]])
    backbone.forward = lambda *args, **kwargs: _BackboneOutput(hidden)
    head.forward = lambda hidden: logits
    try:
        input_ids = torch.zeros(1, 3, dtype=torch.long)
        returned = model(input_ids=input_ids, use_cache=False).logits
    finally:
        del backbone.forward, head.forward
    return torch.equal(returned, logits)
