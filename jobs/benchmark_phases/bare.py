"""vLLM and torch alone, and our engine without its fleet: each in a process of its own with
the settings that ours have in a run."""

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import ray
import torch

from actors.cluster.placement import process_environment
from actors.engines.engine import Engine, engine_environment
from t2g.algo.head import install_chunked_head
from t2g.algo.logprobs import Rows
from t2g.config import EngineConfig, LearnerConfig, ProcessConfig, RolloutConfig
from t2g.data.batching import plan_microbatches
from t2g.types import TrainSample


def environment(role: ProcessConfig) -> dict[str, str]:
    """Return the environment of our rank or engine core; torch reads its thread settings at import."""
    known = process_environment(role)
    if isinstance(role, EngineConfig):
        receives_weights = isinstance(role, RolloutConfig)
        known |= engine_environment(role, owner=0, receives_weights=receives_weights)
    return known


def begin(plain: type, role: ProcessConfig, *args: Any, **named: Any) -> Any:
    """Start an actor of the class without reserving cores."""
    runtime_env = {"env_vars": environment(role)}
    options = {"num_cpus": 0, "num_gpus": role.gpus, "runtime_env": runtime_env}
    return ray.remote(plain).options(**options).remote(*args, **named)


class BareEngine:
    """`vllm.LLM` with the arguments of our engine."""

    def __init__(self, model: str, config: EngineConfig, seed: int, guided: bool = False) -> None:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        os.environ.update(engine_environment(config, owner=os.getpid(), receives_weights=False))
        from vllm import LLM

        arguments = Engine(model, config, seed=seed, guided=guided).arguments()
        self._llm = LLM(**arguments)

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        seeds: Sequence[int] = (),
        guide: dict[str, Any] | None = None,
        **how: Any,
    ) -> int:
        """Sample one response to each prompt; return the number of tokens. how: of SamplingParams."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        guided = StructuredOutputsParams(**guide) if guide else None
        make_params = partial(SamplingParams, detokenize=False, structured_outputs=guided, **how)
        params = [make_params(seed=seed) for seed in seeds or [None] * len(prompts)]
        requests = [{"prompt_token_ids": ids.tolist()} for ids in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


class OurEngine:
    """Our engine without a fleet, which admits, counts and steers: vLLM's front-end process and its core."""

    def __init__(self, model: str, config: EngineConfig, seed: int, guided: bool = False) -> None:
        self._engine = Engine(model, config, seed=seed, guided=guided)
        self._started = False

    async def generate(self, prompts: Sequence[np.ndarray], *, seeds: Sequence[int | None], **how: Any) -> int:
        """Sample one response to each prompt; return the number of tokens. how: of `Engine.generate`."""
        if not self._started:
            await self._engine.start()
            self._started = True
        generate = partial(self._engine.generate, **how)
        requests = [generate(ids, seed=seed) for ids, seed in zip(prompts, seeds, strict=True)]
        responses = await asyncio.gather(*requests)
        return sum(len(response.ids) for response in responses)


class BareLearner:
    """Reference, forward, backward, one step of torch's fused AdamW on the same rows: no ZeRO-3, no float32 copies."""

    def __init__(self, model: str, config: LearnerConfig) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(config.threads)
        self._device = torch.device("cuda" if config.gpus else "cpu")
        self._config = config
        load = partial(AutoModelForCausalLM.from_pretrained, model, dtype=getattr(torch, config.dtype))
        self._policy = load().to(self._device)
        self._reference = load().to(self._device)
        for loaded in (self._policy, self._reference):
            install_chunked_head(loaded)
        optim = config.policy
        self._adamw = torch.optim.AdamW(self._policy.parameters(), lr=optim.lr, betas=optim.betas, fused=True)

    def step(self, samples: Sequence[TrainSample]) -> int:
        """Make one step; return the number of tokens."""
        budget = self._config.tokens_per_microbatch
        for members in plan_microbatches(samples, num_ranks=1, token_budget=budget)[0]:
            rows = Rows([samples[index] for index in members], self._device)
            with torch.no_grad():
                reference = rows.token_outputs(self._reference, 1.0).logprobs
            now = rows.token_outputs(self._policy, 1.0).logprobs
            weights = rows.column("weights")
            gap = reference - now
            ratio = (now - now.detach()).exp()
            kl = gap.exp() - gap - 1
            loss = -ratio * rows.column("advantages") + 0.05 * kl
            (loss * weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._config.policy.max_grad_norm)
        self._adamw.step()
        self._adamw.zero_grad()
        return sum(len(sample) for sample in samples)
