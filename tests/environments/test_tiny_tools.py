"""The world of tools: questions, answers, planted faults, and conversations as the tools would give them."""

import asyncio
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import ROOT
from t2g.config import DemoJob, PolicyJob, WorldConfig, loading
from t2g.environments.environment import Environment
from t2g.environments.tiny.table_tools import list_schemas, make_conversations
from t2g.sandbox import SandboxConfig
from t2g.tasks.base import get_task
from t2g.tasks.tiny import assets, lookups
from t2g.tasks.tiny.lookups import TableCell, TableQuestion
from t2g.text.tokenizer import encode_chat
from t2g.text.tool_calls import read_hermes_calls
from t2g.types import Prompt, ToolResult

CONFIG = loading.load(DemoJob, ROOT / "configs" / "tiny" / "tools.yaml")
NO_FAULTS = WorldConfig(wrong=0, missing=0, invented=0, num_repairs=60)
ALL_WRONG = WorldConfig(wrong=1, missing=0, invented=0)
QUESTION = re.compile(r"(\w+) of (\w+) (plus|minus|times) (\w+) of (\w+)")


def make_records(rates: WorldConfig, *, heldout: bool = False, count: int = 200) -> list[dict[str, Any]]:
    return [*lookups.make_records(count=count, heldout=heldout, rates=rates, seed=3)]


def read_question(record: dict[str, Any]) -> TableQuestion:
    match = QUESTION.fullmatch(record["question"])
    assert match is not None
    field, item, word, other_field, other_item = match.groups()
    return TableQuestion(TableCell(item, field), word, TableCell(other_item, other_field))


def find_answer(record: dict[str, Any]) -> int:
    """Return the answer by the question's words."""
    question = read_question(record)
    left = record["table"][question.left.item][question.left.field]
    right = record["table"][question.right.item][question.right.field]
    return {"plus": left + right, "minus": left - right, "times": left * right}[question.word]


def make_prompt(record: dict[str, Any]) -> Prompt:
    task = get_task("tiny_tools")
    return Prompt(prompt_id="1", prompt_text=task.prompt_text(record), task=task.name, payload=task.payload(record))


@cache
def make_environment() -> Environment:
    job = {"model": {"policy": "m"}, "data": {"path": "d"}, "environment": "tiny_tools"}
    feedback = {"feedback": {"source": "next_message"}}
    return Environment(PolicyJob.model_validate(job | feedback), get_task("tiny_tools"))


def call(turn: str, record: dict[str, Any]) -> list[ToolResult]:
    environment = make_environment()
    return asyncio.run(environment.call_tools(make_prompt(record), read_hermes_calls(turn)))


def test_answers_are_those_of_the_tables_and_no_question_is_in_both_splits() -> None:
    questions = []
    for heldout in (False, True):
        records = make_records(NO_FAULTS, heldout=heldout)
        assert [record["answer"] for record in records] == [str(find_answer(record)) for record in records]
        questions.append({record["question"] for record in records})
    assert questions[0].isdisjoint(questions[1])


def test_the_answer_alone_is_right() -> None:
    record = make_records(NO_FAULTS, count=1)[0]
    task = get_task("tiny_tools")
    prompt = make_prompt(record)
    for response, expected in ((record["answer"], 1), (f" {record['answer']}\n", 1), ("100", 0), (record["turn"], 0)):
        assert task.measure(prompt, response, sandbox=SandboxConfig()) == {"answered": expected}


def test_turns_without_faults_lead_to_the_answer() -> None:
    rng = np.random.default_rng(1)
    for record in make_records(NO_FAULTS, count=20):
        left, right = (int(result.text) for result in call(record["turn"], record))
        turn = lookups.make_calculation(read_question(record), left, right, NO_FAULTS, rng)
        assert [result.text for result in call(turn, record)] == [record["answer"]]


def test_a_tool_refuses_each_kind_of_fault_and_says_where_it_is() -> None:
    record = make_records(NO_FAULTS, count=1)[0]
    rng = np.random.default_rng(1)
    question = TableQuestion(TableCell("phone", "price"), "plus", TableCell("lamp", "stock"))
    messages = set()
    for _ in range(60):
        turn = lookups.make_lookups(question, ALL_WRONG, rng)
        turn += lookups.make_calculation(question, 7, 5, ALL_WRONG, rng)
        results = call(turn, record)
        assert all(result.is_fault for result in results)
        messages |= {re.sub(r"character \d+", "character", result.text) for result in results}
    assert messages == {
        'Error: there is no tool "search"; the tools are lookup, calculate',
        'Error: there is no tool "compute"; the tools are lookup, calculate',
        "Error: `item` is missing; `thing` is no argument of lookup",
        "Error: `left` is missing; `first` is no argument of calculate",
        "Error: ValueError: `item` is phones; the table has no such item",
        "Error: ValueError: `item` is lamps; the table has no such item",
        'Error: `left` is "7"; it needs to be integer',
        "Error: the call is no JSON: Expecting ',' delimiter at character",
    }


def test_conversations_have_the_results_of_the_tools() -> None:
    rates = WorldConfig(wrong=0.5, missing=0, invented=0.2, num_repairs=60)
    num_errors = 0
    for row in make_conversations(rates):
        messages = row["messages"]
        starts = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for start, end in pairwise([*starts, len(messages)]):
            expected = [message["content"] for message in messages[start + 1 : end]]
            assert [result.text for result in call(messages[start]["content"], row)] == expected
            num_errors += any(text.startswith("Error") for text in expected)
    assert num_errors > 30


def test_conversations_without_faults_are_a_calculation_or_the_answer() -> None:
    for row in make_conversations(NO_FAULTS):
        answer = str(find_answer(row))
        if len(row["messages"]) == 3:
            assert [result.text for result in call(row["turn"], row)] == [answer]
        else:
            assert row["turn"] == answer


def test_shares_of_faults() -> None:
    rates = WorldConfig(wrong=0.4, missing=0.1, invented=0)
    is_guess = []
    is_right = []
    for record in make_records(rates, count=2000):
        right = lookups.make_lookups(read_question(record), NO_FAULTS, np.random.default_rng(0))
        is_guess.append(not read_hermes_calls(record["turn"]))
        is_right.append(record["turn"] == right)
    assert np.mean(is_guess) == pytest.approx(0.1, abs=0.02)
    assert np.mean(is_right) == pytest.approx(0.9 * 0.6**2, abs=0.03)


def test_chats_of_the_tokenizer_name_the_tools_and_end_each_message(tmp_path: Path) -> None:
    tokenizer = assets.build_tools_tokenizer(tmp_path, list_schemas())
    messages = [{"role": "user", "content": "price of lamp"}, {"role": "assistant", "content": "x"}]
    messages.append({"role": "tool", "content": "7"})
    text = tokenizer.decode(encode_chat(tokenizer, messages))
    expected = "<|system|>lookup calculate<|end|><|user|>price of lamp<|end|><|assistant|>x<|end|><|tool|>7<|end|>"
    assert text == expected + "<|assistant|>"
    word_ids = tokenizer(["phone", "phones", "search", "thing", "-7", "81"], add_special_tokens=False)["input_ids"]
    assert [len(ids) for ids in word_ids] == [1] * 6
    longest = CONFIG.rollout.max_model_len - CONFIG.rollout.max_new_tokens
    for row in make_conversations(CONFIG.world.model_copy(update={"num_repairs": 100})):
        chat = [{"role": "user", "content": row["question"]}, *row["messages"]]
        assert len(encode_chat(tokenizer, chat)) < longest
