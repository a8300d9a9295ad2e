from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.data.batching import (
    empty_microbatch,
    loss_weights,
    make_train_batch,
    pack,
    pack_minibatch,
    pack_tokens,
    padded_rows,
    plan_microbatches,
)
from t2g.types import Minibatch, TrainBatch, TrainSample


def sample(prompt: int, response: int, first: int = 1) -> TrainSample:
    """Token ids and every per-token array count up from `first`, so that each number names its sample and place."""
    numbers = first + np.arange(response, dtype=np.float32)
    return TrainSample(
        prompt_ids=np.arange(first, first + prompt, dtype=np.int32),
        response_ids=np.arange(first + prompt, first + prompt + response, dtype=np.int32),
        loss_mask=np.ones(response, np.float32),
        advantages=numbers,
        returns=numbers + 0.1,
        values=numbers + 0.2,
        old_logprobs=numbers + 0.3,
        rollout_logprobs=numbers + 0.4,
        ref_logprobs=numbers + 0.5,
    )


def tokens(lengths: list[int], members: list[int], packed: bool) -> int:
    """What a forward of these sequences computes."""
    chosen = [lengths[i] for i in members]
    return sum(chosen) if packed else len(chosen) * max(chosen, default=0)


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    num_ranks=st.integers(1, 4),
    token_budget=st.integers(1, 100),
    packed=st.booleans(),
)
def test_plan(lengths: list[int], num_ranks: int, token_budget: int, packed: bool) -> None:
    plan = plan_microbatches(lengths, num_ranks, token_budget, packed=packed)
    assert sorted(chain.from_iterable(chain.from_iterable(plan))) == list(range(len(lengths)))
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1
    for members in chain.from_iterable(plan):
        assert len(members) <= 1 or tokens(lengths, members, packed) <= token_budget
    if len(lengths) >= num_ranks:
        assert all(any(members for members in rank) for rank in plan)
    assert plan == plan_microbatches(lengths, num_ranks, token_budget, packed=packed)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_packed_rows_are_more_than_half_full(lengths: list[int]) -> None:
    """First fit: two rows of which each is at most half full would have been one."""
    (rows,) = plan_microbatches(lengths, 1, 100, packed=True)
    assert sum(tokens(lengths, members, packed=True) <= 50 for members in rows) <= 1


@given(lengths=st.lists(st.integers(1, 60), min_size=8, max_size=60), num_ranks=st.integers(2, 4), packed=st.booleans())
def test_ranks_are_balanced(lengths: list[int], num_ranks: int, packed: bool) -> None:
    """Tokens of the busiest and the idlest rank differ by at most one microbatch."""
    plan = plan_microbatches(lengths, num_ranks, 120, packed=packed)
    areas = [[tokens(lengths, members, packed) for members in rank] for rank in plan]
    loads = [sum(rank) for rank in areas]
    assert max(loads) - min(loads) <= max(chain.from_iterable(areas))


def test_a_sequence_past_the_budget_stands_alone() -> None:
    plan = plan_microbatches([5, 200, 5], 1, 20)
    assert sorted(plan[0]) == [[0, 2], [1]]


def test_pack_worked_by_hand() -> None:
    batch = pack([sample(2, 2, first=10), sample(1, 1, first=50)], [np.array([0.25, 0.25]), np.array([0.5])])
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 50, 51]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.segment_ids.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.weights.tolist() == [0, 0, 0.25, 0.25, 0, 0.5]
    assert batch.advantages.tolist() == [0, 0, 10, 11, 0, 50]
    np.testing.assert_allclose(batch.ref_logprobs, [0, 0, 10.5, 11.5, 0, 50.5])
    assert batch.input_ids.dtype == np.int64
    assert {getattr(batch, name).dtype for name in ("weights", "values", "returns")} == {np.dtype(np.float32)}


def test_an_empty_response_packs() -> None:
    assert pack([sample(3, 0), sample(1, 1)], [np.zeros(0), np.ones(1)]).weights.tolist() == [0, 0, 0, 0, 1]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_padded_rows_hold_each_sequence(lengths: list[int]) -> None:
    sequences = [np.arange(1, n + 1) + 100 * i for i, n in enumerate(lengths)]
    rows, index = padded_rows(pack_tokens(sequences))
    assert rows.shape == (len(lengths), max(lengths))
    for row, ids in zip(rows, sequences, strict=True):
        assert row.tolist() == [*ids.tolist(), *[0] * (max(lengths) - len(ids))]
    assert rows.flatten()[index].tolist() == np.concatenate(sequences).tolist()


@settings(max_examples=50)
@given(
    masks=st.lists(st.lists(st.sampled_from([0, 1]), max_size=6), min_size=1, max_size=6).filter(
        lambda masks: any(map(any, masks))
    )
)
def test_loss_weights_are_shares_of_one(masks: list[list[int]]) -> None:
    arrays = [np.array(mask, np.float32) for mask in masks]
    by_token, by_sequence = loss_weights(arrays, "token"), loss_weights(arrays, "sequence")
    num_tokens, num_sequences = sum(map(sum, masks)), sum(map(any, masks))
    for mask, token, sequence in zip(masks, by_token, by_sequence, strict=True):
        np.testing.assert_allclose(token, [m / num_tokens for m in mask], rtol=1e-6)
        np.testing.assert_allclose(sequence, [m / sum(mask) / num_sequences if m else 0 for m in mask], rtol=1e-6)
        assert token.dtype == sequence.dtype == np.float32
    for weights in (by_token, by_sequence):
        assert sum(w.sum() for w in weights) == pytest.approx(1, abs=1e-6)


def train_batch(samples: list[TrainSample], num_epochs: int = 1, minibatches: int = 1, seed: int = 0) -> TrainBatch:
    return make_train_batch(
        samples, num_epochs=num_epochs, minibatches_per_epoch=minibatches, loss_mean="token", kl_coef=0.25, seed=seed
    )


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
        assert [len(w) for w in minibatch.weights] == [len(s.response_ids) for s in minibatch.samples]
        assert sum(w.sum() for w in minibatch.weights) == pytest.approx(1, abs=1e-6)
    for epoch in range(num_epochs):
        part = batch.minibatches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(s.advantages[0] for m in part for s in m.samples) == [100 * (i + 1) for i in range(len(samples))]


@settings(max_examples=40)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=9),
    num_ranks=st.integers(1, 4),
    token_budget=st.integers(5, 40),
)
def test_packing_for_any_ranks_keeps_every_token_and_its_weight(
    shapes: list[tuple[int, int]], num_ranks: int, token_budget: int
) -> None:
    samples = [sample(p, r, first=100 * (i + 1)) for i, (p, r) in enumerate(shapes)]
    rng = np.random.default_rng(len(shapes))
    weights = tuple(rng.random(len(s.response_ids)).astype(np.float32) + 0.5 for s in samples)
    packed = pack_minibatch(
        Minibatch(samples=tuple(samples), weights=weights), num_ranks=num_ranks, token_budget=token_budget
    )
    assert len(packed) == num_ranks
    assert len({len(rank) for rank in packed}) == 1
    found = {
        (float(advantage), float(weight))
        for m in chain.from_iterable(packed)
        for advantage, weight in zip(m.advantages[m.weights > 0], m.weights[m.weights > 0], strict=True)
    }
    assert found == {
        (float(a), float(w))
        for s, row in zip(samples, weights, strict=True)
        for a, w in zip(s.advantages, row, strict=True)
    }


def test_the_seed_alone_decides() -> None:
    samples = [sample(2, 3, first=100 * i) for i in range(1, 9)]

    def order(seed: int) -> list[float]:
        return [float(s.advantages[0]) for m in train_batch(samples, 1, 4, seed).minibatches for s in m.samples]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_an_idle_rank_gets_tokens_that_do_not_count() -> None:
    (busy,), (idle,) = pack_minibatch(train_batch([sample(2, 2)]).minibatches[0], num_ranks=2, token_budget=100)
    assert busy.weights.sum() == 1
    assert idle.weights.sum() == 0
    np.testing.assert_equal(vars(idle), vars(empty_microbatch()))


def test_a_minibatch_in_which_no_token_counts_is_left_out() -> None:
    batch = train_batch([sample(2, 0), sample(2, 3)], num_epochs=2, minibatches=2)
    assert [[len(w) for w in m.weights] for m in batch.minibatches] == [[3], [3]]


def test_nothing_to_learn_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the 2 samples has a token"):
        train_batch([sample(2, 0), sample(3, 0)])
