"""From logits to a few numbers per token, some rows at a time. The next-token shift happens here and nowhere else.

Row i of the logits predicts token i + 1; entry i of every result is about token i itself. The first token of a
sequence is predicted by nothing: its entry is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from t2g.algo.kl import full_kl

CHUNK_TOKENS = 1024  # rows whose logits and float32 softmax exist at once


@dataclass(frozen=True, kw_only=True)
class TokenRequest:
    """What is asked of each of N positions, whose distribution is softmax(logits / temperature)."""

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
            found.append(entropy_of(logprobs))
        if ref_logits is not None:
            found.append(full_kl(logits, ref_logits.float() / request.temperature))
        return torch.stack(found, dim=-1)

    chunks = []
    for start in range(0, len(states), CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        reference = None if request.ref_logits is None else request.ref_logits[rows]
        # Nothing is drawn at random in a chunk: its backward pass need not restore the generators.
        chunks.append(
            checkpoint(
                columns, states[rows], request.next_ids[rows], reference, use_reentrant=False, preserve_rng_state=False
            )
        )
    return torch.cat(chunks)


def entropy_of(logprobs: torch.Tensor) -> torch.Tensor:
    """H = -sum_v p_v log p_v, nats. logprobs: [..., V], normalised. Returns [...].

    0 log 0 = 0 in value and gradient: a token of probability 0 has log-probability -inf, and 0 * inf is not a number.

    >>> entropy_of(torch.tensor([0.5, 0.5, 0.0]).log())
    tensor(0.6931)
    """
    probabilities = logprobs.exp()
    return -(probabilities * torch.where(probabilities > 0, logprobs, 0)).sum(-1)


def shift_right(states: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    """Entry i becomes what the model said after token i - 1 of the same sequence; 0 at each sequence's first token.

    states, segment_ids: [T]; a new segment id starts a new sequence. Returns [T].

    >>> shift_right(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 0, 0, 1])).tolist()
    [0.0, 1.0, 2.0, 0.0]
    """
    shifted = torch.nn.functional.pad(states[:-1], (1, 0))
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[1:] = segment_ids[1:] != segment_ids[:-1]
    return shifted.masked_fill(starts, 0)
