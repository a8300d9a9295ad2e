import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from t2g.algo.logprobs import CHUNK_TOKENS, shift_right, token_entropy, token_logprobs


def test_worked_by_hand() -> None:
    logits = torch.tensor([[math.log(1), math.log(3)], [math.log(4), math.log(1)], [50.0, 0.0]])
    ids, segments = torch.tensor([0, 1, 0]), torch.tensor([5, 5, 5])
    # token 1 is drawn from row 0: 3 / 4; token 0 from row 1: 4 / 5; row 2 predicts a token that does not exist
    expected = [0.0, math.log(3 / 4), math.log(4 / 5)]
    torch.testing.assert_close(token_logprobs(logits, ids, segments, 1.0), torch.tensor(expected))
    # at temperature 1/2 odds are squared: 9 / 10 and 16 / 17
    expected = [0.0, math.log(9 / 10), math.log(16 / 17)]
    torch.testing.assert_close(token_logprobs(logits, ids, segments, 0.5), torch.tensor(expected))


def test_a_sequence_knows_nothing_of_the_one_before() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    ids, segments = torch.tensor([1, 2, 3, 0, 1]), torch.tensor([0, 0, 1, 1, 1])
    packed = token_logprobs(logits, ids, segments, 0.7)
    alone = [token_logprobs(logits[a:b], ids[a:b], segments[a:b], 0.7) for a, b in ((0, 2), (2, 5))]
    torch.testing.assert_close(packed, torch.cat(alone))
    assert packed[0] == 0
    assert packed[2] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_checkpoints_change_nothing(dtype: torch.dtype) -> None:
    tokens = 2 * CHUNK_TOKENS + 3
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(tokens, 5, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(0, 5, (tokens,), generator=generator)
    segments = torch.arange(tokens) // 100
    plain = (logits.float() / 0.6).log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
    expected = torch.cat([torch.zeros(1), torch.where(segments[1:] == segments[:-1], plain, 0)])
    chunked = token_logprobs(logits, ids, segments, 0.6)
    torch.testing.assert_close(chunked, expected)
    weights = torch.randn(tokens, generator=generator)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), logits)
    (grad,) = torch.autograd.grad((chunked * weights).sum(), logits)
    torch.testing.assert_close(grad, expected_grad, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_entropy_worked_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -float("inf"), -float("inf")], [9.0, 1.0, 1.0, 1.0]])
    segments = torch.zeros(3, dtype=torch.int64)
    torch.testing.assert_close(token_entropy(logits, segments, 0.3), torch.tensor([0.0, math.log(4), math.log(2)]))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_shift_right_within_each_sequence(lengths: list[int]) -> None:
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    states = torch.arange(1.0, len(segments) + 1)
    shifted = shift_right(states, segments).tolist()
    for i, value in enumerate(shifted):
        first = i == 0 or segments[i] != segments[i - 1]
        assert value == (0 if first else states[i - 1])
