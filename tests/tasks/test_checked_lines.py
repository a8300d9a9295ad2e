"""The task `checked_lines`: each fact of a line against its own finding."""

import random

import pytest
from docker_programs import load_program
from hypothesis import given
from hypothesis import strategies as st

from t2g.sandbox import SandboxConfig
from t2g.tasks.base import get_task
from t2g.tasks.checked_lines import FAULTS, feedback_function, find_facts, judge_facts, measure_facts, split_lines
from t2g.types import Prompt

FINDINGS = "The cells reached 19.24% with MAPbI3.\nFilms of 400 nm kept 95% of PCE after 500 h."


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("It reached 19.24% at 80 °C.", [("19.24", "%"), ("80", "°C")]),
        ("It reached 1,019 % after 500 h and 2 hours.", [("1019", "%"), ("500", "h"), ("2", "hours")]),
        ("It has 3 nanowires, 3 nm each, and 5 mol% of PbI2.", [("3", ""), ("3", "nm"), ("5", "mol%"), ("pbi2", "")]),
        ("In 2019 it was 2000 h.", [("2019", ""), ("2000", "h")]),
        ("1850.5 nm, then 40.5%.", [("1850.5", "nm"), ("40.5", "%")]),
        ("41 cells of 5 \u00b5m, 3 cm² and 2 mL.", [("41", ""), ("5", "\u03bcm"), ("3", "cm2"), ("2", "ml")]),
        ("It has none.", []),
    ],
)
def test_a_number_is_compared_with_its_unit(text: str, facts: list[tuple[str, str]]) -> None:
    assert [fact.identity for fact in find_facts(text)] == facts
    for fact in find_facts(text):
        assert text[fact.start : fact.end] == fact.text


def test_each_fault_by_hand() -> None:
    response = "- The cells reached 19% with MAPbI3 and 500 h.\n- Films of 400 kept 95% of PCE after 700 h."
    judged = judge_facts(FINDINGS, response)
    expected = [
        ("19%", 0, "rounded", "19.24%"),
        ("MAPbI3", 0, None, None),
        ("500 h", 0, "moved", None),  # of the other finding
        ("400", 1, "unit", "400 nm"),
        ("95%", 1, None, None),
        ("PCE", 1, None, None),
        ("700 h", 1, "invented", None),
    ]
    assert [(j.fact.text, j.line, j.fault, j.correction) for j in judged] == expected
    for judgement in judged:
        fact = judgement.fact
        assert response[fact.start : fact.end] == fact.text
    measures = measure_facts(FINDINGS, response)
    # three of seven reported facts are right; the findings have 19.24%, MAPbI3; 400 nm, 95%, PCE, 500 h
    assert measures["fact_precision"] == 3 / 7
    assert measures["fact_recall"] == 3 / 6
    assert measures["fact_f1"] == pytest.approx(2 * 3 / (7 + 6))
    assert [measures[f"fault_{fault}"] for fault in FAULTS] == [1 / 7] * 4


@pytest.mark.parametrize(
    ("value", "fault"),
    [("19.24%", None), ("19%", "rounded"), ("19.2%", "rounded"), ("19.3%", "invented"), ("20%", "invented"),
     ("19.24", "unit"), ("19.240%", "invented"), ("1.9.2%", "invented")],
)  # fmt: skip
def test_rounding_is_told_from_invention(value: str, fault: str | None) -> None:
    (judged,) = judge_facts("It reached 19.24%.", f"It reached {value}.")
    assert judged.fault == fault


@pytest.mark.parametrize("line", ["40.5% of cells grew in 60 h.", "7. 40.5% of cells", "- 41 cells of 5 μm grew"])
def test_a_line_that_begins_with_a_number_is_its_own_answer(line: str) -> None:
    (text,) = [line.text for line in split_lines(line)]
    for answer in (text, f"- {text}", f"1. {text}", f" * {text}"):
        assert measure_facts(line, answer)["fact_f1"] == 1


@pytest.mark.parametrize(("exact", "half_up"), [("40.5%", "41%"), ("0.125 mg", "0.13 mg"), ("2.5 h", "3 h")])
def test_halves_are_rounded_up_or_cut(exact: str, half_up: str) -> None:
    (judged,) = judge_facts(f"It is {exact}.", f"It is {half_up}.")
    assert (judged.fault, judged.correction) == ("rounded", exact)


def test_spans_are_the_facts_and_their_sentences() -> None:
    response = "1. The cells reached 19% with MAPbI3, MAPbI3.\n\n* It kept 95%.\n* It kept 95% too."
    critique, good, poor = feedback_function(FINDINGS, response)
    assert [response[span.start : span.end] for span in good] == ["MAPbI3", "95%"], "a repetition is not paid"
    assert [response[span.start : span.end] for span in poor] == ["19%", "95%"], "there is no third finding"
    assert [span.fix for span in poor] == ["19.24%", None]
    for span in (*good, *poor):
        assert span.critique_range is not None
        start, end = span.critique_range
        assert critique[start:end].startswith(response[span.start : span.end])
    assert critique.endswith("Finding 2 also has 400 nm, PCE, 500 h.")
    assert feedback_function(FINDINGS, "")[1:] == ([], [])


@given(st.text(alphabet="ab A1.%,°hnm\n-*é", max_size=80))
def test_whatever_a_policy_writes_has_spans_within_it(response: str) -> None:
    _, good, poor = feedback_function(FINDINGS, response)
    assert all(0 <= span.start < span.end <= len(response) for span in (*good, *poor))
    measures = measure_facts(FINDINGS, response)
    assert all(0 <= value <= 1 for value in measures.values())


def test_the_task_scores_the_reference_with_one() -> None:
    task = get_task("checked_lines")
    record = {"post": FINDINGS, "ideal_human_summary": FINDINGS}
    prompt = Prompt(prompt_id="1", prompt_text=task.prompt_text(record), task="checked_lines", payload=record)
    measures = task.measure(prompt, FINDINGS, sandbox=SandboxConfig())
    assert measures is not None and measures[task.score_name] == 1
    assert measure_facts(FINDINGS, "")["fact_f1"] == 0


def test_planted_faults_follow_their_rules() -> None:
    real_faults = load_program("real_faults")
    findings = [line.text for line in split_lines(FINDINGS)]
    counts = dict.fromkeys(FAULTS, 0)
    num_lines = 400
    rng = random.Random(1)
    for _ in range(num_lines // 2):
        answer = "\n".join(real_faults.plant_rules(findings, rng))
        for judged in judge_facts(FINDINGS, answer):
            if judged.fault:
                counts[judged.fault] += 1
    shares = {fault: count / num_lines for fault, count in counts.items()}
    # in two lines: one number with decimals; 400 nm and 95%; one last number with a finding before it; and one line
    # without a duration, for which 500 h is of the other finding
    assert shares["rounded"] == pytest.approx(real_faults.FAULT_RATE / 2, abs=0.06)
    assert shares["unit"] == pytest.approx(real_faults.FAULT_RATE, abs=0.06)
    assert shares["moved"] == pytest.approx(real_faults.FAULT_RATE, abs=0.06)
