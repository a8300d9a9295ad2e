"""vLLM loads this file in every process of an engine (entry point group `vllm.general_plugins`).

It registers the engines' side of each learner.sync_transport, and lets an engine-core process end with the actor that
owns it. Only this module and `actors.vllm_compat.scheduler` import vllm outside a worker's methods.
"""

import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils._pytree import tree_map_only
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

from actors.vllm_compat.transports import ended_when_stalled, join, rebuild_arguments
from actors.weights.buckets import ITEM_BYTES, Rendezvous, hash_of
from actors.weights.shared_buffer import BufferMapping

BACKENDS = {"store": "StoreWeightTransferEngine", "nccl": "NcclBroadcastEngine", "ipc": "IpcSharedEngine"}
OWNER_ENV = "T2G_ENGINE_OWNER"  # pid of the actor process, set by actors.engines.engine
OWNER_POLL_S = 0.5


def register() -> None:
    """Called by vLLM once in each of an engine's processes."""
    for transport, engine in BACKENDS.items():
        if (name := f"t2g_{transport}") not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, __name__, engine)
    owner = int(os.environ.get(OWNER_ENV, os.getpid()))
    if owner != os.getpid():
        threading.Thread(target=_end_with_owner, args=(owner,), name="t2g-owner", daemon=True).start()


def _end_with_owner(owner: int) -> None:
    """A killed actor cannot close its engine: without this the core would keep its memory, and its GPU, for ever.

    The owner may be dead before this process looks for it, seconds after it was started, and its pid may be another
    process by then: only an ancestor is the owner.
    """
    while descends_from(owner):
        time.sleep(OWNER_POLL_S)
    os._exit(1)


def descends_from(pid: int) -> bool:
    """Whether process `pid` is an ancestor of this one: the orphans of a dead process get another parent at once."""
    return any(parent.pid == pid for parent in psutil.Process().parents())


@dataclass
class WeightManifest(WeightTransferInitInfo):
    """Opens a version: everything that will be sent. vLLM's `start` takes no argument, so it comes as init info."""

    version: int
    dtype: str  # "float32" or "bfloat16", of every tensor
    shapes: dict[str, list[int]]  # by name


@dataclass
class GroupInitInfo(WeightTransferInitInfo):
    """To a group of the learner and the engines that take a version."""

    rendezvous: dict[str, Any]  # fields of a `Rendezvous`
    rank_offset: int  # the rank of this engine's first GPU


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One bucket of a version.

    way: that of `actors.weights.buckets.Bucket`; with store also the file that both processes can map (`path`, of
    `num_bytes`), overwritten once the bucket is loaded, and in it the `offsets` of the tensors in bytes.
    """

    version: int
    index: int
    names: list[str]
    way: dict[str, Any]


class WholeVersion(WeightTransferEngine[Any, Any]):
    """One version as buckets: refuses what was not announced, and to finish unless it got exactly what was.

    How a bucket's bytes get here is the affair of the class beside or below it.
    """

    init_info_cls, update_info_cls = WeightManifest, BucketInfo
    _manifest: WeightManifest | None = None
    _missing: dict[str, list[int]]  # name -> shape of what has not come yet
    _open = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.packed = True  # of vLLM's nccl and ipc engines: a bucket comes in one piece

    def init_transfer_engine(self, init_info: WeightManifest) -> None:
        self._manifest = init_info
        self._missing = dict(init_info.shapes)
        if self._open:  # the round before broke off
            self._begin()

    def start_weight_update(self) -> None:
        if not self._open:
            self._begin()

    def _begin(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        if self._open:
            # vLLM would go on counting where the broken round stopped, and load a module before its last part is in.
            finalize_layerwise_reload(self.model, self.model_config)
        initialize_layerwise_reload(self.model)
        self._open = True

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Raises ValueError for bytes of another version or hash, and for names not announced or already received."""
        announced = self._manifest
        if announced is None or update_info.version != announced.version:
            raise ValueError(f"bucket {update_info.index} of version {update_info.version} was not announced")
        wrong = [n for n in update_info.names if n not in self._missing]
        if wrong:
            raise ValueError(f"bucket {update_info.index}: {_few(wrong)} not announced, or sent before")
        self._load(update_info, [announced.shapes[name] for name in update_info.names], announced.dtype)
        for name in update_info.names:
            del self._missing[name]

    def _load(self, bucket: BucketInfo, shapes: list[list[int]], dtype: str) -> None:
        """Get the bytes of one bucket and have the model load them."""
        raise NotImplementedError

    def finish_weight_update(self) -> None:
        """Raises ValueError when a name is missing, which would keep its old value; only a whole version mends that."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        assert self._manifest is not None
        if self._missing:
            raise ValueError(
                f"weights of version {self._manifest.version} are refused: {len(self._missing)} of "
                f"{len(self._manifest.shapes)} announced tensors never came ({_few([*self._missing])})"
            )
        finalize_layerwise_reload(self.model, self.model_config)
        self._pack_tied_weights()
        self._open = False

    def _pack_tied_weights(self) -> None:
        """A tied output layer gets nothing under its own name, so vLLM's reload leaves it alone; but on a CPU it
        computes with a packed copy of the weight, which would stay the old one."""
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        owned: set[int] = set()
        for module in self.model.modules():
            own = {id(parameter) for parameter in module.parameters(recurse=False)}
            method = getattr(module, "quant_method", None)
            if own & owned and isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)
            owned |= own


class StoreWeightTransferEngine(WholeVersion):
    """Receives mapped bytes and their hashes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._maps = BufferMapping()

    def _load(self, bucket: BucketInfo, shapes: list[list[int]], dtype: str) -> None:
        data = self._maps.read(bucket.way["path"], bucket.way["num_bytes"])
        kind = {"float32": np.float32, "bfloat16": np.uint16}[dtype]
        views = [np.ndarray(shape, kind, data, at) for shape, at in zip(shapes, bucket.way["offsets"], strict=True)]
        if hash_of(*views) != bucket.way["xxh3"]:
            raise ValueError(f"bucket {bucket.index} of version {bucket.version} arrived with other bytes")
        self.model.load_weights(self._tensors(bucket, views, getattr(torch, dtype)))
        self._own_pending()

    def _tensors(
        self, bucket: BucketInfo, views: list[np.ndarray], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        hashes = bucket.way["tensor_xxh3"] or [""] * len(views)
        for name, view, expected in zip(bucket.names, views, hashes, strict=True):
            tensor = torch.from_numpy(view).view(dtype).to(self.device)
            if expected and hash_of(tensor.reshape(-1).view(torch.uint8).cpu().numpy()) != expected:
                raise ValueError(f"{name} of version {bucket.version} has other bytes than the learner's")
            yield name, tensor

    def _own_pending(self) -> None:
        """Copy what vLLM keeps for later, as of a padded vocabulary until `finish`: the data will hold other bytes."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for module in self.model.modules():
            for _, call in get_layerwise_info(module).loaded_weights:
                call.arguments.update(tree_map_only(torch.Tensor, _own, call.arguments))

    def shutdown(self) -> None:
        self._manifest = None


class NcclBroadcastEngine(WholeVersion, NCCLWeightTransferEngine):
    """vLLM's nccl engine, in a group that is kept from version to version until its members are others."""

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """An announcement, or where this engine meets the learner."""
        return (GroupInitInfo if "rendezvous" in init_dict else WeightManifest)(**init_dict)

    def init_transfer_engine(self, init_info: Any) -> None:
        """Raises RuntimeError as `transports.join`."""
        if isinstance(init_info, WeightManifest):
            WholeVersion.init_transfer_engine(self, init_info)
            return
        NCCLWeightTransferEngine.shutdown(self)
        members = tuple(init_info.rendezvous["members"])
        rank = init_info.rank_offset + self.parallel_config.rank
        self.model_update_group = join(Rendezvous(**init_info.rendezvous | {"members": members}), rank, self.device)

    def _load(self, bucket: BucketInfo, shapes: list[list[int]], dtype: str) -> None:
        """Raises RuntimeError when the broadcast does not come in time, or was broken off."""
        info = NCCLWeightTransferUpdateInfo(names=bucket.names, dtype_names=[dtype] * len(shapes), shapes=shapes)
        group = self.model_update_group
        if group is None:
            raise RuntimeError("the engine has no group to receive weights in")
        with ended_when_stalled(group):
            NCCLWeightTransferEngine.receive_weights(self, info)
        if group.disabled:  # what was loaded are no weights
            raise RuntimeError(f"the broadcast of bucket {bucket.index} of version {bucket.version} was broken off")


class IpcSharedEngine(WholeVersion, IPCWeightTransferEngine):
    """vLLM's ipc engine."""

    def _load(self, bucket: BucketInfo, shapes: list[list[int]], dtype: str) -> None:
        """Raises ValueError when no learner rank is on this GPU."""
        item_bytes = ITEM_BYTES[dtype]
        info = IPCWeightTransferUpdateInfo(
            names=bucket.names,
            dtype_names=[dtype] * len(shapes),
            shapes=shapes,
            ipc_handles={gpu: rebuild_arguments(handle) for gpu, handle in bucket.way["handles"].items()},
            tensor_sizes=[math.prod(shape) * item_bytes for shape in shapes],
        )
        IPCWeightTransferEngine.receive_weights(self, info)

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._packed_importer.close()  # memory of a rank that is gone would stay as long as it is mapped


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.device.type == "cpu" else tensor


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
