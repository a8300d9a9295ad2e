"""Conversations on rollout engines: the environment runs on the driver, and each conversation stays on one engine.

A conversation is one request of the fleet. If its engine is lost, it starts again on another one, from its first turn
and with the same seeds; the next turn finds the turns before it in the engine's prefix cache. An engine has the
deadline of a request for each turn; the time in which the environment replies is not the engine's.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError

from actors.engines.rollout import RolloutFleet, check_prompt_fits
from actors.fleet.fleet_worker import RequestTimedOut
from t2g.config import RolloutConfig
from t2g.environments.call_readers import ReadCalls
from t2g.environments.converse import converse, make_encoder
from t2g.environments.environment import Environment
from t2g.interfaces import RolloutSource, Sampling
from t2g.types import Prompt, Rollout

MAX_CONVERSATION_S = 86400.0  # a conversation; each of its turns and replies has a deadline of its own


class Conversations(RolloutSource):
    """A rollout fleet and an environment as a source of conversations."""

    def __init__(
        self,
        fleet: RolloutFleet,
        config: RolloutConfig,
        environment: Environment,
        tokenizer: Any,
        read_calls: ReadCalls | None = None,
    ) -> None:
        """Raise UserError for a tokenizer, see `make_encoder`.

        Args:
            read_calls: Reads the calls of the environment's tools; None: it has none.
        """
        self._read_calls = read_calls
        self._fleet = fleet
        self._window = config.max_model_len
        self._max_turns = config.max_turns
        self._environment = environment
        self._encode = make_encoder(tokenizer)

    async def sample(
        self, prompt: Prompt, sampling: Sampling, on_rollout: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """Return `num_samples` conversations; errors as `RolloutFleet.sample` and `Environment.reply`."""
        check_prompt_fits(prompt, sampling.max_new_tokens, self._window)
        submits = [partial(self._converse, prompt, sampling, index) for index in range(sampling.num_samples)]
        return await self._fleet.calls(
            submits,
            timeout_s=MAX_CONVERSATION_S,
            what=f"prompt {prompt.prompt_id}",
            on_answer=on_rollout,
        )

    def _converse(self, prompt: Prompt, sampling: Sampling, index: int, worker: Any) -> Coroutine[Any, Any, Rollout]:
        deadline_s = self._fleet.config.compute_deadline_s(sampling.max_new_tokens)

        async def sample_turn(context: np.ndarray, number: int) -> Rollout:
            turn_sampling = replace(sampling, seed=sampling.seed + number)  # equal seeds would repeat random numbers
            request = worker.sample.remote(prompt.prompt_id, context, turn_sampling, index)
            answer = asyncio.wrap_future(request.future())
            try:
                await asyncio.wait([answer], timeout=deadline_s)
                if not answer.done():
                    raise RequestTimedOut(deadline_s)
                return answer.result()
            finally:
                if not answer.done():
                    answer.cancel()
                    with contextlib.suppress(RayActorError):
                        ray.cancel(request)

        return converse(
            prompt,
            sample_turn,
            self._environment,
            self._encode,
            max_turns=self._max_turns,
            max_context_tokens=self._window - sampling.max_new_tokens,
            read_calls=self._read_calls,
        )
