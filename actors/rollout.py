"""Rollout workers: the policy behind a vLLM engine, sampled exactly as PPO trains it.

`RolloutWorker` is the remote side, `RolloutFleet` the driver's, which implements `t2g.interfaces.RolloutSource`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
import xxhash

from actors.engine import Engine, stop_token_ids
from actors.fleet import Fleet
from actors.weight_sync import Bucket, ParamMeta
from t2g.data.chat import load_tokenizer
from t2g.errors import RunStopped, UserError
from t2g.feedback.offsets import decode
from t2g.interfaces import Sampling
from t2g.sections import RolloutConfig
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

    def __init__(self, model: str, config: RolloutConfig, seed: int, revision: str | None = None) -> None:
        self._model, self._revision = model, revision
        self._engine = Engine(model, config, seed=seed, revision=revision, receives_weights=True)

    async def start(self) -> int:
        """Load everything; returns the size of the vocabulary."""
        await self._engine.start()
        self._tokenizer = load_tokenizer(self._model, self._revision)
        self._stop_ids = stop_token_ids(self._model, self._tokenizer, self._revision)
        return self._engine.vocab_size

    async def ping(self) -> None:
        await self._engine.ping()

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

    async def open_update(self, version: int, dtype: str, metas: Sequence[ParamMeta]) -> None:
        await self._engine.open_update(version, dtype, metas)

    async def load_bucket(self, version: int, bucket: Bucket) -> int:
        return await self._engine.load_bucket(version, bucket)

    async def close_update(self, version: int) -> None:
        await self._engine.close_update(version)

    async def score(self, ids: np.ndarray) -> np.ndarray:
        return await self._engine.score(ids)


class RolloutFleet:
    """Rollout workers as one source of rollouts."""

    def __init__(
        self,
        model: str,
        config: RolloutConfig,
        *,
        seed: int,
        placement_timeout_s: float,
        revision: str | None = None,
    ) -> None:
        self._config = config
        self._fleet = Fleet(
            "rollout", RolloutActor, (model, config, seed, revision), config, placement_timeout_s=placement_timeout_s
        )
        self.vocab_size = 0

    def wait_ready(self) -> None:
        self.vocab_size = self._fleet.wait_ready()

    @property
    def dtype(self) -> str:
        return self._config.dtype

    @property
    def max_model_len(self) -> int:
        return self._config.max_model_len

    async def sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        """All responses to one prompt, on one worker, so that they share its prefix cache.

        Raises UserError for a prompt that is empty or too long, RunStopped when no worker answers in time.
        """
        check_window(prompt, sampling.max_new_tokens, self._config.max_model_len)
        timeout_s = self._config.request_timeout_s
        what = f"prompt {prompt.prompt_id}"
        try:
            return await self._fleet.call(
                lambda worker: worker.sample.remote(prompt, sampling),
                load=sampling.num_samples,
                timeout_s=timeout_s,
                what=what,
            )
        except TimeoutError as error:
            raise RunStopped(f"{error}; raise rollout.request_timeout_s or lower rollout.max_num_seqs") from error

    def on_all(self, submit: Callable[[Any], Any], *, timeout_s: float, what: str) -> dict[str, Any]:
        """One call on every living worker, for the weight sync; see `Fleet.on_all`."""
        return self._fleet.on_all(submit, timeout_s=timeout_s, what=what)

    def close(self) -> None:
        self._fleet.close()


RolloutActor = ray.remote(RolloutWorker)
