from types import SimpleNamespace

import torch

from t2g.algo.critic import Critic


class Backbone(torch.nn.Module):
    """Hidden states are the token ids, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=2))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        hidden = torch.stack([input_ids, input_ids + 1], dim=-1).to(torch.bfloat16)
        return SimpleNamespace(last_hidden_state=hidden)


def test_a_fresh_critic_says_zero_and_sums_in_float32() -> None:
    critic = Critic(Backbone()).to(torch.bfloat16)
    ids = torch.tensor([[1, 2], [128, 256]])
    assert critic(ids).tolist() == [[0, 0], [0, 0]]
    with torch.no_grad():
        critic.head.weight.fill_(1)
    values = critic(ids)
    assert values.dtype == torch.float32
    assert values[:, 0].tolist() == [3, 257]  # bfloat16 has no 257
