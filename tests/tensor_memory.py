"""Counts the memory of large tensors while code runs, in forward and backward passes."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class TensorMemory(TorchDispatchMode):
    """Counts the tensors that operations return while the mode is active."""

    def __init__(self, *, min_numel: int, last_dim: int | None = None) -> None:
        """Count tensors of at least `min_numel` elements, and of `last_dim` columns if that is given."""
        super().__init__()
        self.largest_numel = self.peak_bytes = 0
        self._min_numel = min_numel
        self._last_dim = last_dim
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(tensor, torch.Tensor) or tensor.numel() < self._min_numel:
                continue
            if self._last_dim is None or tensor.shape[-1:] == (self._last_dim,):
                self.largest_numel = max(self.largest_numel, tensor.numel())
                storage = StorageWeakRef(tensor.untyped_storage())
                self._alive[storage.cdata] = (storage, tensor.untyped_storage().nbytes())
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._alive.values()))
        return result
