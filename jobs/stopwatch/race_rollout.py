"""Sampling: the fleet, and one engine of it alone, beside bare `LLM.generate`; responses of one length, and of
exponential lengths."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from actors.engines.rollout import sample_seed
from jobs.common.fleets import Fleets
from jobs.stopwatch.bare import BareEngine, OurEngine, begin
from jobs.stopwatch.watch import Bench, Done, Race, Record
from t2g.config import ModelConfig
from t2g.interfaces import Sampling

AIM = 0.95
SEED = 1


async def measure(bench: Bench) -> list[Record]:
    fixed, exponential = bench.models.fixed, bench.models.exponential
    return [await race(bench, "rollout, fixed length", fixed), await race(bench, "rollout, exponential", exponential)]


async def race(bench: Bench, name: str, model: Path) -> Record:
    config, rollout, prompts = bench.config, bench.config.rollout, bench.models.prompts
    prompts = prompts[: rollout.prompts_per_step]
    requests = [(prompt, index) for prompt in prompts for index in range(rollout.samples_per_prompt)]
    ids = [prompt.prompt_ids for prompt, _ in requests]
    seeds = [sample_seed(SEED, prompt.prompt_id, index) for prompt, index in requests]  # as the fleet gives them
    sampling = Sampling(
        num_samples=rollout.samples_per_prompt, temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens, seed=SEED,
    )  # fmt: skip
    bare, alone = (begin(engine, rollout, str(model), rollout, config.run.seed) for engine in (BareEngine, OurEngine))
    params = {"temperature": rollout.temperature, "max_tokens": rollout.max_new_tokens, "top_k": 0}
    ask_bare = partial(bare.generate.remote, ids, stop_token_ids=[bench.models.tokenizer.eos_token_id], **params)
    ask_alone = partial(
        alone.generate.remote, ids, seeds=seeds, temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens
    )
    with Fleets() as fleets:
        fleet = fleets.rollouts(ModelConfig(policy=str(model)), rollout, config)

        async def ask_fleet() -> int:
            groups = await asyncio.gather(*(fleet.sample(prompt, sampling) for prompt in prompts))
            return sum(len(response.response_ids) for group in groups for response in group)

        sides = {
            "bare vLLM": partial(count_tokens, ask_bare),
            "bare vLLM, seeds and logprobs": partial(count_tokens, partial(ask_bare, seeds=seeds, logprobs=0)),
            "engine alone": partial(count_tokens, ask_alone),
            "fleet": partial(count_tokens, ask_fleet),
        }
        return await bench.race(Race(name=name, unit="tokens", sides=sides, reference="bare vLLM", aims={"fleet": AIM}))


async def count_tokens(generate: Callable[[], Awaitable[int]]) -> Done:
    return Done(amount=await generate())
