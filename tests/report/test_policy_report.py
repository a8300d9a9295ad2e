"""The evaluation of policies as a page: what stands in it, and that a model's words stay words."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from test_html import ALLOWED, Page

from t2g.report.policy_page import write_policy_evaluation
from t2g.study.pairwise import PairwiseJudgement, win_rates
from t2g.study.policy_eval import Answers, Response, summarize
from t2g.types import Prompt, Span, SpanFeedback

Judge = Callable[[Prompt, str], SpanFeedback | None]

EVIL = "</div><script>alert(1)</script>\x1b[31m<img src=x onerror=alert(1)>"
NUM = 12


def written(folder: Path, judge: Judge = lambda *_: None) -> tuple[dict, str]:
    """`new` passes all but the last problem and `base` half of them; its last response is evil, its first is empty."""
    texts = {"base": ["", *["words"] * (NUM - 2), EVIL], "new": ["better words"] * NUM}
    passed = {"base": np.arange(NUM) % 2, "new": np.arange(NUM) < NUM - 1}
    prompts = [Prompt(prompt_id=str(i), prompt_text=f"problem {i} {EVIL}", task="code") for i in range(NUM)]
    answers: dict[str, list[Answers]] = {name: [] for name in texts}
    for name, of in texts.items():
        for i, text in enumerate(of):
            responses = (Response(text=text, truncated=i < 3),)
            answers[name].append(Answers(prompt_id=str(i), key="k", responses=responses))
    measured = {name: {"pass@1": of[:, None].astype(float)} for name, of in passed.items()}
    judgements = [
        PairwiseJudgement(key="k", judge="j", prompt_id=str(i), first=first, second=second, verdict="A", reason=EVIL)
        for first, second in (("base", "new"), ("new", "base"))
        for i in range(NUM)
    ]
    result = write_policy_evaluation(
        folder, {"task": EVIL}, prompts, answers, measured, summarize(measured, seed=1),
        win_rates(judgements, answers, seed=1), judge,
    )  # fmt: skip
    assert json.loads((folder / "evaluation.json").read_text()) == json.loads(json.dumps(result))
    return result, (folder / "evaluation.html").read_text()


def test_the_page_has_differences_judges_examples_and_problems(tmp_path: Path) -> None:
    result, html = written(tmp_path)
    (pair,) = result["pairs"]
    assert (pair["wins"], pair["ties"], pair["losses"], pair["exact"]) == (6, 5, 1, True)
    page = Page(html)
    assert set(page.tags) <= ALLOWED
    assert "new − base" in page.text
    assert f"{pair['p']:.4f}†" in page.text
    assert result["judged"]["pairs"][0]["first_bias"]["value"] == 1
    assert "1.000 – 1.000" in page.text
    assert {kind: problem["count"] for kind, problem in result["problems"].items()} == {
        "empty": 1, "truncated": 6, "repetition": 0,
    }  # fmt: skip
    assert result["examples"] == [0, 2, 4, 6, 8, 10]
    assert "| new | base | pass@1 | 0.417 (" in (tmp_path / "evaluation.md").read_text()


def test_examples_show_the_spans_and_critique_of_the_tasks_program(tmp_path: Path) -> None:
    def judge(prompt: Prompt, text: str) -> SpanFeedback | None:
        if "words" not in text:
            return None
        start = text.index("words")
        span = Span(start=start, end=start + 5, label=-1, critique_range=(0, 11))
        return SpanFeedback(critique=f"Too many in {text}.", spans=(span,), status="ok", source="program", version="1")

    _, html = written(tmp_path, judge)
    assert (
        "better </mark>" not in html
        and '<sup class="poor">1✗</sup><mark class="poor" title="poor">words</mark>' in html
    )
    assert '<mark class="poor" title="poor">Too many in</mark> better words.' in html
    assert set(Page(html).tags) <= ALLOWED


def test_nothing_on_the_page_runs_or_is_fetched(tmp_path: Path) -> None:
    _, html = written(tmp_path)
    page = Page(html)
    assert set(page.tags) <= ALLOWED
    assert {name for name, _ in page.attributes} <= {
        "lang",
        "charset",
        "name",
        "content",
        "http-equiv",
        "class",
        "style",
        "id",
        "href",
        "aria-label",
    }
    links = [value for name, value in page.attributes if name == "href"]
    assert links
    assert all((link or "").startswith("#section-") for link in links)
    assert "<script>alert(1)</script>␛[31m" in page.text and "\x1b" not in html
    assert not re.search(r"https?:|url\(|@import", html)
