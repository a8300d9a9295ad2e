"""Weights as they travel: named tensors in buckets of whole modules, with the hash of their bytes.

Knows neither Ray nor how a bucket gets to an engine (`actors.weights.sync`, `actors.vllm_compat.transports`).
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


# What is announced before any byte is sent: the shape of each tensor by its name in the Hugging Face checkpoint, in the
# order in which they are sent. Tied weights are announced and sent once.
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Whole modules of one version, in announced order.

    store: the bytes come along; `way` has `xxh3`, the hash of all of them in order, taken by the learner rank before
    they leave it, and `tensor_xxh3`, with learner.sync_verify=full of each tensor, else empty.
    ipc: they lie in memory of each rank's GPU, tensor after tensor, until the bucket after the next is made; `way` has
    `handles`, of each GPU by its UUID, see `actors.vllm_compat.transports.Shared`.
    nccl: they follow by broadcast.
    """

    index: int  # 0, 1, ... within a version
    names: tuple[str, ...]
    gather_s: float  # that the rank took until it was ready to go
    way: dict[str, Any] = field(default_factory=dict)  # to the bytes: goes into the engine core as it is
    tensors: tuple[np.ndarray, ...] = ()  # C-contiguous, float32, or for bfloat16 its bits in uint16; as announced


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The address and members of one nccl process group. Two are equal only if their ids are."""

    id: str
    host: str
    port: int
    members: tuple[str, ...]  # by rank: the learner, whose rank 0 is rank 0 here too, then the engines, each GPU a rank


def make_bucket(
    index: int, names: Sequence[str], tensors: Sequence[np.ndarray], *, full: bool, started: float
) -> Bucket:
    """For Ray's object store. full: with a hash of each tensor as well. started: of time.monotonic, when the rank
    began to gather it."""
    hashes = {"xxh3": hash_of(*tensors), "tensor_xxh3": [hash_of(tensor) for tensor in tensors] if full else []}
    gather_s = time.monotonic() - started
    return Bucket(index=index, names=tuple(names), gather_s=gather_s, way=hashes, tensors=tuple(tensors))


def hash_of(*arrays: Any) -> str:
    """xxh3 of the bytes of C-contiguous arrays, one after the other.

    >>> hash_of(np.arange(4)) == hash_of(np.arange(2), np.arange(2, 4))
    True
    """
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def num_bytes(shapes: Shapes, dtype: str) -> int:
    """Of all tensors once they are `dtype`."""
    return sum(map(math.prod, shapes.values())) * ITEM_BYTES[dtype]


def module_key(name: str) -> str:
    """The part of a model that must travel in one bucket: a whole decoder layer, else the module that owns the tensor.

    >>> module_key("model.layers.3.self_attn.q_proj.weight"), module_key("model.layers.3.mlp.experts.7.w1")
    ('model.layers.3', 'model.layers.3')
    >>> module_key("model.embed_tokens.weight")
    'model.embed_tokens'
    """
    parts = name.split(".")
    layer = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[:layer])


def plan_buckets(shapes: Shapes, *, dtype: str, bucket_bytes: float) -> list[tuple[str, ...]]:
    """Names of each bucket, in announced order: whole modules, at most `bucket_bytes` unless one module is larger.

    A bucket never ends inside a module: the engine fuses q, k, v (and gate, up) into one tensor and keeps references
    to the first parts until the last has come; the buffer they lie in would be overwritten by a later bucket.
    """
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        modules.setdefault(module_key(name), {})[name] = shape
    buckets: list[tuple[str, ...]] = []
    filled = math.inf
    for members in modules.values():
        filled += (size := num_bytes(members, dtype))
        if filled > bucket_bytes:
            buckets.append(())
            filled = size
        buckets[-1] += tuple(members)
    return buckets
