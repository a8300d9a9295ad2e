"""What the engine core accepts as a version of the weights: the transfer engine alone, on a model that only records."""

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recorder import Recorder
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from actors.vllm_compat.plugin import BucketInfo, StoreWeightTransferEngine, WeightManifest, descends_from
from actors.weights.buckets import hash_arrays


def open_version(transfer: StoreWeightTransferEngine) -> None:
    transfer.init_transfer_engine(WeightManifest(version=5, dtype="bfloat16", shapes={"a": [2, 2], "b": [3]}))


def engine(model: Recorder | None = None) -> tuple[StoreWeightTransferEngine, Recorder]:
    model = model or Recorder()
    config = SimpleNamespace(parallel_config=None, model_config=None)
    engine = StoreWeightTransferEngine(SimpleNamespace(), config, torch.device("cpu"), model)
    open_version(engine)
    engine.start_weight_update()
    return engine, model


BITS = torch.arange(1, 8).to(torch.bfloat16).view(torch.uint16).numpy()
PARTS = {"a": BITS[:4], "b": BITS[4:]}


def bucket(folder: Path, *, names: Sequence[str] = ("a", "b"), **changes: object) -> BucketInfo:
    """Tensor a at byte 0, tensor b at byte 64, as bfloat16 1 .. 7."""
    data = np.zeros(128, np.uint8)
    data[:8] = PARTS["a"].view(np.uint8)
    data[64:70] = PARTS["b"].view(np.uint8)
    (folder / "arena").write_bytes(data.tobytes())
    part = {"version": 5, "index": 0, "names": list(names)}
    transport_meta = {
        "path": str(folder / "arena"), "offsets": [{"a": 0, "b": 64}.get(n, 64) for n in names], "num_bytes": 128,
        "xxh3": hash_arrays(*(PARTS.get(n, BITS) for n in names)), "tensor_xxh3": [],
    }  # fmt: skip
    of_part = {name: changes.pop(name) for name in part.keys() & changes.keys()}
    return BucketInfo(**(part | of_part), transport_meta=transport_meta | changes)


def test_tensors_have_the_manifests_shapes_and_the_learners_bytes(tmp_path: Path) -> None:
    transfer, model = engine()
    each = [hash_arrays(part) for part in PARTS.values()]
    transfer.receive_weights(bucket(tmp_path, tensor_xxh3=each))
    transfer.finish_weight_update()
    assert model.loaded["a"].tolist() == [[1, 2], [3, 4]]
    assert model.loaded["b"].tolist() == [5, 6, 7]


def test_what_is_not_in_the_manifest_or_came_twice_or_changed_is_refused(tmp_path: Path) -> None:
    transfer, model = engine()
    for changes, sentence in (
        ({"names": ["a", "c"]}, "bucket 0: c not in the manifest, or sent before"),
        ({"version": 6}, "bucket 0 has version 6, and the manifest has version 5"),
        ({"xxh3": "0" * 16}, "xxh3 mismatch: bucket 0 of version 5 changed in transfer"),
        ({"offsets": [0, 66]}, "xxh3 mismatch: bucket 0 of version 5 changed in transfer"),
        ({"tensor_xxh3": ["0" * 16, "0" * 16]}, "xxh3 mismatch: a of version 5 differs from the learner's"),
    ):
        with pytest.raises(ValueError, match=sentence):
            transfer.receive_weights(bucket(tmp_path, **changes))
    assert not model.loaded
    transfer.receive_weights(bucket(tmp_path, names=["b"]))
    with pytest.raises(ValueError, match="b not in the manifest, or sent before"):
        transfer.receive_weights(bucket(tmp_path))
    with pytest.raises(ValueError, match=r"version 5 are refused: 1 of 2 tensors of the manifest are missing \(a\)"):
        transfer.finish_weight_update()


def test_a_tensor_of_its_own_type_keeps_its_bits(tmp_path: Path) -> None:
    """1 + 2^-20 is 1 in bfloat16, the type of the version."""
    exact = torch.tensor([1 + 2.0**-20, -3.5, 0.1])
    (tmp_path / "arena").write_bytes(PARTS["a"].tobytes().ljust(64, b"\0") + exact.numpy().tobytes())
    transfer, model = engine()
    meta = {
        "path": str(tmp_path / "arena"), "num_bytes": 76, "offsets": [0, 64], "dtypes": ["bfloat16", "float32"],
        "xxh3": hash_arrays(PARTS["a"], exact.numpy()), "tensor_xxh3": [],
    }  # fmt: skip
    transfer.receive_weights(BucketInfo(version=5, index=0, names=["a", "b"], transport_meta=meta))
    assert model.loaded["a"].tolist() == [[1, 2], [3, 4]]
    assert torch.equal(model.loaded["b"], exact)


@pytest.mark.parametrize(("device", "is_kept"), [("cpu", False), ("meta", True)])
def test_experts_on_a_cpu_are_packed_at_each_version(device: str, is_kept: bool) -> None:
    """vLLM packs them only when it builds their kernel."""
    model = Recorder()
    model.quant_method = SimpleNamespace(moe_kernel="packed")
    config = SimpleNamespace(parallel_config=None, model_config=None)
    transfer = StoreWeightTransferEngine(SimpleNamespace(), config, torch.device(device), model)
    open_version(transfer)
    transfer.start_weight_update()
    assert (model.quant_method.moe_kernel == "packed") == is_kept


class Keeper(Recorder):
    """Loads only once it is whole, as vLLM's fused modules do: until then vLLM keeps the arguments of each load."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            get_layerwise_info(self).loaded_weights.append((name, signature(print).bind(tensor[:1])))


def test_what_vllm_keeps_for_later_outlives_the_arena(tmp_path: Path) -> None:
    transfer, model = engine(Keeper())
    transfer.receive_weights(bucket(tmp_path))
    with (tmp_path / "arena").open("r+b") as arena:
        arena.write(bytes(128))
    pending = {name: call.args[0].tolist() for name, call in get_layerwise_info(model).loaded_weights}
    assert pending == {"a": [[1, 2]], "b": [5]}


def test_a_round_that_was_aborted_is_over_when_the_next_version_has_a_manifest(tmp_path: Path) -> None:
    transfer, model = engine()
    transfer.receive_weights(bucket(tmp_path, names=["b"]))
    open_version(transfer)
    transfer.receive_weights(bucket(tmp_path))
    transfer.finish_weight_update()
    assert set(model.loaded) == {"a", "b"}


def test_only_an_ancestor_is_the_owner() -> None:
    """An owner that died before it was looked for may have left its pid to another process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        assert descends_from(os.getppid())
        assert not descends_from(stranger.pid)
        stranger.communicate(b"\n")
    assert not descends_from(stranger.pid)
