"""From logits to a few numbers per position, and an output head that gives them in place of logits, chunk by chunk.

A batch's logits then never exist at once.

For 8 rows of 1,024 tokens and a vocabulary of 128,256 the logits and their float32 softmax would be over 6 GB, more
than all else in the pass.
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
    """What is asked of each of N positions, whose distribution is softmax(logits / temperature)."""

    places: torch.Tensor  # [N] int64, of the positions in a batch's states, flattened
    next_ids: torch.Tensor  # [N] int64, the token that came after it
    temperature: float
    entropy: bool
    ref_logits: torch.Tensor | None  # [N, V] of the reference: the KL over the whole vocabulary is asked for


def token_columns(
    states: torch.Tensor, request: TokenRequest, to_logits: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
) -> torch.Tensor:
    """[N, 1 to 3] float32, nats: log-probability of next_ids, then entropy and full KL where they are asked for.

    states: [N, H] of any float type; to_logits: [C, H] -> [C, V] of C <= CHUNK_TOKENS rows, the identity where the
    states are the logits. Differentiable in states and in what to_logits holds; what is as large as a chunk's logits
    exists for one chunk at a time, in the backward pass too, which computes it again.
    """

    def columns(chunk: torch.Tensor, next_ids: torch.Tensor, ref_logits: torch.Tensor | None) -> torch.Tensor:
        logits = to_logits(chunk).float() / request.temperature
        logprobs = logits.log_softmax(-1)
        found = [logprobs.gather(-1, next_ids[:, None]).squeeze(-1)]
        if request.entropy:
            found.append(compute_entropy(logprobs))
        if ref_logits is not None:
            found.append(full_kl(logits, ref_logits.float() / request.temperature))
        return torch.stack(found, dim=-1)

    chunks = states.split(CHUNK_TOKENS)  # the gradient of each slice would be as large as all states
    next_ids = request.next_ids.split(CHUNK_TOKENS)
    reference = [None] * len(chunks) if request.ref_logits is None else request.ref_logits.split(CHUNK_TOKENS)
    # Nothing is drawn at random in a chunk: its backward pass need not restore the generators.
    compute = partial(checkpoint, columns, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([compute(*rows) for rows in zip(chunks, next_ids, reference, strict=True)])


def compute_entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """H = -sum_v p_v log p_v, nats. logprobs: [..., V], normalised. Returns [...].

    0 log 0 = 0 in value and gradient: a token of probability 0 has log-probability -inf, and 0 * inf is not a number.

    >>> compute_entropy(torch.tensor([0.5, 0.5, 0.0]).log())
    tensor(0.6931)
    """
    probabilities = logprobs.exp()
    return -(probabilities * torch.where(probabilities > 0, logprobs, 0)).sum(-1)


class ChunkedHead(torch.nn.Linear):
    """The linear layer it takes the place of, with the same parameters by the same names.

    While a request stands, its forward of hidden states [S, L, H] returns the `token_columns` [1, N, C] of the
    request's places; the logits of no other place are made, and these exist for one chunk at a time. It is one call of
    the module all the same: under ZeRO-3 all chunks share one fetch of the weight, in the forward and in the backward
    pass.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)  # not Linear's, which would make new weights
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._request: TokenRequest | None = None

    @contextmanager
    def answering(self, request: TokenRequest) -> Iterator[None]:
        """Calls inside answer `request`, whose places are in [S * L]."""
        self._request = request
        try:
            yield
        finally:
            self._request = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._request is None:
            return super().forward(hidden)
        states = hidden.flatten(0, 1)[self._request.places]
        return token_columns(states, self._request, super().forward)[None]


def install_chunked_head(model: Any) -> bool:
    """Replace a causal LM's output head by a `ChunkedHead`, in place; call it before DeepSpeed takes the model.

    model: a transformers PreTrainedModel; a weight tied to the embeddings stays tied. False, and nothing is changed,
    where the head is no linear layer or the model does something to the logits after it (Gemma 2 caps them, Granite
    and Cohere scale them): per-token numbers would be taken for logits.
    """
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or not _returns_what_the_head_says(model, head):
        return False
    model.set_output_embeddings(ChunkedHead(head))
    return True


class _BackboneOutput:
    """A backbone's output with hidden states and nothing else, by name and by place."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int | slice) -> Any:
        return (self.last_hidden_state,)[place]


@torch.no_grad()
def _returns_what_the_head_says(model: Any, head: torch.nn.Linear) -> bool:
    """Ask the model's own forward, with a backbone and a head that say what we know: no list of models is complete."""
    backbone = model.base_model
    if backbone is model:
        return False
    hidden = torch.zeros(1, 3, head.in_features, dtype=head.weight.dtype)
    said = torch.tensor([[[-40.0], [-0.1], [7.0]]])
    backbone.forward = lambda *args, **kwargs: _BackboneOutput(hidden)
    head.forward = lambda hidden: said
    try:
        returned = model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False).logits
    finally:
        del backbone.forward, head.forward
    return torch.equal(returned, said)
