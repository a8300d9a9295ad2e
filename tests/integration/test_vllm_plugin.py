"""What the engine core accepts as a version of the weights: the transfer engine alone, on a model that only records."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash

from actors.vllm_plugin import StoreAnnouncement, StoreBucket, StoreWeightTransferEngine, descends_from


class Recorder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded.update(weights)


def engine() -> tuple[StoreWeightTransferEngine, Recorder]:
    model = Recorder()
    config = SimpleNamespace(parallel_config=None, model_config=None)
    engine = StoreWeightTransferEngine(SimpleNamespace(), config, torch.device("cpu"), model)
    engine.init_transfer_engine(StoreAnnouncement(version=5, dtype="bfloat16", names=["a", "b"], shapes=[[2, 2], [3]]))
    engine.start_weight_update()
    return engine, model


def bucket(folder: Path, **changes: object) -> StoreBucket:
    """Tensor a at byte 0, tensor b at byte 64, as bfloat16 1 .. 7."""
    data = np.zeros(128, np.uint8)
    bits = torch.arange(1, 8).to(torch.bfloat16).view(torch.uint16).numpy().view(np.uint8)
    data[:8], data[64:70] = bits[:8], bits[8:]
    (folder / "arena").write_bytes(data.tobytes())
    fields = {
        "path": str(folder / "arena"), "version": 5, "index": 0, "names": ["a", "b"], "offsets": [0, 64],
        "num_bytes": 128, "xxh3": xxhash.xxh3_64_hexdigest(data.tobytes()),
    }  # fmt: skip
    return StoreBucket(**(fields | changes))


def test_tensors_are_copies_with_announced_shapes(tmp_path: Path) -> None:
    transfer, model = engine()
    transfer.receive_weights(bucket(tmp_path))
    transfer.finish_weight_update()
    (tmp_path / "arena").write_bytes(bytes(128))
    assert model.loaded["a"].tolist() == [[1, 2], [3, 4]] and model.loaded["b"].tolist() == [5, 6, 7]


def test_what_was_not_announced_or_came_twice_or_changed_is_refused(tmp_path: Path) -> None:
    transfer, model = engine()
    for changes, sentence in (
        ({"names": ["a", "c"]}, "bucket 0: c not announced, or sent before"),
        ({"version": 6}, "bucket 0 of version 6 was not announced"),
        ({"xxh3": "0" * 16}, "arrived with other bytes"),
    ):
        with pytest.raises(ValueError, match=sentence):
            transfer.receive_weights(bucket(tmp_path, **changes))
    assert not model.loaded
    transfer.receive_weights(bucket(tmp_path, names=["b"], offsets=[64]))
    with pytest.raises(ValueError, match="b not announced, or sent before"):
        transfer.receive_weights(bucket(tmp_path))
    with pytest.raises(ValueError, match=r"version 5 are refused: 1 of 2 announced tensors never came \(a\)"):
        transfer.finish_weight_update()


def test_a_name_announced_twice_is_refused() -> None:
    transfer, _ = engine()
    with pytest.raises(ValueError, match="announce a more than once"):
        transfer.init_transfer_engine(
            StoreAnnouncement(version=6, dtype="float32", names=["a", "a"], shapes=[[1], [1]])
        )


def test_only_an_ancestor_is_the_owner() -> None:
    """An owner that died before it was looked for may have left its pid to another process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        assert descends_from(os.getppid())
        assert not descends_from(stranger.pid)
        stranger.communicate(b"\n")
    assert not descends_from(stranger.pid)
