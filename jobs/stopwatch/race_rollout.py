"""Sampling: the fleet beside bare `LLM.generate`, responses of one length, and of exponential lengths."""

import asyncio
import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

from actors.engines.rollout import RolloutFleet, sample_seed
from jobs.stopwatch.bare import BareEngine, begin
from jobs.stopwatch.watch import Bench, Done, Race, Record, Side
from t2g.interfaces import Sampling

AIM = 0.95
SEED = 1


async def measure(bench: Bench) -> list[Record]:
    fixed, exponential = bench.models.fixed, bench.models.exponential
    return [await race(bench, "rollout, one length", fixed), await race(bench, "rollout, exponential", exponential)]


async def race(bench: Bench, name: str, model: Path) -> Record:
    config, timeout_s = bench.config, bench.config.cluster.placement_timeout_s
    bare = begin(BareEngine, config.rollout, str(model), config.rollout, config.run.seed)
    with closing(
        RolloutFleet(str(model), config.rollout, seed=config.run.seed, placement_timeout_s=timeout_s)
    ) as fleet:
        fleet.wait_ready()
        sides = {
            "bare vLLM": bare_side(bench, bare),
            "bare vLLM, seeds and logprobs": bare_side(bench, bare, logprobs=0),
            "fleet": fleet_side(bench, fleet),
        }
        return await bench.race(Race(name=name, unit="tokens", sides=sides, limit="bare vLLM", aim=AIM))


def bare_side(bench: Bench, bare: Any, **how: Any) -> Side:
    """how: with logprobs also seeds, those that the fleet's samples have."""
    rollout, tokenizer = bench.config.rollout, bench.models.tokenizer
    prompts = bench.models.prompts[: rollout.prompts_per_step]
    asked = [(p, i) for p in prompts for i in range(rollout.samples_per_prompt)]
    seeds = [sample_seed(SEED, p.prompt_id, i) for p, i in asked] if how else []
    how |= {"temperature": rollout.temperature, "max_tokens": rollout.max_new_tokens}
    how |= {"top_k": 0, "stop_token_ids": [tokenizer.eos_token_id]}

    async def side() -> Done:
        return Done(amount=await bare.generate.remote([p.prompt_ids for p, _ in asked], seeds=seeds, **how))

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
