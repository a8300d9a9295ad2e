"""Rollout workers: the policy behind a vLLM engine, sampled exactly as PPO trains it.

`RolloutWorker` is the remote side, `RolloutFleet` the driver's, which implements `t2g.interfaces.RolloutSource`.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import ray
import xxhash
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from actors.cluster.fanout import first_line
from actors.engines.engine import Engine
from actors.fleet.fleet import Fleet
from actors.fleet.fleet_worker import DIED, FleetWorker, describe_loss
from actors.weights.gpu_time_sharing import RELEASE_S
from actors.weights.probe import Gap
from actors.weights.weight_receiver import WeightReceiver
from t2g.config import RolloutConfig
from t2g.errors import LearnerLost, MissedSync, UserError
from t2g.interfaces import GpuUser, Sampling
from t2g.text.thinking import Tags, find_answer_start, find_thinking_tags
from t2g.types import Prompt, Rollout


def sample_seed(seed: int, prompt_id: str, sample_index: int) -> int:
    """Return the seed of one response, independent of batch, worker and order.

    >>> sample_seed(1, "a", 0) == sample_seed(1, "a", 0), sample_seed(1, "a", 0) == sample_seed(1, "a", 1)
    (True, False)
    """
    text = f"{seed}\0{prompt_id}\0{sample_index}"
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1  # vLLM takes int64


def check_prompt_fits(prompt: Prompt, max_new_tokens: int, max_model_len: int) -> None:
    """Raise UserError for a prompt that is empty or leaves no room for the full response."""
    num_tokens = len(prompt.prompt_ids)
    if num_tokens == 0:
        raise UserError(f"prompt {prompt.prompt_id} has no tokens")
    if num_tokens + max_new_tokens > max_model_len:
        raise UserError(
            f"prompt {prompt.prompt_id} has {num_tokens} tokens: with {max_new_tokens} new ones it does not fit into "
            f"the window of {max_model_len} (rollout.max_model_len)"
        )


class RolloutWorker(Engine, WeightReceiver):
    """One policy engine."""

    _tags: Tags | None = None  # around the model's thinking

    def __init__(
        self, model: str, config: RolloutConfig, *, thinking_tags: Sequence[str] | None = None, **engine: Any
    ) -> None:
        super().__init__(model, config, **engine)
        self._configured_tags = thinking_tags

    def check_tokenizer(self) -> None:
        self._tags = find_thinking_tags(self._tokenizer, self._configured_tags)

    async def sample(self, prompt_id: str, prompt_ids: np.ndarray, sampling: Sampling, index: int) -> Rollout:
        """Sample response `index` of a prompt, [P] int32."""
        done = await self.generate(
            prompt_ids,
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens,
            seed=sample_seed(sampling.seed, prompt_id, index),
        )
        answer_start = find_answer_start(self._tokenizer, prompt_ids, done.ids, done.text, self._tags)
        return Rollout(
            prompt_id=prompt_id,
            sample_index=index,
            prompt_ids=prompt_ids,
            response_ids=done.ids,
            rollout_logprobs=done.logprobs,
            response_text=done.text,
            finish_reason=done.finish_reason,
            policy_versions=done.versions,
            answer_start=answer_start,
        )


RolloutActor = ray.remote(RolloutWorker)


class RolloutFleet(Fleet):
    """Rollout workers as a source of rollouts, and as the workers of a weight sync."""

    role = "rollout"
    actor = RolloutActor
    config: RolloutConfig
    baseline_gap: Gap | None = None
    gpu_user: GpuUser = "engines"
    is_switching_gpus = False  # between engines and learner

    def __init__(self, model: str, config: RolloutConfig, *, placement_timeout_s: float, **engine: Any) -> None:
        """Start the fleet.

        Args:
            engine: seed, revision, transport, lora and can_sleep of `Engine`, and thinking_tags of `RolloutWorker`;
                the default transport is store.
        """
        arguments = {"model": model, "config": config, "transport": "store", **engine}
        super().__init__(arguments, config, placement_timeout_s=placement_timeout_s)

    @property
    def vocab_size(self) -> int:
        return self.started_with

    async def sample(
        self, prompt: Prompt, sampling: Sampling, on_rollout: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """Sample all responses to one prompt on one worker, so that they share its prefix cache.

        Raises:
            UserError: The prompt is empty or too long.
            SamplingFailed: No worker answered.
            RunStopped: No worker is left.
        """
        check_prompt_fits(prompt, sampling.max_new_tokens, self.config.max_model_len)

        def submit(index: int, worker: Any) -> Any:
            return worker.sample.remote(prompt.prompt_id, prompt.prompt_ids, sampling, index)

        submits = [partial(submit, index) for index in range(sampling.num_samples)]
        return await self.calls(
            submits,
            timeout_s=self.config.compute_deadline_s(sampling.max_new_tokens),  # `config` may be another run's
            what=f"prompt {prompt.prompt_id}",
            on_answer=on_rollout,
        )

    async def compute_logprobs(self, prompt: Prompt, response_ids: np.ndarray) -> np.ndarray:
        """Return the log-probabilities of a response at temperature 1, without its last token: [R - 1] float32.

        The last token is left out: the engine samples one more, for which a full window has no room.
        """
        ids = np.concatenate([prompt.prompt_ids, response_ids[:-1]])
        (logprobs,) = await self.calls(
            [lambda worker: worker.compute_logprobs.remote(ids)],
            timeout_s=self.config.deadline_s,
            what=f"prompt {prompt.prompt_id}",
        )
        return logprobs[len(prompt.prompt_ids) - 1 :]

    def _should_restart(self, worker: FleetWorker) -> bool:
        return self._has_gpus and super()._should_restart(worker)  # a start would fail on a rank's GPU

    def _check_min_workers(self, now: float) -> None:
        if self._has_gpus:
            super()._check_min_workers(now)

    @property
    def _has_gpus(self) -> bool:
        return self.gpu_user == "engines" and not self.is_switching_gpus

    def begin_sync(self) -> list[FleetWorker]:
        """Return the workers of a weight sync that begins. An unreachable one misses it, and catches up later."""
        for worker in self.started():
            worker.end_sync()  # for a worker that failed while a push replaced its catch-up
        for worker in self.serving():
            if not worker.health.reachable:
                self.record_missed_sync(worker, "could not be reached")
        return [worker for worker in self.started() if worker.health.reachable]

    async def replace_unreachable(self) -> None:
        """Kill each unreachable worker that fails one more health check: it may hold a GPU that others need."""
        unreachable = [worker for worker in self.started() if not worker.health.reachable]
        num_killed = 0
        for worker in unreachable:
            check = worker.handle.check_health.remote()
            try:
                await asyncio.wait_for(asyncio.wrap_future(check.future()), self.config.health.check_timeout_s)
                self._apply_event(worker, "check_passed")
            except (TimeoutError, RayError):
                self._apply_event(worker, "died", "could not be reached during the GPU switch")
                num_killed += 1
        if num_killed:
            await asyncio.sleep(RELEASE_S)

    async def request(self, worker: FleetWorker, submit: Callable[[Any], Any], what: str) -> Any:
        """Make one call of a weight sync on one worker.

        Raises:
            MissedSync: The worker died or raised an error.
            LearnerLost: A bucket is lost.
        """
        try:
            return await submit(worker.handle)
        except RayTaskError as error:  # before DIED: for a lost argument Ray raises an error of both types
            if isinstance(error.cause, ObjectLostError):
                raise LearnerLost(f"{what} was lost with the node of learner rank 0") from error
            raise MissedSync(f"refused {what}: {first_line(error.cause)}") from error
        except DIED as error:
            self.record_failure(worker, error)
            raise MissedSync(f"{describe_loss(error)} during {what}") from error
