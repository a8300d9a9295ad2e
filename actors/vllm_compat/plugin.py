"""vLLM loads this file in every process of an engine (entry point group `vllm.general_plugins`).

It registers the engines' side of each learner.sync_transport, and lets an engine-core process end with the actor that
owns it. Only this module and `actors.vllm_compat.scheduler` import vllm outside of functions.
"""

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
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

from actors.vllm_compat.transports import abort_when_stalled, join_group, rebuild_arguments
from actors.weights.buckets import Rendezvous, hash_arrays
from actors.weights.shared_buffer import BufferMapping

BACKENDS = {"store": "StoreWeightTransferEngine", "nccl": "NcclBroadcastEngine", "ipc": "IpcSharedEngine"}
OWNER_ENV = "T2G_ENGINE_OWNER"  # pid of the actor process, set by actors.engines.engine
OWNER_POLL_S = 0.5


def register() -> None:
    """Register the transports. vLLM calls this once in each process of an engine."""
    for transport, engine in BACKENDS.items():
        name = f"t2g_{transport}"
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, __name__, engine)
    owner = int(os.environ.get(OWNER_ENV, os.getpid()))
    if owner != os.getpid():
        threading.Thread(target=_end_with_owner, args=(owner,), name="t2g-owner", daemon=True).start()


def _end_with_owner(owner: int) -> None:
    """End this process with the actor that owns it: a killed actor cannot close its engine, which would keep its GPU.

    The owner may die before this check, and its pid may then belong to another process: only an ancestor is the owner.
    """
    while True:
        with suppress(psutil.Error):  # an ancestor ended during the listing; the next poll lists again
            if not descends_from(owner):
                os._exit(1)
        time.sleep(OWNER_POLL_S)


def descends_from(pid: int) -> bool:
    """Return whether process `pid` is an ancestor of this one. Orphans get another parent at once."""
    return any(parent.pid == pid for parent in psutil.Process().parents())


@dataclass
class WeightManifest(WeightTransferInitInfo):
    """Everything that a version sends. vLLM's `start` takes no argument, so this is sent as init info."""

    version: int
    dtype: str  # "float32" or "bfloat16", of every tensor whose bucket names no other type
    shapes: dict[str, list[int]]  # by name


@dataclass
class GroupInitInfo(WeightTransferInitInfo):
    """The process group of the learner and the engines that receive a version."""

    rendezvous: dict[str, Any]  # fields of a `Rendezvous`
    rank_offset: int  # the rank of this engine's first GPU


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One bucket of a version.

    `transport_meta` is that of `actors.weights.buckets.Bucket`. With store it also has the file that both processes map
    (`path`, of `num_bytes`), which is overwritten once the bucket is loaded, and the byte `offsets` of the tensors.
    """

    version: int
    index: int
    names: list[str]
    transport_meta: dict[str, Any]


class ManifestTransferEngine(WeightTransferEngine[Any, Any]):
    """Receive a version in buckets, and check them against the manifest.

    It refuses tensors that are not in the manifest, and refuses to finish with a missing tensor. Subclasses read the
    bytes of a bucket.
    """

    init_info_cls = WeightManifest
    update_info_cls = BucketInfo
    _manifest: WeightManifest | None = None
    _missing: dict[str, list[int]]  # name -> shape of the tensors not received yet
    _open = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.packed = True  # vLLM's nccl and ipc engines then receive a bucket in one piece

    def init_transfer_engine(self, init_info: WeightManifest) -> None:
        self._manifest = init_info
        self._missing = dict(init_info.shapes)
        if self._open:  # the previous round was interrupted
            self._begin()

    def start_weight_update(self) -> None:
        if not self._open:
            self._begin()

    def _begin(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        if self._open:
            # vLLM would continue counting from the interrupted round, and load a module before its last part.
            finalize_layerwise_reload(self.model, self.model_config)
        self._forget_packed_experts()
        initialize_layerwise_reload(self.model)
        self._open = True

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Load one bucket.

        Raises:
            ValueError: The version, a hash or a name is not that of the manifest, or a name was received before.
        """
        manifest = self._manifest
        if manifest is None or update_info.version != manifest.version:
            problem = "no manifest was received" if manifest is None else f"the manifest has version {manifest.version}"
            raise ValueError(f"bucket {update_info.index} has version {update_info.version}, and {problem}")
        wrong_names = [name for name in update_info.names if name not in self._missing]
        if wrong_names:
            raise ValueError(f"bucket {update_info.index}: {_few(wrong_names)} not in the manifest, or sent before")
        shapes = [manifest.shapes[name] for name in update_info.names]
        dtypes = update_info.transport_meta.get("dtypes") or [manifest.dtype] * len(update_info.names)
        self._load(update_info, shapes, dtypes)
        for name in update_info.names:
            del self._missing[name]

    def _load(self, bucket: BucketInfo, shapes: list[list[int]], dtypes: list[str]) -> None:
        """Read the bytes of one bucket and have the model load them."""
        raise NotImplementedError

    def finish_weight_update(self) -> None:
        """Commit the version.

        Raises:
            ValueError: A tensor is missing and would keep its old value. Only a full push repairs that.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        assert self._manifest is not None
        if self._missing:
            raise ValueError(
                f"weights of version {self._manifest.version} are refused: {len(self._missing)} of "
                f"{len(self._manifest.shapes)} tensors of the manifest are missing ({_few([*self._missing])})"
            )
        finalize_layerwise_reload(self.model, self.model_config)
        self._pack_tied_weights()
        self._open = False

    def _forget_packed_experts(self) -> None:
        """Have vLLM pack the experts of a mixture again.

        On a CPU it packs them when it builds their kernel, which it does at the first load only: later loads would be
        copied into the packed memory without packing. On a GPU the kernel must stay, for captured graphs.
        """
        if self.device.type != "cpu":
            return
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def _pack_tied_weights(self) -> None:
        """Pack the weight of a tied output layer again.

        No tensor has its name, so vLLM's reload skips it. On a CPU it computes with a packed copy of the weight, which
        would keep the old values.
        """
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        owned: set[int] = set()
        for module in self.model.modules():
            parameter_ids = {id(parameter) for parameter in module.parameters(recurse=False)}
            method = getattr(module, "quant_method", None)
            if parameter_ids & owned and isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)
            owned |= parameter_ids


class StoreWeightTransferEngine(ManifestTransferEngine):
    """Receives buckets in shared memory, with their hashes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._mapping = BufferMapping()

    def _load(self, bucket: BucketInfo, shapes: list[list[int]], dtypes: list[str]) -> None:
        meta = bucket.transport_meta
        data = self._mapping.read(meta["path"], meta["num_bytes"])
        views: list[np.ndarray] = []
        for shape, dtype, start in zip(shapes, dtypes, meta["offsets"], strict=True):
            end = start + _count_bytes(shape, dtype)
            views.append(data[start:end])
        if hash_arrays(*views) != meta["xxh3"]:
            raise ValueError(f"xxh3 mismatch: bucket {bucket.index} of version {bucket.version} changed in transfer")
        self.model.load_weights(self._tensors(bucket, views, shapes, dtypes))
        self._copy_pending()

    def _tensors(
        self, bucket: BucketInfo, views: list[np.ndarray], shapes: list[list[int]], dtypes: list[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        hashes = bucket.transport_meta["tensor_xxh3"] or [""] * len(views)
        for name, view, shape, dtype, expected in zip(bucket.names, views, shapes, dtypes, hashes, strict=True):
            typed = torch.from_numpy(view).view(getattr(torch, dtype))
            tensor = typed.view(shape).to(self.device)
            if expected and _hash_tensor(tensor) != expected:
                raise ValueError(f"xxh3 mismatch: {name} of version {bucket.version} differs from the learner's")
            yield name, tensor

    def _copy_pending(self) -> None:
        """Copy tensors that vLLM keeps until `finish`, as of a padded vocabulary: the next bucket overwrites them."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for module in self.model.modules():
            for _, call in get_layerwise_info(module).loaded_weights:
                copies = tree_map_only(torch.Tensor, _copy_from_buffer, call.arguments)
                call.arguments.update(copies)

    def shutdown(self) -> None:
        self._manifest = None


class NcclBroadcastEngine(ManifestTransferEngine, NCCLWeightTransferEngine):
    """vLLM's nccl engine, with a process group that is reused until its members change."""

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        if "rendezvous" in init_dict:
            return GroupInitInfo(**init_dict)
        return WeightManifest(**init_dict)

    def init_transfer_engine(self, init_info: Any) -> None:
        """Take the manifest, or join the group. Raises RuntimeError as `transports.join_group`."""
        if isinstance(init_info, WeightManifest):
            ManifestTransferEngine.init_transfer_engine(self, init_info)
            return
        NCCLWeightTransferEngine.shutdown(self)
        members = tuple(init_info.rendezvous["members"])
        rendezvous = Rendezvous(**init_info.rendezvous | {"members": members})
        rank = init_info.rank_offset + self.parallel_config.rank
        self.model_update_group = join_group(rendezvous, rank, self.device)

    def _load(self, bucket: BucketInfo, shapes: list[list[int]], dtypes: list[str]) -> None:
        """Raises RuntimeError when the broadcast does not arrive in time, or was aborted."""
        info = NCCLWeightTransferUpdateInfo(names=bucket.names, dtype_names=dtypes, shapes=shapes)
        group = self.model_update_group
        if group is None:
            raise RuntimeError("the engine has no group to receive weights in")
        try:
            with abort_when_stalled(group):
                NCCLWeightTransferEngine.receive_weights(self, info)
        except RuntimeError as error:  # the loaded bytes are not weights
            raise RuntimeError(f"bucket {bucket.index} of version {bucket.version}: {error}") from error


class IpcSharedEngine(ManifestTransferEngine, IPCWeightTransferEngine):
    """vLLM's ipc engine."""

    def _load(self, bucket: BucketInfo, shapes: list[list[int]], dtypes: list[str]) -> None:
        """Raises ValueError if no learner rank is on this GPU."""
        sizes = [_count_bytes(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        handles = bucket.transport_meta["handles"]
        info = IPCWeightTransferUpdateInfo(
            names=bucket.names,
            dtype_names=dtypes,
            shapes=shapes,
            ipc_handles={gpu: rebuild_arguments(handle) for gpu, handle in handles.items()},
            tensor_sizes=sizes,
        )
        IPCWeightTransferEngine.receive_weights(self, info)

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._packed_importer.close()  # mapped memory of a removed rank would not be freed


def _count_bytes(shape: list[int], dtype: str) -> int:
    return math.prod(shape) * getattr(torch, dtype).itemsize


def _hash_tensor(tensor: torch.Tensor) -> str:
    received = tensor.reshape(-1).view(torch.uint8)
    return hash_arrays(received.cpu().numpy())


def _copy_from_buffer(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.device.type == "cpu" else tensor


def _few(names: list[str]) -> str:
    text = ", ".join(names[:3])
    num_more = len(names) - 3
    return f"{text} and {num_more} more" if num_more > 0 else text
