import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from actors.cluster import telemetry
from actors.cluster.telemetry import COUNTERS, GAUGES, RayMetrics
from t2g.metrics import find_metric

DASHBOARD = Path(__file__).parents[3] / "docker" / "grafana" / "dashboard.json"


class FakeMetric:
    """Takes the place of Ray's Gauge and Counter."""

    metrics_by_name: dict[str, "FakeMetric"]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.name = name
        self.tag_keys = tag_keys
        self.values: list[tuple[float, dict[str, str]]] = []
        self.metrics_by_name[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.tag_keys)
        self.values.append((value, tags))

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses it"
        self.set(value, tags)


def logged(*steps: dict[str, float]) -> dict[str, list[tuple[float, dict[str, str]]]]:
    """What each name on the port was told."""

    class Fake(FakeMetric):
        metrics_by_name: dict[str, FakeMetric] = {}  # noqa: RUF012  one for each call

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(telemetry, "Gauge", Fake)
        patched.setattr(telemetry, "Counter", Fake)
        sink = RayMetrics("own")
    for step, metrics in enumerate(steps, start=1):
        sink.log(step, metrics)
    return {name: metric.values for name, metric in Fake.metrics_by_name.items() if metric.values}


def test_gauges_are_set_and_counters_add_what_happened() -> None:
    tags = {"run": "own"}
    assert logged(
        {"policy/kl": 0.5, "dropped/samples": 2.0, "other": 9.0}, {"policy/kl": 0.25, "dropped/samples": 0.0}
    ) == {
        "t2g_step": [(1, tags), (2, tags)],
        "t2g_kl_nats": [(0.5, tags), (0.25, tags)],
        "t2g_dropped_samples": [(2.0, tags)],
    }


def test_numbers_that_are_none_are_left_out() -> None:
    assert set(logged({"policy/kl": math.nan, "dropped/samples": math.inf})) == {"t2g_step"}


def test_each_exported_metric_is_registered() -> None:
    unknown = [name for name in (*GAUGES, *COUNTERS) if find_metric(name) is None]
    assert unknown == []


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]


def test_the_dashboard_shows_what_the_code_registers_and_nothing_else() -> None:
    named = set(re.findall(r"\bray_\w+", DASHBOARD.read_text(encoding="utf-8")))
    gauges = {f"ray_{name}" for name in GAUGES.values()}
    counters = {f"ray_{name}_total" for name in COUNTERS.values()}
    assert named == gauges | counters
    increases = {n for p in panels() for t in p["targets"] for n in re.findall(r"increase\((\w+)\{", t["expr"])}
    assert increases == counters  # a counter restarts at 0 with its driver: only its growth says something


def test_panels_have_an_own_place_and_title_and_select_the_run() -> None:
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels()]
    titles = [p["title"] for p in panels()]
    assert len(set(places)) == len(places)
    assert len(set(titles)) == len(titles)
    assert len({p["id"] for p in panels()}) == len(titles)
    assert all('{run=~"$run"}' in t["expr"] for p in panels() for t in p["targets"])
    assert not re.search(r"https?://", DASHBOARD.read_text(encoding="utf-8"))
