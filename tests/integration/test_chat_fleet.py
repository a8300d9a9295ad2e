"""An annotator on engines of our own: guided decoding holds it to the schema.

The model knows which character follows which, and so writes texts of one letter and a list with one span.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import bigram_model

from actors.engines.chat import ChatFleet
from jobs.common.fleets import Fleets
from t2g.config import AnnotateConfig, JobConfig, LLMConfig, RewardEngineConfig
from t2g.errors import UserError
from t2g.feedback.sources.chat_client import ChatCompletion, ChatError, ChatRequest
from t2g.feedback.sources.llm import LLMFeedback
from t2g.tasks.base import get_task
from t2g.text.tokenizer import encode_chat, load_tokenizer
from t2g.types import Prompt, SpanFeedback

pytestmark = pytest.mark.slow  # an engine of its own; test_reward_fleet has one that a schema guides

ENGINE = RewardEngineConfig(max_model_len=4096, kv_cache_gib=0.1)
COLOURS = ["red", "green", "blue", "grey", "pink", "gold", "teal", "cyan"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colours": {"type": "array", "items": {"enum": COLOURS}, "minItems": 4, "maxItems": 4}},
    "required": ["colours"],
    "additionalProperties": False,
}
PROMPT = Prompt(prompt_id="p", prompt_ids=np.zeros(0, np.int32), prompt_text="What hums?", task="prompts")
QUESTION = [{"role": "user", "content": "Which colours? <|im_end|>"}]


def make_config(model: Path, max_output_tokens: int = 48) -> AnnotateConfig:
    llm = LLMConfig(model=str(model), max_output_tokens=max_output_tokens, max_tries=2)
    return AnnotateConfig(source="llm", engine=ENGINE, llm=llm)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    follows = {'"': "a", "a": '"', "[": "{", "}": "]", ":": "1", "1": ","}
    folder = bigram_model(tmp_path_factory.mktemp("annotator"), follows)
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": ENGINE.max_model_len}))
    return folder


@pytest.fixture(scope="module")
def fleets(cluster: None) -> Iterator[Fleets]:
    with Fleets() as fleets:
        yield fleets


@pytest.fixture(scope="module")
def fleet(fleets: Fleets, model: Path) -> ChatFleet:
    return fleets.feedback(make_config(model), get_task("prompts"), JobConfig()).client.chat


def ask(fleet: ChatFleet, *seeds: int, temperature: float = 0.0, question: str | None = None) -> list[ChatCompletion]:
    messages = QUESTION if question is None else [{"role": "user", "content": question}]

    async def run() -> list[ChatCompletion]:
        return await asyncio.gather(
            *(
                fleet.complete(
                    ChatRequest(
                        messages=messages, schema=SCHEMA, max_output_tokens=64, temperature=temperature, seed=seed
                    )
                )
                for seed in seeds
            )
        )

    return asyncio.run(run())


def test_answers_follow_the_schema_and_the_seed(fleet: ChatFleet, model: Path) -> None:
    first, again = ask(fleet, 1, 2)
    assert first == again  # at temperature 0 no seed has a part
    assert first.finish_reason == "stop"
    assert set(json.loads(first.text)["colours"]) <= set(COLOURS)
    assert first.prompt_tokens == len(encode_chat(load_tokenizer(str(model)), QUESTION))
    warm = ask(fleet, 1, 1, 2, 3, 4, temperature=2.0)
    assert warm[0].text == warm[1].text
    assert len({answer.text for answer in warm}) > 1


def test_a_question_that_does_not_fit_is_refused_in_a_sentence(fleet: ChatFleet) -> None:
    with pytest.raises(ChatError, match=r"do not fit into engine\.max_model_len=4096") as caught:
        ask(fleet, 1, question="red " * 4000)
    assert not caught.value.is_transient


def test_an_answer_becomes_feedback(fleet: ChatFleet, model: Path) -> None:
    source = LLMFeedback(fleet, make_config(model, max_output_tokens=400), get_task("prompts"))
    feedback = asyncio.run(source.judge(PROMPT, "A phone that hums."))
    assert (feedback.source, feedback.status, feedback.critique) == ("llm", "ok", "a")
    (span,) = feedback.spans
    assert (span.start, span.end, span.severity, span.critique_range) == (10, 11, 1, (0, 1))


def test_an_annotation_that_is_cut_is_unparsable_with_a_reason(fleets: Fleets, model: Path) -> None:
    source = fleets.feedback(make_config(model), get_task("prompts"), JobConfig())

    async def run() -> list[SpanFeedback]:
        return await asyncio.gather(*(source.judge(PROMPT, f"The phone hums {i} times.") for i in range(3)))

    for feedback in asyncio.run(run()):
        assert (feedback.source, feedback.status) == ("llm", "unparsable")
        assert "truncated after 48 tokens" in feedback.reason and feedback.version.startswith(str(model))


def test_a_window_too_small_is_reported_before_an_engine_starts(model: Path) -> None:
    config = make_config(model).model_copy(update={"llm": LLMConfig(model=str(model), max_output_tokens=4096)})
    with pytest.raises(UserError, match=r"llm\.max_output_tokens=4096 leaves no room"):
        ChatFleet(config, seed=1, placement_timeout_s=1)
