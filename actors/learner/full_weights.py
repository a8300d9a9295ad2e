"""The whole weights of a ZeRO-3 model, bucket by bucket: one gather for each, into memory that is kept.

`deepspeed.zero.GatheredParameters` makes new memory for each bucket, on the host at several times what a copy costs,
and changes the parameters' state. This reads the ranks' partitions and leaves the parameters as they are.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from actors.learner import lora
from actors.weights.buckets import Shapes, plan_buckets
from t2g.config import Dtype


def metadata(engine: Any, *, adapters: bool = False) -> Shapes:
    """Every weight in the order of `FullWeights.buckets`. Tied weights appear once, adapters are merged.

    adapters: theirs alone.

    engine: a deepspeed.DeepSpeedEngine. No collective.
    """
    shapes = {name: tuple(p.ds_shape) for name, p in engine.module.named_parameters()}
    return {name: shapes[own] for name, (own, *_) in lora.sources(shapes, adapters=adapters).items()}


class FullWeights:
    """Of one deepspeed.DeepSpeedEngine. `buckets` and `gather` are collectives: all ranks call them, in one order.

    What they give lies in memory that the next bucket overwrites: read it, or copy it, before. On CPUs that memory is
    kept: 2 + 1 / num_ranks times the largest bucket, which may be one module larger than `bucket_bytes`.
    """

    def __init__(self, engine: Any, *, adapters: bool = False) -> None:
        """adapters: of LoRA alone, by their own names, instead of merged weights."""
        self._engine, self._adapters = engine, adapters
        self._memory: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def buckets(
        self, bucket_bytes: int, dtype: Dtype, *, device: Any = "cpu", everywhere: bool = False
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """(name, contiguous tensor of type dtype on device) pairs on rank 0, or everywhere; empty lists elsewhere.

        Under LoRA they are the merged weights by their checkpoint names. Cut by `plan_buckets`.
        """
        named = dict(self._engine.module.named_parameters())
        sources, shapes = lora.sources(named, adapters=self._adapters), metadata(self._engine, adapters=self._adapters)
        for names in plan_buckets(shapes, dtype=dtype, bucket_bytes=bucket_bytes):
            pieces = self.gather({source: named[source] for name in names for source in sources[name]})
            if not everywhere and self._engine.global_rank != 0:
                yield []
                continue
            merged = {name: self._merged(name, sources[name], named, pieces) for name in names}
            flat = self._in_order(list(merged.values()), getattr(torch, dtype), torch.device(device))
            yield [(n, w[: math.prod(shapes[n])].view(shapes[n])) for n, w in zip(names, flat, strict=True)]

    def gather(self, parameters: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """[num_ranks, n] of each parameter, in its own type on the engine's device, for `whole`."""
        found: dict[str, torch.Tensor] = {}
        for dtype in sorted({p.ds_tensor.dtype for p in parameters.values()}, key=str):  # as a rule there is one
            alike = {name: p.ds_tensor for name, p in parameters.items() if p.ds_tensor.dtype == dtype}
            found |= dict(zip(alike, self._gather_alike(list(alike.values()), dtype), strict=True))
        return found

    def _gather_alike(self, partitions: Sequence[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """A partition is 1 / num_ranks of a parameter's elements, rounded up; the last rank's is filled up."""
        device, num_ranks = self._engine.device, self._engine.world_size
        if num_ranks == 1:
            return [partition.to(device).view(1, -1) for partition in partitions]
        sizes = [len(partition) for partition in partitions]
        mine = self._kept(f"mine {dtype}", sum(sizes), dtype, device)
        for piece, partition in zip(mine.split(sizes), partitions, strict=True):
            piece.copy_(partition)
        everyones = self._kept(f"everyones {dtype}", num_ranks * sum(sizes), dtype, device)
        torch.distributed.all_gather_into_tensor(everyones, mine)
        return everyones.view(num_ranks, -1).split(sizes, dim=1)

    def _merged(
        self, name: str, own: Sequence[str], named: Mapping[str, Any], pieces: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """[num_ranks, n], or [1, n] where an adapter is merged."""
        if len(own) == 1:
            return pieces[own[0]]
        parts = [whole(named[source], pieces[source]) for source in own]
        return lora.checkpoint_weight(self._engine.module, name, parts).reshape(1, -1)

    def _in_order(
        self, pieces: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> Sequence[torch.Tensor]:
        """[num_ranks * n] of each: no copy where one rank has them all, as they are wanted."""
        if all(len(p) == 1 and p.dtype == dtype and p.device == device for p in pieces):
            return [p.view(-1) for p in pieces]
        sizes = [p.numel() for p in pieces]
        flat = self._kept("in order", sum(sizes), dtype, device).split(sizes)
        for target, piece in zip(flat, pieces, strict=True):
            target.view(piece.shape).copy_(piece)
        return flat

    def _kept(self, use: str, numel: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """[numel] of memory for one use. A GPU's is not kept: torch keeps it itself, and training needs it."""
        if torch.device(device).type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        memory = self._memory.get(use)
        if memory is None or memory.dtype != dtype or len(memory) < numel:
            self._memory[use] = memory = torch.empty(numel, dtype=dtype, device=device)
        return memory[:numel]


def whole(parameter: Any, pieces: torch.Tensor) -> torch.Tensor:
    """The parameter as it is without ZeRO-3; pieces: of `FullWeights.gather`."""
    return pieces.reshape(-1)[: parameter.ds_numel].view(parameter.ds_shape)
