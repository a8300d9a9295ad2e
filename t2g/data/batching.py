"""Plan optimizer steps, microbatches and padded rows of sequences with numpy.

The learner's models run a microbatch as right-padded rows, with one sequence per row; `shared_prompts` has the other
layout. With several sequences in a row, transformers would make a mask of row x row, which excludes flash attention on
a GPU. On a CPU, dense attention over one row of 4,096 tokens takes a model of a million parameters five times as long
(2,100 tokens/s against 10,500). So the plan groups sequences of similar length, and the token budget bounds rows x
longest row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TypeVar

import numpy as np

from t2g.types import TokenSequence, TrainBatch, TrainSample, TrainSequence

EMPTY_TOKENS = 32  # minimum: a CPU forward of a few bfloat16 tokens can crash on an illegal instruction
MUCH_SHORTER = 0.7  # share of the longest row; cuts the padding of exponential lengths from a third to a sixth

AnySequence = TypeVar("AnySequence", bound=TrainSequence)
Plan = list[list[list[int]]]  # [rank][microbatch] -> indices of sequences, ascending


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """A prompt in a row and the responses that follow it, in tokens."""

    prompt_length: int
    response_lengths: tuple[int, ...]  # empty responses are left out


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """The input of a model for S rows of L tokens, with N response tokens in the order of the sequences."""

    ids: np.ndarray  # [S, L] int64
    response_index: np.ndarray  # [N] int64, index of each response token in ids.flatten()
    logit_index: np.ndarray  # [N] int64, index of the token whose output predicts it
    positions: np.ndarray | None = None  # [S, L] int64; None: the index in the row
    groups: tuple[PromptGroup, ...] = ()  # groups of the only row, if responses share prompts


def plan_by_length(lengths: Sequence[int], num_ranks: int, token_budget: int) -> Plan:
    """Assign every sequence to a microbatch of a rank; deterministic.

    Each rank gets the same number of microbatches, at least one, and some may be empty. A microbatch has at most
    `token_budget` tokens (rows x longest row); a longer sequence gets a microbatch of its own. Once a microbatch holds
    a quarter of the budget, sequences shorter than MUCH_SHORTER of its longest row are left out: they would be mostly
    padding. The ranks' work differs by about one microbatch.

    Args:
        lengths: Number of tokens of each sequence.

    >>> plan_by_length([3, 9, 3, 8], num_ranks=2, token_budget=18)
    [[[1, 3]], [[0, 2]]]
    """

    def area(members: list[int]) -> int:
        if not members:
            return 0
        longest = lengths[members[0]]  # the members are sorted
        return len(members) * longest

    def fits(last: list[int], index: int) -> bool:
        if area([*last, index]) > token_budget:
            return False
        is_partly_full = area(last) >= token_budget / 4
        return not is_partly_full or lengths[index] >= MUCH_SHORTER * lengths[last[0]]

    bins: list[list[int]] = []
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])  # stable: equal lengths in order
    for index in longest_first:
        if bins and fits(bins[-1], index):
            bins[-1].append(index)
        else:
            bins.append([index])

    return assign_to_ranks(bins, area, num_ranks)


def assign_to_ranks(bins: list[list[int]], area: Callable[[list[int]], int], num_ranks: int) -> Plan:
    """Give every rank the same number of microbatches, and about the same work.

    Args:
        bins: The indices in each microbatch, changed in place: the largest ones are halved, or empty ones added, until
            the ranks divide their number.
        area: Returns the tokens that the model computes for a microbatch.
    """
    while not bins or len(bins) % num_ranks:
        divisible = filter(lambda members: len(members) > 1, bins)
        largest = max(divisible, key=area, default=None)
        if largest is None:
            bins.append([])
            continue
        half = len(largest) // 2
        bins.append(largest[half:])
        del largest[half:]

    bins.sort(key=lambda members: (-area(members), members))
    return _assign_round_robin(bins, num_ranks)


def _assign_round_robin(bins: list[list[int]], num_ranks: int) -> Plan:
    """Assign the microbatches to the ranks round-robin, in alternating direction."""
    plan: Plan = [[] for _ in range(num_ranks)]
    for position, members in enumerate(bins):
        round_, rank = divmod(position, num_ranks)
        if round_ % 2:  # alternate the direction, so that no rank always gets the largest microbatch
            rank = num_ranks - 1 - rank
        plan[rank].append(sorted(members))
    return plan


def plan_microbatches(
    sequences: Sequence[TokenSequence], *, num_ranks: int, token_budget: int, group_size: int = 1
) -> Plan:
    """Return each rank's microbatches as indices of `sequences`, see `plan_by_length`; some may be empty.

    Args:
        group_size: Number of consecutive sequences that stay in one microbatch.
    """
    lengths = _count_tokens(sequences)
    longest: list[int] = []  # length of each group
    for first in range(0, len(lengths), group_size):
        group_lengths = lengths[first : first + group_size]
        longest.append(max(group_lengths))
    plan = plan_by_length(longest, num_ranks, token_budget // group_size)

    def sequences_of(groups: list[int]) -> list[int]:
        indices: list[int] = []
        for group in groups:
            first = group * group_size
            indices.extend(range(first, first + group_size))
        return indices

    result: Plan = []
    for share in plan:
        rank_microbatches = map(sequences_of, share)
        result.append(list(rank_microbatches))
    return result


def _count_tokens(sequences: Sequence[TokenSequence]) -> list[int]:
    return [len(sequence.prompt_ids) + len(sequence.response_ids) for sequence in sequences]


def make_rows(sequences: Sequence[TokenSequence]) -> TokenRows:
    """Return one row per sequence, padded with 0 on the right.

    A causal model needs no mask: padding on the right does not affect earlier tokens. Without sequences the result is a
    row of zeros and N = 0, because every rank must join the collectives.

    >>> two = [TrainSequence(prompt_ids=[5], response_ids=[6, 7], weights=[]),
    ...        TrainSequence(prompt_ids=[8], response_ids=[9], weights=[])]
    >>> rows = make_rows(two)
    >>> rows.ids.tolist(), rows.response_index.tolist(), rows.logit_index.tolist()
    ([[5, 6, 7], [8, 9, 0]], [1, 2, 4], [0, 1, 3])
    """
    lengths = _count_tokens(sequences)
    width = max(lengths, default=0) or EMPTY_TOKENS
    num_rows = len(lengths) or 1
    ids = np.zeros((num_rows, width), np.int64)
    indices = [np.zeros(0, np.int64)]
    row_starts = range(0, ids.size, width)
    for start, sequence, length in zip(row_starts, sequences, lengths, strict=False):
        first = start + len(sequence.prompt_ids)
        end = start + length
        ids.flat[start:first] = sequence.prompt_ids
        ids.flat[first:end] = sequence.response_ids
        indices.append(np.arange(first, end))
    response_index = np.concatenate(indices)
    return TokenRows(ids=ids, response_index=response_index, logit_index=response_index - 1)


def normalize_weights(sequences: Sequence[AnySequence]) -> tuple[AnySequence, ...]:
    """Return the sequences of one optimizer step with weights that sum to 1; some token must have a weight.

    >>> a = TrainSequence(prompt_ids=[5], response_ids=[6, 7], weights=np.ones(2))
    >>> b = TrainSequence(prompt_ids=[8], response_ids=[9], weights=np.array([6.0]))
    >>> [s.weights.tolist() for s in normalize_weights([a, b])]
    [[0.125, 0.125], [0.75]]
    """
    total = sum(float(sequence.weights.sum(dtype=np.float64)) for sequence in sequences)

    def normalize(sequence: AnySequence) -> AnySequence:
        weights = sequence.weights.astype(np.float64) / total
        return replace(sequence, weights=weights.astype(np.float32))

    return tuple(map(normalize, sequences))


def make_train_batch(
    samples: Sequence[TrainSample], *, num_epochs: int, minibatches_per_epoch: int, kl_coef: float, seed: int
) -> TrainBatch:
    """Return the optimizer steps of one update: num_epochs passes, each a new permutation cut into minibatches.

    The sizes of minibatches differ by at most one sample; a minibatch without a weighted token is left out. A single
    step has all samples in their order. The same arguments give the same batch.

    Args:
        kl_coef: The coefficient of the KL loss term.

    Raises:
        ValueError: No token of any sample has a weight.
    """
    rng = np.random.default_rng(seed)
    is_single_step = num_epochs * minibatches_per_epoch <= 1
    minibatches = []
    for _ in range(num_epochs):
        order = np.arange(len(samples))
        if not is_single_step:
            order = rng.permutation(len(samples))
        for indices in np.array_split(order, minibatches_per_epoch):
            minibatch = [samples[index] for index in indices]
            if any(sample.weights.any() for sample in minibatch):
                minibatches.append(normalize_weights(minibatch))
    if not minibatches:
        raise ValueError(f"none of the {len(samples)} samples has a token with a weight: there is nothing to learn")
    return TrainBatch(minibatches=tuple(minibatches), kl_coef=kl_coef)


def draw_steps(num_examples: int, *, num_epochs: float, batch_size: int, seed: int) -> list[list[int]]:
    """Return the indices of the examples of each optimizer step; a function of the arguments only.

    Every epoch is a permutation. `num_epochs` passes over N examples are round(num_epochs * N) examples, at least one.
    They are cut into steps of `batch_size` across epoch borders; the last step may be smaller.

    >>> draw_steps(3, num_epochs=1.5, batch_size=2, seed=0)
    [[2, 0], [1, 2]]
    """
    num_draws = _count_draws(num_examples, num_epochs)

    def draw_epoch(epoch: int) -> list[int]:
        rng = np.random.default_rng([seed, epoch])
        return rng.permutation(num_examples).tolist()

    epochs = map(draw_epoch, range(num_draws))  # more than needed; an epoch is drawn when it is read
    draws: list[int] = []
    while len(draws) < num_draws:
        draws.extend(next(epochs))
    del draws[num_draws:]
    return [draws[first : first + batch_size] for first in range(0, num_draws, batch_size)]


def count_steps(num_examples: int, num_epochs: float, batch_size: int) -> int:
    """Return the number of optimizer steps of `draw_steps`."""
    return ceil(_count_draws(num_examples, num_epochs) / batch_size)


def _count_draws(num_examples: int, num_epochs: float) -> int:
    return max(1, round(num_epochs * num_examples))
