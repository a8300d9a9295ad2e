import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.config.secrets import CONTROL
from t2g.report.charts import share_range
from t2g.report.held_out import headline, last_held_out, metric_rows
from t2g.report.run_page import MAX_EXAMPLES, MAX_SINGLES, write_report
from t2g.report.templates import MAX_TEXT_CHARS, number
from t2g.runs.log import SampleRecord
from t2g.text.transcript import format_reply, list_reply
from t2g.types import PolicyTurn, Span, SpanFeedback, ToolResult

VOID = {"meta"}  # SVG elements close themselves or have an end tag
ALLOWED = {
    *("del", "ins"),
    *("nav", "a"),
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
        "methods": {
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
    links = [value for name, value in page.attributes if name == "href"]
    assert all(re.fullmatch(r"#section-\d+", link or "") for link in links)
    assert not names & {"src", "srcset", "action", "data", "poster", "background", "xlink:href"}
    assert not [name for name in names if name.startswith("on")]
    styles = [value for name, value in page.attributes if name == "style"]
    assert all(re.fullmatch(r"width: [\d.]+%", style) for style in styles)


def test_one_method_and_three_methods(tmp_path: Path) -> None:
    one = write(tmp_path / "one.html")
    methods = {
        name: [{"step": 1, "samples": 64.0, "eval/f1": f1}]
        for name, f1 in (("span", 0.75), ("scalar", 0.625), ("odd", 0.5))
    }
    three = write(tmp_path / "three.html", methods=methods, reward_model={"good_f1": 0.875, "records": 200})
    for text in (one, three):
        page = Page(text)
        assert_offline(page)
        assert "url(" not in text
        assert "@import" not in text
    assert one.count("<polyline") == 2  # held-out metric and KL; reward and length were not logged
    assert "0.750+0.250" in Page(three).text
    assert "one run with one seed" in Page(one).text
    assert "±" not in Page(one).text
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


def test_calls_and_results_of_tools_are_folded(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"town": "<b>Oslo", "days": 2, "unit": "C"}}</tool_call>'
    result = ToolResult(tool="f", text="rain\n" + "<i>" * 90, characters=(0, len(call)))
    turn = PolicyTurn(tokens=(0, 1), characters=(0, len(call)), answer_start=0, results=(result,))
    text = call + format_reply(list_reply("", [result])) + "Rain."
    start = call.index("2")
    poor = feedback("days wrong", Span(start=start, end=start + 1, label=-1, critique_range=(0, 4)))
    page = write(tmp_path / "r.html", examples=[[replace(sample("p", text, poor), turns=(turn,))]])
    assert "<details open><summary>call of f</summary>" in page and "<details><summary>rain …</summary>" in page
    assert ("poor", "2") in Page(page).marks and "<b>Oslo" not in page and "<i><i>" not in page
    assert "Rain." in Page(page).text


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
    summary = {
        ATTACK: ATTACK,
        "base": {ATTACK: 0.25},
        "reward_model": {ATTACK: ATTACK},
        "versions": {ATTACK: ATTACK},
        "timing": {ATTACK: 1.0},
    }
    methods = {ATTACK: [{"step": 1, f"eval/{ATTACK}": 0.5}]}
    examples = [[sample(ATTACK, ATTACK, judged)] * 2]
    text = write(tmp_path / "r.html", title=ATTACK, summary=summary, methods=methods, examples=examples)
    page = Page(text)
    assert_offline(page)
    assert "49" not in page.text
    assert page.text.count("alert(1)</script>") >= 12


def test_control_and_bidirectional_characters_are_shown_everywhere(tmp_path: Path) -> None:
    odd = "a\x1b\u202e\u2066\u200fb"
    summary = {odd: odd, "base": {odd: 0.25}, "reward_model": {odd: odd}, "versions": {odd: odd}, "timing": {odd: 1}}
    first = [{"step": 1, "samples": 8, f"eval/{odd}": 0.5}]
    second = [{"step": 1, f"eval/{odd}": 0.25}]
    examples = [[sample(odd, odd), sample(odd, odd, feedback(odd))]]
    origin = {"date": odd, "command": odd, "config": odd}
    text = write(
        tmp_path / "r.html",
        title=odd,
        summary=summary,
        methods={odd: first, odd + "2": second},
        examples=examples,
        alarms=[(odd, odd)],
        origin=origin,
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
    pairs = [[sample(f"prompt {i}", "x")] * 2 for i in range(MAX_EXAMPLES + 8)]
    singles = [[sample(f"single {i}", "x")] for i in range(MAX_SINGLES + 3)]
    text = Page(write(tmp_path / "r.html", examples=pairs + singles)).text
    assert f"{7 + 3} more prompts are not shown" in text
    assert f"prompt {MAX_EXAMPLES}" in text, "the first stands at the top"
    assert f"prompt {MAX_EXAMPLES + 1}" not in text
    assert f"single {MAX_SINGLES - 1}" in text
    assert f"single {MAX_SINGLES}" not in text


def test_a_response_without_one_before_stands_in_no_card_of_before_and_after(tmp_path: Path) -> None:
    pair = [sample("twice", "first"), sample("twice", "last")]
    single = [sample("once", "alone")]
    other = [sample("other", "o1"), sample("other", "o2")]
    text = Page(write(tmp_path / "r.html", examples=[other, pair, single])).text
    compared, _, rest = text[text.rindex("More responses before and after") :].rpartition("Responses to other prompts")
    assert compared.count("Before") == compared.count("After") == 1
    assert "alone" not in compared
    assert "alone" in rest and "Before" not in rest and "After" not in rest
    alone = Page(write(tmp_path / "r.html", examples=[single])).text
    assert "Before" not in alone and "After" not in alone and "before and after" not in alone


def style_of(page: str) -> str:
    return page[page.index("<style>") + len("<style>") : page.index("</style>")]


def outermost_rules(style: str) -> list[str]:
    """Return the selectors that are inside of no other rule."""
    rules = []
    depth = 0
    start = 0
    for index, character in enumerate(style):
        if character == "{":
            rules += [style[start:index].strip()] if depth == 0 else []
            depth += 1
        elif character == "}":
            depth -= 1
            start = index + 1
    assert depth == 0
    return rules


def test_the_style_sheet_styles_nothing_outside_of_the_report(tmp_path: Path) -> None:
    """A notebook that shows the page keeps its own style."""
    page = write(tmp_path / "r.html", examples=[[sample("p", "x")]])
    rules = outermost_rules(style_of(page))
    assert rules == ["body:has(> .t2g-report)", "body > .t2g-report", ".t2g-report"]
    assert not re.search(r":root|(?<![\w-])(body|html)\b", style_of(page).partition(".t2g-report {")[2])
    assert page.index("<body>") < page.index('<div class="t2g-report">') < page.index("<h1>")


def test_a_page_has_links_to_its_headings(tmp_path: Path) -> None:
    page = write(tmp_path / "r.html", alarms=[("step 1", "KL")], origin={"date": "today"})
    links = re.findall(r'<a href="#(section-\d+)">(.*?)</a>', page)
    headings = re.findall(r'<h2 id="(section-\d+)">(.*?)</h2>', page)
    assert links == headings
    assert [title for _, title in links][:3] == ["Alarms", "Training", "Held-out results"]
    assert page.count("<h2") == len(headings), "every heading has a link"
    short = write(tmp_path / "short.html", summary={}, methods={}, alarms=[("step 1", "KL")])
    assert "<nav" not in short and "<h2>Alarms</h2>" in short


def test_the_score_has_its_interval_over_prompts(tmp_path: Path) -> None:
    base = {"f1": 0.5, "score": 0.5, "score_se": 0.02, "wrong": 1.0}
    last = {"step": 1, "samples": 64.0, "eval/f1": 0.75, "eval/score": 0.75, "eval/score_se": 0.01, "eval/wrong": 0.5}
    text = Page(write(tmp_path / "r.html", base=base, methods={"policy": [last]})).text
    assert text.count("0.500± 0.039") == 2 and text.count("0.750± 0.020+0.250") == 2, "on its card and in the table"
    assert "score_se" not in text and text.count("±") == 5 and "half the 95 % interval" in text


@pytest.mark.parametrize(
    ("values", "ends"),
    [((0.01, 0.03), (0.0, 0.03)), ((0.2, 0.97), (0.0, 1.0)), ((0.0, 0.001), (0.0, 0.01)), ((0.5,), (0.0, 1.0))],
)
def test_the_axis_of_a_small_share_ends_near_it(values: tuple[float, ...], ends: tuple[float, float]) -> None:
    assert share_range(values) == ends


def test_small_shares_fill_their_chart(tmp_path: Path) -> None:
    steps = [{"step": step, "samples": 8 * step, "policy/clip_share": 0.02 * step} for step in (1, 2)]
    page = write(tmp_path / "r.html", methods={"policy": steps})
    chart = page[page.index("PPO-clipped tokens") :]
    assert re.findall(r'text-anchor="end">([\d.]+)<', chart)[:5] == ["0.00", "0.01", "0.02", "0.03", "0.04"]


def test_bars_of_a_reward_model_have_no_color_of_a_judgement(tmp_path: Path) -> None:
    """A poor F1 of 97 % is good: red would say the opposite."""
    page = write(tmp_path / "r.html", reward_model={"poor_f1": 0.97})
    assert '<td class="bar"><div><div style="width: 97.0%">' in page
    assert not re.search(r"\.bar[^{}]*\{[^}]*--(poor|good)", style_of(page))


def test_a_run_without_anything_yet(tmp_path: Path) -> None:
    text = write(tmp_path / "r.html", summary={}, methods={})
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
    base = {"f1": 0.5, "score": 0.5}
    finals = {"a": {"f1": 0.75, "length": 8.0, "score": 0.75}, "b": {}}
    rows = metric_rows(base, finals, first="f1")
    f1, length = rows
    assert (f1.name, f1.base.value) == ("f1", 0.5)
    assert {method: figure.value for method, figure in f1.methods.items()} == {"a": 0.75, "b": None}
    assert (length.name, length.base.value) == ("length", None)
    assert {method: figure.value for method, figure in length.methods.items()} == {"a": 8.0, "b": None}
    assert [row.name for row in metric_rows(base, finals, first="score")] == ["score", "f1", "length"]


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
