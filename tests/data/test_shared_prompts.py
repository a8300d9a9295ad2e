from dataclasses import replace
from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.data.batching import EMPTY_TOKENS
from t2g.data.shared_prompts import group_by_prompt, make_shared_row, plan_shared_prompts, repeated_prompt_lengths
from t2g.types import TokenIds

# The number of each response's prompt, and its length. Prompt n has n + 1 tokens.
SHAPES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=20)


def make_sequences(shapes: list[tuple[int, int]]) -> list[TokenIds]:
    """Every token of a response has an id of its own."""
    sequences = []
    next_id = 100
    for prompt, length in shapes:
        prompt_ids = np.full(prompt + 1, prompt + 1, np.int32)
        response_ids = np.arange(next_id, next_id + length, dtype=np.int32)
        next_id += length
        sequences.append(TokenIds(prompt_ids=prompt_ids, response_ids=response_ids))
    return sequences


def count_row(sequences: list[TokenIds]) -> int:
    """Return the tokens of a row with one copy of each prompt, without its padding."""
    prompts = {sequence.prompt_ids.tobytes(): len(sequence.prompt_ids) for sequence in sequences}
    return sum(prompts.values()) + sum(len(sequence.response_ids) for sequence in sequences)


@settings(max_examples=200)
@given(SHAPES, st.integers(1, 4), st.integers(1, 60))
def test_a_plan_has_each_sequence_once_within_the_budget(
    shapes: list[tuple[int, int]], num_ranks: int, token_budget: int
) -> None:
    sequences = make_sequences(shapes)
    plan = plan_shared_prompts(sequences, num_ranks=num_ranks, token_budget=token_budget)
    microbatches = [*chain.from_iterable(plan)]
    assert sorted(chain.from_iterable(microbatches)) == list(range(len(sequences)))
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    for members in microbatches:
        assert len(members) <= 1 or count_row([sequences[index] for index in members]) <= token_budget
    assert plan == plan_shared_prompts(sequences, num_ranks=num_ranks, token_budget=token_budget)


@given(SHAPES)
def test_a_prompt_whose_responses_fit_stays_in_one_microbatch(shapes: list[tuple[int, int]]) -> None:
    """With one rank, whose microbatches need not be divided."""
    sequences = make_sequences(shapes)
    groups = group_by_prompt(sequences)
    budget = 1
    for group in groups:
        tokens = count_row([sequences[index] for index in group])
        budget = max(budget, tokens)
    (microbatches,) = plan_shared_prompts(sequences, num_ranks=1, token_budget=budget)
    for group in groups:
        assert sum(bool(set(group) & set(members)) for members in microbatches) == 1


def test_responses_past_the_budget_are_split() -> None:
    """Five responses of 4 tokens to a prompt of 3: two have 11 tokens, three have 15."""
    sequences = make_sequences([(2, 4)] * 5)
    assert plan_shared_prompts(sequences, num_ranks=1, token_budget=14) == [[[0, 1], [2, 3], [4]]]


@given(SHAPES)
def test_a_row_has_each_prompt_once_and_predicts_each_response_token(shapes: list[tuple[int, int]]) -> None:
    sequences = make_sequences(shapes)
    row = make_shared_row(sequences)
    assert row.ids.shape == row.positions.shape == (1, max(EMPTY_TOKENS, count_row(sequences)))
    ids = row.ids[0]
    positions = row.positions[0]
    assert ids[row.response_index].tolist() == [*chain.from_iterable(sequence.response_ids for sequence in sequences)]
    previous: list[int] = []
    places: list[int] = []
    for sequence in sequences:
        num_prompt = len(sequence.prompt_ids)
        num_response = len(sequence.response_ids)
        whole = [*sequence.prompt_ids, *sequence.response_ids]
        previous += whole[num_prompt - 1 : -1]
        places += range(num_prompt, num_prompt + num_response)
    assert ids[row.logit_index].tolist() == previous
    assert positions[row.response_index].tolist() == places
    assert (positions[row.logit_index] == positions[row.response_index] - 1).all()


def test_two_ranks_share_what_they_can() -> None:
    """Three prompts of 3 tokens with two responses of 4: a microbatch each, and one is divided for the second rank."""
    sequences = make_sequences([(2, 4)] * 2)
    for marker in (50, 60):
        sequences += [replace(sequence, prompt_ids=np.full(3, marker, np.int32)) for sequence in sequences[:2]]
    plan = plan_shared_prompts(sequences, num_ranks=2, token_budget=11)
    assert sorted(map(len, chain.from_iterable(plan))) == [1, 1, 2, 2]
    assert {len(rank) for rank in plan} == {2}


def test_repeated_prompts_are_those_that_equal_an_earlier_one() -> None:
    sequences = make_sequences([(3, 1), (1, 5), (3, 2), (3, 0)])
    assert repeated_prompt_lengths(sequences) == [4, 4]
    assert group_by_prompt(sequences) == [[0, 2, 3], [1]]
