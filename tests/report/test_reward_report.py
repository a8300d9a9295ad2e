"""The evaluation of a reward model as JSON and as a page: what stands in them, and that a model's words stay words."""

import json
import re
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_html import ALLOWED, Page

from t2g.feedback.records import AnnotatedRecord, read_record
from t2g.report.reward_page import EVALUATION_FILE, HTML_FILE, write_evaluation
from t2g.study.reward_eval import ERROR_KINDS, JudgedRecord
from t2g.types import Span, SpanFeedback

EVIL = "</div><script>alert(1)</script>\x1b[31m<img src=x onerror=alert(1)>"


def says(critique: str, *spans: Span, status: Any = "ok", quotes: int | None = None, reason: str = "") -> SpanFeedback:
    located = len(spans)
    return SpanFeedback(
        critique=critique, spans=spans, status=status, source="reward_model", version="v", reason=reason,
        num_quotes=located if quotes is None else quotes, num_located=located,
    )  # fmt: skip


PROMPT_IDS = count()  # intervals are over prompts


def case(response: str, model: SpanFeedback, *, prompt: str = "p", agreement: float | None = None) -> Any:
    """A record whose first word is good and second poor, and what the model says of it; a token a character."""
    record = read_record(
        {"prompt_id": str(next(PROMPT_IDS)), "prompt": prompt, "response": response, "critique": "gold words",
         "good": ["aa"], "poor": ["bb"]}
    )  # fmt: skip
    gold = SpanFeedback(**{**vars(record.to_feedback()), "agreement": agreement})

    def labels(feedback: SpanFeedback) -> np.ndarray:
        character_labels = np.zeros(len(response))
        for span in feedback.spans:
            character_labels[span.start : span.end] = span.label
        return character_labels

    judged = JudgedRecord(
        response=response, gold=gold, feedback=model, parsed=model.status == "ok", gold_labels=labels(gold),
        labels=labels(model),
    )  # fmt: skip
    return record, judged


GOOD = Span(start=0, end=2, label=1, critique_range=(0, 5))
POOR = Span(start=3, end=5, label=-1)


@pytest.fixture
def cases() -> list[tuple[AnnotatedRecord, JudgedRecord]]:
    right = says("model words", GOOD, POOR)
    half = says("half", GOOD)
    more = says("more", GOOD, POOR, Span(start=6, end=8, label=-1), quotes=4)
    failed = says("", status="failed", reason="two workers were late")
    others = [case("aa bb cc", judged) for judged in (half, more, failed)]
    return [case("aa bb cc", right, agreement=0.9), *others]


def write(folder: Path, cases: list[tuple[AnnotatedRecord, JudgedRecord]], **about: str) -> tuple[dict[str, Any], str]:
    records, judged = zip(*cases, strict=True)
    result = write_evaluation(
        folder, about={"reward_model": "my/model", "data": "heldout.jsonl", **about},
        records=records, judged=judged, seed=1,
    )  # fmt: skip
    assert json.loads((folder / EVALUATION_FILE).read_text()) == json.loads(json.dumps(result))
    return json.loads(json.dumps(result)), (folder / HTML_FILE).read_text(encoding="utf-8")


def test_the_json_holds_metrics_intervals_and_examples(
    tmp_path: Path, cases: list[tuple[AnnotatedRecord, JudgedRecord]]
) -> None:
    result, _ = write(tmp_path, cases)
    assert result["reward_model"] == "my/model"
    metrics = result["metrics"]
    assert (metrics["good_recall"], metrics["poor_recall"]) == (6 / 8, 4 / 8)  # two characters a span, four records
    assert (metrics["poor_precision"], metrics["poor_span_exact_f1"]) == (4 / 6, 2 * 2 / (4 + 3))
    assert (metrics["usable_rate"], metrics["located_rate"], metrics["agreement"]) == (3 / 4, 6 / 7, 0.9)
    low, high = result["intervals"]["poor_recall"]
    assert 0 <= low < 0.5 < high <= 1
    assert result["token_confusion"]["poor"] == {"good": 0, "poor": 4, "neutral": 4}
    assert list(result["errors"]) == list(ERROR_KINDS)
    assert {kind: error["count"] for kind, error in result["errors"].items() if error["count"]} == {
        "missed_poor": 1, "invented_poor": 1, "not_located": 1, "unparsable": 1,
    }  # fmt: skip
    (missed,) = result["errors"]["missed_poor"]["examples"]
    missed_id = cases[1][0].prompt_id
    assert (missed["prompt_id"], missed["what"], missed["model"]["critique"]) == (missed_id, ["bb"], "half")
    assert [(s["start"], s["end"], s["label"], s["severity"]) for s in missed["gold"]["spans"]] == [
        (0, 2, 1, 1), (3, 5, -1, 1),
    ]  # fmt: skip


def test_the_page_shows_gold_and_model_side_by_side(
    tmp_path: Path, cases: list[tuple[AnnotatedRecord, JudgedRecord]]
) -> None:
    _, html = write(tmp_path, cases)
    page = Page(html)
    assert set(page.tags) <= ALLOWED
    missed = html[html.index(">missed poor: 1</h2>") : html.index(">invented good: 0</h2>")]
    gold, model = missed.split('<div class="label">Reward model')
    assert '<mark class="good" title="good">aa</mark>' in gold and '<mark class="poor" title="poor">bb</mark>' in gold
    assert '<mark class="good" title="good">aa</mark>' in model and 'class="poor"' not in model
    assert "gold words" in gold and '<mark class="good" title="good">half</mark>' in model
    for words in (
        "0.750",
        "failed: two workers were late",
        "1 of 4 quotes are not in the response",
        "my/model",
        "t2g 0.2.0",
    ):
        assert words in page.text
    assert re.search(r"0\.500\s*0\.\d+ – (1\.000|0\.\d+)", page.text)  # poor recall with its interval


def test_a_data_set_without_several_annotators_has_no_line_of_agreement(
    tmp_path: Path, cases: list[tuple[AnnotatedRecord, JudgedRecord]]
) -> None:
    assert "<td>agreement</td>" in write(tmp_path, cases)[1]
    assert "<td>agreement</td>" not in write(tmp_path, cases[1:])[1]


def test_nothing_on_the_page_runs_or_is_fetched(tmp_path: Path) -> None:
    evil = case(f"aa bb {EVIL}", says(EVIL, Span(start=6, end=6 + len(EVIL), label=-1)), prompt=EVIL)
    _, html = write(tmp_path, [evil], task=EVIL)
    page = Page(html)
    assert set(page.tags) <= ALLOWED
    assert {name for name, _ in page.attributes} <= {"lang", "charset", "name", "content", "http-equiv", "class",
                                                     "style", "title", "id", "href", "aria-label"}  # fmt: skip
    links = [value for name, value in page.attributes if name == "href"]
    assert links
    assert all((link or "").startswith("#section-") for link in links)
    assert page.text.count("<script>alert(1)</script>␛[31m") >= 5
    assert "\x1b" not in html
    assert "default-src 'none'" in html and "prefers-color-scheme: dark" in html
    assert not re.search(r"https?:|url\(|@import", html)
