"""Buckets of weights: the named tensors of complete modules, with the hash of their bytes.

This module knows neither Ray nor the transports (`actors.weights.sync`, `actors.vllm_compat.transports`).
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

ITEM_BYTES = {"float32": 4, "bfloat16": 2}

# The shape of each tensor by its name in the Hugging Face checkpoint, in sending order. Tied weights appear once.
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Complete modules of one version, in the order of the manifest.

    store: `tensors` has the bytes. `transport_meta` has `xxh3`, the hash of all of them in order, computed by the
    learner rank, and `tensor_xxh3`, the hash of each tensor with learner.sync_verify=full, else empty.
    ipc: the bytes lie in the GPU memory of each rank, tensor after tensor, until the bucket after the next is packed.
    `transport_meta` has `handles`, by the UUID of the GPU, see `actors.vllm_compat.transports.SharedMemory`.
    nccl: the bytes follow by broadcast.

    With all of them `transport_meta` has `dtypes`, the type of each tensor: buffers keep theirs.
    """

    index: int  # 0, 1, ... within a version
    names: tuple[str, ...]
    gather_s: float  # until the rank had the bucket ready
    transport_meta: dict[str, Any] = field(default_factory=dict)  # passed to the engine core unchanged
    tensors: tuple[np.ndarray, ...] = ()  # C-contiguous, float32, or for bfloat16 its bits in uint16


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The address and members of one nccl process group; `id` is unique."""

    id: str
    host: str
    port: int
    members: tuple[str, ...]  # by rank: rank 0 of the learner, then the engines, one rank per GPU


def make_bucket(
    index: int, names: Sequence[str], tensors: Sequence[np.ndarray], *, full: bool, started: float
) -> Bucket:
    """Make a bucket for Ray's object store.

    Args:
        full: Whether to hash each tensor as well.
        started: The value of time.monotonic when the rank began to gather the bucket.
    """
    hashes = [hash_arrays(tensor) for tensor in tensors] if full else []
    dtypes = ["bfloat16" if tensor.dtype == np.uint16 else tensor.dtype.name for tensor in tensors]
    meta = {"xxh3": hash_arrays(*tensors), "tensor_xxh3": hashes, "dtypes": dtypes}
    gather_s = time.monotonic() - started
    return Bucket(index=index, names=tuple(names), gather_s=gather_s, transport_meta=meta, tensors=tuple(tensors))


def hash_arrays(*arrays: Any) -> str:
    """Return the xxh3 hash of the concatenated bytes of C-contiguous arrays.

    >>> hash_arrays(np.arange(4)) == hash_arrays(np.arange(2), np.arange(2, 4))
    True
    """
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def num_bytes(shapes: Shapes, dtype: str) -> int:
    """Return the bytes of all tensors in `dtype`."""
    numel = sum(map(math.prod, shapes.values()))
    return numel * ITEM_BYTES[dtype]


def get_module_name(name: str) -> str:
    """Return the module that must be sent in one bucket: the decoder layer, else the module that owns the tensor.

    >>> get_module_name("model.layers.3.self_attn.q_proj.weight"), get_module_name("model.layers.3.mlp.experts.7.w1")
    ('model.layers.3', 'model.layers.3')
    >>> get_module_name("model.embed_tokens.weight")
    'model.embed_tokens'
    """
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1])


def group_by_module(names: Iterable[str]) -> list[list[str]]:
    """Return the names of each module that must be sent in one bucket, in order.

    >>> group_by_module(["layers.0.a", "layers.1.a", "layers.0.b"])
    [['layers.0.a', 'layers.0.b'], ['layers.1.a']]
    """
    modules: dict[str, list[str]] = {}
    for name in names:
        members = modules.setdefault(get_module_name(name), [])
        members.append(name)
    return list(modules.values())


def plan_buckets(shapes: Shapes, *, dtype: str, bucket_bytes: float) -> list[tuple[str, ...]]:
    """Return the tensor names of each bucket: complete modules, at most `bucket_bytes` unless one module is larger.

    A bucket never ends inside a module. The engine fuses q, k, v (and gate, up) into one tensor, and keeps references
    to the first parts until it has the last. A later bucket would overwrite the buffer of these parts.
    """
    buckets: list[tuple[str, ...]] = []
    filled = math.inf
    for members in group_by_module(shapes):
        module_shapes = {name: shapes[name] for name in members}
        size = num_bytes(module_shapes, dtype)
        filled += size
        if filled > bucket_bytes:
            buckets.append(())
            filled = size
        buckets[-1] += tuple(members)
    return buckets
