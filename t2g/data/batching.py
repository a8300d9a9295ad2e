"""Who trains on what, together with what: samples into packed microbatches. Pure planning with numpy.

Records are packed (no padding crosses a process border). The learner's models run a microbatch as right-padded rows
(`padded_rows`): dense attention over one packed row costs a small model five times the time on a CPU. So the plan puts
sequences of like length together and the token budget bounds rows x longest row; a plan for packed rows bounds their
length.
"""

from collections.abc import Sequence

import numpy as np

from t2g.types import Microbatch, Minibatch, PackedTokens, TrainBatch, TrainSample

EMPTY_TOKENS = 32  # a CPU forward of a handful of bfloat16 tokens can die on an illegal instruction
_TOKEN_FIELDS = (
    "loss_mask", "advantages", "returns", "values", "old_logprobs", "rollout_logprobs", "ref_logprobs",
)  # fmt: skip

Plan = list[list[list[int]]]  # [rank][microbatch] -> indices of sequences, ascending


def plan_microbatches(
    lengths: Sequence[int], num_ranks: int, token_budget: int, *, packed: bool = False
) -> Plan:
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


def pack(samples: Sequence[TrainSample]) -> Microbatch:
    """Prompt and response of each sample in one row; every per-token array is 0 on prompts."""
    tokens = pack_tokens([np.concatenate([s.prompt_ids, s.response_ids]) for s in samples])
    arrays = {
        name: np.concatenate(
            [part for s in samples for part in (np.zeros(len(s.prompt_ids)), getattr(s, name))]
        ).astype(np.float32)
        for name in _TOKEN_FIELDS
    }  # fmt: skip
    return Microbatch(**vars(tokens), **arrays)


def empty_microbatch() -> Microbatch:
    """What a rank without samples runs: tokens of id 0 that count for nothing. Its backward joins the collectives."""
    zeros = np.zeros(EMPTY_TOKENS, np.float32)
    return Microbatch(**vars(empty_tokens()), **dict.fromkeys(_TOKEN_FIELDS, zeros))


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
    num_ranks: int,
    token_budget: int,
    num_epochs: int,
    minibatches_per_epoch: int,
    seed: int,
) -> TrainBatch:
    """The optimizer steps of one update: num_epochs passes, each a fresh permutation cut into minibatches.

    Parts of a permutation differ by at most one sample; a part in which no token counts is left out. The same
    arguments give the same batch. Raises ValueError when no token of any sample counts.
    """
    rng = np.random.default_rng(seed)
    minibatches = []
    for _ in range(num_epochs):
        for chosen in np.array_split(rng.permutation(len(samples)), minibatches_per_epoch):
            part = [samples[i] for i in chosen]
            num_tokens = int(sum(s.loss_mask.sum() for s in part))
            if num_tokens:
                minibatches.append(_minibatch(part, num_tokens, num_ranks, token_budget))
    if not minibatches:
        raise ValueError(f"none of the {len(samples)} samples has a token with loss_mask 1: there is nothing to learn")
    return TrainBatch(minibatches=tuple(minibatches))


def _minibatch(samples: Sequence[TrainSample], num_tokens: int, num_ranks: int, token_budget: int) -> Minibatch:
    lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
    return Minibatch(
        num_tokens=num_tokens,
        microbatches=tuple(
            tuple(pack([samples[i] for i in members]) if members else empty_microbatch() for members in micro)
            for micro in plan_microbatches(lengths, num_ranks, token_budget)
        ),
    )
