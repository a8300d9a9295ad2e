"""Rollout workers: the policy behind a vLLM engine, sampled exactly as PPO trains it.

`RolloutWorker` is the remote side, `RolloutFleet` the driver's, which implements `t2g.interfaces.RolloutSource`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import ray
import xxhash
from ray.exceptions import ObjectLostError, RayTaskError

from actors.cluster.fanout import first_line
from actors.engines.engine import Engine, stop_token_ids
from actors.fleet.fleet import Fleet
from actors.fleet.member import DIED, Member, fate
from actors.weights.buckets import Bucket, ParamMeta
from actors.weights.transports import Meeting
from t2g.config import RolloutConfig, Transport
from t2g.errors import LearnerLost, MissedSync, UserError
from t2g.interfaces import Sampling
from t2g.text.offsets import decode
from t2g.text.tokenizer import load_tokenizer
from t2g.types import Prompt, Rollout


def sample_seed(seed: int, prompt_id: str, sample_index: int) -> int:
    """Seed of one response: the same in any batch, on any worker, in any order.

    >>> sample_seed(1, "a", 0) == sample_seed(1, "a", 0), sample_seed(1, "a", 0) == sample_seed(1, "a", 1)
    (True, False)
    """
    return xxhash.xxh3_64_intdigest(f"{seed}\0{prompt_id}\0{sample_index}".encode()) >> 1  # vLLM takes int64


def check_window(prompt: Prompt, max_new_tokens: int, max_model_len: int) -> None:
    """Raises UserError for a prompt that is empty or leaves no room for the whole response."""
    num_tokens = len(prompt.prompt_ids)
    if num_tokens == 0:
        raise UserError(f"prompt {prompt.prompt_id} has no tokens")
    if num_tokens + max_new_tokens > max_model_len:
        raise UserError(
            f"prompt {prompt.prompt_id} has {num_tokens} tokens: with {max_new_tokens} new ones it does not fit into "
            f"the window of {max_model_len} (rollout.max_model_len)"
        )


class RolloutWorker:
    """One policy engine. `start` first."""

    def __init__(
        self,
        model: str,
        config: RolloutConfig,
        seed: int,
        revision: str | None = None,
        transport: Transport = "store",
    ) -> None:
        self._model, self._revision = model, revision
        self._engine = Engine(model, config, seed=seed, revision=revision, transport=transport)

    async def start(self) -> int:
        """Load everything; returns the size of the vocabulary."""
        await self._engine.start()
        self._tokenizer = load_tokenizer(self._model, self._revision)
        self._stop_ids = stop_token_ids(self._model, self._tokenizer, self._revision)
        return self._engine.vocab_size

    async def probe(self) -> None:
        await self._engine.probe()

    async def sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        return list(await asyncio.gather(*(self._one(prompt, sampling, i) for i in range(sampling.num_samples))))

    async def _one(self, prompt: Prompt, sampling: Sampling, index: int) -> Rollout:
        done = await self._engine.generate(
            prompt.prompt_ids,
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens,
            seed=sample_seed(sampling.seed, prompt.prompt_id, index),
            stop_ids=self._stop_ids,
        )
        return Rollout(
            prompt_id=prompt.prompt_id,
            sample_index=index,
            prompt_ids=prompt.prompt_ids,
            response_ids=done.ids,
            rollout_logprobs=done.logprobs,
            response_text=decode(self._tokenizer, done.ids),
            finish_reason=done.finish_reason,
            policy_versions=done.versions,
        )

    async def open_update(self, round_id: str, version: int, dtype: str, metas: Sequence[ParamMeta]) -> None:
        await self._engine.intake.open(round_id, version, dtype, metas)

    async def join_group(self, round_id: str, meeting: Meeting, rank: int) -> None:
        await self._engine.intake.join(round_id, meeting, rank)

    async def load_bucket(self, round_id: str, bucket: Bucket) -> dict[str, float]:
        return await self._engine.intake.load(round_id, bucket)

    async def close_update(self, round_id: str) -> None:
        await self._engine.intake.close(round_id)

    async def score(self, ids: np.ndarray) -> np.ndarray:
        return await self._engine.score(ids)


class RolloutFleet(Fleet):
    """Rollout workers as one source of rollouts, and as the receivers of a weight sync."""

    def __init__(
        self,
        model: str,
        config: RolloutConfig,
        *,
        seed: int,
        placement_timeout_s: float,
        revision: str | None = None,
        transport: Transport = "store",
        actor: Any = None,
    ) -> None:
        """transport: of the weights. actor: another class with a RolloutWorker's methods."""
        arguments = (model, config, seed, revision, transport)
        super().__init__("rollout", actor or RolloutActor, arguments, config, placement_timeout_s=placement_timeout_s)
        self.vocab_size, self.dtype, self.max_model_len = 0, config.dtype, config.max_model_len
        self.tensor_parallel = config.tensor_parallel
        self.open_timeout_s = config.health.probe_timeout_s * config.health.max_failures

    def wait_ready(self) -> None:
        self.vocab_size = super().wait_ready()

    async def sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        """All responses to one prompt, on one worker, so that they share its prefix cache.

        Raises UserError for a prompt that is empty or too long, SamplingFailed when no worker could answer it,
        RunStopped when none is left.
        """
        check_window(prompt, sampling.max_new_tokens, self.max_model_len)
        return await self.call(
            lambda worker: worker.sample.remote(prompt, sampling),
            load=sampling.num_samples,
            timeout_s=self.config.request_timeout_s,
            what=f"prompt {prompt.prompt_id}",
        )

    def receivers(self) -> list[Member]:
        """Who gets the next weights, between two syncs. Who cannot be reached misses them, and catches up, or its
        successor does."""
        for member in self.started():
            member.sync_ended()  # one that was lost while a push took over from its catch-up heard of no end
        for member in self.serving():
            if not member.health.reachable:
                self.missed(member, "could not be reached")
        return [member for member in self.started() if member.health.reachable]

    def ask(self, receiver: Member, submit: Callable[[Any], Any], what: str) -> Coroutine[Any, Any, Any]:
        """One call of a weight sync on one worker; its engine is paused from now on until it has or missed them.

        Awaited, it raises MissedSync when it died or refused, LearnerLost when a bucket was lost on its way.
        """
        receiver.syncing = True  # now: set by a task, it might come after the end of the sync, and nobody took it back
        return self._ask(receiver, submit, what)

    async def _ask(self, receiver: Member, submit: Callable[[Any], Any], what: str) -> Any:
        try:
            return await submit(receiver.handle)
        except RayTaskError as error:  # before DIED: of an argument that is lost Ray makes one of both kinds
            if isinstance(error.cause, ObjectLostError):
                raise LearnerLost(f"{what} was lost with the node of learner rank 0") from error
            raise MissedSync(f"refused {what}: {first_line(error.cause)}") from error
        except DIED as error:
            self.failed(receiver, error)
            raise MissedSync(f"{fate(error)} during {what}") from error


RolloutActor = ray.remote(RolloutWorker)
