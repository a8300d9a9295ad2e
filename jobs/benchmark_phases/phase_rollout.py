"""Sampling: the fleet, and one engine of it alone, beside bare `LLM.generate`; responses of one length, and of
exponential lengths."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import chain, product
from pathlib import Path

from actors.engines.rollout import sample_seed
from jobs.benchmark_phases.bare import BareEngine, OurEngine, begin
from jobs.benchmark_phases.timer import Bench, Comparison, Done, Record, Side
from jobs.common.fleets import Fleets
from t2g.config import ModelConfig
from t2g.interfaces import Sampling

AIM = 0.95
SEED = 1


async def measure(bench: Bench) -> list[Record]:
    fixed = await measure_sampling(bench, "rollout, fixed length", bench.models.fixed)
    exponential = await measure_sampling(bench, "rollout, exponential", bench.models.exponential)
    return [fixed, exponential]


async def measure_sampling(bench: Bench, name: str, model: Path) -> Record:
    """Measure the tokens that bare vLLM, our engine and our fleet sample in a second."""
    config = bench.config
    rollout = config.rollout
    prompts = bench.models.prompts[: rollout.prompts_per_step]
    sampling = Sampling(
        num_samples=rollout.samples_per_prompt, temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens, seed=SEED,
    )  # fmt: skip
    sides = plain_sides(bench, model)
    with Fleets() as fleets:
        fleet = fleets.rollouts(ModelConfig(policy=str(model)), rollout, config)

        async def ask_fleet() -> int:
            groups = await asyncio.gather(*(fleet.sample(prompt, sampling) for prompt in prompts))
            return sum(len(response.response_ids) for response in chain.from_iterable(groups))

        sides["fleet"] = partial(count_tokens, ask_fleet)
        comparison = Comparison(name=name, unit="tokens", sides=sides, reference="bare vLLM", aims={"fleet": AIM})
        return await bench.measure(comparison)


def plain_sides(bench: Bench, model: Path) -> dict[str, Side]:
    """Return the sides of bare vLLM and of our engine without its fleet."""
    rollout = bench.config.rollout
    prompts = bench.models.prompts[: rollout.prompts_per_step]
    requests = list(product(prompts, range(rollout.samples_per_prompt)))
    ids = [prompt.prompt_ids for prompt, _ in requests]
    seeds = [sample_seed(SEED, prompt.prompt_id, index) for prompt, index in requests]  # as the fleet gives them

    bare = begin(BareEngine, rollout, str(model), rollout, bench.config.run.seed)
    alone = begin(OurEngine, rollout, str(model), rollout, bench.config.run.seed)
    params = {"temperature": rollout.temperature, "max_tokens": rollout.max_new_tokens, "top_k": 0}
    eos = bench.models.tokenizer.eos_token_id
    ask_bare = partial(bare.generate.remote, ids, stop_token_ids=[eos], **params)
    ask_bare_alike = partial(ask_bare, seeds=seeds, logprobs=0)
    ask_alone = partial(
        alone.generate.remote, ids, seeds=seeds, temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens
    )
    return {
        "bare vLLM": partial(count_tokens, ask_bare),
        "bare vLLM, seeds and logprobs": partial(count_tokens, ask_bare_alike),
        "engine alone": partial(count_tokens, ask_alone),
    }


async def count_tokens(generate: Callable[[], Awaitable[int]]) -> Done:
    tokens = await generate()
    return Done(amount=tokens)
