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

T = TypeVar("T")


class WeightReceiver:
    """Of `actors.engines.engine.Engine`, which it is mixed into: `open_update`, `load_bucket` for each bucket in any
    order and two at a time, `close_update`. Calls of an earlier round are refused.

    With nccl `join_group` comes before the first buckets of a group, and all come one by one in their order. Adapters
    take the place of those before at the end of a round, whole (`actors.weights.adapters`).

    A round that broke off is mended by the next `open_update`, whose version comes whole.
    """

    _llm: Any  # an AsyncLLM; `_lora` and `_adapter`, what its requests name, are the engine's own as well
    _adapters: Adapters | None = None  # of the open round
    _round_id, _version = "", 0
    _updating = False  # as vLLM's worker sees it: it refuses to start an update within another

    async def _of_core(self, answer: Awaitable[T]) -> T:
        raise NotImplementedError("this is the engine's own")

    @cached_property
    def _free(self) -> asyncio.Queue[SharedBuffer]:
        """Two: one is written while the core reads the other."""
        arenas: asyncio.Queue[SharedBuffer] = asyncio.Queue()
        for _ in range(2):
            arenas.put_nowait(SharedBuffer())
        return arenas

    async def open_update(self, round_id: str, version: int, dtype: str, shapes: Shapes) -> None:
        """Freeze running requests where they are, drop their KV and prefix caches, and announce a version."""
        self._round_id, self._version = round_id, version
        await self._of_core(self._llm.pause_generation(mode="keep", clear_cache=True))
        if self._lora is not None:
            self._adapters = Adapters(self._lora, shapes, dtype, version)
            return
        await self._tell_core({"version": version, "dtype": dtype, "shapes": dict(shapes)})
        if not self._updating:
            await self._of_core(self._llm.start_weight_update())
            self._updating = True

    async def join_group(self, round_id: str, rendezvous: Rendezvous, rank: int) -> None:
        """Have the engine core meet rank 0 of the learner and the other engines, all of them at once."""
        self._refuse_other_rounds(round_id)
        await self._tell_core({"rendezvous": asdict(rendezvous), "rank_offset": rank})

    async def _tell_core(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._of_core(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(info)))

    async def load_bucket(self, round_id: str, bucket: Bucket) -> dict[str, float]:
        """Hand one bucket to the engine core; returns the seconds of each stage."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._refuse_other_rounds(round_id)
        if self._adapters is not None:
            self._adapters.add(bucket)  # loaded by `close_update`
            return {"gather": bucket.gather_s, "hand_over": 0.0, "load": 0.0}
        async with self._mapped(bucket.tensors) as (place, started):
            handed_over = time.monotonic()
            self._refuse_other_rounds(round_id)
            part = {"version": self._version, "index": bucket.index, "names": list(bucket.names)}
            request = WeightTransferUpdateRequest(part | {"way": bucket.way | place})
            try:
                await self._of_core(self._llm.update_weights(request))
            except Exception:
                self._updating = False
                raise
            loaded = time.monotonic()
        return {"gather": bucket.gather_s, "hand_over": handed_over - started, "load": loaded - handed_over}

    @asynccontextmanager
    async def _mapped(self, tensors: Sequence[np.ndarray]) -> AsyncIterator[tuple[dict[str, Any], float]]:
        """Where the engine core finds the tensors meanwhile, {} of none; when this began."""
        if not tensors:
            yield {}, time.monotonic()
            return
        buffer = await self._free.get()
        try:
            started = time.monotonic()
            offsets, num_bytes = await asyncio.to_thread(buffer.write, tensors)
            yield {"path": buffer.path, "offsets": offsets, "num_bytes": num_bytes}, started
        finally:
            self._free.put_nowait(buffer)

    async def close_update(self, round_id: str) -> None:
        """Refuse or commit the version, then let the frozen requests go on with the new weights."""
        self._refuse_other_rounds(round_id)
        if self._adapters is not None:
            self._adapter = await self._of_core(self._adapters.load(self._llm))
            await self._of_core(self._llm.update_weight_version(str(self._version)))
        else:
            await self._of_core(self._llm.finish_weight_update(weight_version=str(self._version)))
            self._updating = False
        if not await self._of_core(self._llm.reset_prefix_cache()):
            raise RuntimeError("the engine kept a prefix cache of the old weights")
        await self._of_core(self._llm.resume_generation())

    def _refuse_other_rounds(self, round_id: str) -> None:
        """A call that was thought lost may come when another round is open: its bucket would break that one too."""
        if round_id != self._round_id:
            raise RuntimeError("this belongs to a weight sync that is over")
