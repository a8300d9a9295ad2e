"""From logits to one number per token. The next-token shift happens here and nowhere else.

Row i of the logits predicts token i + 1; entry i of every result is about token i itself. The first token of a
sequence is predicted by nothing: its entry is 0.
"""

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 1024  # rows whose float32 softmax exists at once


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


def token_logprobs(
    logits: torch.Tensor, input_ids: torch.Tensor, segment_ids: torch.Tensor, temperature: float
) -> torch.Tensor:
    """log softmax(logits / temperature) of each token given those before it in its sequence.

    logits: [T, V] of any float type; input_ids, segment_ids: [T] int64. Returns [T] float32, nats, entry i about
    input_ids[i], 0 at each sequence's first token. The policy is softmax(logits / temperature) everywhere
    (method.md, Temperature). Differentiable; float32 copies of the logits exist for CHUNK_TOKENS rows at a time, in
    the backward pass too.
    """
    next_ids = torch.nn.functional.pad(input_ids[1:], (0, 1))
    chunks = []
    for rows, ids in zip(logits.split(CHUNK_TOKENS), next_ids.split(CHUNK_TOKENS), strict=True):
        if logits.requires_grad:
            chunks.append(checkpoint(_gather_logprobs, rows, ids, temperature, use_reentrant=False))
        else:
            chunks.append(_gather_logprobs(rows, ids, temperature))
    return shift_right(torch.cat(chunks), segment_ids)


def _gather_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    scaled = logits.float() / temperature
    return scaled.gather(-1, ids[:, None]).squeeze(-1) - scaled.logsumexp(-1)


@torch.no_grad()
def token_entropy(logits: torch.Tensor, segment_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy of the distribution that token i was drawn from, H = -sum_v p_v log p_v of softmax(logits / T).

    logits: [T, V]; segment_ids: [T]. Returns [T] float32, nats, aligned and zeroed like `token_logprobs`.
    """
    chunks = []
    for rows in logits.split(CHUNK_TOKENS):
        logprobs = (rows.float() / temperature).log_softmax(-1)
        chunks.append(-(logprobs.exp() * logprobs).nan_to_num(nan=0).sum(-1))  # 0 log 0 = 0
    return shift_right(torch.cat(chunks), segment_ids)
