import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from t2g.algo.critic import Critic
from t2g.algo.head import install_chunked_head
from t2g.algo.logprobs import Rows
from t2g.types import TrainSequence

TEMPERATURE = 0.6
CPU = torch.device("cpu")
SHAPES = [(3, 6), (1, 0), (1, 3), (1, 1)]  # prompt, response


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def sequences() -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    return [
        TrainSequence(prompt_ids=rng.integers(0, 60, p), response_ids=rng.integers(0, 60, r), weights=np.ones(r))
        for p, r in SHAPES
    ]


def ids_of(sequence: TrainSequence) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([sequence.prompt_ids, sequence.response_ids]))


@pytest.mark.parametrize("chunked", [True, False])
def test_sequences_together_are_as_alone(chunked: bool) -> None:
    """Value and gradient of one microbatch of four sequences = one plain forward of each of them."""
    model = tiny_model(seed=1)
    reference = tiny_model(seed=2)
    rows = Rows(sequences(), CPU)
    weights = torch.linspace(-1, 1, 30).unflatten(0, (3, 10))

    expected: list[list[torch.Tensor]] = [[], [], []]
    for one in sequences():
        ids = ids_of(one)
        before = slice(len(one.prompt_ids) - 1, len(one) - 1)
        logprobs, ref = ((m(ids[None]).logits[0, before] / TEMPERATURE).log_softmax(-1) for m in (model, reference))
        p = logprobs.exp()
        chosen = logprobs.gather(-1, torch.from_numpy(one.response_ids)[:, None])[:, 0]
        per_sequence = (chosen, -(p * logprobs).sum(-1), (p * (logprobs - ref)).sum(-1))
        for column, per_token in zip(expected, per_sequence, strict=True):
            column.append(per_token)
    plain = [torch.cat(column) for column in expected]
    total = sum((column * weight).sum() for column, weight in zip(plain, weights, strict=True))
    expected_grads = torch.autograd.grad(total, list(model.parameters()))

    if chunked:
        assert install_chunked_head(model)
    ref_logits = rows.logits(reference).detach()
    outputs = rows.token_outputs(model, TEMPERATURE, entropy=True, ref_logits=ref_logits)
    columns = [outputs.logprobs, outputs.entropy, outputs.full_kl]
    for column, want_column in zip(columns, plain, strict=True):
        torch.testing.assert_close(column, want_column)
    total = sum((column * weight).sum() for column, weight in zip(columns, weights, strict=True))
    for grad, expected_grad in zip(torch.autograd.grad(total, list(model.parameters())), expected_grads, strict=True):
        assert (grad - expected_grad).norm() < 1e-5 * expected_grad.norm() + 1e-5


class Heads:
    """The number of positions that the head computes."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.seen: list[int] = []
        model.lm_head.register_forward_pre_hook(lambda _, args: self.seen.append(args[0][..., 0].numel()))


def test_logits_are_computed_where_a_response_is_predicted() -> None:
    """By a plain head in the columns where any row has a response; of a chunked one see test_head."""
    long = (60, 40)
    short = (50, 1)
    sequences = [
        TrainSequence(prompt_ids=np.ones(p), response_ids=np.full(r, 4), weights=np.ones(r)) for p, r in (long, short)
    ]
    model = tiny_model()
    heads = Heads(model)
    assert Rows(sequences, CPU).logits(model).shape == (41, 64)
    assert Rows(sequences[1:], CPU).logits(model).shape == (32, 64)  # few: EMPTY_TOKENS
    assert heads.seen == [2 * 41, 33]  # columns 49, 59 to 98; the first 32, and 49


@pytest.mark.parametrize("chunked", [True, False])
def test_without_sequences_there_is_a_gradient_of_nothing(chunked: bool) -> None:
    model = tiny_model()
    if chunked:
        install_chunked_head(model)
    rows = Rows([], CPU)
    assert rows.column("weights").shape == rows.sequence_ids.shape == (0,)
    for grad in torch.autograd.grad(rows.token_outputs(model, 1.0).logprobs.sum(), list(model.parameters())):
        assert not grad.any()


def test_statistics_that_were_not_requested_are_none() -> None:
    model = tiny_model()
    rows = Rows(sequences(), CPU)
    whole = rows.token_outputs(model, 1.0, entropy=True, ref_logits=rows.logits(model))
    alone = rows.token_outputs(model, 1.0)
    assert (alone.entropy, alone.full_kl) == (None, None)
    torch.testing.assert_close(alone.logprobs, whole.logprobs)
    kl = rows.token_outputs(model, 1.0, ref_logits=rows.logits(tiny_model(seed=2)))
    assert kl.entropy is None and kl.full_kl.max() > 0.01
    assert whole.full_kl.abs().max() < 1e-6  # from itself


def test_values_are_of_the_state_before_the_token() -> None:
    critic = Critic(tiny_model().model)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        values = Rows(sequences(), CPU).values(critic)
        prefixes = [ids_of(s)[: len(s.prompt_ids) + t] for s in sequences() for t in range(len(s.response_ids))]
        expected = [critic(prefix[None])[0, -1] for prefix in prefixes]
    torch.testing.assert_close(values, torch.stack(expected))


def test_numbers_and_segments_follow_the_response_tokens() -> None:
    sequences = [
        TrainSequence(prompt_ids=[1], response_ids=[2] * n, weights=np.arange(n) + 10.0 * n) for n in (2, 0, 1)
    ]
    assert Rows(sequences, CPU).column("weights").tolist() == [20, 21, 10]
    assert Rows(sequences, CPU).sequence_ids.tolist() == [0, 0, 2]
