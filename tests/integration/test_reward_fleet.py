"""A real reward fleet with random weights: whatever the model would like to say, guided decoding makes it an answer."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from models import random_model

from actors.placement import connect
from actors.reward import RewardFleet
from t2g.errors import UserError
from t2g.feedback.card import make_card, write_card
from t2g.sections import ClusterConfig, FeedbackConfig, RewardEngineConfig, StyleConfig
from t2g.tasks.base import get_task
from t2g.types import Prompt, SpanFeedback

ENGINE = RewardEngineConfig(
    max_model_len=2048, max_new_tokens=640, max_critique_chars=40, max_spans=2, max_quote_chars=8, kv_cache_gib=0.1
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardFleet]:
    model = random_model(tmp_path_factory.mktemp("reward"), "qwen2")
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 2048}))
    config = FeedbackConfig(reward_model=str(model), engine=ENGINE)
    connect(ClusterConfig(object_store_gib=0.1), {"feedback.engine": ENGINE})
    fleet = RewardFleet(config, get_task("prompts"), seed=1, placement_timeout_s=30)
    fleet.wait_ready()
    yield fleet
    fleet.close()
    ray.shutdown()


PROMPT = Prompt(prompt_id="p", prompt_ids=np.zeros(1, np.int32), prompt_text="What hums?", task="prompts")


def judge(fleet: RewardFleet, responses: list[str]) -> list[SpanFeedback]:
    async def run() -> list[SpanFeedback]:
        return await asyncio.gather(*(fleet.judge(PROMPT, r) for r in responses))

    return asyncio.run(run())


def align(fleet: RewardFleet, response: str, critiques: list[str]) -> list[SpanFeedback]:
    async def run() -> list[SpanFeedback]:
        return await asyncio.gather(*(fleet.align(PROMPT, response, c) for c in critiques))

    return asyncio.run(run())


def test_every_answer_parses_and_is_the_same_when_asked_again(fleet: RewardFleet) -> None:
    responses = [f"The phone hums {i} times." for i in range(8)] + [""]
    answers = judge(fleet, responses)
    assert {a.status for a in answers} <= {"ok", "empty"}
    assert all(a.source == "reward_model" and a.version == fleet.version for a in answers)
    assert all(len(a.critique) <= 2 * 40 + 39 for a in answers)  # the bound of `answer_grammar`
    again = judge(fleet, responses)
    assert all(a is b for a, b in zip(answers, again, strict=True))


def test_a_response_too_long_for_the_window_fails_alone(fleet: RewardFleet) -> None:
    short, long = judge(fleet, ["The phone hums.", "The phone hums. " * 500])
    assert short.status in ("ok", "empty") and long.status == "failed"


def test_a_given_critique_comes_back_with_spans_and_is_kept_beside_the_models_own(fleet: RewardFleet) -> None:
    response = "The phone hums."
    (own,) = judge(fleet, [response])
    critiques = ['It "hums"\n\\ and 😀 is wrong.', "", "Long. " * 60]  # longer than what the model itself may write
    answers = align(fleet, response, critiques)
    assert [answer.critique for answer in answers] == critiques
    assert {answer.status for answer in answers} <= {"ok", "empty"}
    assert align(fleet, response, critiques)[0] is answers[0]
    assert judge(fleet, [response])[0] is own
    (failed,) = align(fleet, response, ["Long. " * 500])
    assert failed.status == "failed" and "do not fit" in failed.reason


def test_a_model_is_not_asked_for_what_it_was_not_trained_for(tmp_path: Path) -> None:
    """Refused before any engine is started."""
    task = get_task("prompts")
    write_card(tmp_path, make_card(task, StyleConfig(critique=False)))
    config = FeedbackConfig(reward_model=str(tmp_path), engine=ENGINE)
    with pytest.raises(UserError, match="was trained for task prompts, without a critique"):
        RewardFleet(config, task, seed=1, placement_timeout_s=30)
