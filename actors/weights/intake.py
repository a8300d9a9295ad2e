"""The engine's side of a weight sync: buckets from the actor process into the engine core, and the version's commit."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from actors.weights.arena import Arena
from actors.weights.buckets import Bucket, ParamMeta, SharedBucket, StoredBucket
from actors.weights.transports import Meeting


class Intake:
    """`open`, `load` for each bucket in any order and two at a time, `close`. Calls of an earlier round are refused.

    With nccl `join` comes before the buckets, and they come one by one in their order.

    A round that broke off is mended by the next `open`, whose version comes whole.
    """

    def __init__(self, llm: Any, of_core: Callable[[Awaitable[None]], Awaitable[None]]) -> None:
        """llm: an AsyncLLM. of_core: awaits what its engine core answers."""
        self._llm, self._of_core = llm, of_core
        self._round_id, self._version = "", 0
        self._updating = False  # as vLLM's worker sees it: it refuses to start an update within another
        self._free: asyncio.Queue[Arena] = asyncio.Queue()
        for _ in range(2):  # one is written while the core reads the other
            self._free.put_nowait(Arena())

    async def open(self, round_id: str, version: int, dtype: str, metas: Sequence[ParamMeta]) -> None:
        """Freeze running requests where they are, drop their KV and prefix caches, and announce a version."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._round_id, self._version = round_id, version
        await self._of_core(self._llm.pause_generation(mode="keep", clear_cache=True))
        announcement = {
            "version": version,
            "dtype": dtype,
            "names": [meta.name for meta in metas],
            "shapes": [list(meta.shape) for meta in metas],
        }
        await self._of_core(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(announcement)))
        if not self._updating:
            await self._of_core(self._llm.start_weight_update())
            self._updating = True

    async def join(self, round_id: str, meeting: Meeting, rank: int) -> None:
        """Have the engine core meet rank 0 of the learner and the other engines, all of them at once."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._refuse_other_rounds(round_id)
        place = WeightTransferInitRequest(asdict(meeting) | {"rank": rank})
        await self._of_core(self._llm.init_weight_transfer_engine(place))

    async def load(self, round_id: str, bucket: Bucket) -> dict[str, float]:
        """Hand one bucket to the engine core; returns the seconds of each stage."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._refuse_other_rounds(round_id)
        async with self._within_reach(bucket) as (info, started):
            handed_over = time.monotonic()
            self._refuse_other_rounds(round_id)
            try:
                await self._of_core(self._llm.update_weights(WeightTransferUpdateRequest(info)))
            except Exception:
                self._updating = False
                raise
            loaded = time.monotonic()
        return {"gather": bucket.gather_s, "hand_over": handed_over - started, "load": loaded - handed_over}

    @asynccontextmanager
    async def _within_reach(self, bucket: Bucket) -> AsyncIterator[tuple[dict[str, Any], float]]:
        """What the engine core must know of a bucket, whose bytes it can get at meanwhile; when this began."""
        info = {"version": self._version, "index": bucket.index, "names": list(bucket.names)}
        if isinstance(bucket, SharedBucket):
            info["handles"] = bucket.handles
        if not isinstance(bucket, StoredBucket):
            yield info, time.monotonic()
            return
        arena = await self._free.get()
        try:
            started = time.monotonic()
            offsets, num_bytes = await asyncio.to_thread(arena.write, bucket.tensors)
            info |= {"path": arena.path, "offsets": offsets, "num_bytes": num_bytes}
            yield info | {"xxh3": bucket.xxh3, "tensor_xxh3": list(bucket.tensor_xxh3)}, started
        finally:
            self._free.put_nowait(arena)

    async def close(self, round_id: str) -> None:
        """Refuse or commit the version, then let the frozen requests go on with the new weights."""
        self._refuse_other_rounds(round_id)
        await self._of_core(self._llm.finish_weight_update(weight_version=str(self._version)))
        self._updating = False
        if not await self._of_core(self._llm.reset_prefix_cache()):
            raise RuntimeError("the engine kept a prefix cache of the old weights")
        await self._of_core(self._llm.resume_generation())

    def _refuse_other_rounds(self, round_id: str) -> None:
        """A call that was thought lost may come when another round is open: its bucket would break that one too."""
        if round_id != self._round_id:
            raise RuntimeError("this belongs to a weight sync that is over")
