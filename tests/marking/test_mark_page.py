"""The page in a real browser, by keys alone: two spans, a reload, a kill, a second person, how far they agree."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import Browser, browsing, needs_browser

from t2g.config import DataConfig
from t2g.feedback.fixes import apply_fixes
from t2g.feedback.records import load_annotated

pytestmark = [pytest.mark.slow, needs_browser]
ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    {"prompt": "Which phone?", "response": "👍 A red phone by Ann."},
    {"prompt": "<img src=x onerror=alert(1)>", "response": "<script>alert(1)</script> two words"},
    {"prompt": "Last?", "response": "Yes."},
]
SAVED = "document.getElementById('saved').textContent === 'saved'"
SHOWN = "document.getElementById('{}').textContent"


@contextmanager
def serving(data: Path, by: str, *, end: signal.Signals = signal.SIGTERM) -> Iterator[tuple[str, list[str]]]:
    """The address of the page; after the block, the job's last output."""
    command = [sys.executable, "-m", "jobs", "mark", str(data), "--by", by]
    job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output: list[str] = []
    try:
        assert job.stdout is not None
        for line in job.stdout:
            output.append(line)
            if match := re.search(r"go on at (http://\S+)", line):
                output.clear()
                yield match[1], output
                break
        else:
            raise AssertionError("".join(output))
    finally:
        job.send_signal(end)
        lines = job.communicate(timeout=60)[0].splitlines()
        output += [line for line in lines if line and not line.startswith(end.name)]  # without the signal's answer
        assert job.returncode == (0 if end == signal.SIGTERM else -end), output


def at(browser: Browser, place: int, finished: int) -> None:
    browser.wait(f"{SHOWN.format('progress')}.includes('response {place} of 3, {finished} finished')")


def words(browser: Browser, count: int) -> None:
    """Selects so many words from where the caret is."""
    browser.press(*["Control+Shift+Right"] * count)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


def test_two_people_mark_by_keys_reload_go_on_and_are_compared(browser: Browser, tmp_path: Path) -> None:
    data = tmp_path / "my.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    with serving(data, "ann", end=signal.SIGKILL) as (url, _):
        browser.open(url)
        at(browser, 1, 0)
        browser.press("g")
        assert "select some words" in browser.ask(SHOWN.format("problem"))
        browser.press("Right", "Right")  # beyond the thumb
        words(browser, 2)
        browser.press("g", "2")
        words(browser, 1)
        browser.press("p", "3", "1", "u", "c", "The phone was blue.", "Escape")
        assert browser.ask("[...document.querySelectorAll('#spans li')].map(line => line.textContent)") == [
            "good 2: A red",
            "poor 3: phone",
        ]
        assert browser.ask("[...CSS.highlights.keys()].sort().join()") == "good2,poor3"
        line = "document.querySelector('#spans .poor').textContent"
        shut = "document.getElementById('fix').hidden"
        browser.press("d")
        assert browser.ask(line) == "poor 3: phone → (delete)"
        browser.press("f", "kettle", "Enter")
        assert browser.ask(line) == "poor 3: phone → kettle" and browser.ask(shut)
        browser.press("u", "u")
        assert browser.ask(line) == "poor 3: phone"
        browser.press("f", "bag", "Escape")
        assert browser.ask(line) == "poor 3: phone → bag" and browser.ask(shut)
        browser.press("x")  # the caret is where it was
        assert browser.ask("[...CSS.highlights.keys()].join()") == "good2"
        browser.press("u")
        assert browser.ask(SHOWN.format("response")) == ROWS[0]["response"], "keys never write into the response"
        browser.wait(SAVED)
        browser.open(url)  # nothing was finished, and nothing is lost
        at(browser, 1, 0)
        assert browser.ask("document.getElementById('critique').value") == "The phone was blue."
        assert browser.ask("document.querySelectorAll('#spans li').length") == 2
        browser.press("n")
        at(browser, 2, 1)
        browser.press("Control+Shift+Right", "p")
        browser.wait("document.querySelectorAll('#spans li').length === 1")
        browser.wait(SAVED)
    with serving(data, "ann") as (url, output):  # what was killed goes on where it was
        browser.open(url)
        at(browser, 2, 1)
        assert browser.ask("document.querySelectorAll('#spans li').length") == 1
        assert browser.ask("document.querySelectorAll('img, script:not([src])').length") == 0
        browser.press("c", "no", "Control+Enter")
        at(browser, 3, 2)
        browser.press("b")
        at(browser, 2, 2)
        assert "finished" in browser.ask(SHOWN.format("finished"))
        browser.press("s")
        at(browser, 3, 2)
        typed = "critique = document.getElementById('critique'), critique.value = 'typed', critique"
        skip = "document.querySelector('[data-key=b]').click()"
        browser.ask(f"({typed}.dispatchEvent(new Event('input')), {skip})")  # at once, and without a blur
        at(browser, 2, 2)
        browser.press("s")
        at(browser, 3, 2)
        assert browser.ask("document.getElementById('critique').value") == "typed"
        changed = "response = document.getElementById('response'), response.textContent = 'another', response"
        browser.ask(
            f"({changed}.dispatchEvent(new Event('input')))"
        )  # as an input method does, which cannot be prevented
        assert browser.ask(SHOWN.format("response")) == "Yes."
        assert browser.complaints() == []
    assert "2 of 3 responses are marked" in output[0]
    with serving(data, "bea") as (url, output):
        browser.open(url)
        at(browser, 1, 0)
        browser.press("Right", "Right")
        words(browser, 3)
        browser.press("g", "n")
        browser.wait(f"{SHOWN.format('problem')}.startsWith('a critique is missing')")
        browser.press("c", "fine", "Control+Enter")
        at(browser, 2, 1)
        # 16 written characters; phone is poor to one and good to the other: 11/16, by chance (4 x 9 + 7 x 7) / 16^2
        share = "with ann: 1 responses that both marked, the same label on 69% of 16 characters, kappa 0.53"
        browser.wait(f"{SHOWN.format('agreements')}.startsWith('{share}')")
        assert browser.complaints() == []
    assert share in output[1]
    first, second = load_annotated(DataConfig(path=str(data.with_suffix(".marks") / "ann" / "annotated.jsonl")))
    assert [(span.start, span.end, span.label, span.severity) for span in first.spans] == [(2, 7, 1, 2), (8, 13, -1, 3)]
    assert [quote.quote for quote in (*first.good, *first.poor)] == ["A red", "phone"]
    assert apply_fixes(first.response, first.spans) == "👍 A red bag by Ann."
    assert (first.critique, first.source, first.version) == ("The phone was blue.", "human", "ann")
    assert first.spans[1].critique_range == (0, 19)
    assert (second.critique, len(second.spans), second.response) == ("no", 1, ROWS[1]["response"])


def test_a_stale_tab_says_so_and_overwrites_nothing(browser: Browser, tmp_path: Path) -> None:
    data = tmp_path / "my.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    journal = data.with_suffix(".marks") / "ann" / "journal.jsonl"
    with serving(data, "ann") as (url, _):
        browser.open(url)
        at(browser, 1, 0)
        browser.press("c", "one", "Escape")
        browser.wait(SAVED)
        first = json.loads(journal.read_text().splitlines()[-1])
        change = json.dumps({"critique": "of another tab", "version": first["version"]})
        options = f"{{method: 'POST', headers: {{'Content-Type': 'application/json'}}, body: JSON.stringify({change})}}"
        browser.ask(f"void fetch('item/0', {options}).then(answer => window.code = answer.status)")
        browser.wait("window.code === 200")
        browser.press("c", " more")
        browser.wait(f"{SHOWN.format('problem')}.startsWith('another tab changed this response')")
        assert browser.ask(SHOWN.format("saved")) == "not saved"
        assert json.loads(journal.read_text().splitlines()[-1])["critique"] == "of another tab"
        browser.ask("document.getElementById('saved').textContent = ''")  # else the browser asks whether to leave
        browser.open(url)
        at(browser, 1, 0)
        assert browser.ask("document.getElementById('critique').value") == "of another tab"
        browser.press("c", ", gone on")
        browser.wait(SAVED)
        assert "of another tab" in json.loads(journal.read_text().splitlines()[-1])["critique"]
        (conflict,) = browser.complaints()
        assert "409" in conflict


@pytest.mark.parametrize(("dark", "width"), [(False, 1200), (True, 1200), (False, 500)])
def test_the_page_fits_its_window(browser: Browser, tmp_path: Path, dark: bool, width: int) -> None:
    data = tmp_path / "my.jsonl"
    data.write_text(json.dumps({"prompt": "word " * 80, "response": "long" * 200 + " and words"}))
    with serving(data, "ann") as (url, _):
        browser.look(dark=dark, width=width)
        browser.open(url)
        browser.wait(f"{SHOWN.format('progress')} !== ''")
        browser.press("Control+Shift+Right", "p")
        browser.wait(SAVED)
        assert browser.ask("document.documentElement.scrollWidth") <= width
        browser.picture(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 10_000
        assert browser.complaints() == []
