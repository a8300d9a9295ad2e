"""The reward model: its fleet, and one engine of it alone, beside bare `LLM.generate` on the same prompts, with the
grammar and without."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from actors.engines.reward import RewardFleet
from jobs.common.fleets import Fleets
from jobs.stopwatch.bare import BareEngine, OurEngine, begin
from jobs.stopwatch.watch import Bench, Done, Race, Record, Side
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
    model, task, engine = bench.models.fixed, get_task("prompts"), bench.config.reward_engine
    write_card(model, make_card(task, SPARSE))
    config = FeedbackConfig(source="reward_model", reward_model=str(model), engine=engine)
    prompts = [replace(prompt, prompt_id=f"r{i}") for i, prompt in enumerate(bench.models.prompts[:ANSWERS])]
    tokenizer = bench.models.tokenizer
    ids = [build_feedback_prompt(task, p, RESPONSE, tokenizer, engine.max_prompt_tokens) for p in prompts]
    grammar = make_answer_grammar(
        max_critique_chars=engine.max_critique_chars, max_spans=engine.max_spans, max_quote_chars=engine.max_quote_chars
    )
    how = {"temperature": 0.0, "max_tokens": engine.max_new_tokens, "stop_token_ids": [tokenizer.eos_token_id]}
    ours = {"temperature": 0.0, "max_new_tokens": engine.max_new_tokens, "seeds": [None] * ANSWERS}
    bare, alone = (
        begin(kind, engine, str(model), engine, bench.config.run.seed, True) for kind in (BareEngine, OurEngine)
    )
    with Fleets() as fleets:
        fleet, races = fleets.feedback(config, task, bench.config), []
        for name, guide, ask in (
            ("reward, with the grammar", {"grammar": grammar}, fleet.judge),
            ("reward, without", None, fleet.judge_unguided),
        ):
            sides: dict[str, Side] = {
                "bare vLLM": partial(ask_actor, partial(bare.generate.remote, ids, logprobs=0, guide=guide, **how)),
                "engine alone": partial(ask_actor, partial(alone.generate.remote, ids, guide=guide, **ours)),
                "fleet": partial(ask_fleet, fleet, prompts, ask),
            }
            race = Race(name=name, unit="answers", sides=sides, reference="bare vLLM", aims={"fleet": AIM})
            races.append(await bench.race(race))
        return races


async def ask_actor(generate: Any) -> Done:
    return Done(amount=ANSWERS, more={"tokens": await generate()})


async def ask_fleet(fleet: RewardFleet, prompts: list[Prompt], judge: Any) -> Done:
    fleet.clear_cache()
    answers = await asyncio.gather(*(judge(prompt, RESPONSE) for prompt in prompts))
    return Done(amount=ANSWERS, more={"failed": sum(feedback.status == "failed" for feedback in answers)})
