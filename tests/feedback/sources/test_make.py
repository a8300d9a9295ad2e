"""Which source a config names, and whether it needs engines of our own."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from t2g.config import AnnotateConfig, FeedbackConfig
from t2g.errors import UserError
from t2g.feedback.sources.human import HumanFeedback
from t2g.feedback.sources.llm import LLMFeedback
from t2g.feedback.sources.make import make_local_source
from t2g.feedback.sources.program import ProgramFeedback
from t2g.tasks.base import get_task

URL = "http://127.0.0.1:9/v1"
KEY_VARIABLE = "T2G_TEST_ENDPOINT_KEY"
OWN = {"model": "m"}
SERVER = {"model": "m", "url": URL}
TEXT = {"spans": False}


@pytest.mark.parametrize(
    ("fields", "models", "engine_model"),
    [
        ({"source": "reward_model", "reward_model": "m"}, ["reward_model"], "reward_model"),
        ({"source": "reward_model", "reward_model": "m", "align": "llm"}, ["reward_model"], "reward_model"),
        ({"source": "llm", "llm": OWN}, ["llm"], "llm"),
        ({"source": "llm", "llm": SERVER}, ["llm"], None),
        ({"source": "llm", "llm": SERVER, "align": "reward_model"}, ["llm"], None),  # nothing to align
        ({"source": "llm", "llm": OWN, "align": "llm", "style": TEXT}, ["llm"], "llm"),
        (
            {"source": "llm", "llm": SERVER, "align": "reward_model", "reward_model": "m", "style": TEXT},
            ["llm", "reward_model"],
            "reward_model",
        ),
        ({"source": "program"}, [], None),
        ({"source": "pkg.mod:f", "align": "llm", "llm": OWN}, ["llm"], "llm"),
        ({"source": "pkg.mod:f", "align": "llm", "llm": SERVER}, ["llm"], None),
        ({"source": "human", "human_file": "f"}, [], None),
        ({"source": "human", "human_file": "f", "align": "llm", "llm": OWN}, ["llm"], "llm"),
        ({"source": "human", "human_file": "f", "align": "llm", "llm": SERVER}, ["llm"], None),
        (
            {"source": "human", "human_file": "f", "align": "reward_model", "reward_model": "m"},
            ["reward_model"],
            "reward_model",
        ),
    ],
)
def test_which_models_have_a_part_in_the_feedback(
    fields: dict[str, Any], models: list[str], engine_model: str | None
) -> None:
    for config in (FeedbackConfig(**fields), AnnotateConfig(**fields)):
        assert ([*config.models], config.engine_model) == (models, engine_model)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"source": "pkg.mod:f", "align": "llm"}, r"align=llm needs llm\.model"),
        ({"source": "pkg.mod:f", "align": "reward_model"}, "align=reward_model needs reward_model"),
        ({"source": "program", "style": TEXT}, r"style\.spans=false is for source=llm, and source is program"),
        ({"source": "llm", "llm": OWN, "style": TEXT}, r"style\.spans=false .* align needs to be llm or reward_model"),
        ({"source": "llm", "llm": OWN, "align": "llm", "style": TEXT | {"critique": False}}, "style.critique true"),
        (
            {"source": "llm", "llm": OWN, "align": "reward_model", "reward_model": "m", "style": TEXT},
            r"both need engines of our own; set llm\.url, or align=llm",
        ),
    ],
)
def test_a_critique_alone_needs_an_aligner(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        FeedbackConfig(**fields)


def test_programs() -> None:
    built_in = make_local_source(FeedbackConfig(source="program"), get_task("code"))
    named = make_local_source(FeedbackConfig(source="t2g.tasks.tiny.task:feedback_function"), get_task("prompts"))
    assert isinstance(built_in, ProgramFeedback) and isinstance(named, ProgramFeedback)
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
