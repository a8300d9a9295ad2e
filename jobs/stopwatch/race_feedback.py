"""From a reward model's answer to token rewards, on one core: parse, locate, project, by the length of the response."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from jobs.stopwatch.watch import Bench, Done, Race, Record
from t2g.config import RewardRuleConfig
from t2g.feedback import token_offsets, token_rewards
from t2g.feedback.parse import Quote, format_answer, parse_answer
from t2g.feedback.rewards import compute_sentence_ids
from t2g.tasks.base import Task
from t2g.text.offsets import decode

TOKENS = (2_000, 8_000, 32_000)
SPANS = 200  # of the longest, of the others in proportion
CHARACTERS = 12  # of a quote
LEAST_TOKENS = 32_000  # of a turn, in as many responses as that takes


async def measure(bench: Bench) -> list[Record]:
    tokenizer = bench.models.tokenizer
    rng = np.random.default_rng(bench.config.run.seed)
    letters = " ".join("aeiou" * 4_000)
    vocabulary = np.asarray(tokenizer(letters)["input_ids"])
    records: list[Record] = []
    for size in TOKENS:
        spans = SPANS * size // max(TOKENS)
        rounds = LEAST_TOKENS // size
        responses = [rng.choice(vocabulary, size).astype(np.int32) for _ in range(rounds)]
        answers = [answer_about(decode(tokenizer, ids), spans) for ids in responses]
        side = partial(rewards_of, tokenizer, responses, answers)
        race = Race(name=f"feedback, {size:,} tokens", unit="tokens", sides={"t2g": side})
        records.append(await bench.race(race))
    return records


def answer_about(text: str, spans: int) -> str:
    starts = np.linspace(0, len(text) - CHARACTERS, spans).astype(int)
    quotes = [Quote(quote=text[start : start + CHARACTERS]) for start in starts]
    return format_answer("Some of it is good, and some of it is poor.", quotes[::2], quotes[1::2])


async def rewards_of(tokenizer: Any, responses: Sequence[np.ndarray], answers: Sequence[str]) -> Done:
    paid = 0
    rule = RewardRuleConfig()
    for ids, answer in zip(responses, answers, strict=True):
        text = decode(tokenizer, ids)
        feedback = parse_answer(answer, text, source="benchmark", version="")
        offsets = token_offsets(tokenizer, ids)
        rewards = token_rewards(offsets, feedback.spans, text=text, rule=rule)
        paid += np.count_nonzero(rewards)
        compute_sentence_ids(offsets, text, Task.step_pattern)
    return Done(amount=sum(map(len, responses)), more={"tokens paid": paid})
