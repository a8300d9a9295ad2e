"""Compare what a run logged with the registry of metrics."""

import json
from pathlib import Path

from t2g.metrics import find_metric
from t2g.runs.log import METRICS_FILE


def assert_registered(run: Path) -> None:
    """Fail if a line of metrics.jsonl has a metric that is not in the registry."""
    lines = (run / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    logged: set[str] = set()
    for line in lines:
        logged |= json.loads(line).keys()
    assert {name for name in logged if find_metric(name) is None} == set()
