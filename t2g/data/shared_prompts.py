"""Plan and lay out microbatches in which all responses to a prompt follow one copy of it.

A microbatch is one row without padding, in which every token is computed once (Prefix Grouper, arXiv 2506.05433). The
model needs the attention of `t2g.algo.shared_attention`: a response attends to its prompt and to itself.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from t2g.data.batching import EMPTY_TOKENS, Plan, PromptGroup, TokenRows, count_tokens, deal_microbatches
from t2g.types import TokenSequence


def group_by_prompt(sequences: Sequence[TokenSequence]) -> list[list[int]]:
    """Return the indices of the sequences of each prompt, in the order in which the prompts first appear."""
    groups: dict[bytes, list[int]] = {}
    for index, sequence in enumerate(sequences):
        key = np.asarray(sequence.prompt_ids, np.int64).tobytes()
        groups.setdefault(key, []).append(index)
    return [*groups.values()]


def count_repeated_tokens(sequences: Sequence[TokenSequence]) -> list[int]:
    """Return the length of each prompt that follows an equal one: what a row of the sequences does not repeat."""
    repeated: list[int] = []
    for group in group_by_prompt(sequences):
        repeated += [len(sequences[index].prompt_ids) for index in group[1:]]
    return repeated


def plan_shared_prompts(sequences: Sequence[TokenSequence], *, num_ranks: int, token_budget: int) -> Plan:
    """Assign every sequence to a microbatch of a rank, with the responses to a prompt together; deterministic.

    Each rank gets the same number of microbatches, at least one, and some may be empty. A microbatch computes at most
    `token_budget` tokens; a longer sequence gets a microbatch of its own. Responses to a prompt that exceed the budget
    are cut into several microbatches.
    """

    def area(members: Sequence[int]) -> int:
        chosen = [sequences[index] for index in members]
        return sum(count_tokens(chosen)) - sum(count_repeated_tokens(chosen))

    def fill(bins: list[list[int]], unit: list[int]) -> None:
        """Add a unit to the last microbatch, or to a new one if it does not fit."""
        if bins and area([*bins[-1], *unit]) <= token_budget:
            bins[-1].extend(unit)
        else:
            bins.append([*unit])

    units: list[list[int]] = []
    for group in group_by_prompt(sequences):
        parts: list[list[int]] = []
        for index in group:
            fill(parts, [index])
        units += parts
    units.sort(key=area, reverse=True)

    bins: list[list[int]] = []
    for unit in units:
        fill(bins, unit)
    return deal_microbatches(bins, area, num_ranks)


def make_shared_row(sequences: Sequence[TokenSequence]) -> TokenRows:
    """Return one row: each prompt, then all responses to it; at least EMPTY_TOKENS tokens, padded with 0.

    A response's positions begin after its prompt. The last token of the prompt predicts the first token of each
    response.

    >>> two = [TrainSequence(prompt_ids=[5], response_ids=[6, 7], weights=[]),
    ...        TrainSequence(prompt_ids=[5], response_ids=[9], weights=[])]
    >>> row = make_shared_row(two)
    >>> row.ids[0, :4].tolist(), row.positions[0, :4].tolist()
    ([5, 6, 7, 9], [0, 1, 2, 1])
    >>> row.index.tolist(), row.before.tolist(), row.groups[0].responses
    ([1, 2, 3], [0, 1, 0], (2, 1))
    """
    no_places = np.zeros(0, np.int64)
    index = [no_places] * len(sequences)
    before = [no_places] * len(sequences)
    parts: list[np.ndarray] = []
    groups: list[PromptGroup] = []
    end = 0
    for members in group_by_prompt(sequences):
        prompt_ids = sequences[members[0]].prompt_ids
        parts.append(prompt_ids)
        end += len(prompt_ids)
        last_of_prompt = end - 1
        for member in members:
            response_ids = sequences[member].response_ids
            parts.append(response_ids)
            start = end
            end += len(response_ids)
            index[member] = np.arange(start, end)
            before[member] = index[member] - 1
            before[member][:1] = last_of_prompt
        responses = [len(sequences[member].response_ids) for member in members]
        groups.append(PromptGroup(prompt=len(prompt_ids), responses=tuple(responses)))

    padding = max(0, EMPTY_TOKENS - end)
    if padding:
        parts.append(np.zeros(padding))
        groups.append(PromptGroup(prompt=padding, responses=()))
    ids = np.concatenate(parts).astype(np.int64)
    positions = _make_positions(groups)
    return TokenRows(
        ids=ids[None],
        index=np.concatenate([no_places, *index]),
        before=np.concatenate([no_places, *before]),
        positions=positions[None],
        groups=tuple(groups),
    )


def _make_positions(groups: Iterable[PromptGroup]) -> np.ndarray:
    """Return the position of each token in its own sequence, [L] int64."""
    ranges: list[range] = []
    for group in groups:
        ranges.append(range(group.prompt))
        ranges += [range(group.prompt, group.prompt + length) for length in group.responses]
    return np.fromiter(chain.from_iterable(ranges), np.int64)
