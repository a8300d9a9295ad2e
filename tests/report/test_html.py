import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.config.texts import CONTROL
from t2g.report.run_page import MAX_EXAMPLES, headline, last_held_out, metric_rows, write_report
from t2g.report.templates import MAX_TEXT_CHARS, number
from t2g.runs.log import SampleRecord
from t2g.types import Span, SpanFeedback

VOID = {"meta"}  # SVG elements close themselves or have an end tag
ALLOWED = {
    *("del", "ins"),
    *("dl", "dt", "dd", "details", "summary", "pre", "label", "input", "i"),
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "main",
    "h1",
    "h2",
    "div",
    "span",
    "b",
    "p",
    "section",
    "article",
    "figure",
    "figcaption",
    "table",
    "tr",
    "th",
    "td",
    "footer",
    "mark",
    "sup",
    "svg",
    "line",
    "polyline",
    "circle",
    "text",
}


class Page(HTMLParser):
    """Tags, attributes, marked texts and visible text of a page; fails on tags that do not close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.marks: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[tuple[str, str]] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append((tag, dict(attrs).get("class") or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][0] == "style":
            return
        self.text += data
        if self._open and self._open[-1][0] == "mark":
            self.marks.append((self._open[-1][1], data))


PARTS = {"base", "reward_model", "versions", "timing"}  # of a summary


def write(path: Path, **changes: Any) -> str:
    content: dict[str, Any] = {
        "title": "A run",
        "summary": {"steps": 2, "samples": 128, "base": {"f1": 0.5}, "timing": {"ppo": 75.0}, "versions": {"t2g": "1"}},
        "arms": {
            "policy": [{"step": 0, "eval/f1": 0.5}, {"step": 1, "samples": 64.0, "policy/kl": 0.25, "eval/f1": 0.625}]
        },
        "examples": [],
    }
    content["summary"] |= {key: changes.pop(key) for key in PARTS & changes.keys()}
    write_report(path, **{**content, **changes})
    return path.read_text(encoding="utf-8")


def feedback(critique: str, *spans: Span, status: str = "ok") -> SpanFeedback:
    return SpanFeedback(critique=critique, spans=spans, status=status, source="reward_model", version="v")


def sample(prompt: str, response: str, judged: SpanFeedback | None = None) -> SampleRecord:
    return SampleRecord(
        step=1, split="eval", prompt_id="1", sample_index=0, prompt=prompt, response=response, finish_reason="stop",
        feedback=judged,
    )  # fmt: skip


def assert_offline(page: Page) -> None:
    assert set(page.tags) <= ALLOWED
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "srcset", "action", "data", "poster", "background", "xlink:href"}
    assert not [name for name in names if name.startswith("on")]
    styles = [value for name, value in page.attributes if name == "style"]
    assert all(re.fullmatch(r"width: [\d.]+%", style) for style in styles)


def test_one_arm_and_three_arms(tmp_path: Path) -> None:
    one = write(tmp_path / "one.html")
    arms = {
        name: [{"step": 1, "samples": 64.0, "eval/f1": f1}]
        for name, f1 in (("span", 0.75), ("scalar", 0.625), ("odd", 0.5))
    }
    three = write(tmp_path / "three.html", arms=arms, reward_model={"good_f1": 0.875, "records": 200})
    for text in (one, three):
        page = Page(text)
        assert_offline(page)
        assert "url(" not in text
        assert "@import" not in text
    assert one.count("<polyline") == 2  # held-out metric and KL; reward and length were not logged
    assert "0.750+0.250" in Page(three).text
    assert "0.875" in Page(three).text
    assert 'style="width: 87.5%"' in three
    assert "1 min 15 s" in Page(three).text


def test_spans_are_marked_in_response_and_critique(tmp_path: Path) -> None:
    judged = feedback(
        "name right, day wrong",
        Span(start=0, end=4, label=1, critique_range=(0, 10)),
        Span(start=8, end=14, label=-1, critique_range=(12, 21)),
        Span(start=12, end=16, label=1),
    )
    text = write(tmp_path / "r.html", examples=[[sample("p", "Mara on Monday👍!", judged)]])
    marks = Page(text).marks[3:]  # three in the legend
    assert marks == [
        ("good", "Mara"),
        ("poor", "Mond"),
        ("both", "ay"),
        ("good", "👍!"),
        ("good", "name right"),
        ("poor", "day wrong"),
    ]
    assert text.count('<sup class="poor">2✗</sup>') == 2  # in the response and in the critique
    assert text.count('<sup class="good">3✓</sup>') == 1  # the critique has no phrase for it


def test_a_span_with_a_fix_is_struck_and_the_fix_is_escaped(tmp_path: Path) -> None:
    judged = feedback(
        "day wrong",
        Span(start=8, end=14, label=-1, critique_range=(0, 9), fix="<b>Tues</b>\0"),
        Span(start=14, end=15, label=-1, fix=""),
    )
    text = write(tmp_path / "r.html", examples=[[sample("p", "Mara on Monday!", judged)]])
    fix = '<ins title="fix">&lt;b&gt;Tues&lt;/b&gt;␀</ins>'
    assert f'<del><mark class="poor" title="poor">Monday</mark></del>{fix}' in text
    assert '<del><mark class="poor" title="poor">!</mark></del></div>' in text
    assert text.count("<ins") == 2  # one in the legend; none in the critique


ATTACK = (
    '"><script>alert(1)</script><img src=https://x.example/a onerror=alert(1)>{{ 7*7 }}</style></title>&amp;\u202e\0'
)


def test_untrusted_text_stays_text_everywhere(tmp_path: Path) -> None:
    judged = SpanFeedback(
        critique=ATTACK,
        spans=(Span(start=2, end=20, label=-1, critique_range=(5, 15)),),
        status="ok",
        source=ATTACK,
        version="",
    )
    text = write(
        tmp_path / "r.html",
        title=ATTACK,
        summary={
            ATTACK: ATTACK,
            "base": {ATTACK: 0.25},
            "reward_model": {ATTACK: ATTACK},
            "versions": {ATTACK: ATTACK},
            "timing": {ATTACK: 1.0},
        },
        arms={ATTACK: [{"step": 1, f"eval/{ATTACK}": 0.5}]},
        examples=[[sample(ATTACK, ATTACK, judged)] * 2],
    )
    page = Page(text)
    assert_offline(page)
    assert "49" not in page.text
    assert page.text.count("alert(1)</script>") >= 12


def test_control_and_bidirectional_characters_are_shown_everywhere(tmp_path: Path) -> None:
    odd = "a\x1b\u202e\u2066\u200fb"
    text = write(
        tmp_path / "r.html",
        title=odd,
        summary={odd: odd, "base": {odd: 0.25}, "reward_model": {odd: odd}, "versions": {odd: odd}, "timing": {odd: 1}},
        arms={odd: [{"step": 1, "samples": 8, f"eval/{odd}": 0.5}], odd + "2": [{"step": 1, f"eval/{odd}": 0.25}]},
        examples=[[sample(odd, odd), sample(odd, odd, feedback(odd))]],
        alarms=[(odd, odd)],
        made={"date": odd, "command": odd, "config": odd},
        beside={odd: [odd, 1]},
    )
    assert not CONTROL.search(text.replace("\n", ""))
    assert text.count("a␛���b") >= 20


def test_odd_texts(tmp_path: Path) -> None:
    long = "漢" * (MAX_TEXT_CHARS + 1234)
    examples = [
        [sample("", "", feedback("", status="failed"))],
        [sample("lone \ud800 surrogate", long, feedback(long, Span(start=3990, end=9000, label=1)))],
    ]
    page = Page(write(tmp_path / "r.html", examples=examples))
    for words in (
        "(empty prompt)",
        "(empty response)",
        "(no critique)",
        "by reward_model, failed",
        "1,234 more characters",
    ):
        assert words in page.text
    assert page.text.count("漢") == 2 * MAX_TEXT_CHARS
    assert ("good", "漢" * 10) in page.marks


def test_more_examples_than_fit_are_counted(tmp_path: Path) -> None:
    examples = [[sample(f"prompt {i}", "x")] for i in range(MAX_EXAMPLES + 8)]
    text = Page(write(tmp_path / "r.html", examples=examples)).text
    assert "7 more examples are not shown" in text
    assert f"prompt {MAX_EXAMPLES}" in text, "the first stands at the top"
    assert f"prompt {MAX_EXAMPLES + 1}" not in text


def test_a_run_without_anything_yet(tmp_path: Path) -> None:
    text = write(tmp_path / "r.html", summary={}, arms={})
    assert_offline(Page(text))
    assert "<h2>" not in text


@settings(max_examples=25, deadline=None)
@given(
    st.text(max_size=60),
    st.lists(
        st.builds(Span, start=st.integers(0, 60), end=st.integers(0, 60), label=st.sampled_from((-1, 1))), max_size=5
    ),
)
def test_any_text_gives_a_well_formed_page(
    tmp_path_factory: pytest.TempPathFactory, text: str, spans: list[Span]
) -> None:
    example = [sample(text, text, feedback(text, *spans)), sample(text, text)]
    assert_offline(Page(write(tmp_path_factory.mktemp("r") / "r.html", title=text, examples=[example])))


def test_headline_is_the_metric_that_score_repeats() -> None:
    assert (
        headline({"length": 9.0, "f1": 0.5, "score": 0.5}, {"span": {"length": 9.5, "f1": 0.75, "score": 0.75}}) == "f1"
    )
    assert headline({"length": 9.0, "score": 0.5}, {}) == "score"
    assert headline({}, {"span": {"length": 9.0}}) == "length"
    assert headline({}, {}) is None


def test_rows_of_the_table() -> None:
    base, finals = {"f1": 0.5, "score": 0.5}, {"a": {"f1": 0.75, "length": 8.0, "score": 0.75}, "b": {}}
    assert metric_rows(base, finals, first="f1") == [("f1", 0.5, [0.75, None]), ("length", None, [8.0, None])]
    assert [row[0] for row in metric_rows(base, finals, first="score")] == ["score", "f1", "length"]


def test_last_held_out_is_of_the_last_step_that_evaluated() -> None:
    assert last_held_out(
        [{"step": 1, "eval/f1": 0.25}, {"step": 2, "eval/f1": 0.5}, {"step": 3, "policy/kl": 1.0}]
    ) == {"f1": 0.5}
    assert last_held_out([]) == {}


def test_number() -> None:
    assert [number(v) for v in (0.71234, -0.5, 38.42, 12800, 1.0, None, True, "span")] == [
        "0.712",
        "-0.500",
        "38.4",
        "12,800",
        "1.000",
        "–",
        "True",
        "span",
    ]
