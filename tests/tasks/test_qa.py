"""UltraFeedback: the published list, the hub's rows, and what an annotator is shown."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t2g.config import DataConfig
from t2g.data.load import load_records
from t2g.sandbox import SandboxConfig
from t2g.tasks.base import get_task
from t2g.types import Prompt

TASK = get_task("qa")
ROWS = load_records(DataConfig(path=str(Path(__file__).parents[1] / "data" / "ultrafeedback.json")))
TURNS = [
    {"role": "user", "content": "At what temperature does water boil?"},
    {"role": "assistant", "content": "At 100 °C at sea level."},
    {"role": "user", "content": "And in Fahrenheit?"},
]


def prompt(record: dict[str, Any]) -> Prompt:
    return Prompt(
        prompt_id="1", prompt_ids=np.zeros(0, np.int32), prompt_text="p", task="qa", payload=TASK.payload(record)
    )


def test_a_published_record() -> None:
    first = ROWS[0]
    assert TASK.policy_messages(first) == [{"role": "user", "content": "Why is the sky blue?"}]
    assert TASK.response(first) == first["response"][-1]["content"]
    assert TASK.notes(prompt(first), first["response"][-1]["content"]) == (
        f"A critique of this response that was published with it:\n{first['critique']}"
    )
    assert TASK.notes(prompt(first), "another response") is None
    assert (TASK.reference(first), TASK.measure(prompt(first), "x", sandbox=SandboxConfig())) == (None, None)


@pytest.mark.parametrize("number", [4, 8])  # none, and an empty one
def test_no_published_critique(number: int) -> None:
    row = ROWS[number - 1]
    assert TASK.notes(prompt(row), TASK.response(row) or "") is None


def test_the_turns_before_the_response_are_the_prompt() -> None:
    row = next(row for row in ROWS if len(row["response"]) > 2)
    assert TASK.policy_messages(row) == TURNS
    assert TASK.prompt_text(row).endswith("user: And in Fahrenheit?")
    assert TASK.policy_messages(row, 3) == [*TURNS[:2], {"role": "user", "content": "And"}]


def test_a_hub_row() -> None:
    chosen = [TURNS[0], TURNS[1]]
    row = {"prompt": TURNS[0]["content"], "prompt_id": "ab", "chosen": chosen, "messages": chosen, "rejected": []}
    assert TASK.policy_messages(row) == [TURNS[0]]
    assert TASK.response(row) == TASK.reference(row) == "At 100 °C at sea level."


def test_a_response_that_is_a_text() -> None:
    assert TASK.response({"prompt": "p", "response": "r"}) == "r"
    assert TASK.response({"prompt": "p"}) is None


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ([], "field response is no list of"),
        ([{"role": "user", "content": "x"}], "field response ends with a message by user; a response is by assistant"),
        ([{"role": "assistant", "content": " "}], "field content is ' '"),
        ([{"role": "assistant"}], r"response\[0\] needs a role"),
        (3, "field response is 3"),
        ("", "field response is ''"),
    ],
)
def test_a_response_that_is_none(response: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TASK.response({"prompt": "p", "response": response})
