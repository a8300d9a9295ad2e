"""The engine's side of a weight sync: buckets from the actor process into the engine core, and the version's commit."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from actors.weights.adapters import Adapters
from actors.weights.buckets import Bucket, Rendezvous, Shapes
from actors.weights.shared_buffer import SharedBuffer

Answer = TypeVar("Answer")


class WeightReceiver:
    """A mixin of `actors.engines.engine.Engine`: `open_update`, `load_bucket` for each bucket, `close_update`.

    Buckets come in any order, two at a time; with nccl one by one in order, and `join_group` precedes the first bucket
    of a group. Adapters are replaced at the end of a round (`actors.weights.adapters`). Calls of an earlier round are
    refused. After an interrupted round the next `open_update` starts again with a full version.
    """

    _llm: Any  # an AsyncLLM; the engine also has `_lora`, and `_adapter`, which its requests name
    _adapters: Adapters | None = None  # adapters of the open round
    _round_id = ""
    _version = 0
    _updating = False  # vLLM's worker refuses to start an update within another one

    async def _await_core(self, answer: Awaitable[Answer]) -> Answer:
        raise NotImplementedError("the engine implements it")

    @cached_property
    def _free_buffers(self) -> asyncio.Queue[SharedBuffer]:
        """Two buffers: one is written while the core reads the other."""
        buffers: asyncio.Queue[SharedBuffer] = asyncio.Queue()
        for _ in range(2):
            buffers.put_nowait(SharedBuffer())
        return buffers

    async def open_update(self, round_id: str, version: int, dtype: str, shapes: Shapes) -> None:
        """Pause running requests, drop their KV and prefix caches, and send the manifest of a version to the core."""
        self._round_id = round_id
        self._version = version
        await self._await_core(self._llm.pause_generation(mode="keep", clear_cache=True))
        if self._lora is not None:
            self._adapters = Adapters(self._lora, shapes, dtype, version)
            return
        await self._init_core_transfer({"version": version, "dtype": dtype, "shapes": dict(shapes)})
        if not self._updating:
            await self._await_core(self._llm.start_weight_update())
            self._updating = True

    async def join_group(self, round_id: str, rendezvous: Rendezvous, rank: int) -> None:
        """Have the engine core join the process group of learner rank 0 and the other engines."""
        self._check_round(round_id)
        await self._init_core_transfer({"rendezvous": asdict(rendezvous), "rank_offset": rank})

    async def _init_core_transfer(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(info)
        await self._await_core(self._llm.init_weight_transfer_engine(request))

    async def load_bucket(self, round_id: str, bucket: Bucket) -> dict[str, float]:
        """Pass one bucket to the engine core; return its timings in seconds."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._check_round(round_id)
        if self._adapters is not None:
            self._adapters.add(bucket)  # loaded by `close_update`
            return {"gather": bucket.gather_s, "copy_to_core": 0.0, "load": 0.0}
        async with self._write_to_buffer(bucket.tensors) as (location, started):
            copied = time.monotonic()
            self._check_round(round_id)
            info = {
                "version": self._version,
                "index": bucket.index,
                "names": list(bucket.names),
                "transport_meta": bucket.transport_meta | location,
            }
            request = WeightTransferUpdateRequest(info)
            try:
                await self._await_core(self._llm.update_weights(request))
            except Exception:
                self._updating = False
                raise
            loaded = time.monotonic()
        return {"gather": bucket.gather_s, "copy_to_core": copied - started, "load": loaded - copied}

    @asynccontextmanager
    async def _write_to_buffer(self, tensors: Sequence[np.ndarray]) -> AsyncIterator[tuple[dict[str, Any], float]]:
        """Yield the location of the tensors for the engine core, {} without tensors, and the start time."""
        if not tensors:
            yield {}, time.monotonic()
            return
        buffer = await self._free_buffers.get()
        try:
            started = time.monotonic()
            offsets, num_bytes = await asyncio.to_thread(buffer.write, tensors)
            yield {"path": buffer.path, "offsets": offsets, "num_bytes": num_bytes}, started
        finally:
            self._free_buffers.put_nowait(buffer)

    async def close_update(self, round_id: str) -> None:
        """Commit or refuse the version, then resume the paused requests with the new weights."""
        self._check_round(round_id)
        if self._adapters is not None:
            self._adapter = await self._await_core(self._adapters.load(self._llm))
            version = str(self._version)
            await self._await_core(self._llm.update_weight_version(version))
        else:
            version = str(self._version)
            await self._await_core(self._llm.finish_weight_update(weight_version=version))
            self._updating = False
        was_reset = await self._await_core(self._llm.reset_prefix_cache())
        if not was_reset:
            raise RuntimeError("the engine kept a prefix cache of the old weights")
        await self._await_core(self._llm.resume_generation())

    def _check_round(self, round_id: str) -> None:
        """Refuse a late call of an earlier round: its bucket would corrupt the open round."""
        if round_id != self._round_id:
            raise RuntimeError("this call belongs to a weight sync that is over")
