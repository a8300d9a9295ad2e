"""Curves and spans as a notebook shows them, and as text elsewhere."""

import json
from pathlib import Path
from typing import Any

from jobs.api import PolicyRun


def sample(step: int, response: str, *spans: tuple[int, int, int], index: int = 0) -> dict[str, Any]:
    marked = [{"start": start, "end": end, "label": label, "severity": 1} for start, end, label in spans]
    feedback = {"critique": "<b>so so</b>", "spans": marked, "status": "ok", "source": "program", "version": "1"}
    names = {"prompt_id": f"p{index}", "prompt": "Why & how?", "split": "train", "finish_reason": "stop"}
    return names | {"step": step, "sample_index": index, "response": response, "feedback": feedback}


def write_run(folder: Path) -> PolicyRun:
    lines = [
        sample(1, "an earlier answer", (0, 2, 1)),
        sample(2, "nothing is marked", index=1),
        sample(2, "good <x> bad", (0, 4, 1), (9, 12, -1), index=2),
    ]
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    steps = [{"step": step, "samples": 8 * step, "reward/token_mean": 0.1 * step} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    return PolicyRun(folder=folder)


def test_samples_have_colored_spans_and_the_latest_with_spans_come_first(tmp_path: Path) -> None:
    view = write_run(tmp_path).show_samples(2)
    markup = view._repr_html_()
    assert '<mark class="good">good</mark> &lt;x&gt; <mark class="poor">bad</mark>' in markup
    assert markup.index("&lt;x&gt;") < markup.index("nothing is marked")
    assert "an earlier answer" not in markup, "two were asked for"
    assert "&lt;b&gt;so so" in markup and "<b>" not in markup and "Why &amp; how?" in markup
    assert "<script" not in markup
    assert repr(view).startswith("2 responses")


def test_a_run_shows_its_curves(tmp_path: Path) -> None:
    markup = write_run(tmp_path)._repr_html_()
    assert markup.count('role="img"') + markup.count("<figure>") >= 1
    assert "Mean token reward" in markup and '<mark class="good">good</mark>' in markup


def test_a_run_before_its_first_step_shows_nothing(tmp_path: Path) -> None:
    run = PolicyRun(folder=tmp_path)
    assert "<figure" not in run._repr_html_() and "<table" not in run._repr_html_()
    assert repr(run.show_samples()).startswith("0 responses")
