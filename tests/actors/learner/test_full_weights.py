"""Partitions of two ranks put together, against the tensors that they were cut from."""

import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from actors.learner.full_weights import FullWeights, get_shapes
from actors.learner.models import ABSENT

# Odd numbers of elements: the last rank's partitions are padded.
SHAPES = {"embed.weight": (7, 3), "layers.0.a": (5,), "layers.0.b": (2, 2), "norm.weight": (1,)}


class Partitioned(nn.Module):
    """What is used of a ZeRO-3 model: every parameter is empty, and knows this rank's partition of it."""

    def __init__(self, whole: dict[str, torch.Tensor], rank: int, num_ranks: int) -> None:
        super().__init__()
        self.named = {}
        for name, tensor in whole.items():
            size = math.ceil(tensor.numel() / num_ranks)
            padded = torch.full((size * num_ranks,), float("nan"), dtype=tensor.dtype)
            padded[: tensor.numel()] = tensor.flatten()
            parameter: Any = nn.Parameter(torch.empty(0, dtype=tensor.dtype))
            parameter.ds_tensor = padded[rank * size : (rank + 1) * size].clone()
            parameter.ds_numel = tensor.numel()
            parameter.ds_shape = tensor.shape
            self.named[name] = parameter

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return iter(self.named.items())


class FakeEngine:
    device = torch.device("cpu")

    def __init__(self, whole: dict[str, torch.Tensor], rank: int, num_ranks: int) -> None:
        self.module = Partitioned(whole, rank, num_ranks)
        self.global_rank = rank
        self.world_size = num_ranks


def tensors(dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: torch.randn(shape).to(dtypes.get(name, torch.float32)) for name, shape in SHAPES.items()}


def rank_main(rank: int, folder: str, whole: dict[str, torch.Tensor]) -> None:
    """The buckets three times; each rank writes what it was given, and where in memory it lay."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    weights = FullWeights(FakeEngine(whole, rank, 2))
    all_buckets = []
    addresses = []
    for dtype, on_all_ranks in (("float32", False), ("float32", True), ("bfloat16", False)):
        buckets = list[list[tuple[str, torch.Tensor]]]()
        for bucket in weights.buckets(40, dtype, on_all_ranks=on_all_ranks):
            buckets.append([(name, tensor.clone()) for name, tensor in bucket])
            addresses += [tensor.data_ptr() for name, tensor in bucket if dtype == "float32" and name == "embed.weight"]
        all_buckets.append(buckets)
    torch.save({"buckets": all_buckets, "addresses": addresses}, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def names_of(buckets: list[list[tuple[str, torch.Tensor]]]) -> list[list[str]]:
    names = []
    for bucket in buckets:
        own_names = [name for name, _ in bucket]
        names.append(own_names)
    return names


def test_two_ranks_give_the_whole_weights(tmp_path: Path) -> None:
    whole = tensors({"layers.0.b": torch.bfloat16})
    torch.multiprocessing.spawn(rank_main, (str(tmp_path), whole), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    names = [["embed.weight"], ["layers.0.a", "layers.0.b", "norm.weight"]]
    for (rank0, rank1), on_all_ranks, dtype in zip(
        zip(first["buckets"], second["buckets"], strict=True),
        (False, True, False),
        (torch.float32, torch.float32, torch.bfloat16),
        strict=True,
    ):
        assert names_of(rank0) == names
        for name, tensor in chain.from_iterable(rank0):
            assert tensor.dtype == dtype, name
            assert torch.equal(tensor, whole[name].to(dtype)), name
        assert names_of(rank1) == (names if on_all_ranks else [[], []])
        for name, tensor in chain.from_iterable(rank1):
            assert torch.equal(tensor, whole[name].to(dtype)), name
    assert len(set(first["addresses"])) == 1, "memory is kept from call to call"


def test_one_rank_has_its_weights_without_a_copy() -> None:
    whole = tensors({})
    engine = FakeEngine(whole, 0, 1)
    buckets = list(FullWeights(engine).buckets(10**6, "float32"))
    assert [name for bucket in buckets for name, _ in bucket] == [*get_shapes(engine)] == [*SHAPES]
    for name, tensor in buckets[0]:
        assert torch.equal(tensor, whole[name])
        assert tensor.data_ptr() == engine.module.named[name].ds_tensor.data_ptr()


def test_buffers_of_the_files_keep_their_type_and_widest_types_come_first() -> None:
    """1 + 2^-20 is 1 in bfloat16. A buffer that the files lack is unknown to an engine."""
    engine = FakeEngine(tensors({}), 0, 1)
    layer = nn.Module()
    layer.register_buffer("bias", torch.tensor([1 + 2.0**-20]))
    layer.register_buffer("scale", torch.tensor([2.0], dtype=torch.bfloat16))
    layer.register_buffer("absent", torch.zeros(1))
    layer.register_buffer("frequencies", torch.zeros(1), persistent=False)
    engine.module.layers = nn.ModuleList([layer])
    setattr(engine.module, ABSENT, frozenset({"layers.0.absent"}))
    (bucket,) = FullWeights(engine).buckets(10**6, "bfloat16")
    sent = dict(bucket)
    assert sent.keys() == get_shapes(engine).keys() == SHAPES.keys() | {"layers.0.bias", "layers.0.scale"}
    assert torch.equal(sent["layers.0.bias"], layer.bias)
    assert torch.equal(sent["layers.0.scale"], layer.scale)
    assert bucket[0][0] == "layers.0.bias"
    assert {tensor.dtype for _, tensor in bucket[1:]} == {torch.bfloat16}
