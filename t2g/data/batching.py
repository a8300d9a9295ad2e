"""Who trains on what, together with what: samples into minibatches, minibatches into packed microbatches of ranks.

Pure planning with numpy.

Records are packed (no padding crosses a process border). The learner's models run a microbatch as right-padded rows
(`padded_rows`): dense attention over one packed row costs a small model five times the time on a CPU. So the plan puts
sequences of like length together and the token budget bounds rows x longest row; a plan for packed rows bounds their
length.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from t2g.types import Microbatch, Minibatch, PackedTokens, TrainBatch, TrainSample

EMPTY_TOKENS = 32  # a CPU forward of a handful of bfloat16 tokens can die on an illegal instruction
_TOKEN_FIELDS = ("advantages", "returns", "values", "old_logprobs", "rollout_logprobs", "ref_logprobs")

LossMean = Literal["token", "sequence"]
Plan = list[list[list[int]]]  # [rank][microbatch] -> indices of sequences, ascending


def plan_microbatches(lengths: Sequence[int], num_ranks: int, token_budget: int, *, packed: bool = False) -> Plan:
    """Every sequence once; each rank gets the same number of microbatches, at least one, some perhaps empty.

    lengths: tokens of each sequence. A microbatch has at most `token_budget` tokens: rows x longest row, or, when it is
    packed into one row, the sum of its lengths; a longer sequence has one of its own. Deterministic; ranks differ by
    about one microbatch's work.

    >>> plan_microbatches([3, 9, 3, 8], num_ranks=2, token_budget=18)
    [[[1, 3]], [[0, 2]]]
    >>> plan_microbatches([3, 9, 3, 8], num_ranks=2, token_budget=12, packed=True)
    [[[0, 1]], [[2, 3]]]
    """

    def area(members: list[int]) -> int:
        if packed or not members:
            return sum(lengths[i] for i in members)
        return len(members) * lengths[members[0]]  # they come by falling length: the first is the longest

    bins: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        within_reach = bins if packed else bins[-1:]
        home = next((members for members in within_reach if area([*members, i]) <= token_budget), None)
        if home is None:
            bins.append([i])
        else:
            home.append(i)

    while not bins or len(bins) % num_ranks:
        largest = max((b for b in bins if len(b) > 1), key=area, default=None)
        if largest is None:
            bins.append([])
            continue
        half = len(largest) // 2
        bins.append(largest[half:])
        del largest[half:]
    bins.sort(key=lambda b: (-area(b), b))
    plan: Plan = [[] for _ in range(num_ranks)]
    for i, members in enumerate(bins):
        turn, place = divmod(i, num_ranks)
        rank = place if turn % 2 == 0 else num_ranks - 1 - place  # back and forth: nobody always gets the largest
        plan[rank].append(sorted(members))
    return plan


def pack_tokens(sequences: Sequence[np.ndarray]) -> PackedTokens:
    """Token ids of several sequences, each [L >= 1], as one row."""
    lengths = [len(ids) for ids in sequences]
    return PackedTokens(
        input_ids=np.concatenate(sequences).astype(np.int64),
        position_ids=np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]),
        segment_ids=np.repeat(np.arange(len(lengths), dtype=np.int64), lengths),
    )


def pack(samples: Sequence[TrainSample], weights: Sequence[np.ndarray]) -> Microbatch:
    """Prompt and response of each sample in one row; every per-token array is 0 on prompts. weights: [R] of each."""
    tokens = pack_tokens([np.concatenate([s.prompt_ids, s.response_ids]) for s in samples])
    columns = {"weights": weights} | {name: [getattr(s, name) for s in samples] for name in _TOKEN_FIELDS}
    arrays = {
        name: np.concatenate(
            [part for s, array in zip(samples, column, strict=True) for part in (np.zeros(len(s.prompt_ids)), array)]
        ).astype(np.float32)
        for name, column in columns.items()
    }
    return Microbatch(**vars(tokens), **arrays)


def empty_microbatch() -> Microbatch:
    """What a rank without samples runs: tokens of id 0 that count for nothing. Its backward joins the collectives."""
    zeros = np.zeros(EMPTY_TOKENS, np.float32)
    return Microbatch(**vars(empty_tokens()), **dict.fromkeys(("weights", *_TOKEN_FIELDS), zeros))


def empty_tokens() -> PackedTokens:
    """`empty_microbatch` for forward passes."""
    return pack_tokens([np.zeros(EMPTY_TOKENS, np.int64)])


def padded_rows(tokens: PackedTokens) -> tuple[np.ndarray, np.ndarray]:
    """Rows [S, L] int64 of the packed sequences, 0 on the right, and where in rows.flatten() each of the T tokens is.

    A causal model needs no mask for them: nothing to the right of a token reaches it.

    >>> rows, index = padded_rows(pack_tokens([np.array([5, 6, 7]), np.array([8])]))
    >>> rows.tolist(), index.tolist()
    ([[5, 6, 7], [8, 0, 0]], [0, 1, 2, 3])
    """
    width = int(tokens.position_ids.max()) + 1
    index = tokens.segment_ids * width + tokens.position_ids
    rows = np.zeros((int(tokens.segment_ids[-1]) + 1, width), np.int64)
    rows.flat[index] = tokens.input_ids
    return rows, index


def make_train_batch(
    samples: Sequence[TrainSample],
    *,
    num_epochs: int,
    minibatches_per_epoch: int,
    loss_mean: LossMean,
    kl_coef: float,
    seed: int,
) -> TrainBatch:
    """The optimizer steps of one update: num_epochs passes, each a fresh permutation cut into minibatches.

    Parts of a permutation differ by at most one sample; a part in which no token counts is left out. The same
    arguments give the same batch. kl_coef is that of the loss term. Raises ValueError when no token of any sample
    counts.
    """
    rng = np.random.default_rng(seed)
    minibatches = []
    for _ in range(num_epochs):
        for chosen in np.array_split(rng.permutation(len(samples)), minibatches_per_epoch):
            part = tuple(samples[i] for i in chosen)
            if any(s.loss_mask.any() for s in part):
                weights = loss_weights([s.loss_mask for s in part], loss_mean)
                minibatches.append(Minibatch(samples=part, weights=weights))
    if not minibatches:
        raise ValueError(f"none of the {len(samples)} samples has a token with loss_mask 1: there is nothing to learn")
    return TrainBatch(minibatches=tuple(minibatches), kl_coef=kl_coef)


def loss_weights(masks: Sequence[np.ndarray], loss_mean: LossMean) -> tuple[np.ndarray, ...]:
    """Each token's share of a minibatch's loss: [R] float32 per sample, in all 1. Some token has mask 1.

    token: 1 / N, where N tokens count. sequence: 1 / (S * n) for each of a sample's n such tokens, where S samples have
    any.

    >>> [w.tolist() for w in loss_weights([np.array([1, 1, 0]), np.array([1, 1])], "token")]
    [[0.25, 0.25, 0.0], [0.25, 0.25]]
    >>> [w.tolist() for w in loss_weights([np.array([1]), np.array([1, 1])], "sequence")]
    [[0.5], [0.25, 0.25]]
    """
    counts = [int(mask.sum()) for mask in masks]
    num_sequences = sum(count > 0 for count in counts)
    shares = {"token": [sum(counts)] * len(masks), "sequence": [num_sequences * max(count, 1) for count in counts]}
    return tuple((mask / share).astype(np.float32) for mask, share in zip(masks, shares[loss_mean], strict=True))


def pack_minibatch(minibatch: Minibatch, *, num_ranks: int, token_budget: int) -> tuple[tuple[Microbatch, ...], ...]:
    """microbatches[rank][i] of one optimizer step; every rank has the same number, see `plan_microbatches`."""
    samples, weights = minibatch.samples, minibatch.weights
    lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
    return tuple(
        tuple(
            pack([samples[i] for i in members], [weights[i] for i in members]) if members else empty_microbatch()
            for members in micro
        )
        for micro in plan_microbatches(lengths, num_ranks, token_budget)
    )
