"""Training on several criteria: the run of one is the run without names, and each has its metrics, curve and label."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import letter_tokenizer
from trainer_bench import Bench, job

from t2g.config import AlarmConfig, PolicyJob, with_overrides
from t2g.feedback.sources.combined import make_source
from t2g.feedback.sources.make import make_local_source
from t2g.loop.alarms import find_alarms
from t2g.report.run_page import report_run
from t2g.tasks.prompts_only import PromptsTask


def pieces(response: str, letter: str) -> list[tuple[str, int]]:
    return [(letter, k + 1) for k in range(response.count(letter))]


def letters(prompt: str, response: str) -> Any:
    return "a yes, b no", pieces(response, "a"), pieces(response, "b")


def opposite(prompt: str, response: str) -> Any:
    return "b yes, a no", pieces(response, "b"), pieces(response, "a")


def broken(prompt: str, response: str) -> Any:
    return "a yes", pieces(response, "a"), 5 if response.startswith("c") else []


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def source(name: str, **options: Any) -> dict[str, Any]:
    return {"source": f"{__name__}:{name}", **options}


def bench(folder: Path, tokenizer: Any, feedback: dict[str, Any], **overrides: Any) -> Bench:
    settings = {"num_steps": 3, "feedback": feedback, "log.num_samples": 32} | overrides
    config: PolicyJob = with_overrides(job(), settings)
    new_bench = Bench(folder, tokenizer, config)
    local = make_source(config.feedback, lambda one, section: make_local_source(one, PromptsTask(), section=section))
    new_bench.trainer.feedback = new_bench.trainer.train_feedback = local
    new_bench.run()
    return new_bench


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_one_criterion_is_the_run_of_its_source_to_the_bit(tokenizer: Any, tmp_path: Path) -> None:
    plain = bench(tmp_path / "plain", tokenizer, source("letters"))
    named = bench(tmp_path / "named", tokenizer, {"sources": {"facts": source("letters")}})
    assert named.metrics() == plain.metrics()
    np.testing.assert_array_equal(named.learner.logits.detach(), plain.learner.logits.detach())
    first = samples(tmp_path / "plain")
    second = samples(tmp_path / "named")
    for column in ("token_rewards", "token_advantages"):
        assert [line.get(column) for line in first] == [line.get(column) for line in second]
    assert {line["feedback"]["critique"] for line in second} == {"a yes, b no"}
    assert {span["criterion"] for line in second for span in line["feedback"]["spans"]} == {"facts"}


def test_opposite_criteria_cancel_and_unequal_weights_do_not(tokenizer: Any, tmp_path: Path) -> None:
    both = {"facts": source("letters"), "style": source("opposite")}
    even_bench = bench(tmp_path / "even", tokenizer, {"sources": both})
    assert all(not any(line.get("token_rewards", ())) for line in samples(tmp_path / "even"))
    last = even_bench.metrics()[-1]
    assert last["criterion_reward/facts"] == -last["criterion_reward/style"]
    assert last["reward/token_mean"] == 0
    assert last["criterion_failed/facts"] == last["criterion_failed/style"] == 0

    both["style"]["weight"] = 0.25
    uneven = bench(tmp_path / "uneven", tokenizer, {"sources": both}).metrics()
    assert uneven[1]["criterion_reward/facts"] == -4 * uneven[1]["criterion_reward/style"] != 0
    total = uneven[1]["criterion_reward/facts"] + uneven[1]["criterion_reward/style"]
    assert uneven[1]["reward/response_mean"] == pytest.approx(total, abs=1e-6)


def test_each_criterion_has_a_curve_a_label_and_an_alarm(tokenizer: Any, tmp_path: Path) -> None:
    sources = {"facts": source("letters"), "praise": source("broken", required=False, weight=2)}
    criteria_bench = bench(tmp_path, tokenizer, {"sources": sources}, **{"objective.normalize_criteria": True})
    metrics = criteria_bench.metrics()
    assert all(0 < m["criterion_failed/praise"] < 0.8 and m["feedback/failed_share"] == 0 for m in metrics[1:])
    lines = samples(tmp_path)
    results = [line["feedback"]["criteria"] for line in lines]
    assert {result["praise"]["status"] for result in results} >= {"ok", "failed"}
    page = report_run(tmp_path).read_text()
    chart = page.split("Reward by criterion")[1].split("</figure>")[0]
    assert "facts" in chart and "praise" in chart and chart.count('class="line ') >= 2
    assert "✓ facts</sup>" in page and "✓ praise</sup>" in page
    (alarm,) = [text for text in find_alarms(metrics[:2], AlarmConfig()) if "praise" in text]
    assert "of the responses have no usable feedback of criterion praise, above alarms.max_failed_share" in alarm
