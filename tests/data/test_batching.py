from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.data.batching import (
    EMPTY_TOKENS,
    draw_steps,
    make_rows,
    make_train_batch,
    normalize_weights,
    plan_by_length,
    plan_microbatches,
)
from t2g.types import TrainBatch, TrainSample


def sample(prompt: int, response: int, first: int = 1) -> TrainSample:
    """Token ids and every per-token array count up from `first`, so that each number names its sample and place."""
    numbers = first + np.arange(response, dtype=np.float32)
    ids = np.arange(first, first + prompt + response, dtype=np.int32)
    prompt_ids = ids[:prompt].copy()
    response_ids = ids[prompt:].copy()
    return TrainSample(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        weights=np.ones(response, np.float32),
        advantages=numbers,
        returns=numbers + 0.1,
        values=numbers + 0.2,
        old_logprobs=numbers + 0.3,
        rollout_logprobs=numbers + 0.4,
        ref_logprobs=numbers + 0.5,
    )


def tokens(lengths: list[int], members: list[int]) -> int:
    """What a forward of these sequences computes."""
    return len(members) * max((lengths[i] for i in members), default=0)


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    num_ranks=st.integers(1, 4),
    token_budget=st.integers(1, 100),
)
def test_plan(lengths: list[int], num_ranks: int, token_budget: int) -> None:
    plan = plan_by_length(lengths, num_ranks, token_budget)
    assert sorted(chain.from_iterable(chain.from_iterable(plan))) == list(range(len(lengths)))
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1
    for members in chain.from_iterable(plan):
        assert len(members) <= 1 or tokens(lengths, members) <= token_budget
    if len(lengths) >= num_ranks:
        assert all(map(any, plan))  # each rank has a microbatch that is not empty
    assert plan == plan_by_length(lengths, num_ranks, token_budget)


@given(lengths=st.lists(st.integers(1, 60), min_size=8, max_size=60), num_ranks=st.integers(2, 4))
def test_ranks_are_balanced(lengths: list[int], num_ranks: int) -> None:
    """Tokens of the busiest and the idlest rank differ by at most one microbatch."""
    plan = plan_by_length(lengths, num_ranks, 120)
    areas = []
    loads = []
    for rank in plan:
        rank_areas = [tokens(lengths, members) for members in rank]
        areas += rank_areas
        loads.append(sum(rank_areas))
    assert max(loads) - min(loads) <= max(areas)


def test_a_sequence_past_the_budget_stands_alone() -> None:
    plan = plan_by_length([5, 200, 5], 1, 20)
    assert sorted(plan[0]) == [[0, 2], [1]]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 3), st.integers(10, 80))
def test_pairs_stay_together(pairs: list[int], num_ranks: int, token_budget: int) -> None:
    sequences = [sample(2, response) for longer in pairs for response in (longer, longer // 2)]
    batches = plan_microbatches(sequences, num_ranks=num_ranks, token_budget=token_budget, group_size=2)
    assert sorted(chain.from_iterable(chain.from_iterable(batches))) == list(range(len(sequences)))
    assert len({len(share) for share in batches}) == 1
    for members in chain.from_iterable(batches):
        assert members[1::2] == [i + 1 for i in members[::2]]
        lengths = [len(sequences[i]) for i in members]
        assert len(members) <= 2 or len(members) * max(lengths) <= token_budget


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_rows_hold_each_sequence(shapes: list[tuple[int, int]]) -> None:
    samples = [sample(p, r, first=100 * (i + 1)) for i, (p, r) in enumerate(shapes)]
    rows = make_rows(samples)
    whole = [[*s.prompt_ids.tolist(), *s.response_ids.tolist()] for s in samples]
    width = max(len(row) for row in whole)
    assert rows.ids.tolist() == [row + [0] * (width - len(row)) for row in whole]
    assert rows.ids.flatten()[rows.response_index].tolist() == [i for s in samples for i in s.response_ids.tolist()]
    assert (rows.logit_index == rows.response_index - 1).all()


def test_a_rank_without_sequences_gets_a_row_in_which_nothing_counts() -> None:
    rows = make_rows([])
    assert rows.ids.shape == (1, EMPTY_TOKENS)
    assert rows.response_index.size == 0


@settings(max_examples=50)
@given(
    weights=st.lists(st.lists(st.sampled_from([0, 1, 8]), max_size=6), min_size=1, max_size=6).filter(
        lambda rows: any(map(any, rows))
    )
)
def test_loss_shares_sum_to_one(weights: list[list[int]]) -> None:
    samples = [replace(sample(1, len(row)), weights=np.array(row, np.float32)) for row in weights]
    for shares, row in zip(normalize_weights(samples), weights, strict=True):
        np.testing.assert_allclose(shares.weights, [weight / sum(map(sum, weights)) for weight in row], rtol=1e-6)
        assert shares.weights.dtype == np.float32


def train_batch(samples: list[TrainSample], num_epochs: int = 1, minibatches: int = 1, seed: int = 0) -> TrainBatch:
    return make_train_batch(samples, num_epochs=num_epochs, minibatches_per_epoch=minibatches, kl_coef=0.25, seed=seed)


@settings(max_examples=40)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=9),
    num_epochs=st.integers(1, 2),
    minibatches=st.integers(1, 4),
)
def test_each_epoch_has_every_sample_once(shapes: list[tuple[int, int]], num_epochs: int, minibatches: int) -> None:
    samples = [sample(p, r, first=100 * (i + 1)) for i, (p, r) in enumerate(shapes)]
    batch = train_batch(samples, num_epochs, minibatches, seed=3)
    assert batch.kl_coef == 0.25
    per_epoch = len(batch.minibatches) // num_epochs
    assert per_epoch == min(minibatches, len(samples))
    for minibatch in batch.minibatches:
        assert sum(s.weights.sum() for s in minibatch) == pytest.approx(1, abs=1e-6)
    for epoch in range(num_epochs):
        part = batch.minibatches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(s.advantages[0] for m in part for s in m) == [100 * (i + 1) for i in range(len(samples))]


def test_the_seed_alone_decides() -> None:
    samples = [sample(2, 3, first=100 * i) for i in range(1, 9)]

    def order(seed: int) -> list[float]:
        return [float(s.advantages[0]) for m in train_batch(samples, 1, 4, seed).minibatches for s in m]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_a_minibatch_in_which_no_token_counts_is_left_out() -> None:
    batch = train_batch([sample(2, 0), sample(2, 3)], num_epochs=2, minibatches=2)
    for minibatch in batch.minibatches:
        assert [len(sample.weights) for sample in minibatch] == [3]
    assert len(batch.minibatches) == 2


def test_nothing_to_learn_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the 2 samples has a token"):
        train_batch([sample(2, 0), sample(3, 0)])


def test_half_an_epoch_and_two_and_a_half() -> None:
    def drawn(num_epochs: float) -> list[list[int]]:
        return draw_steps(6, num_epochs=num_epochs, batch_size=4, seed=5)

    assert [len(step) for step in drawn(0.5)] == [3]
    assert [len(step) for step in drawn(2.5)] == [4, 4, 4, 3]
    counts = np.bincount(np.concatenate(drawn(2.5)), minlength=6)
    assert sorted(counts) == [2, 2, 2, 3, 3, 3]  # two whole epochs and half of one
    assert drawn(2.5)[0] == drawn(1)[0]


@given(st.integers(1, 30), st.integers(1, 3), st.integers(1, 12), st.integers(0, 5))
def test_every_example_is_drawn_once_an_epoch(num_examples: int, num_epochs: int, batch_size: int, seed: int) -> None:
    steps = draw_steps(num_examples, num_epochs=num_epochs, batch_size=batch_size, seed=seed)
    assert [len(step) for step in steps[:-1]] == [batch_size] * (len(steps) - 1)
    assert (np.bincount(np.concatenate(steps), minlength=num_examples) == num_epochs).all()


def test_rows_of_exponential_lengths_are_hardly_padded() -> None:
    """A step's 64 samples in microbatches of 4,096 tokens: rows x longest row, beside the tokens that are in them."""
    for seed in range(5):
        lengths = 16 + np.random.default_rng(seed).exponential(128, 64).astype(int)
        bins = [*chain.from_iterable(plan_by_length(lengths.tolist(), 1, 4096))]
        area = sum(len(members) * lengths[members].max() for members in bins)
        assert lengths.sum() / area > 0.8
        assert len(bins) <= 8
