"""A real reward fleet with random weights: whatever the model would like to say, guided decoding makes it an answer."""

import asyncio
import json
from collections.abc import Iterator

import numpy as np
import pytest
import ray
from models import random_model

from actors.placement import connect
from actors.reward import RewardFleet
from t2g.config import ClusterConfig, FeedbackConfig, RewardEngineConfig
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


def judge(fleet: RewardFleet, responses: list[str]) -> list[SpanFeedback]:
    blank = np.zeros(1, np.int32)
    prompt = Prompt(prompt_id="p", prompt_ids=blank, prompt_text="What hums?", task="prompts")

    async def run() -> list[SpanFeedback]:
        return await asyncio.gather(*(fleet.judge(prompt, r) for r in responses))

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
