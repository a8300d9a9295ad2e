"""The full weights of a ZeRO-3 model, bucket by bucket: one gather per bucket, into reused memory.

`deepspeed.zero.GatheredParameters` allocates memory for each bucket, which on the host costs several times a copy, and
changes the state of the parameters. This module reads the ranks' partitions and does not change the parameters.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from actors.learner import lora
from actors.weights.buckets import Shapes, plan_buckets
from t2g.config import Dtype


def get_shapes(engine: Any, *, adapters: bool = False) -> Shapes:
    """Return the shape of every weight in the order of `FullWeights.buckets`. This is no collective.

    Tied weights appear once, adapters are merged.

    Args:
        engine: A deepspeed.DeepSpeedEngine.
        adapters: Whether to return only the weights of the adapters.
    """
    shapes = {name: tuple(p.ds_shape) for name, p in engine.module.named_parameters()}
    return {name: shapes[own] for name, (own, *_) in lora.sources(shapes, adapters=adapters).items()}


class FullWeights:
    """The weights of one deepspeed.DeepSpeedEngine. `buckets` and `gather` are collectives of all ranks.

    The next bucket overwrites the memory of the returned tensors. On CPUs the memory is reused: 2 + 1 / num_ranks times
    the largest bucket, which may be one module larger than `bucket_bytes`.
    """

    def __init__(self, engine: Any, *, adapters: bool = False) -> None:
        """Read the weights of `engine`; with `adapters`, LoRA adapters by their own names instead of merged weights."""
        self._engine, self._adapters = engine, adapters
        self._memory: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def buckets(
        self, bucket_bytes: int, dtype: Dtype, *, device: Any = "cpu", everywhere: bool = False
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the buckets of `plan_buckets`: pairs of a name and a contiguous tensor of `dtype` on `device`.

        Rank 0 yields them, or every rank with `everywhere`; other ranks yield empty lists. Under LoRA these are the
        merged weights by their checkpoint names.
        """
        named = dict(self._engine.module.named_parameters())
        sources, shapes = (
            lora.sources(named, adapters=self._adapters),
            get_shapes(self._engine, adapters=self._adapters),
        )
        for names in plan_buckets(shapes, dtype=dtype, bucket_bytes=bucket_bytes):
            pieces = self.gather({source: named[source] for name in names for source in sources[name]})
            if not everywhere and self._engine.global_rank != 0:
                yield []
                continue
            merged = {name: self._merged(name, sources[name], named, pieces) for name in names}
            flat = self._flatten(list(merged.values()), getattr(torch, dtype), torch.device(device))
            yield [(n, w[: math.prod(shapes[n])].view(shapes[n])) for n, w in zip(names, flat, strict=True)]

    def gather(self, parameters: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return [num_ranks, n] of each parameter, in its own type on the engine's device, for `full_tensor`."""
        gathered: dict[str, torch.Tensor] = {}
        for dtype in sorted({p.ds_tensor.dtype for p in parameters.values()}, key=str):  # usually one type
            alike = {name: p.ds_tensor for name, p in parameters.items() if p.ds_tensor.dtype == dtype}
            gathered |= dict(zip(alike, self._gather_alike(list(alike.values()), dtype), strict=True))
        return gathered

    def _gather_alike(self, partitions: Sequence[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """Gather partitions of one type. Each has 1 / num_ranks of the elements, rounded up; the last is padded."""
        device, num_ranks = self._engine.device, self._engine.world_size
        if num_ranks == 1:
            return [partition.to(device).view(1, -1) for partition in partitions]
        sizes = [len(partition) for partition in partitions]
        own = self._get_memory(f"own {dtype}", sum(sizes), dtype, device)
        for piece, partition in zip(own.split(sizes), partitions, strict=True):
            piece.copy_(partition)
        all_ranks = self._get_memory(f"all_ranks {dtype}", num_ranks * sum(sizes), dtype, device)
        torch.distributed.all_gather_into_tensor(all_ranks, own)
        return all_ranks.view(num_ranks, -1).split(sizes, dim=1)

    def _merged(
        self, name: str, own: Sequence[str], named: Mapping[str, Any], pieces: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return [num_ranks, n], or [1, n] with a merged adapter."""
        if len(own) == 1:
            return pieces[own[0]]
        parts = [full_tensor(named[source], pieces[source]) for source in own]
        return lora.checkpoint_weight(self._engine.module, name, parts).reshape(1, -1)

    def _flatten(
        self, pieces: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> Sequence[torch.Tensor]:
        """Return [num_ranks * n] of each piece, without a copy if one rank has all in the right type and place."""
        if all(len(p) == 1 and p.dtype == dtype and p.device == device for p in pieces):
            return [p.view(-1) for p in pieces]
        sizes = [p.numel() for p in pieces]
        flat = self._get_memory("in order", sum(sizes), dtype, device).split(sizes)
        for target, piece in zip(flat, pieces, strict=True):
            target.view(piece.shape).copy_(piece)
        return flat

    def _get_memory(self, use: str, numel: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Return [numel] of memory for one use. GPU memory is not kept: torch caches it, and training needs it."""
        if torch.device(device).type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        memory = self._memory.get(use)
        if memory is None or memory.dtype != dtype or len(memory) < numel:
            self._memory[use] = memory = torch.empty(numel, dtype=dtype, device=device)
        return memory[:numel]


def full_tensor(parameter: Any, pieces: torch.Tensor) -> torch.Tensor:
    """Return the parameter without partitioning; pieces: of `FullWeights.gather`."""
    return pieces.reshape(-1)[: parameter.ds_numel].view(parameter.ds_shape)
