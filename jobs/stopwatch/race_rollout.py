"""Sampling: the fleet, and one engine of it alone, beside bare `LLM.generate`; responses of one length, and of
exponential lengths."""

import asyncio
import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from actors.engines.rollout import RolloutFleet, sample_seed
from jobs.stopwatch.bare import BareEngine, OurEngine, begin
from jobs.stopwatch.watch import Bench, Done, Race, Record, Side
from t2g.interfaces import Sampling

AIM = 0.95
SEED = 1


async def measure(bench: Bench) -> list[Record]:
    fixed, exponential = bench.models.fixed, bench.models.exponential
    return [await race(bench, "rollout, one length", fixed), await race(bench, "rollout, exponential", exponential)]


async def race(bench: Bench, name: str, model: Path) -> Record:
    config, timeout_s = bench.config, bench.config.cluster.placement_timeout_s
    bare, alone = (
        begin(engine, config.rollout, str(model), config.rollout, config.run.seed) for engine in (BareEngine, OurEngine)
    )
    with closing(
        RolloutFleet(str(model), config.rollout, seed=config.run.seed, placement_timeout_s=timeout_s)
    ) as fleet:
        fleet.wait_ready()
        sides = {
            "bare vLLM": bare_side(bench, bare),
            "bare vLLM, seeds and logprobs": bare_side(bench, bare, logprobs=0),
            "engine alone": engine_side(bench, alone),
            "fleet": fleet_side(bench, fleet),
        }
        return await bench.race(Race(name=name, unit="tokens", sides=sides, limit="bare vLLM", aims={"fleet": AIM}))


def requests(bench: Bench) -> tuple[list[np.ndarray], list[int]]:
    """The prompt of each response of a step, and the seed that the fleet gives it."""
    rollout = bench.config.rollout
    prompts = bench.models.prompts[: rollout.prompts_per_step]
    asked = [(p, i) for p in prompts for i in range(rollout.samples_per_prompt)]
    return [p.prompt_ids for p, _ in asked], [sample_seed(SEED, p.prompt_id, i) for p, i in asked]


def bare_side(bench: Bench, bare: Any, **how: Any) -> Side:
    """how: with logprobs also seeds."""
    rollout, (prompts, seeds) = bench.config.rollout, requests(bench)
    if how:
        how["seeds"] = seeds
    how |= {"temperature": rollout.temperature, "max_tokens": rollout.max_new_tokens}
    how |= {"top_k": 0, "stop_token_ids": [bench.models.tokenizer.eos_token_id]}

    async def side() -> Done:
        return Done(amount=await bare.generate.remote(prompts, **how))

    return side


def engine_side(bench: Bench, engine: Any) -> Side:
    rollout, (prompts, seeds) = bench.config.rollout, requests(bench)
    how = {"temperature": rollout.temperature, "max_new_tokens": rollout.max_new_tokens}

    async def side() -> Done:
        return Done(amount=await engine.generate.remote(prompts, seeds=seeds, **how))

    return side


def fleet_side(bench: Bench, fleet: RolloutFleet) -> Side:
    rollout = bench.config.rollout
    sampling = Sampling(
        num_samples=rollout.samples_per_prompt, temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens, seed=SEED,
    )  # fmt: skip

    async def side() -> Done:
        prompts = bench.models.prompts[: rollout.prompts_per_step]
        groups = await asyncio.gather(*(fleet.sample(prompt, sampling) for prompt in prompts))
        return Done(amount=sum(len(rollout.response_ids) for rollout in itertools.chain(*groups)))

    return side
