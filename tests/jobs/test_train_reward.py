"""How the reward job measures a served model, with a fake in the place of the engine."""

import asyncio
from pathlib import Path

import pytest

from jobs.train_reward import measure
from t2g.data.records import AnnotatedRecord, read_record
from t2g.feedback.parse import parse_answer
from t2g.tasks.tiny_assets import build_tokenizer
from t2g.types import Prompt, SpanFeedback

GUIDED = {
    "ab cd": '{"critique": "x", "good": ["ab"], "poor": ["zz"]}',  # finds the good one, misses the poor one
    "ef gh": '{"critique": "x", "good": [], "poor": ["ef", "gh"]}',
}
UNGUIDED = {"ab cd": '{"critique": "x", "good": [], "poor": []}', "ef gh": "I think that"}


class FakeFleet:
    """Answers from two tables."""

    name = "fake"

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        return parse_answer(GUIDED[response_text], response_text, source="fake", version="1")

    async def judge_unguided(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        return parse_answer(UNGUIDED[response_text], response_text, source="fake", version="1")


def record(response: str, good: list[str], poor: list[str]) -> AnnotatedRecord:
    return read_record({"prompt": "p", "response": response, "critique": "c", "good": good, "poor": poor})


def test_spans_come_from_the_guided_answer_and_the_parse_rate_from_the_other(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path, ["x"], vocab_size=261)  # a token a byte
    records = [record("ab cd", ["ab"], ["cd"]), record("ef gh", [], ["ef"])]
    metrics = asyncio.run(measure(FakeFleet(), records, tokenizer))
    assert metrics == pytest.approx(
        {
            "good_precision": 1.0, "good_recall": 1.0, "good_f1": 1.0, "good_tokens": 2,
            "poor_precision": 2 / 4, "poor_recall": 2 / 4, "poor_f1": 4 / 8, "poor_tokens": 4,
            "located_rate": 3 / 4, "parse_rate": 1 / 2, "num_records": 2,
        }
    )  # fmt: skip
