import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from t2g.algo.critic import Critic
from t2g.algo.head import install_chunked_head
from t2g.algo.rows import Rows
from t2g.data.batching import pack_tokens

TEMPERATURE = 0.6
SEQUENCES = [np.random.default_rng(i).integers(0, 60, length) for i, length in enumerate((9, 1, 4, 2))]


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("chunked", [True, False])
def test_packed_sequences_are_as_alone(chunked: bool) -> None:
    """Value and gradient of one microbatch of four sequences = one plain forward of each of them."""
    model, reference = tiny_model(seed=1), tiny_model(seed=2)
    rows, weights = Rows(pack_tokens(SEQUENCES), torch.device("cpu")), torch.linspace(-1, 1, 48).unflatten(0, (3, 16))

    expected: list[list[torch.Tensor]] = [[], [], []]
    for ids in (torch.from_numpy(s) for s in SEQUENCES):
        logprobs, ref = ((m(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1) for m in (model, reference))
        p = logprobs.exp()
        chosen = logprobs.gather(-1, ids[1:, None])[:, 0]
        per_sequence = (chosen, -(p * logprobs).sum(-1), (p * (logprobs - ref)).sum(-1))
        for column, per_token in zip(expected, per_sequence, strict=True):
            column.append(torch.nn.functional.pad(per_token, (1, 0)))
    plain = [torch.cat(column) for column in expected]
    total = sum((column * weight).sum() for column, weight in zip(plain, weights, strict=True))
    want = torch.autograd.grad(total, list(model.parameters()))

    if chunked:
        assert install_chunked_head(model)
    ref_logits = rows.logits(reference).detach()
    found = rows.token_outputs(model, TEMPERATURE, entropy=True, ref_logits=ref_logits)
    columns = [found.logprobs, found.entropy, found.full_kl]
    for column, want_column in zip(columns, plain, strict=True):
        torch.testing.assert_close(column, want_column)
    total = sum((column * weight).sum() for column, weight in zip(columns, weights, strict=True))
    for grad, want_grad in zip(torch.autograd.grad(total, list(model.parameters())), want, strict=True):
        assert (grad - want_grad).norm() < 1e-5 * want_grad.norm() + 1e-5


def test_what_is_not_asked_for_is_none() -> None:
    model = tiny_model()
    rows = Rows(pack_tokens(SEQUENCES), torch.device("cpu"))
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
        values = Rows(pack_tokens(SEQUENCES), torch.device("cpu")).values(critic)
        prefixes = [torch.from_numpy(s[:t]) for s in SEQUENCES for t in range(len(s))]
        expected = [critic(p[None])[0, -1] if len(p) else torch.tensor(0.0) for p in prefixes]
    torch.testing.assert_close(values, torch.stack(expected))
