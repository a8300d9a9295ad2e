"""The metrics of a run on Ray's metrics port, for Prometheus and `docker/grafana/dashboard.json`.

Prometheus sees each name with Ray's prefix `ray_`, counters with `_total` behind, and the tag `run`.
"""

import math
from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge

from t2g import metrics as m
from t2g.runs.log import Sink

# Metric -> name on the port; the description is the unit and meaning of the registry.
TRAINING_GAUGES = {
    m.STEP: "t2g_step",
    m.SAMPLES: "t2g_samples",
    m.TOKEN_REWARD: "t2g_reward_token_mean",
    m.HELD_OUT_SCORE: "t2g_eval_score",
    m.KL: "t2g_kl_nats",
    m.ENTROPY: "t2g_entropy_nats",
    m.TRUNCATED_SHARE: "t2g_truncated_share",
}
FLEET_GAUGES = {
    m.STALENESS_MEAN: "t2g_staleness_mean_updates",
    m.STALENESS_MAX: "t2g_staleness_max_updates",
    m.IDLE_LEARNER: "t2g_learner_idle_share",
    m.IDLE + "rollout": "t2g_rollout_idle_share",
    m.IDLE + "reward": "t2g_reward_idle_share",
    m.fill(m.WORKERS, "rollout"): "t2g_rollout_workers",
    m.fill(m.WORKERS, "reward"): "t2g_reward_workers",
}
STEP_GAUGES = {
    m.BUFFERED: "t2g_buffered_samples",
    m.FAILED_SHARE: "t2g_feedback_failed_share",
    m.STEP_S: "t2g_step_seconds",
    m.SYNC_S: "t2g_sync_seconds",
    m.SYNC_BYTES: "t2g_sync_bytes",
    m.SPEED: "t2g_tokens_per_second",
}
GAUGES: dict[str, str] = TRAINING_GAUGES | FLEET_GAUGES | STEP_GAUGES
# Metrics that count events of one step: summed up over the life of the driver.
COUNTERS: dict[str, str] = {
    m.fill(m.RESTARTS, "rollout"): "t2g_rollout_restarts",
    m.fill(m.RESTARTS, "reward"): "t2g_reward_restarts",
    m.DROPPED_SAMPLES: "t2g_dropped_samples",
    m.SYNC_MISSED: "t2g_missed_syncs",
}
TAG = "run"


class RayMetrics(Sink):
    """The gauges and counters of a run. Needs `ray.init` before the first `log`."""

    def __init__(self, run: str) -> None:
        self._tags = {TAG: run}
        self._gauges = {metric: Gauge(name, _describe(metric), (TAG,)) for metric, name in GAUGES.items()}
        self._counters = {metric: Counter(name, _describe(metric), (TAG,)) for metric, name in COUNTERS.items()}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Export the metrics of a step. Other metrics keep their last value."""
        for metric, value in {**metrics, "step": step}.items():
            if not math.isfinite(value):
                continue
            if metric in self._gauges:
                self._gauges[metric].set(value, tags=self._tags)
            elif metric in self._counters and value > 0:
                self._counters[metric].inc(value, tags=self._tags)


def _describe(name: str) -> str:
    metric = m.find_metric(name)
    assert metric is not None
    return f"{metric.unit}: {metric.meaning}"
