"""The whole weights of a ZeRO-3 model, bucket by bucket: one collective each, into memory that is kept.

`deepspeed.zero.GatheredParameters` makes new memory for each bucket, on the host at several times what a copy costs,
and changes the parameters' state. This reads the ranks' partitions and leaves the parameters as they are.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from actors import lora
from actors.buckets import ParamMeta, plan_buckets
from t2g.sections import Dtype


def metadata(engine: Any) -> list[ParamMeta]:
    """Every weight in the order of `WholeWeights.buckets`. Tied weights appear once, adapters are merged.

    engine: a deepspeed.DeepSpeedEngine. No collective.
    """
    shapes = {name: tuple(p.ds_shape) for name, p in engine.module.named_parameters()}
    return [ParamMeta(name=name, shape=shapes[own]) for name, (own, *_) in lora.sources(shapes).items()]


class WholeWeights:
    """Of one deepspeed.DeepSpeedEngine. Every call is a collective: all ranks make it, in the same order.

    What a call gives lies in memory that the next one overwrites: read it, or copy it, before.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._memory: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def buckets(
        self, bucket_bytes: int, dtype: Dtype, *, device: Any = "cpu", everywhere: bool = False
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """(name, contiguous tensor of type dtype on device) pairs on rank 0, or everywhere; empty lists elsewhere.

        Under LoRA they are the merged weights by their checkpoint names. Cut by `plan_buckets`.
        """
        module, here = self._engine.module, everywhere or self._engine.global_rank == 0
        named = dict(module.named_parameters())
        sources = lora.sources(named)
        for names in plan_buckets(metadata(self._engine), dtype=dtype, bucket_bytes=bucket_bytes):
            whole = self.gather({source: named[source] for name in names for source in sources[name]}, here=here)
            if here:
                merged = [lora.checkpoint_weight(module, name, [whole[s] for s in sources[name]]) for name in names]
                yield list(zip(names, self._converted(merged, getattr(torch, dtype), device), strict=True))
            else:
                yield []

    def gather(self, parameters: Mapping[str, Any], *, here: bool) -> dict[str, torch.Tensor]:
        """The whole tensors in their own type on the engine's device; not `here`: none, but for the others' sake."""
        found: dict[str, torch.Tensor] = {}
        for dtype in sorted({p.ds_tensor.dtype for p in parameters.values()}, key=str):  # as a rule there is one
            alike = {name: p for name, p in parameters.items() if p.ds_tensor.dtype == dtype}
            padded = self._gather_padded([p.ds_tensor for p in alike.values()], here)
            if here:
                pairs = zip(alike.items(), padded, strict=True)
                found |= {name: tensor[: p.ds_numel].view(p.ds_shape) for (name, p), tensor in pairs}
        return found

    def _gather_padded(self, partitions: Sequence[torch.Tensor], here: bool) -> list[torch.Tensor]:
        """Each parameter's elements in order, and what fills up the last rank's partition: all are of one size."""
        device, num_ranks = self._engine.device, self._engine.world_size
        if num_ranks == 1:
            return [partition.to(device) for partition in partitions]
        dtype, sizes = partitions[0].dtype, [len(partition) for partition in partitions]
        mine = self._kept(f"mine {dtype}", sum(sizes), dtype, device)
        for piece, partition in zip(mine.split(sizes), partitions, strict=True):
            piece.copy_(partition)
        everyones = self._kept(f"everyones {dtype}", num_ranks * sum(sizes), dtype, device)
        torch.distributed.all_gather_into_tensor(everyones, mine)
        if not here:
            return []
        padded = self._kept(f"padded {dtype}", len(everyones), dtype, device).split([num_ranks * n for n in sizes])
        for tensor, pieces in zip(padded, everyones.view(num_ranks, -1).split(sizes, dim=1), strict=True):
            tensor.view(num_ranks, -1).copy_(pieces)
        return list(padded)

    def _converted(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: Any) -> list[torch.Tensor]:
        device = torch.device(device)
        if all(t.dtype == dtype and t.device == device and t.is_contiguous() for t in tensors):
            return list(tensors)
        ends = list(itertools.accumulate(t.numel() for t in tensors))
        flat = self._kept("converted", ends[-1], dtype, device)
        starts = [0, *ends[:-1]]
        return [flat[a:b].view(t.shape).copy_(t) for t, a, b in zip(tensors, starts, ends, strict=True)]

    def _kept(self, use: str, numel: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """[numel] of memory for one use. A GPU's is not kept: torch keeps it itself, and training needs it."""
        if torch.device(device).type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        memory = self._memory.get(use)
        if memory is None or memory.dtype != dtype or len(memory) < numel:
            self._memory[use] = memory = torch.empty(numel, dtype=dtype, device=device)
        return memory[:numel]
