import math
from dataclasses import replace

import pytest
import torch

from t2g.algo.head import CHUNK_TOKENS, TokenRequest, compute_entropy, token_columns


def request(
    next_ids: torch.Tensor, temperature: float, *, entropy: bool = False, ref_logits: torch.Tensor | None = None
) -> TokenRequest:
    places = torch.arange(len(next_ids))
    return TokenRequest(
        positions=places, next_ids=next_ids, temperature=temperature, entropy=entropy, ref_logits=ref_logits
    )


def test_worked_by_hand() -> None:
    logits = torch.tensor([[math.log(1), math.log(3)], [math.log(4), math.log(1)]])
    ids = torch.tensor([1, 0])
    expected = [[math.log(3 / 4)], [math.log(4 / 5)]]
    torch.testing.assert_close(token_columns(logits, request(ids, 1.0)), torch.tensor(expected))
    # at temperature 1/2 odds are squared: (1, 9) / 10 and (16, 1) / 17; the reference's are even at any temperature
    p = 9 / 10
    q = 16 / 17
    entropy = [-(x * math.log(x) + (1 - x) * math.log(1 - x)) for x in (p, q)]
    expected = [
        [math.log(p), entropy[0], math.log(2) - entropy[0]],
        [math.log(q), entropy[1], math.log(2) - entropy[1]],
    ]
    columns = token_columns(logits, request(ids, 0.5, entropy=True, ref_logits=torch.zeros(2, 2)))
    torch.testing.assert_close(columns, torch.tensor(expected))
    # temperature divides the reference's logits too: (2, 1) / 3 becomes (4, 1) / 5
    ref_logits = torch.tensor([[math.log(2), 0.0], [math.log(2), 0.0]])
    kl = token_columns(logits, request(ids, 0.5, ref_logits=ref_logits))[0, 1]
    assert kl == pytest.approx(1 / 10 * math.log(1 / 8) + 9 / 10 * math.log(9 / 2))


def test_an_entropy_for_metrics_has_its_value_and_no_gradient() -> None:
    logits = torch.tensor([[2.0, 0.5, -1.0], [0.0, -torch.inf, 1.0]], requires_grad=True)
    ids = torch.tensor([0, 2])
    metric_request = replace(request(ids, 1.0, entropy=True), entropy_gradient=False)
    columns = token_columns(logits, metric_request)
    torch.testing.assert_close(columns, token_columns(logits, request(ids, 1.0, entropy=True)))
    (grad,) = torch.autograd.grad(columns.sum(), logits)
    (expected,) = torch.autograd.grad(token_columns(logits, request(ids, 1.0))[:, 0].sum(), logits)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_neither_values_nor_gradients(dtype: torch.dtype) -> None:
    tokens = 2 * CHUNK_TOKENS + 3
    vocabulary = 5
    generator = torch.Generator().manual_seed(1)
    states, head, ref_logits = (torch.randn(n, m, generator=generator) for n, m in ((tokens, 4), (5, 4), (tokens, 5)))
    states = states.to(dtype).requires_grad_()
    head = head.to(dtype).requires_grad_()
    ids = torch.randint(0, vocabulary, (tokens,), generator=generator)
    weights = torch.randn(tokens, 3, generator=generator)

    token_request = request(ids, 0.6, entropy=True, ref_logits=ref_logits)
    chunked = token_columns(states, token_request, lambda chunk: torch.nn.functional.linear(chunk, head))
    grads = torch.autograd.grad((chunked * weights).sum(), (states, head))

    logprobs = (torch.nn.functional.linear(states, head).float() / 0.6).log_softmax(-1)
    gap = logprobs - (ref_logits / 0.6).log_softmax(-1)
    terms = (logprobs[range(tokens), ids], -(logprobs.exp() * logprobs).sum(-1), (logprobs.exp() * gap).sum(-1))
    plain = torch.stack(terms, dim=-1)
    expected = torch.autograd.grad((plain * weights).sum(), (states, head))
    torch.testing.assert_close(chunked, plain)
    for grad, expected_grad in zip(grads, expected, strict=True):
        scale = expected_grad.abs().max().item()
        torch.testing.assert_close(
            grad, expected_grad, rtol=0, atol=scale * (2e-2 if dtype == torch.bfloat16 else 1e-6)
        )


def test_entropy_and_its_gradient() -> None:
    """dH / dz_v = -p_v (log p_v + H): towards the even distribution, where it is 0."""
    odds = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    logits = odds.log().requires_grad_()
    entropy = compute_entropy(logits.log_softmax(-1))
    p = odds / odds.sum(-1, keepdim=True)
    expected = torch.tensor([math.log(4), sum(-x / 10 * math.log(x / 10) for x in (1, 2, 3, 4))])
    torch.testing.assert_close(entropy, expected)
    (grad,) = torch.autograd.grad(entropy.sum(), logits)
    torch.testing.assert_close(grad, -p * (p.log() + expected[:, None]))
    assert grad[0].abs().max() < 1e-7


@pytest.mark.parametrize("ruled_out", [-math.inf, -200.0])
def test_a_token_of_probability_0_adds_nothing(ruled_out: float) -> None:
    """As if it were not in the vocabulary, in value and gradient; -200 is past what float32 can say of exp."""
    few = torch.tensor([[0.3, -1.0, 0.7]], requires_grad=True)
    more = torch.tensor([[0.3, -1.0, ruled_out, 0.7]], requires_grad=True)
    few_ref = torch.tensor([[0.0, 0.1, 0.2]])
    more_ref = torch.tensor([[0.0, 0.1, ruled_out, 0.2]])
    ids = torch.tensor([0])
    expected = token_columns(few, request(ids, 0.9, entropy=True, ref_logits=few_ref))
    actual = token_columns(more, request(ids, 0.9, entropy=True, ref_logits=more_ref))
    torch.testing.assert_close(actual, expected)
    (want_grad,), (grad,) = (torch.autograd.grad(x.sum(), y) for x, y in ((expected, few), (actual, more)))
    torch.testing.assert_close(grad[:, [0, 1, 3]], want_grad)
    assert grad[0, 2] == 0
