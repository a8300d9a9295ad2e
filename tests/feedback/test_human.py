"""Judgements from a file."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t2g.config import FeedbackConfig
from t2g.errors import UserError
from t2g.feedback.human import HumanFeedback
from t2g.feedback.sources import make_local_source
from t2g.tasks.prompts import PromptsTask
from t2g.types import Prompt, SpanFeedback


def prompt(prompt_id: str, text: str) -> Prompt:
    return Prompt(prompt_id=prompt_id, prompt_ids=np.zeros(0, np.int32), prompt_text=text, task="prompts")


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def judge(source: HumanFeedback, asked: Prompt, response: str) -> SpanFeedback:
    return asyncio.run(source.judge(asked, response))


ROW = {"prompt_id": "7", "response": "a phone", "critique": "Wrong thing: a phone.", "poor": ["phone"]}


def test_by_id_and_by_text(tmp_path: Path) -> None:
    by_text = {"prompt": "What?", "response": "yes", "critique": "Right.", "good": [{"quote": "yes", "severity": 3}]}
    path = write(tmp_path / "human.jsonl", ROW, by_text)
    source = make_local_source(FeedbackConfig(source="human", human_file=str(path)), PromptsTask())
    assert isinstance(source, HumanFeedback)
    found = judge(source, prompt("7", "anything"), "a phone")
    assert [(s.start, s.end, s.label) for s in found.spans] == [(2, 7, -1)]
    assert (found.status, found.source, found.num_located) == ("ok", "human", 1)
    assert found.version.startswith("human.jsonl@")
    assert judge(source, prompt("8", "What?"), "yes").spans[0].severity == 3


def test_the_text_of_a_prompt_counts_before_an_id_that_another_data_set_may_have(tmp_path: Path) -> None:
    def row(critique: str, **asked: str) -> dict[str, Any]:
        return {"response": "yes", "critique": critique, **asked}

    source = HumanFeedback(
        write(
            tmp_path / "human.jsonl",
            row("id", prompt_id="7"),
            row("text", prompt="Who?"),
            row("both", prompt_id="7", prompt="Why?"),
        )
    )
    critiques = {
        asked: judge(source, prompt(*asked), "yes").critique
        for asked in (("7", "Who?"), ("7", "Why?"), ("7", "When?"), ("8", "Who?"))
    }
    assert list(critiques.values()) == ["text", "both", "id", "text"]
    assert judge(source, prompt("8", "Why?"), "yes").status == "failed"  # judged for prompt 7 only


def test_a_response_that_nobody_judged_is_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = HumanFeedback(write(tmp_path / "human.jsonl", ROW))
    assert judge(source, prompt("7", ""), "a phone.").status == "failed"
    assert judge(source, prompt("8", ""), "a phone").status == "failed"
    assert ["no judgement of a response to prompt 7" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"response": "a"}, "needs a response and a prompt_id or prompt"),
        ({"prompt_id": "1"}, "needs a response"),
        ({"prompt_id": 7, "prompt": "a", "response": "a"}, "prompt_id is 7; it needs to be a text"),
        ({"prompt": ["a"], "response": "a"}, "prompt is .* needs to be a text"),
        ({"prompt_id": "1", "response": "a"}, "the critique is None"),
        ({"prompt_id": "1", "response": "a", "critique": "c", "good": "a"}, "need to be a list"),
        ({"prompt_id": "1", "response": "a", "critique": "c", "good": [3]}, "is no quote"),
        ({"prompt_id": "1", "response": "a", "critique": "c", "good": ["b"]}, "1 of its 1 quotes do not stand"),
        (ROW, "a line before it judged already"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    path = write(tmp_path / "human.jsonl", ROW, row)
    with pytest.raises(UserError, match=reason) as error:
        HumanFeedback(path)
    assert "human.jsonl:2: " in str(error.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        HumanFeedback(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="holds no judgements"):
        HumanFeedback(write(tmp_path / "empty.jsonl"))
