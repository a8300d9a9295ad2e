"""The critic: a policy's backbone with a scalar head."""

import torch


class ValueHead(torch.nn.Linear):
    """A linear layer that sums in float32 and gives float32, whatever its weights are; it starts at 0."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden.float(), self.weight.float())


class Critic(torch.nn.Module):
    """Values of states. A fresh critic says 0 everywhere, so that the first advantages are those of the rewards."""

    def __init__(self, backbone: torch.nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = ValueHead(backbone.config.get_text_config().hidden_size, 1, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[S, L] int64 -> [S, L] float32: column i is the state *after* token i (`logprobs.Rows.values` takes it for
        the one before token i + 1)."""
        hidden = self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.head(hidden).squeeze(-1)


def disable_dropout(model: torch.nn.Module) -> None:
    """Set every dropout of the model to 0: with it, ratios would differ from 1 before the first update."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
