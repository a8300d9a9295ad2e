"""A real engine that breaks a weight sync when it is asked to."""

from pathlib import Path

import ray
from stub_engines import BREAK_SYNC, taken

from actors.engines.rollout import RolloutWorker
from actors.weights.buckets import Bucket


class BreakableRolloutWorker(RolloutWorker):
    """A real engine that refuses the second bucket of the sync that finds a file BREAK_SYNC in its model's folder."""

    async def load_bucket(self, round_id: str, bucket: Bucket) -> dict[str, float]:
        flag = Path(self._model) / BREAK_SYNC
        if bucket.index == 1 and taken(flag):
            raise ValueError("half a sync, as asked for")
        return await super().load_bucket(round_id, bucket)


BreakableRollout = ray.remote(BreakableRolloutWorker)
