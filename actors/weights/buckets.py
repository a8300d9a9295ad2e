"""Weights as they travel: named tensors in buckets of whole modules, with the hash of their bytes.

Knows neither Ray nor how a bucket gets to an engine (`actors.weights.sync`, `actors.weights.transports`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class ParamMeta:
    """What is announced of one tensor before any byte is sent. Tied weights are announced and sent once."""

    name: str  # as in the Hugging Face checkpoint
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Whole modules of one version, in announced order. With nccl the bytes follow by broadcast."""

    index: int  # 0, 1, ... within a version
    names: tuple[str, ...]
    gather_s: float  # that the rank took until it was ready to go


@dataclass(frozen=True, kw_only=True)
class StoredBucket(Bucket):
    """With its bytes, for Ray's object store. bfloat16 travels as its bits in uint16."""

    tensors: tuple[np.ndarray, ...]  # C-contiguous, float32, or uint16 for bfloat16; shapes as announced
    xxh3: str  # of all tensors' bytes in order, taken by the learner rank before they leave it
    tensor_xxh3: tuple[str, ...]  # of each tensor with learner.sync_verify=full, else empty


@dataclass(frozen=True, kw_only=True)
class SharedBucket(Bucket):
    """Its bytes lie in the memory of each rank's GPU, tensor after tensor, until the bucket after the next is made."""

    handles: dict[str, tuple[Any, ...]]  # of each GPU by its UUID, see `actors.weights.transports.Shared`


def make_bucket(
    index: int, names: Sequence[str], tensors: Sequence[np.ndarray], *, full: bool, started: float
) -> StoredBucket:
    """full: with a hash of each tensor as well. started: of time.monotonic, when the rank began to gather it."""
    return StoredBucket(
        index=index,
        names=tuple(names),
        tensors=tuple(tensors),
        xxh3=hash_of(*tensors),
        tensor_xxh3=tuple(hash_of(tensor) for tensor in tensors) if full else (),
        gather_s=time.monotonic() - started,
    )


def hash_of(*arrays: Any) -> str:
    """xxh3 of the bytes of C-contiguous arrays, one after the other.

    >>> hash_of(np.arange(4)) == hash_of(np.arange(2), np.arange(2, 4))
    True
    """
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def num_bytes(metas: Sequence[ParamMeta], dtype: str) -> int:
    """Of all tensors once they are `dtype`."""
    return sum(int(np.prod(meta.shape)) for meta in metas) * ITEM_BYTES[dtype]


def module_key(name: str) -> str:
    """The part of a model that must travel in one bucket: a whole decoder layer, else the module that owns the tensor.

    >>> module_key("model.layers.3.self_attn.q_proj.weight"), module_key("model.layers.3.mlp.experts.7.w1")
    ('model.layers.3', 'model.layers.3')
    >>> module_key("model.embed_tokens.weight")
    'model.embed_tokens'
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1])


def plan_buckets(metas: Sequence[ParamMeta], *, dtype: str, bucket_bytes: float) -> list[tuple[str, ...]]:
    """Names of each bucket, in announced order: whole modules, at most `bucket_bytes` unless one module is larger.

    A bucket never ends inside a module: the engine fuses q, k, v (and gate, up) into one tensor and keeps references
    to the first parts until the last has come; the arena they lie in would be overwritten by a later bucket.
    """
    sizes: dict[str, int] = {}
    members: dict[str, list[str]] = {}
    for meta in metas:
        key = module_key(meta.name)
        sizes[key] = sizes.get(key, 0) + num_bytes([meta], dtype)
        members.setdefault(key, []).append(meta.name)
    buckets: list[tuple[str, ...]] = []
    filled = 0
    for key, names in members.items():
        if buckets and filled + sizes[key] <= bucket_bytes:
            buckets[-1] += tuple(names)
            filled += sizes[key]
        else:
            buckets.append(tuple(names))
            filled = sizes[key]
    return buckets
