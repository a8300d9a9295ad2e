import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.report import main
from t2g.errors import UserError
from t2g.report.run_page import find_run, load_examples, report_run


def sample(
    step: int, prompt_id: str, response: str, *, split: str = "train", judged: bool = True, index: int = 0
) -> dict[str, Any]:
    span = {"start": 0, "end": 2, "label": -1, "severity": 2, "critique_range": [0, 3]}
    feedback = {"critique": "bad start", "spans": [span], "status": "ok", "source": "reward_model", "version": "v"}
    return {
        "step": step,
        "split": split,
        "prompt_id": prompt_id,
        "sample_index": index,
        "prompt": f"prompt of {prompt_id}",
        "response": response,
        "finish_reason": "stop",
        "feedback": feedback if judged else None,
    }


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def responses_of(pairs: list[Any]) -> list[list[str]]:
    texts = []
    for example in pairs:
        responses = [sample.response for sample in example]
        texts.append(responses)
    return texts


def test_examples_pair_the_first_and_last_response_to_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    first = [
        sample(0, "held", "held first", split="eval", judged=False),
        sample(1, "once", "single"),
        sample(1, "twice", "first"),
        sample(1, "twice", "first, other sample"),
    ]
    later = [
        sample(2, "held", "held middle", split="eval"),
        sample(3, "twice", "last"),
        sample(4, "held", "held last", split="eval"),
        sample(4, "late", "single and late"),
    ]
    write_lines(path, first + later)
    pairs = load_examples(path)
    assert responses_of(pairs) == [
        ["held first", "held middle", "held last"],
        ["first", "last"],
        ["single and late"],
        ["single"],
    ]
    before, *_, after = pairs[0]
    assert before.feedback is None
    (span,) = after.feedback.spans
    assert (span.start, span.end, span.label, span.severity, tuple(span.critique_range)) == (0, 2, -1, 2, (0, 3))
    assert pairs[1][0].prompt == "prompt of twice"


def test_only_the_same_sample_of_the_same_prompt_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    records = [
        sample(1, "7", "trained on"),
        sample(2, "7", "held out", split="eval"),  # an id of another data set
        sample(3, "7", "another text") | {"prompt": "another prompt"},
        sample(4, "7", "another sample", index=1),
    ]
    write_lines(path, records)
    pairs = load_examples(path)
    assert responses_of(pairs) == [
        ["held out"],
        ["another sample"],
        ["another text"],
        ["trained on"],
    ]


def test_report_of_a_running_and_of_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my-run"
    folder.mkdir()
    write_lines(folder / "metrics.jsonl", [{"step": 0, "eval/f1": 0.5}, {"step": 1, "samples": 64.0, "eval/f1": 0.625}])
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"made: report {folder / 'report.html'}\n"
    running = (folder / "report.html").read_text()
    assert "Text2Grad: my-run" in running
    assert "+0.125" in running
    write_lines(folder / "samples.jsonl", [sample(0, "a", "before"), sample(1, "a", "after")])
    summary = {"steps": 1, "timing": {"ppo": 61.0}, "versions": {"ray": "2.60.0"}, "reward_model": {"good_f1": 0.9}}
    (folder / "summary.json").write_text(json.dumps(summary))
    finished = report_run(folder).read_text()
    assert finished.index(">Before <") < finished.index(">After <")
    for words in ("1 min 01 s", "ray 2.60.0", "good_f1", 'title="poor">be</mark>fore', "bad start"[3:]):
        assert words in finished


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "metrics.jsonl holds no finished step"),
        ({"metrics.jsonl": '{"step": 1}\n', "summary.json": "{"}, "summary.json is not the summary of a run"),
        ({"metrics.jsonl": '{"step": 1}\n', "summary.json": "[]"}, "summary.json is not the summary of a run"),
        (
            {"metrics.jsonl": '{"step": 1}\n', "samples.jsonl": '{"step": 1}\n'},
            "samples.jsonl:1 is not a line of a run's log",
        ),
        ({"metrics.jsonl": "x\ny\n"}, "metrics.jsonl:1 is not a JSON object with a step"),
    ],
)
def test_a_folder_that_no_run_wrote_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], words: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        report_run(tmp_path)
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_null_in_metrics_is_no_point_of_a_curve(tmp_path: Path) -> None:
    """RunLog writes null for a number that is not finite, and a file on a shared mount may have one anywhere."""
    steps = [{"step": n, "samples": n * 64, "eval/f1": 0.5, "policy/kl": 0.1} for n in (1, 2, 3)]
    write_lines(tmp_path / "metrics.jsonl", [*steps, {"step": 4, "samples": None, "eval/f1": 0.6, "policy/kl": None}])
    page = report_run(tmp_path).read_text()
    assert "Held-out f1" in page and "KL to the reference" in page


def test_a_page_tells_what_was_done_and_what_each_token_was_paid(tmp_path: Path) -> None:
    folder = tmp_path / "my-run"
    folder.mkdir()
    steps = [
        {"step": 0, "eval/f1": 0.5, "eval/wrong": 1.26},
        {"step": 1, "samples": 8, "tokens/poor_share": 0.25, "tokens/good_share": 0.5, "policy/entropy": 1.5,
         "policy/clip_share": 0.1, "response/truncated_share": 0.3, "idle/learner": 0.5, "time/sync_s": 0.2,
         "eval/f1": 0.75, "eval/wrong": 0.29, "reward/total_mean": 0.5, "reward/outcome/my:pay": 0.25,
         "feedback/metrics/tone": 0.125},
    ]  # fmt: skip
    write_lines(folder / "metrics.jsonl", steps)
    tokens = {"token_ranges": [[0, 2], [2, 5], [5, 5]], "token_texts": ["It", " is", ""], "token_rewards": [0, -1, 0.5]}
    tokens |= {"token_advantages": [0.5, -2, 2], "token_ratios": [1, 1.2, 0.9]}
    records = [sample(step, "held", f"answer {step}", split="eval") for step in (0, 1, 2)]
    records.append(sample(1, "paid", "It is") | tokens)
    truncated = {"token_rewards": [0, -1, -0.5], "finish_reason": "length"}
    records.append(sample(1, "short", "It is") | tokens | truncated)
    write_lines(folder / "samples.jsonl", records)
    (folder / "summary.json").write_text(json.dumps({"base": {"f1": 0.5}, "all_neutral": False, "steps": 1}))
    (folder / "commands.log").write_text(
        "2026-11-22T10:00:00Z first\n2026-11-22T11:00:00Z python -m x a=<b> k=sk-old-12345678\n"
    )
    (folder / "config.yaml").write_text("run: {seed: 7}\n")
    page = report_run(folder).read_text()
    assert '<i class="q1p1" title="reward +0.00, advantage +0.50, ratio 1.000">It</i>' in page
    assert '<i class="q0m4 q1m4 q2p4" title="reward -1.00, advantage -2.00, ratio 1.200"> is</i>' in page
    assert '<i class="q0p2 q1p4 q2m2" title="reward +0.50, advantage +2.00, ratio 0.900">∎</i>' in page
    assert page.count("truncated here") == 2, "at the last character, and in no response that ended"
    assert page.count('name="by"') == 3 and "script" not in page
    assert [f">Step {step}<" in page for step in (0, 1, 2)] == [True] * 3
    assert "One prompt, step by step" in page
    assert "2026-11-22T11:00:00Z" in page and "python -m x a=&lt;b&gt; k=***" in page and "run: {seed: 7}" in page
    assert "1.260</td>" in page, "the base stands in every row"
    assert "all_neutral" not in page
    for title in (
        "Labelled tokens",
        "Entropy of the policy",
        "PPO-clipped tokens",
        "Truncated responses",
        "Idle",
        "Time",
        "Mean reward of a response",
        "Outcome reward my:pay",
        "Metric tone",
        "Held-out f1 by training reward",
    ):
        assert f"<figcaption>{title}</figcaption>" in page


def make_run(folder: Path, *, f1: float, config: str, response: str) -> Path:
    folder.mkdir(parents=True)
    after = {"step": 1, "samples": 8, "eval/f1": f1, "eval/wrong": 0.25}
    write_lines(folder / "metrics.jsonl", [{"step": 0, "eval/f1": 0.5, "eval/wrong": f1}, after])
    (folder / "config.yaml").write_text(config)
    samples = [sample(0, "p", "long ago"), sample(1, "p", response), sample(1, response, "x")]
    write_lines(folder / "samples.jsonl", samples)
    (folder / "summary.json").write_text(json.dumps({"steps": 1, "timing": {"ppo": 10 * f1}}))
    return folder


def test_two_runs_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = "objective: {rewards: {placement: %s}}\nrun: {seed: 7}\n"
    one = make_run(tmp_path / "one", f1=0.75, config=config % "span", response="one says <b>")
    two = make_run(tmp_path / "two", f1=0.625, config=config % "scalar", response="two says")
    write_lines(two / "alarms.jsonl", [{"step": 1, "alarm": "the KL is <high>"}])
    assert main([str(one), str(two)]) == 0
    path = one / "report_beside.html"
    assert capsys.readouterr().out == f"made: report {path}\n"
    assert not (one / "report.html").exists()
    page = path.read_text()
    assert "<h1>one and two</h1>" in page and page.count("<polyline") == 2
    # the base that both had, and none where they had another
    assert "<td>0.500</td><td>0.750" in page and "+0.250" in page and "+0.125" in page
    assert "<td>–</td><td>0.250</td><td>0.250</td>" in page
    assert "<tr><td>config.objective.rewards.placement</td>" in page and "config.run.seed" not in page
    assert '<td>timing.ppo</td><td class="value">7.500</td><td class="value">6.250</td>' in page
    assert page.index(">one <span") < page.index("e says &lt;b&gt;") < page.index(">two <span")
    assert "long ago" not in page and page.count("prompt of p") == 1, "the last responses, to the prompts of both runs"
    assert "<dt>two, step 1</dt><dd>the KL is &lt;high&gt;</dd>" in page
    twin = make_run(tmp_path / "more" / "one", f1=0.75, config=config % "span", response="one says <b>")
    assert main([str(one), str(twin)]) == 0
    page = (one / "report_beside.html").read_text()
    assert "What differs" not in page and "One prompt in each run" in page
    assert main([str(one), str(one)]) == 0, "one run is not beside itself"
    assert (one / "report.html").exists(), "one run is not beside itself"
    (two / "config.yaml").write_text("{")
    assert main([str(one), str(two)]) == 2
    assert "is not the config of a run" in capsys.readouterr().err


def test_a_page_opens_with_the_typical_change_of_a_held_out_prompt(tmp_path: Path) -> None:
    """Good less poor spans change by -1, 1 and 2 on held-out prompts: that of 1 is shown above all figures."""

    def judged(step: int, prompt_id: str, labels: list[int], split: str = "eval") -> dict[str, Any]:
        record = sample(step, prompt_id, f"{prompt_id} at {step}", split=split)
        spans = [{"start": i, "end": i + 1, "label": label, "severity": 1} for i, label in enumerate(labels)]
        return record | {"feedback": record["feedback"] | {"critique": f"of {prompt_id} at {step}", "spans": spans}}

    write_lines(tmp_path / "metrics.jsonl", [{"step": 0, "eval/f1": 0.5}, {"step": 5, "samples": 8, "eval/f1": 0.25}])
    changes = {"worse": ([1], []), "better": ([-1, 1], [1]), "best": ([-1], [1]), "unjudged": ([-1], [1, 1, 1])}
    records = [judged(0, name, before) for name, (before, _) in changes.items()]
    records += [judged(5, name, after) for name, (_, after) in changes.items()]
    records[-1]["feedback"] = records[-1]["feedback"] | {"status": "failed", "spans": []}
    records += [judged(1, "trained", [-1], "train"), judged(4, "trained", [1, 1], "train")]
    write_lines(tmp_path / "samples.jsonl", records)
    page = report_run(tmp_path).read_text()
    opening, _, rest = page.partition('<div class="figures">')
    assert 'mark class="poor" title="poor">b</mark>' in opening and 'mark class="good" title="good">e</mark>' in opening
    assert opening.index('Before <span class="status">step 0: 1 good, 1 poor') < opening.index("of better at 0")
    assert opening.index("of better at 0") < opening.index('After <span class="status">step 5: 1 good, 0 poor')
    assert opening.index("step 5") < opening.index("of better at 5") and "The prompt is held out" in opening
    assert "More responses before and after" in rest and "prompt of better" not in rest and "prompt of best" in rest
    write_lines(tmp_path / "samples.jsonl", [record for record in records if record["split"] == "train"])
    opening = report_run(tmp_path).read_text().partition('<div class="figures">')[0]
    assert "of trained at 4" in opening and "held out" not in opening


def test_good_shares_are_green_and_poor_ones_red(tmp_path: Path) -> None:
    steps = [{"step": step, "samples": 8, "tokens/poor_share": 0.25, "tokens/good_share": 0.5} for step in (1, 2)]
    write_lines(tmp_path / "metrics.jsonl", steps)
    page = report_run(tmp_path).read_text()
    assert page.count('class="line good"') == page.count('class="line poor"') == 2, "the line and the legend"
    assert "svg .line.good { stroke: var(--good);" in page and "svg .line.poor { stroke: var(--poor);" in page
    chart = page[page.index('<svg viewBox="0 0 560') :]
    assert re.findall(r'text-anchor="end">([\d.]+)<', chart)[:6] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]


def test_alarms_of_a_run_stand_on_its_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", f1=0.75, config="{}", response="x")
    assert "Alarms" not in report_run(run).read_text()
    write_lines(run / "alarms.jsonl", [{"step": 1, "alarm": "the KL is high"}])
    assert "<dt>step 1</dt><dd>the KL is high</dd>" in report_run(run).read_text()
    write_lines(run / "alarms.jsonl", [{"step": 1}])
    with pytest.raises(UserError, match=r"alarms.jsonl:1 is not a line"):
        report_run(run)


def test_tokens_that_do_not_fit_their_text_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    odd = sample(1, "odd", "ab") | {"token_ranges": [[0, 9], [-3, 99], [5, 2]], "token_rewards": [1.0]}
    more = sample(1, "more rewards than tokens", "cd") | {"token_ranges": [[0, 2]], "token_rewards": [0.5, 1.0]}
    write_lines(tmp_path / "samples.jsonl", [odd, more])
    page = report_run(tmp_path).read_text()
    assert 'title="reward +1.00">ab</i>' in page and 'title="reward +0.50">cd</i>' in page


def test_five_thousand_samples_are_a_page_within_seconds(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    write_lines(tmp_path / "samples.jsonl", [sample(i // 8, f"p{i % 500}", "word " * 50) for i in range(5000)])
    started = time.process_time()
    size = report_run(tmp_path).stat().st_size
    assert time.process_time() - started < 10 and size < 1_000_000


def test_the_report_of_a_smoke_run_is_found_and_has_the_name_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smoke = tmp_path / "my-run" / "smoke"
    smoke.mkdir(parents=True)
    (smoke / "config.yaml").write_text("run: {name: my-run, smoke: true}\n")
    write_lines(smoke / "metrics.jsonl", [{"step": 1, "samples": 8, "reward/token_mean": 0.5}])
    assert main([str(tmp_path / "my-run")]) == 0
    assert capsys.readouterr().out == f"made: report {smoke / 'report.html'}\n"
    assert "<title>Text2Grad: my-run (smoke run)</title>" in (smoke / "report.html").read_text()
    write_lines(smoke.parent / "metrics.jsonl", [{"step": 1, "samples": 8}])
    assert find_run(smoke.parent) == smoke.parent
