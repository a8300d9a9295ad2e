"""Plan and lay out microbatches in which all responses to a prompt follow one copy of it.

A microbatch is one row without padding, in which every token is computed once (Prefix Grouper, arXiv 2506.05433). The
model needs the attention of `t2g.algo.shared_attention`: a response attends to its prompt and to itself.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from t2g.data.batching import EMPTY_TOKENS, Plan, PromptGroup, TokenRows, assign_to_ranks
from t2g.types import TokenSequence


def group_by_prompt(sequences: Sequence[TokenSequence]) -> list[list[int]]:
    """Return the indices of the sequences of each prompt, in the order in which the prompts first appear."""
    groups: dict[bytes, list[int]] = {}
    for index, sequence in enumerate(sequences):
        key = np.asarray(sequence.prompt_ids, np.int64).tobytes()
        groups.setdefault(key, []).append(index)
    return [*groups.values()]


def repeated_prompt_lengths(sequences: Sequence[TokenSequence]) -> list[int]:
    """Return the length of each prompt that equals an earlier one: the tokens that a shared row saves."""
    lengths: list[int] = []
    for group in group_by_prompt(sequences):
        lengths += [len(sequences[index].prompt_ids) for index in group[1:]]
    return lengths


def plan_shared_prompts(sequences: Sequence[TokenSequence], *, num_ranks: int, token_budget: int) -> Plan:
    """Assign every sequence to a microbatch of a rank, with the responses to a prompt together; deterministic.

    Each rank gets the same number of microbatches, at least one, and some may be empty. A microbatch computes at most
    `token_budget` tokens; a longer sequence gets a microbatch of its own. Responses to a prompt that exceed the budget
    are split over several microbatches.
    """
    groups = group_by_prompt(sequences)
    prompt_of: dict[int, int] = {}  # index of a sequence -> number of its prompt
    for number, group in enumerate(groups):
        prompt_of |= dict.fromkeys(group, number)

    def count_row_tokens(members: Sequence[int]) -> int:
        prompts = {prompt_of[index]: len(sequences[index].prompt_ids) for index in members}
        num_response_tokens = sum(len(sequences[index].response_ids) for index in members)
        return sum(prompts.values()) + num_response_tokens

    def add_unit(bins: list[list[int]], unit: list[int]) -> None:
        """Append a unit to the last bin, or as a new bin if it does not fit."""
        if bins and count_row_tokens([*bins[-1], *unit]) <= token_budget:
            bins[-1].extend(unit)
        else:
            bins.append([*unit])

    units: list[list[int]] = []
    for group in groups:
        units_of_prompt: list[list[int]] = []
        for index in group:
            add_unit(units_of_prompt, [index])
        units += units_of_prompt
    units.sort(key=count_row_tokens, reverse=True)

    bins: list[list[int]] = []
    for unit in units:
        add_unit(bins, unit)
    return assign_to_ranks(bins, count_row_tokens, num_ranks)


def make_shared_row(sequences: Sequence[TokenSequence]) -> TokenRows:
    """Return one row: each prompt, then all responses to it; at least EMPTY_TOKENS tokens, padded with 0.

    A response's positions begin after its prompt. The last token of the prompt predicts the first token of each
    response.

    >>> two = [TrainSequence(prompt_ids=[5], response_ids=[6, 7], weights=[]),
    ...        TrainSequence(prompt_ids=[5], response_ids=[9], weights=[])]
    >>> row = make_shared_row(two)
    >>> row.ids[0, :4].tolist(), row.positions[0, :4].tolist()
    ([5, 6, 7, 9], [0, 1, 2, 1])
    >>> row.response_index.tolist(), row.logit_index.tolist(), row.groups[0].response_lengths
    ([1, 2, 3], [0, 1, 0], (2, 1))
    """
    nothing = np.zeros(0, np.int64)
    response_index = [nothing] * len(sequences)
    logit_index = [nothing] * len(sequences)
    segments: list[np.ndarray] = []
    groups: list[PromptGroup] = []
    end = 0
    for members in group_by_prompt(sequences):
        prompt_ids = sequences[members[0]].prompt_ids
        segments.append(prompt_ids)
        end += len(prompt_ids)
        last_of_prompt = end - 1
        for member in members:
            response_ids = sequences[member].response_ids
            segments.append(response_ids)
            start = end
            end += len(response_ids)
            response_index[member] = np.arange(start, end)
            logit_index[member] = response_index[member] - 1
            logit_index[member][:1] = last_of_prompt
        lengths = [len(sequences[member].response_ids) for member in members]
        response_lengths = tuple(filter(None, lengths))
        groups.append(PromptGroup(prompt_length=len(prompt_ids), response_lengths=response_lengths))

    padding = max(0, EMPTY_TOKENS - end)
    if padding:
        segments.append(np.zeros(padding, np.int64))
        groups.append(PromptGroup(prompt_length=padding, response_lengths=()))
    ids = np.concatenate(segments).astype(np.int64)
    positions = _make_positions(groups)
    return TokenRows(
        ids=ids[None],
        response_index=np.concatenate([nothing, *response_index]),
        logit_index=np.concatenate([nothing, *logit_index]),
        positions=positions[None],
        groups=tuple(groups),
    )


def _make_positions(groups: Iterable[PromptGroup]) -> np.ndarray:
    """Return the position of each token in its own sequence, [L] int64."""
    ranges: list[np.ndarray] = []
    for group in groups:
        ranges.append(np.arange(group.prompt_length))
        ranges += [group.prompt_length + np.arange(length) for length in group.response_lengths]
    return np.concatenate(ranges)
