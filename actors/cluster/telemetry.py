"""The metrics of a run on Ray's metrics port, for Prometheus and `docker/grafana/dashboard.json`.

Prometheus sees each name with Ray's prefix `ray_`, counters with `_total` behind, and the tag `run`.
"""

import math
from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge

# Metric of t2g.runs.metrics -> name and description on the port.
GAUGES: dict[str, tuple[str, str]] = {
    "step": ("t2g_step", "finished steps"),
    "samples": ("t2g_samples", "responses sampled for training so far"),
    "reward/token_mean": ("t2g_reward_token_mean", "mean token reward of the step"),
    "eval/score": ("t2g_eval_score", "held-out score by which the best checkpoint is kept"),
    "policy/kl": ("t2g_kl_nats", "KL to the reference, nats per sequence"),
    "policy/entropy": ("t2g_entropy_nats", "entropy, nats per token"),
    "response/truncated_share": ("t2g_truncated_share", "responses of the step that max_new_tokens truncated"),
    "staleness/mean": ("t2g_staleness_mean_updates", "mean updates between a token's weights and those it trains"),
    "staleness/max": ("t2g_staleness_max_updates", "most updates between a token's weights and those it trains"),
    "idle/learner": ("t2g_learner_idle_share", "share of the step in which the learner had no call"),
    "idle/rollout": ("t2g_rollout_idle_share", "share of the rollout engines' time without a request"),
    "idle/reward": ("t2g_reward_idle_share", "share of the reward engines' time without a request"),
    "rollout/workers": ("t2g_rollout_workers", "rollout workers that serve"),
    "reward/workers": ("t2g_reward_workers", "reward workers that serve"),
    "buffer/samples": ("t2g_buffered_samples", "judged responses that wait for a later step"),
    "feedback/failed_share": ("t2g_feedback_failed_share", "responses of the step without usable feedback"),
    "time/step_s": ("t2g_step_seconds", "seconds of the step, evaluation left out"),
    "time/sync_s": ("t2g_sync_seconds", "seconds of the weight sync"),
    "sync/bytes": ("t2g_sync_bytes", "weights sent to each worker"),
    "speed/tokens_per_s": ("t2g_tokens_per_second", "sampled tokens by seconds of the whole step"),
}
# Metrics that count events of one step: summed up over the life of the driver.
COUNTERS: dict[str, tuple[str, str]] = {
    "rollout/restarts": ("t2g_rollout_restarts", "rollout workers that were lost and replaced"),
    "reward/restarts": ("t2g_reward_restarts", "reward workers that were lost and replaced"),
    "dropped/samples": ("t2g_dropped_samples", "responses that were not trained on"),
    "sync/missed": ("t2g_missed_syncs", "weight syncs that a worker missed"),
}
TAG = "run"


class RayMetrics:
    """A `t2g.runs.log.Sink`. Needs `ray.init` before the first `log`."""

    def __init__(self, run: str) -> None:
        self._tags = {TAG: run}
        self._gauges = {metric: Gauge(name, text, (TAG,)) for metric, (name, text) in GAUGES.items()}
        self._counters = {metric: Counter(name, text, (TAG,)) for metric, (name, text) in COUNTERS.items()}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Export the metrics of a step. Other metrics keep their last value."""
        for metric, value in {**metrics, "step": step}.items():
            if not math.isfinite(value):
                continue
            if metric in self._gauges:
                self._gauges[metric].set(value, tags=self._tags)
            elif metric in self._counters and value > 0:
                self._counters[metric].inc(value, tags=self._tags)

    def close(self) -> None:
        """Do nothing: Ray stops the export when the driver ends."""
