"""The tasks: SLF5K as published and as on the hub, the tiny world as one of them, and finding a task by name."""

import sys
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from t2g.config import DataConfig, StyleConfig, WorldConfig
from t2g.data.load import load_records
from t2g.errors import UserError
from t2g.feedback.reward_prompt import build_feedback_prompt, compute_prompt_version
from t2g.sandbox import SandboxConfig
from t2g.tasks.base import get_task
from t2g.tasks.tiny import world
from t2g.tasks.tiny.assets import build_tokenizer
from t2g.tasks.tiny.task import feedback_function
from t2g.types import Prompt

PUBLISHED = Path(__file__).parents[1] / "data" / "slf5k.json"
TASK = get_task("summarization")
SANDBOX = SandboxConfig()
HUB_ROW = {
    "id": "t3_9",
    "subreddit": "tech",
    "title": "Help",
    "post": "My lamp leaks.",
    "tldr_human_reference_summary": "lamp leaks",
    "ideal_human_summary": "A lamp leaks.",
    "generated_summary_for_feedback": "A lamp.",
    "feedback": "Say that it leaks.",
}


def prompt(text: str, **payload: Any) -> Prompt:
    return Prompt(prompt_id="1", prompt_ids=np.zeros(0, np.int32), prompt_text=text, task="t", payload=payload)


def test_a_published_object() -> None:
    first, second, third, *_, last = load_records(DataConfig(path=str(PUBLISHED)))
    assert TASK.prompt_id(first) == "t3_boat01"
    assert TASK.prompt_text(last) == f"Subreddit: TrueOffMyChest\nTitle: The bus driver waited\n{last['post']}"
    assert TASK.response(first) == first["generated_summary"]
    assert TASK.reference(second) == second["ideal_human_summary"]
    assert TASK.prompt_text(third).endswith(third["Post"])
    assert TASK.reference(third) is None
    assert set(TASK.payload(third)) == {"subreddit", "title", "generated_summary", "feedback"}


def test_a_hub_row() -> None:
    assert TASK.policy_messages(HUB_ROW)[0]["content"].endswith("Subreddit: tech\nTitle: Help\nMy lamp leaks.")
    assert TASK.reference(HUB_ROW) == "A lamp leaks."
    assert TASK.reference(HUB_ROW | {"ideal_human_summary": None}) == "lamp leaks"
    assert TASK.payload(HUB_ROW)["feedback"] == "Say that it leaks."
    assert "post" not in TASK.payload(HUB_ROW)
    assert TASK.response(HUB_ROW) == "A lamp."
    assert TASK.response({"post": "p"}) is None
    with pytest.raises(ValueError, match="field generated_summary is 3"):
        TASK.response({"generated_summary": 3})


def test_a_human_s_feedback_is_about_one_summary_only() -> None:
    question = prompt("p", **TASK.payload(HUB_ROW))
    assert TASK.notes(question, "A lamp.") == "A human's feedback on this summary:\nSay that it leaks."
    assert TASK.notes(question, "A sampled summary.") is None
    assert TASK.notes(prompt("p", generated_summary="A lamp."), "A lamp.") is None
    assert TASK.notes(prompt("p", generated_summary=3, feedback="x"), "A lamp.") is None


def test_rouge_by_hand() -> None:
    question = prompt("p", ideal_human_summary="the red phone hums loudly")
    # stems: the red phone hum loudli / a red phone hums -> 3 of 4 and 5 words, 2 of 3 and 4 pairs
    measures = TASK.measure(question, "A red phone hums!", sandbox=SANDBOX)
    assert measures == {"rouge1": pytest.approx(6 / 9), "rouge2": pytest.approx(4 / 7), "rougeL": pytest.approx(6 / 9)}
    assert TASK.score_name in measures
    assert TASK.measure(question, "", sandbox=SANDBOX) == {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}
    assert TASK.measure(prompt("p"), "A red phone hums!", sandbox=SANDBOX) is None


@pytest.mark.parametrize("name", ["summarization", "qa", "code", "prompts"])
def test_instructions_follow_the_style(name: str) -> None:
    task = get_task(name)

    def instructions(critique: bool, labels: Literal["sparse", "dense"]) -> str:
        style = StyleConfig(critique=critique, labels=labels)
        [message] = task.feedback_messages(prompt("{input}"), "{response}", style=style)
        return message["content"]

    for labels in ("sparse", "dense"):
        assert '{"critique": "...", "good": ["..."], "poor": ["..."]}' in instructions(True, labels)
        assert '{"good": ["..."], "poor": ["..."]}' in instructions(False, labels)
        assert "critique" not in instructions(False, labels)
    assert "leave none out" in instructions(True, "dense") and "leave none out" in instructions(False, "dense")
    assert "leave none out" not in instructions(True, "sparse")
    assert instructions(True, "sparse") == task.feedback_messages(prompt("{input}"), "{response}")[0]["content"]
    styles = product((True, False), ("sparse", "dense"))
    assert len({compute_prompt_version(task, StyleConfig(critique=c, labels=labels)) for c, labels in styles}) == 4


def test_a_task_of_one_s_own_by_its_import_path(tmp_path: Path) -> None:
    """A fourth task needs no edit of the package; inheriting from it is a convenience."""
    (tmp_path / "haiku_task.py").write_text(
        "from t2g.tasks.prompts_only import PromptsTask\n"
        "class Haiku(PromptsTask):\n"
        "    name = 'haiku'\n"
        "    score_name = 'lines'\n"
        "    def measure(self, prompt, response_text, *, sandbox):\n"
        "        return {'lines': float(response_text.count('/') + 1)}\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        task = get_task("haiku_task:Haiku")
    finally:
        sys.path.remove(str(tmp_path))
    assert task.measure(prompt("p"), "old pond / a frog jumps in / sound of water", sandbox=SANDBOX) == {"lines": 3.0}
    assert task.policy_messages({"prompt": "Rain."}) == [{"role": "user", "content": "Rain."}]


@pytest.mark.parametrize("post", [None, "", "  ", 3])
def test_a_row_without_a_post(post: Any) -> None:
    with pytest.raises(ValueError, match="post"):
        TASK.prompt_text({"post": post})


@pytest.mark.parametrize("name", ["prompts", "summarization", "qa", "code", "tiny"])
def test_the_feedback_prompt_holds_what_is_judged(name: str, tmp_path: Path) -> None:
    task = get_task(name)
    tokenizer = build_tokenizer(tmp_path, ["x"], vocab_size=261)  # one token a byte
    question = prompt("A post with words. " * 20)
    whole = build_feedback_prompt(task, question, "the response", tokenizer, 10_000)
    text = tokenizer.decode(whole)
    assert question.prompt_text in text
    assert text.endswith("the response<|end|><|assistant|>")
    cut = build_feedback_prompt(task, question, "the response", tokenizer, len(whole) - 7)
    assert tokenizer.decode(cut) == text.replace(question.prompt_text, question.prompt_text[:-7])
    least = len(whole) - len(question.prompt_text)
    assert len(build_feedback_prompt(task, question, "the response", tokenizer, least)) == least
    with pytest.raises(UserError, match=r"prompt 1: .* do not fit"):
        build_feedback_prompt(task, question, "the response", tokenizer, least - 1)


def test_other_instructions_are_another_version() -> None:
    versions = {compute_prompt_version(get_task(name)) for name in ("prompts", "summarization", "code", "tiny")}
    assert len(versions) == 4
    assert compute_prompt_version(TASK) == compute_prompt_version(get_task("t2g.tasks.summarization:SummarizationTask"))


@pytest.mark.parametrize("name", ["nope", "t2g.tasks.summarization:Nope", "no_such.module:Task", ":", "t2g.errors:"])
def test_a_task_that_is_not_there(name: str) -> None:
    with pytest.raises(UserError, match="task="):
        get_task(name)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def f(:", "SyntaxError"),
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("class Task:\n    def __init__(self):\n        raise ValueError('no data')", "ValueError: no data"),
    ],
)
def test_a_task_module_that_breaks_is_one_sentence(text: str, reason: str, tmp_path: Path) -> None:
    name = f"broken_task_{reason[:9].lower()}"
    (tmp_path / f"{name}.py").write_text(text)
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(UserError, match=f"task='{name}:Task' cannot be loaded: {reason}"):
            get_task(f"{name}:Task")
    finally:
        sys.path.remove(str(tmp_path))


def test_the_tiny_world_walks_the_same_path() -> None:
    task = get_task("tiny")
    row = next(world.make_records(count=1, heldout=False, rates=WorldConfig(), seed=1))
    assert task.prompt_text(row) == row["post"]
    assert task.reference(row) == row["tldr_human_reference_summary"]
    assert task.policy_messages(row, 5)[0]["content"] == world.POLICY_INSTRUCTION + row["post"][:5]
    question = prompt(row["post"], **task.payload(row))
    assert task.measure(question, row["ideal_human_summary"], sandbox=SANDBOX)["fact_f1"] == 1.0  # type: ignore[index]
    assert task.score_name in task.measure(question, "", sandbox=SANDBOX)  # type: ignore[operator]
    judged = feedback_function(row["post"], row["ideal_human_summary"], payload=question.payload)
    assert len(judged.good) == len(row["facts"]) == 5
