"""The reward model: its fleet, and one engine of it alone, beside bare `LLM.generate` on the same prompts, with the
grammar and without."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from actors.engines.reward import RewardFleet
from jobs.benchmark_phases.bare import BareEngine, OurEngine, begin
from jobs.benchmark_phases.timer import Bench, Comparison, Done, Record, Side
from jobs.common.fleets import Fleets
from t2g.config import FeedbackConfig
from t2g.feedback.card import make_card, write_card
from t2g.feedback.grammar import make_answer_grammar
from t2g.feedback.reward_prompt import build_feedback_prompt
from t2g.tasks.base import SPARSE, get_task
from t2g.types import Prompt

AIM = 0.9
ANSWERS = 32
RESPONSE = "a good answer, and a bad one. " * 8


async def measure(bench: Bench) -> list[Record]:
    model = bench.models.fixed
    tokenizer = bench.models.tokenizer
    engine = bench.config.reward_engine
    task = get_task("prompts")
    write_card(model, make_card(task, SPARSE))
    config = FeedbackConfig(source="reward_model", reward_model=str(model), engine=engine)
    prompts: list[Prompt] = []
    ids: list[np.ndarray] = []
    for index, base_prompt in enumerate(bench.models.prompts[:ANSWERS]):
        prompt = replace(base_prompt, prompt_id=f"r{index}")
        prompts.append(prompt)
        ids.append(build_feedback_prompt(task, prompt, RESPONSE, tokenizer, engine.max_prompt_tokens))

    bare_side, alone_side = plain_engines(bench, ids)
    grammar = make_answer_grammar(
        max_critique_chars=engine.max_critique_chars, max_spans=engine.max_spans, max_quote_chars=engine.max_quote_chars
    )
    records: list[Record] = []
    with Fleets() as fleets:
        fleet = fleets.feedback(config, task, bench.config)
        for name, guide, request in (
            ("reward, with the grammar", {"grammar": grammar}, fleet.judge),
            ("reward, without", None, fleet.judge_unguided),
        ):
            sides: dict[str, Side] = {
                "bare vLLM": partial(bare_side, guide),
                "engine alone": partial(alone_side, guide),
                "fleet": partial(ask_fleet, fleet, prompts, request),
            }
            comparison = Comparison(name=name, unit="answers", sides=sides, reference="bare vLLM", aims={"fleet": AIM})
            records.append(await bench.measure(comparison))
        return records


GuidedSide = Callable[[dict[str, str] | None], Awaitable[Done]]  # takes a guide


def plain_engines(bench: Bench, ids: list[np.ndarray]) -> tuple[GuidedSide, GuidedSide]:
    """Return the sides of bare vLLM and of our engine without its fleet."""
    engine = bench.config.reward_engine
    model = str(bench.models.fixed)
    start = partial(begin, role=engine, model=model, config=engine, seed=bench.config.run.seed, guided=True)
    bare = start(BareEngine)
    alone = start(OurEngine)

    eos = bench.models.tokenizer.eos_token_id
    ask_bare = partial(
        bare.generate.remote, ids, logprobs=0, temperature=0.0, max_tokens=engine.max_new_tokens, stop_token_ids=[eos]
    )
    ask_alone = partial(
        alone.generate.remote, ids, temperature=0.0, max_new_tokens=engine.max_new_tokens, seeds=[None] * ANSWERS
    )
    return partial(ask_actor, ask_bare), partial(ask_actor, ask_alone)


async def ask_actor(generate: Any, guide: dict[str, str] | None) -> Done:
    tokens = await generate(guide=guide)
    return Done(amount=ANSWERS, more={"tokens": tokens})


async def ask_fleet(fleet: RewardFleet, prompts: list[Prompt], judge: Any) -> Done:
    fleet.clear_cache()
    answers = await asyncio.gather(*(judge(prompt, RESPONSE) for prompt in prompts))
    num_failed = sum(feedback.status == "failed" for feedback in answers)
    return Done(amount=ANSWERS, more={"failed": num_failed})
