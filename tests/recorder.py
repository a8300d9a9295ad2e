"""A model that keeps what an engine's weight transfer has it load."""

from collections.abc import Iterable

import torch


class Recorder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded.update(weights)
