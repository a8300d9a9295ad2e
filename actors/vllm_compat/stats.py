"""A stat logger for vLLM that fills an engine's meter."""

from typing import Any

from actors.fleet.meter import Meter


def make_stat_logger(meter: Meter) -> type:
    """Return a stat-logger class whose instances pass each scheduler step of vLLM to the meter."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class MeterLogger(PrometheusStatLogger):  # with any other base vLLM adds its own hundred Prometheus metrics
        def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None: ...

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                meter.step(
                    generated=iteration_stats.num_generation_tokens if iteration_stats else 0,
                    preempted=iteration_stats.num_preempted_reqs if iteration_stats else 0,
                    queued=scheduler_stats.num_waiting_reqs,
                    cache_use=scheduler_stats.kv_cache_usage,
                )

        def log_engine_initialized(self) -> None: ...
        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...
        def record_admission_rejection(self, reason: str) -> None: ...

    return MeterLogger
