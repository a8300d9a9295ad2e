"""The feedback function that quotes inventions, and the independent measure, on texts with details counted by hand."""

import time

import numpy as np
import pytest

from t2g.feedback.fixes import apply_fixes
from t2g.sandbox import SandboxConfig
from t2g.tasks.base import get_task
from t2g.tasks.findings import measure_faithfulness
from t2g.tasks.findings_feedback import feedback_function
from t2g.types import Prompt

TEXT = "Title: does zinc help?\nIn Uganda, 1,250 of 2,000 patients of the WHO study improved by 12.5% in March 2019."
TRUE = [
    "Zinc helps.",
    "The study of 2,000 patients in Uganda was made by WHO.",
    "Of 2000 patients, 1250 improved, that is 12.5%, in 2019.",
    "1. Zinc helps.\n2. It helps patients.",
]
INVENTED = [  # what stands in no text, and how severe it is
    ("The study in Kenya shows it.", [("Kenya", 2)]),
    ("Zinc helped 300 of 2,000 patients.", [("300", 3)]),
    ("It was found in March 2020 by Harvard University.", [("March 2020", 3), ("Harvard University", 2)]),
    ("NASA says that zinc helps.", [("NASA", 2)]),
]


def quoted(response: str) -> list[tuple[str, int]]:
    _, good, poor = feedback_function(TEXT, response)
    assert all(span.label == 1 for span in good)
    assert all(span.label == -1 for span in poor)
    return [(response[span.start : span.end], span.severity) for span in poor]


@pytest.mark.parametrize("summary", TRUE)
def test_what_the_text_says_is_blamed_by_neither(summary: str) -> None:
    assert quoted(summary) == []
    assert measure_faithfulness(TEXT, summary)["invents"] == 0


@pytest.mark.parametrize("summary", ["10² nm", "10⁶ cells", "a 5① b"])
def test_a_raised_digit_is_no_number_of_its_own(summary: str) -> None:
    assert measure_faithfulness("Zinc helped.", summary)["invents"] == 1
    assert measure_faithfulness(summary, summary)["invents"] == 0


@pytest.mark.parametrize(("summary", "inventions"), INVENTED)
def test_what_the_text_does_not_say_is_found_by_both(summary: str, inventions: list[tuple[str, int]]) -> None:
    assert quoted(summary) == inventions
    assert measure_faithfulness(TEXT, summary)["invents"] == (
        summary[:4] != "NASA"
    )  # a sentence's first word tells nothing


def test_the_critique_says_of_each_quote_what_is_wrong_where_the_span_says() -> None:
    critique, good, poor = feedback_function(TEXT, "Zinc helped 300 in Uganda, in Uganda.")
    assert critique == "300: the text has no such number. Uganda: so says the text."
    assert [critique[slice(*span.critique_range)] for span in (*poor, *good)] == [critique[:33], critique[34:]]
    assert [(span.start, span.end) for span in good] == [(19, 25)]  # a repeated detail earns nothing
    assert feedback_function(TEXT, "it helps")[1:] == ([], [])


@pytest.mark.parametrize(
    ("summary", "fixed"),
    [
        ("Zinc helped in May 2018.", "Zinc helped in March 2019."),
        ("Zinc helped in 2018.", None),  # the text's date has another form
        ("In March 2019, or in May 2018.", None),  # it is stated
        ("Zinc helped 300 in Kenya.", None),
    ],
)
def test_the_only_date_of_the_text_is_the_fix_of_another(summary: str, fixed: str | None) -> None:
    _, _, poor = feedback_function(TEXT, summary)
    assert apply_fixes(summary, poor) == (fixed or summary)
    assert [span.fix for span in feedback_function(f"{TEXT} Since June 2012.", summary)[2] if span.fix] == []


def test_faithfulness_by_hand() -> None:
    measures = measure_faithfulness("Zinc helped two of 60.", "In Rome zinc helped 2 children, and Rome 3 of 60.")
    # details: Rome, 2 (two), Rome, 3, 60; long words: Rome, zinc, helped, children, Rome
    assert measures == {"invents": 1, "invented": 3 / 5, "details": 5, "novel": 3 / 5, "copied": 0}
    assert measure_faithfulness("a b c d e f", "x a b c d e y z")["copied"] == 5 / 8
    assert measure_faithfulness("a b c d e f", "a b c x d e f")["copied"] == 0
    nothing = measure_faithfulness(TEXT, "")
    assert set(nothing.values()) == {0}
    assert measure_faithfulness(TEXT, TEXT)["copied"] == 1


def test_line_ends_are_searched_in_linear_time() -> None:
    started = time.process_time()
    measure_faithfulness("In Rome.", "Zinc." + "\n" * 8000 + "x\n\n 2. In Rome")
    assert time.process_time() - started < 0.5
    assert measure_faithfulness("In Rome.", "\n\n 2. In Rome")["details"] == 1


def test_lines_are_measured_by_their_details() -> None:
    task = get_task("finding_lines")
    record = {"post": "Zinc helped 40 in Rome.", "ideal_human_summary": "- Zinc helped 40 in Rome."}
    prompt = Prompt(prompt_id="1", prompt_text=task.prompt_text(record), task="finding_lines", payload=record)

    def measure(text: str) -> dict[str, float]:
        return task.measure(prompt, text, sandbox=SandboxConfig()) or {}

    assert measure("- Zinc helped 40 in Rome.")["detail_f1"] == 1
    wrong = measure("- Zinc helped 41 in Rome.")  # one of two is invented, one of two is left out
    assert (wrong["invented"], wrong["detail_recall"], wrong["detail_f1"]) == (0.5, 0.5, 0.5)
    short = measure("- Zinc helped 40.")
    assert (short["invented"], short["detail_recall"], short["detail_f1"]) == (0, 0.5, pytest.approx(2 / 3))
    assert measure("- Zinc helped.")["detail_f1"] == 0


def test_a_record_becomes_a_prompt_and_a_measure() -> None:
    task = get_task("findings")
    record = {"title": "does zinc help?", "post": "Zinc helps.", "ideal_human_summary": "Zinc helps."}
    (message,) = task.policy_messages(record)
    assert message["content"].endswith("Title: does zinc help?\nZinc helps.")
    prompt = Prompt(
        prompt_id="1", prompt_ids=np.zeros(0, np.int32), prompt_text=task.prompt_text(record), task="findings",
        payload=task.payload(record),
    )  # fmt: skip
    measured = task.measure(prompt, "Zinc helps.", sandbox=SandboxConfig())
    assert measured is not None
    assert (measured["rougeL"], measured["novel"], measured["invents"]) == (1, 0, 0)
