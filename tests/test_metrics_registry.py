"""One registry of metrics: no name is written elsewhere, and the patterns of families find their members."""

import json
import re
from pathlib import Path

import pytest

from t2g.config import LogConfig
from t2g.metrics import CHOICES, EARLIER_NAMES, METRICS, find_metric
from t2g.runs.log import METRICS_FILE, RunLog, read_records

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("t2g", "actors", "jobs", "docker")


def test_no_metric_is_named_outside_the_registry() -> None:
    groups = {name.partition("/")[0] for name in METRICS if "/" in name}.union(*CHOICES.values())
    unregistered = []
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            if file == ROOT / "t2g" / "metrics.py":
                continue
            code = "\n".join(line for line in file.read_text(encoding="utf-8").splitlines() if ">>>" not in line)
            for group, rest in re.findall(r"""["']([a-z_]+)/([a-z0-9_{}]+)["']""", code):
                is_free = group in ("samples", "learner") and "{" in rest  # tables and files
                if group in groups and not is_free:
                    unregistered.append(f"{file.name}: {group}/{rest}")
    assert unregistered == []


@pytest.mark.parametrize(
    ("logged", "family"),
    [
        ("policy/kl", "policy/kl"),
        ("reward/workers", "<role>/workers"),
        ("critic/mfu", "<model>/mfu"),
        ("eval/score", "eval/score"),
        ("eval/fact_f1", "eval/<name>"),
        ("eval/fact_f1_turn_2", "eval/<score>_turn_<n>"),
        ("sandbox/together_share", "sandbox/<mode>_share"),
        ("feedback/recall_name", "feedback/recall_<class>"),
    ],
)
def test_a_logged_name_is_found(logged: str, family: str) -> None:
    metric = find_metric(logged)
    assert metric is not None and metric.name == family


def test_metrics_of_an_earlier_run_are_read_under_their_names_of_today(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    line = {"step": 1, "sync/hand_over_s": 0.25, "response/cut_share": 0.5, "reward/token_mean": 0.125}
    path.write_text(json.dumps(line) + "\n")
    expected = {"step": 1, "sync/copy_to_core_s": 0.25, "response/truncated_share": 0.5, "reward/token_mean": 0.125}
    assert [*read_records(path)] == [expected]
    log = RunLog(tmp_path, LogConfig())
    assert log.truncate(first_step=2) == [expected]
    assert json.loads(path.read_text()) == expected
    for name, current in EARLIER_NAMES.items():
        assert find_metric(current) is not None and find_metric(name) is None


@pytest.mark.parametrize("name", ["policy/klx", "policy", "learner/workers", "reward/outcome/", "sandbox/_share", ""])
def test_an_unknown_name_is_not_found(name: str) -> None:
    assert find_metric(name) is None


def test_each_metric_has_a_meaning_and_each_share_says_of_what() -> None:
    for metric in METRICS.values():
        assert metric.meaning
        assert metric.unit != "share"
        is_share = metric.name.endswith(("_share", "_rate"))
        assert metric.unit.startswith("share of") or not is_share
