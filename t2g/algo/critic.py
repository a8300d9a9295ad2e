"""The critic: a policy's backbone with a scalar head."""

from typing import Any

import torch


class ValueHead(torch.nn.Linear):
    """A linear layer that computes in float32 for weights of any dtype; its weights start at 0."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden.float(), self.weight.float())


class Critic(torch.nn.Module):
    """The value model. A new critic predicts 0 everywhere: the first advantages depend on the rewards only."""

    def __init__(self, backbone: torch.nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        hidden_size = backbone.config.get_text_config().hidden_size
        self.head = ValueHead(hidden_size, 1, bias=False)

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Return values [S, L] float32 of input ids [S, L] int64; column i is the state *after* token i.

        `logprobs.Rows.values` uses it as the state before token i + 1.

        Args:
            inputs: Other inputs of the backbone.
        """
        hidden = self.backbone(input_ids=input_ids, **inputs, use_cache=False).last_hidden_state
        return self.head(hidden).squeeze(-1)
