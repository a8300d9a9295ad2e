"""Which source a config names, and whether it needs engines of our own."""

import json
from pathlib import Path
from typing import Any

import pytest

from t2g.config import AnnotateConfig, FeedbackConfig
from t2g.errors import UserError
from t2g.feedback.sources.human import HumanFeedback
from t2g.feedback.sources.llm import LLMFeedback
from t2g.feedback.sources.make import make_local_source
from t2g.feedback.sources.program import ProgramFeedback
from t2g.tasks.base import get_task

URL, KEY_VARIABLE = "http://127.0.0.1:9/v1", "T2G_TEST_ENDPOINT_KEY"


@pytest.mark.parametrize(
    ("fields", "model", "engines"),
    [
        ({"source": "reward_model", "reward_model": "m"}, "reward_model", True),
        ({"source": "llm", "llm": {"model": "m"}}, "llm", True),
        ({"source": "llm", "llm": {"model": "m", "url": URL}}, "llm", False),
        ({"source": "program"}, None, False),
        ({"source": "program", "align": "llm", "llm": {"model": "m"}}, None, False),  # nothing to align
        ({"source": "human", "human_file": "f"}, None, False),
        ({"source": "human", "human_file": "f", "align": "llm", "llm": {"model": "m"}}, "llm", True),
        ({"source": "human", "human_file": "f", "align": "llm", "llm": {"model": "m", "url": URL}}, "llm", False),
        ({"source": "human", "human_file": "f", "align": "reward_model", "reward_model": "m"}, "reward_model", True),
    ],
)
def test_which_model_has_a_part_in_the_feedback(fields: dict[str, Any], model: str | None, engines: bool) -> None:
    config = AnnotateConfig(**fields)
    assert (config.judge_model, config.own_engines) == (model, engines)


def test_programs() -> None:
    own = make_local_source(FeedbackConfig(source="program"), get_task("code"))
    named = make_local_source(FeedbackConfig(source="t2g.tasks.tiny.task:feedback_function"), get_task("prompts"))
    assert isinstance(own, ProgramFeedback) and isinstance(named, ProgramFeedback)
    with pytest.raises(UserError, match=r"task prompts has no program of its own; name one as pkg\.mod:function"):
        make_local_source(FeedbackConfig(source="program"), get_task("prompts"))


def test_an_endpoint_is_an_annotator_and_an_aligner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = {"model": "judge", "url": URL, "key_env": KEY_VARIABLE}
    config = FeedbackConfig(source="llm", llm=llm)  # type: ignore[arg-type]
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"{KEY_VARIABLE}, which is not set"):
        make_local_source(config, get_task("prompts"))
    monkeypatch.setenv(KEY_VARIABLE, "word")
    assert isinstance(make_local_source(config, get_task("prompts")), LLMFeedback)

    path = tmp_path / "human.jsonl"
    path.write_text(json.dumps({"prompt": "Why?", "response": "So.", "critique": "Too short."}) + "\n")
    human = AnnotateConfig(source="human", human_file=str(path), align="llm", llm=llm)  # type: ignore[arg-type]
    source = make_local_source(human, get_task("prompts"))
    assert isinstance(source, HumanFeedback) and isinstance(source.aligner, LLMFeedback)
