"""Where the buckets of a version come from: from the learner, and once more from what is held of it.

With the transports ipc and nccl (`transports`) nothing is held: the learner sends again, as long as it has that
version. Each broadcast has a group of its own, so that nobody waits for an engine that has gone.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from actors.weights.buckets import ParamMeta
from actors.weights.transports import Meeting
from t2g.concurrency import end
from t2g.config import LearnerConfig


class WeightOwner(Protocol):
    """What the learner group offers to a weight sync. Blocking calls; LearnerLost when a rank is."""

    policy_version: int  # it changes before the weights do

    def announce(self) -> Sequence[ParamMeta]:
        """Every parameter of the policy in the order in which it is sent, without gathering any."""
        ...

    def address(self) -> tuple[str, int]:
        """A host and port for the meeting of the next `stream_weights`."""
        ...

    def stream_weights(self, dtype: str, *, full: bool, meeting: Meeting | None) -> Generator[Any, None, None]:
        """References to buckets as `plan_buckets` cuts them; tensors converted to `dtype` ("float32" or "bfloat16").

        full: each with a hash of every tensor. meeting: with nccl; the engines are on their way there, and a bucket
        is broadcast without waiting for the next to be asked for.
        """
        ...

    def probe_logprobs(self, ids: np.ndarray) -> np.ndarray:
        """[N - 1] float32: log softmax(logits)[ids[t + 1]] after ids[: t + 1], at temperature 1 as `Engine.score`."""
        ...


@dataclass(kw_only=True)
class Version:
    """What is needed to bring one version to a worker."""

    number: int
    metas: Sequence[ParamMeta]
    buckets: list[Any] = field(default_factory=list)  # references; none with ipc and nccl
    proved: list[Any] = field(default_factory=list)  # receivers that have it
    probe_logprobs: np.ndarray | None = None  # [N - 1] float32, the learner's, once it was asked
    num_calls: int = 1  # of the learner, for it; the first was `announce`


class BucketSource:
    """round_ is always the `actors.weights.sync.Round` that the buckets are for, opened by all of its crew."""

    def __init__(
        self, learner: WeightOwner, config: LearnerConfig, dtype: str, probe: np.ndarray, *, gpus_per_engine: int
    ) -> None:
        self._learner, self._config, self._dtype, self._probe = learner, config, dtype, probe
        self._gpus_per_engine = gpus_per_engine  # each is a rank of the meeting

    async def first(self, version: Version, round_: Any) -> AsyncGenerator[Any, None]:
        """The learner's buckets, held in `version` where they can be.

        Whether the workers still listen makes no difference to it: the ranks are in the middle of one call.
        """
        meeting, joining = None, []
        if self._config.sync_transport == "nccl":
            meeting, joining = await self._meet(version, round_)
        version.num_calls += 1
        stream = self._learner.stream_weights(self._dtype, full=self._config.sync_verify == "full", meeting=meeting)
        try:
            while (ref := await asyncio.to_thread(next, stream, None)) is not None:
                await asyncio.gather(*joining)
                if self._config.keeps_buckets:
                    version.buckets.append(ref)
                yield ref
        finally:
            _close(stream)
            await end(joining)

    async def _meet(self, version: Version, round_: Any) -> tuple[Meeting, list["asyncio.Future[Any]"]]:
        """Where this round's group meets, and the engines on their way there; the learner must now go as well."""
        version.num_calls += 1
        host, port = await asyncio.to_thread(self._learner.address)
        first = {receiver.handle: 1 + index * self._gpus_per_engine for index, receiver in enumerate(round_.crew)}
        meeting = Meeting(host=host, port=port, size=1 + len(first) * self._gpus_per_engine)
        what = "the meeting with the learner"
        joining = round_.each(lambda w: w.join_group.remote(round_.id, meeting, first[w]), what)
        return meeting, [asyncio.ensure_future(joining)]

    async def expected(self, version: Version) -> np.ndarray:
        """[N - 1] float32: the learner's logprobs of the probe, asked for once. Call it when all buckets are out."""
        if version.probe_logprobs is None:
            version.num_calls += 1
            version.probe_logprobs = await asyncio.to_thread(self._learner.probe_logprobs, self._probe)
        return version.probe_logprobs

    def can_send_again(self, version: Version) -> bool:
        return self._config.keeps_buckets or self._learner.policy_version == version.number

    async def again(self, version: Version, round_: Any) -> AsyncGenerator[Any, None]:
        """What is held, or the learner's buckets once more; the crew is dropped when it went on meanwhile."""
        for ref in version.buckets:
            yield ref
        if self._config.keeps_buckets:
            return
        async with aclosing(self.first(version, round_)) as buckets:
            async for ref in buckets:
                yield ref
        if not self.can_send_again(version):
            for receiver in list(round_.crew):
                round_.drop(receiver, f"was sent version {version.number} when the learner went on")


def _close(stream: Generator[Any, None, None]) -> None:
    """Here and now: left to the garbage collector, the stream would be ended after Ray is."""
    try:
        stream.close()
    except ValueError:  # cancelled while a thread waits in it for the next bucket: it ends with the process
        return
