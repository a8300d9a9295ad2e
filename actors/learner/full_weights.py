"""The full weights of a ZeRO-3 model, bucket by bucket: one gather per bucket, into reused memory.

`deepspeed.zero.GatheredParameters` allocates memory for each bucket, which on the host costs several times a copy, and
changes the state of the parameters. This module reads the ranks' partitions and does not change the parameters.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from actors.learner import lora
from actors.learner.models import ABSENT
from actors.weights.buckets import Shapes, group_by_module, plan_buckets
from t2g.config import Dtype


def get_shapes(engine: Any, *, adapters: bool = False) -> Shapes:
    """Return the shape of every weight in the order of `FullWeights.buckets`. This is no collective.

    Tied weights appear once, adapters are merged. Names and shapes are those of the model's files.

    Args:
        engine: A deepspeed.DeepSpeedEngine.
        adapters: Whether to return only the weights of the adapters.
    """
    shapes = _own_shapes(engine.module, adapters=adapters)
    if adapters:
        return shapes
    in_files: dict[str, tuple[int, ...]] = {}
    for names in group_by_module(shapes):
        empty = {name: torch.empty(shapes[name], device="meta") for name in names}
        converted = to_file_layout(engine.module, empty)
        in_files |= {name: tuple(tensor.shape) for name, tensor in converted.items()}
    return in_files


def _own_shapes(model: torch.nn.Module, *, adapters: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by the name that it has in the model without adapters."""
    shapes = {name: tuple(parameter.ds_shape) for name, parameter in model.named_parameters()}
    sources = lora.map_weight_sources(shapes, adapters=adapters)
    own_shapes = {name: shapes[source] for name, (source, *_) in sources.items()}
    if not adapters:
        for name, buffer in get_sent_buffers(model).items():
            own_shapes[name] = tuple(buffer.shape)
    return own_shapes


def get_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers by the name that they have in the model without adapters.

    A persistent buffer belongs to the weights of a model: its files hold it, and a state dict has it.
    """
    buffers: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                full_name = f"{prefix}.{name}" if prefix else name
                buffers[full_name] = buffer
    sources = lora.map_weight_sources(buffers)
    return {name: buffers[source] for name, (source, *_) in sources.items()}


def get_sent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers that an engine has: those that it finds in the model's files."""
    absent = getattr(model, ABSENT, frozenset())
    return {name: buffer for name, buffer in get_buffers(model).items() if name not in absent}


def to_file_layout(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the tensors by the names, and in the layout, of the files that the model was loaded from.

    transformers keeps the experts of a mixture in one tensor, where most files have a tensor for each expert.

    Args:
        tensors: By the names of the model, the tensors of complete modules.
    """
    if not getattr(model, "_weight_conversions", None):  # those that transformers applied when it loaded the files
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors))


class FullWeights:
    """The weights of one deepspeed.DeepSpeedEngine. `buckets` and `gather` are collectives of all ranks.

    The next bucket overwrites the memory of the returned tensors. On CPUs the memory is reused: 2 + 1 / num_ranks times
    the largest bucket, which may be one module larger than `bucket_bytes`.
    """

    def __init__(self, engine: Any, *, adapters: bool = False) -> None:
        """Read the weights of `engine`; with `adapters`, LoRA adapters by their own names instead of merged weights."""
        self._engine = engine
        self._adapters = adapters
        self._memory: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def buckets(
        self, bucket_bytes: int, dtype: Dtype, *, device: Any = "cpu", on_all_ranks: bool = False
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the buckets of `plan_buckets`: pairs of a name and a contiguous tensor of `dtype` on `device`.

        Rank 0 yields them, or every rank with `on_all_ranks`; other ranks yield empty lists. Under LoRA these are the
        merged weights. Names and layout are those of the model's files. A buffer keeps its own type.
        """
        model = self._engine.module
        named = dict(model.named_parameters())
        sources = lora.map_weight_sources(named, adapters=self._adapters)
        shapes = _own_shapes(model, adapters=self._adapters)
        buffers = {name: buffer for name, buffer in get_sent_buffers(model).items() if name in shapes}
        target = torch.device(device)
        for names in plan_buckets(shapes, dtype=dtype, bucket_bytes=bucket_bytes):
            weights = [name for name in names if name not in buffers]
            needed = chain.from_iterable(sources[name] for name in weights)
            pieces = self.gather({source: named[source] for source in needed})
            if not on_all_ranks and self._engine.global_rank != 0:
                yield []
                continue

            merged = [self._merged(name, sources[name], named, pieces) for name in weights]
            flat = self._flatten(merged, getattr(torch, dtype), target) if weights else []
            tensors = {name: buffers[name].detach().to(target) for name in names if name in buffers}
            for name, padded in zip(weights, flat, strict=True):
                shape = shapes[name]
                tensors[name] = padded[: math.prod(shape)].view(shape)

            bucket = self._convert(names, tensors)
            bucket.sort(key=lambda pair: -pair[1].element_size())  # vLLM needs tensors of wider types to be aligned
            yield bucket

    def _convert(self, names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Return a bucket in the order of `get_shapes`, in the layout of the model's files."""
        if self._adapters:
            return [(name, tensors[name]) for name in names]
        bucket: list[tuple[str, torch.Tensor]] = []
        for module in group_by_module(names):
            module_tensors = {name: tensors[name] for name in module}
            converted = to_file_layout(self._engine.module, module_tensors)
            bucket += [(name, tensor.contiguous()) for name, tensor in converted.items()]
        return bucket

    def gather(self, parameters: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return [num_ranks, n] of each parameter, in its own type on the engine's device, for `full_tensor`."""
        gathered: dict[str, torch.Tensor] = {}
        partitions = {name: parameter.ds_tensor for name, parameter in parameters.items()}
        dtypes = {partition.dtype for partition in partitions.values()}  # usually one type
        for dtype in sorted(dtypes, key=str):
            alike = {name: partition for name, partition in partitions.items() if partition.dtype == dtype}
            pieces = self._gather_alike([*alike.values()], dtype)
            gathered.update(zip(alike, pieces, strict=True))
        return gathered

    def _gather_alike(self, partitions: Sequence[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """Gather partitions of one type. Each has 1 / num_ranks of the elements, rounded up; the last is padded."""
        device = self._engine.device
        num_ranks = self._engine.world_size
        if num_ranks == 1:
            return [partition.to(device).view(1, -1) for partition in partitions]

        sizes = [len(partition) for partition in partitions]
        total = sum(sizes)
        local_shard = self._get_memory(f"own {dtype}", total, dtype, device)
        for piece, partition in zip(local_shard.split(sizes), partitions, strict=True):
            piece.copy_(partition)
        all_ranks = self._get_memory(f"all_ranks {dtype}", num_ranks * total, dtype, device)
        torch.distributed.all_gather_into_tensor(all_ranks, local_shard)
        return all_ranks.view(num_ranks, -1).split(sizes, dim=1)

    def _merged(
        self, name: str, sources: Sequence[str], named: Mapping[str, Any], pieces: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return [num_ranks, n], or [1, n] with a merged adapter."""
        if len(sources) == 1:
            return pieces[sources[0]]
        parts = [full_tensor(named[source], pieces[source]) for source in sources]
        merged = lora.checkpoint_weight(self._engine.module, name, parts)
        return merged.reshape(1, -1)

    def _flatten(
        self, pieces: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> Sequence[torch.Tensor]:
        """Return [num_ranks * n] of each piece, without a copy if one rank has all in the right type and place."""
        if all(len(piece) == 1 and piece.dtype == dtype and piece.device == device for piece in pieces):
            return [piece.view(-1) for piece in pieces]
        sizes = [piece.numel() for piece in pieces]
        memory = self._get_memory("in order", sum(sizes), dtype, device)
        flat = memory.split(sizes)
        for target, piece in zip(flat, pieces, strict=True):
            target.view(piece.shape).copy_(piece)
        return flat

    def _get_memory(self, use: str, numel: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Return [numel] of memory for one use. GPU memory is not kept: torch caches it, and training needs it."""
        if torch.device(device).type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        memory = self._memory.get(use)
        if memory is None or memory.dtype != dtype or len(memory) < numel:
            memory = torch.empty(numel, dtype=dtype, device=device)
            self._memory[use] = memory
        return memory[:numel]


def full_tensor(parameter: Any, pieces: torch.Tensor) -> torch.Tensor:
    """Return the parameter without partitioning; pieces: of `FullWeights.gather`."""
    padded = pieces.reshape(-1)
    return padded[: parameter.ds_numel].view(parameter.ds_shape)
