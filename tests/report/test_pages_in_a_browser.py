"""The report in a real browser: light, dark and narrow, of one run, of two, and of five thousand samples."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browsing, needs_browser

from t2g.report.run_page import report_beside, report_run

pytestmark = [pytest.mark.slow, needs_browser]
LOOKS = {"light": {}, "dark": {"dark": True}, "narrow": {"width": 500}}
NUM_SAMPLES = 5000
OVERLAPS = """(() => {
  const found = [];
  for (const svg of document.querySelectorAll('figure > svg')) {
    const boxes = [...svg.querySelectorAll('text')].map((text) => [text.textContent, text.getBoundingClientRect()]);
    const around = svg.getBoundingClientRect();
    boxes.forEach(([a, one], i) => {
      const inside = around.left - 1 < one.left && one.right < around.right + 1;
      if (!inside || one.top < around.top - 1 || around.bottom + 1 < one.bottom) found.push(a + ' leaves the picture');
      for (const [b, other] of boxes.slice(i + 1))
        if (one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom)
          found.push(a + ' over ' + b);
    });
  }
  return found;
})()"""  # labels of charts
NOTEBOOK = """<!doctype html><html><head><style>body { margin: 7px; background: rgb(1, 2, 3); }
td { padding: 3px; }</style></head><body><h1>mine</h1><table><tr><td>1</td></tr></table><mark>m</mark><div id="output">
</div></body></html>"""  # a page of another author, into which a notebook puts a report
OWN_STYLE = """['html', 'body', 'h1', 'table', 'td', 'mark'].map((name) => {
  const style = getComputedStyle(document.querySelector(name));
  return [style.margin, style.padding, style.font, style.color, style.backgroundColor, style.borderCollapse,
          style.colorScheme, style.boxSizing, style.getPropertyValue('--card')].join('; ');
})"""
LOAD_S = 5.0  # measured: 0.4 for the first page, 0.1 for others


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


def make_run(folder: Path, num_steps: int) -> Path:
    """A run with everything that a page shows, in its longest forms."""
    folder.mkdir()
    words = [f"word{i}" for i in range(50)]
    text = " ".join(words)
    ranges = []
    for word in words:
        start = ranges[-1][1] + 1 if ranges else 0
        ranges.append([start, start + len(word)])
    span = {"start": 0, "end": 60, "label": -1, "severity": 2, "critique_range": [0, 9]}
    judged = {"critique": "It is bad. " * 20, "spans": [span], "status": "ok", "source": "reward_model", "version": "v"}
    tokens = {"token_ranges": ranges, "token_rewards": [1.0] * 50, "token_advantages": [-1.0] * 50}
    step = {
        "eval/a_score_with_a_name_that_is_longer_than_its_axis": 0.7,
        "eval/repetition": 0.5,
        "policy/kl": 1234567.0,
        "policy/entropy": 1.0,
    }
    step |= {"idle/learner": 0.5, "idle/rollout": 0.2, "time/step_s": 12345.0, "time/generate_s": 3.0}
    with (folder / "metrics.jsonl").open("w") as lines, (folder / "samples.jsonl").open("w") as samples:
        for number in range(num_steps):
            lines.write(json.dumps({"step": number, "samples": 8 * number} | step) + "\n")
            for index in range(NUM_SAMPLES // num_steps):
                sample = {"step": number, "split": "train", "prompt_id": f"p{index}", "sample_index": 0}
                sample |= {"prompt": "x" * 300, "response": text, "finish_reason": "stop", "feedback": judged}
                samples.write(json.dumps(sample | tokens) + "\n")
    (folder / "alarms.jsonl").write_text(json.dumps({"step": 1, "alarm": "alarms.max_kl=" + "long" * 40}) + "\n")
    (folder / "config.yaml").write_text(f"run: {{name: {folder.name}}}\nmodel: {{policy: {'/folder' * 30}}}\n")
    (folder / "commands.log").write_text("2026-11-22T10:00:00Z python -m jobs.train_policy " + "long" * 100)
    return folder


def test_pages_fit_their_windows_and_load_at_once(browser: Browser, tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", 500)
    two = make_run(tmp_path / ("two" * 20), 20)
    for path in (report_run(one), report_run(two), report_beside([one, two])):
        for name, look in LOOKS.items():
            browser.look(**look)
            started = time.monotonic()
            browser.open(path.as_uri())
            assert time.monotonic() - started < LOAD_S
            width, height = browser.ask("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
            assert width <= look.get("width", 1200) and height > 2000, path
            assert browser.complaints() == []
            assert browser.ask(OVERLAPS) == [], path
            browser.picture(path.with_name(f"{path.stem}-{name}.png"))
    browser.look()
    assert browser.ask("document.querySelectorAll('svg .line').length") > 8
    browser.open((two / "report.html").as_uri())
    color = "getComputedStyle(document.querySelector('.heat i')).backgroundColor"
    paid = browser.ask(color)
    browser.ask("document.getElementById('by-advantage').click()")
    assert browser.ask(color) != paid, "another quantity has another color"


def test_a_notebook_that_shows_a_report_keeps_its_own_style(browser: Browser, tmp_path: Path) -> None:
    page = report_run(make_run(tmp_path / "one", 20)).read_text()
    notebook = tmp_path / "notebook.html"
    notebook.write_text(NOTEBOOK)
    browser.look()
    browser.open(notebook.as_uri())
    before = browser.ask(OWN_STYLE)
    browser.ask(f"(document.getElementById('output').innerHTML = {json.dumps(page)}).length")
    assert browser.ask(OWN_STYLE) == before
    card = "getComputedStyle(document.querySelector('.t2g-report .card')).borderRadius"
    assert browser.ask(card) == "12px", "the report has its style"


def test_links_of_the_contents_lead_to_their_headings(browser: Browser, tmp_path: Path) -> None:
    path = report_run(make_run(tmp_path / "one", 20))
    browser.look()
    browser.open(path.as_uri())
    browser.ask("document.querySelector('nav a:last-child').click()")
    top = "document.querySelector('h2:last-of-type').getBoundingClientRect().top"
    bottom = "document.querySelector('nav').getBoundingClientRect().bottom"
    assert browser.ask(bottom) <= browser.ask(top) < browser.ask("window.innerHeight"), "below the contents, in view"
    hidden = """[...document.querySelectorAll('.text')].filter((text) => text.scrollHeight > text.clientHeight
        && text.clientHeight < 300).length"""
    assert browser.ask(hidden) == 0, "no short text is cut"
