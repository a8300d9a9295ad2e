"""The world of code: rules, faulty programs, tests; the interpreter against the sandbox; which lines are blamed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t2g.config import DemoJob, StyleConfig, WorldConfig, loading
from t2g.data.prompts import encode_teacher_prompt
from t2g.feedback.fixes import apply_fixes
from t2g.sandbox import Outcome, SandboxConfig, run_solution
from t2g.tasks.base import get_task
from t2g.tasks.tiny import assets, programs
from t2g.tasks.tiny.interpreter import interpret
from t2g.tasks.tiny.programs import Rule
from t2g.tasks.tiny.world import write_world
from t2g.types import Prompt

CONFIG = loading.load(DemoJob, Path(__file__).parents[3] / "configs" / "tiny" / "code.yaml")
NO_FAULTS = WorldConfig(wrong=0, missing=0, invented=0, repeated=0)
RULES = [Rule("red", "+", 2), Rule("blue", "*", 3), Rule("teal", "-", 4)]
CASES = [(rule.word, n, rule.value(n)) for rule in RULES for n in programs.VISIBLE] + [("pink", 2, 2), ("gold", 5, 5)]
TESTS = programs.make_tests(CASES)
FAULTY = """\
def f(k, n):
    if k == "red":
        return n + 2
    if k == "blue":
        return n * 5
    return n
"""
BOX = SandboxConfig(timeout_s=5)


def count_failed(judged: dict[str, Any]) -> int:
    return sum(not test["passed"] for test in judged["execution"]["tests"])


def records(count: int, rates: WorldConfig, *, heldout: bool = True) -> list[dict[str, Any]]:
    return list(programs.make_records(count=count, heldout=heldout, rates=rates, seed=3))


def prompt_of(record: dict[str, Any]) -> Prompt:
    task = get_task("tiny_code")
    text = task.prompt_text(record)
    ids = np.zeros(0, np.int32)
    return Prompt(prompt_id="1", prompt_ids=ids, prompt_text=text, task=task.name, payload=task.payload(record))


def measured(record: dict[str, Any], program: str) -> dict[str, float] | None:
    return get_task("tiny_code").measure(prompt_of(record), program, sandbox=BOX)


def test_a_question_in_both_wordings() -> None:
    assert programs.make_question(RULES, 0) == "red: add 2; blue: times 3; teal: minus 4."
    assert programs.make_question(RULES, 1) == "If red, plus 2. If blue, by 3. If teal, less 4."


def test_feedback_blames_the_wrong_line_and_none_for_what_is_missing() -> None:
    judge = get_task("tiny_code").make_feedback_function(style=StyleConfig(), sandbox=SandboxConfig(require=()))
    assert judge is not None
    judged = judge("", FAULTY, payload={"test": TESTS})
    assert [FAULTY[span.start : span.end] for span in judged["poor"]] == ["return n * 5"]
    assert [FAULTY[span.start : span.end] for span in judged["good"]] == ["return n + 2"]
    assert "A case is missing before line 6" in judged["critique"]
    assert judged["execution"]["isolation"] == ["interpreted"]


def test_a_critique_fits_into_the_positions_of_the_model(tmp_path: Path) -> None:
    task = get_task("tiny_code")
    tokenizer = assets.build_code_tokenizer(tmp_path)
    judge = task.make_feedback_function(style=StyleConfig(), sandbox=SandboxConfig(require=()))
    assert judge is not None
    for row in records(100, CONFIG.world):
        critique = judge(task.prompt_text(row), row["solution"], payload=row)["critique"]
        ids = encode_teacher_prompt(task, prompt_of(row), critique, tokenizer, 512 - CONFIG.rollout.max_new_tokens)
        assert ids is not None and critique in tokenizer.decode(ids)


@pytest.mark.parametrize("wording", [0, 1])
def test_a_fix_is_the_line_of_the_rule(wording: int) -> None:
    judge = get_task("tiny_code").make_feedback_function(style=StyleConfig(), sandbox=SandboxConfig(require=()))
    assert judge is not None
    poor = judge(programs.make_question(RULES, wording), FAULTY, payload={"test": TESTS})["poor"]
    assert apply_fixes(FAULTY, poor) == FAULTY.replace("n * 5", "n * 3")
    num_fixed = 0
    for row in records(100, CONFIG.world.model_copy(update={"wrong": 0.5})):
        task = get_task("tiny_code")
        judged = judge(task.prompt_text(row), row["solution"], payload=row)
        fixed = judge(task.prompt_text(row), apply_fixes(row["solution"], judged["poor"]), payload=row)
        failed = count_failed(judged)
        fails = count_failed(fixed)
        has_fix = any(span.fix for span in judged["poor"])
        assert fails < failed if has_fix else fails == failed
        num_fixed += has_fix
    assert num_fixed > 50


def test_without_faults_a_program_passes_but_where_it_looks_at_n() -> None:
    rows = records(200, NO_FAULTS)
    special = [" if n == " in row["solution"] for row in rows]
    assert 0.1 < np.mean(special) < 0.3  # of 3 to 5 branches each with .05: .18
    for row, looks in zip(rows, special, strict=True):
        assert measured(row, row["solution"]) == {"passed": float(not looks), "shown_only": float(looks)}


def test_hidden_tests_judge_the_program_in_a_response_as_the_shown_ones_do() -> None:
    measures = []
    for row in records(20, NO_FAULTS):
        measures.append(measured(row, f"Here it is:\n```python\n{row['solution']}```\nDone."))
        assert measures[-1] == measured(row, row["solution"])
    assert measures.count({"passed": 1.0, "shown_only": 0.0}) > 10  # the others look at n


def test_each_fault_shows() -> None:
    """Wrong and missing fail the shown tests; a repeated branch never runs; an invented one may be seen or not."""
    for fault, fewest, most in (("wrong", 1, 1), ("missing", 1, 1), ("repeated", 0, 0), ("invented", 0.2, 0.7)):
        rows = records(100, WorldConfig(**{**NO_FAULTS.model_dump(), fault: 1 if fault != "missing" else 0.999}))
        failed = [1 - sum((measured(row, row["solution"]) or {}).values()) for row in rows]
        assert fewest <= np.mean(failed) <= most, fault


def test_the_shares_of_the_shipped_world() -> None:
    rows = records(1000, CONFIG.world)
    measures = [measured(row, row["solution"]) or {} for row in rows]
    assert 0.08 < np.mean([one["passed"] for one in measures]) < 0.18
    assert 0.01 < np.mean([one["shown_only"] for one in measures]) < 0.08


def test_training_records_hide_no_tests_and_share_no_rules_with_held_out_ones(tmp_path: Path) -> None:
    paths = write_world(tmp_path, WorldConfig(num_train=300, num_heldout=100), programs.make_records)
    train = [json.loads(line) for line in paths["train"].open()]
    heldout = [json.loads(line) for line in paths["heldout"].open()]
    assert not any("hidden_test" in row for row in train)
    assert all("hidden_test" in row for row in heldout)
    assert measured(train[0], train[0]["solution"]).keys() == {"passed", "unsupported"}

    def rules(row: dict[str, Any]) -> frozenset[str]:
        return frozenset(line for line in row["test"].split("\n") if "assert" in line and "f(" in line)

    assert not {rules(row) for row in train} & {rules(row) for row in heldout}


@pytest.mark.parametrize(
    "body",
    [
        "while n:\n        n = n - 1",
        "return len(k)",
        "return k * n",
        "return n ** n",
        "return other",
        "return True",
        "return",
        "if n > 2:\n        return n",
        "import os",
    ],
)
def test_what_the_interpreter_leaves_to_the_sandbox(body: str) -> None:
    assert interpret(f"def f(k, n):\n    {body}\n    return n\n", TESTS) is None


@pytest.mark.parametrize(
    "head", ["def f(k, k):", "def f(k, *n):", "def f(k, n=1):", "def g(k, n):", "@f\ndef f(k, n):"]
)
def test_no_other_function_is_interpreted(head: str) -> None:
    assert interpret(f"{head}\n    return n\n", TESTS) is None
    assert interpret("def f(k, n):\n    return n\n", TESTS.replace("==", "!=")) is None


def test_the_sandbox_says_what_the_interpreter_says() -> None:
    """Of faulty references, cut and scrambled ones among them: verdict, tests, values and lines."""
    rng = np.random.default_rng(5)
    sampled = [row["solution"] for row in records(3, CONFIG.world.model_copy(update={"wrong": 0.5}))]
    lines = FAULTY.split("\n")
    otherwise = FAULTY.replace('    if k == "blue', '    elif k == "blue').replace(
        "    return n\n", "    else:\n        return n"
    )
    special = FAULTY.replace("n * 5", "2 if n == 2 else -5")
    without_return = FAULTY.removesuffix("    return n\n")
    cut = FAULTY[: int(rng.integers(40, 80))]
    scrambled = "\n".join(lines[place] for place in rng.permutation(len(lines)))
    tried = [*sampled, special, otherwise, without_return, cut, scrambled]
    known = 0
    for program in tried:
        judged = interpret(program, TESTS)
        if judged is not None:
            known += 1
            assert summarize(judged) == summarize(run_solution(program, TESTS, BOX)), program
    assert known >= 7


def summarize(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.passed, outcome.reason, outcome.tests


def test_texts_come_back_from_the_tokenizer_and_fit_the_windows(tmp_path: Path) -> None:
    tokenizer = assets.build_code_tokenizer(tmp_path)
    rows = records(300, CONFIG.world)
    assert all(tokenizer.decode(tokenizer(row["solution"]).input_ids) == row["solution"] for row in rows)
    assert max(len(tokenizer(row["solution"]).input_ids) for row in rows) < CONFIG.rollout.max_new_tokens
    assert max(len(tokenizer(row["question"]).input_ids) for row in rows) + 8 < CONFIG.rollout.max_prompt_tokens
    rule = [tokenizer.decode([i]) for i in tokenizer(programs.make_question(RULES[:1], 1)).input_ids]
    assert rule == ["If", " red", ", plus", " 2", "."]
    assert [tokenizer.decode([i]) for i in tokenizer("        return n + 2\n").input_ids][-4:] == [
        " n",
        " +",
        " 2",
        "\n",
    ]
