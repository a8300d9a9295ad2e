"""The state machine of a worker: events -> state. It has no side effects; `actors.fleet.fleet` executes it.

STARTING -> STALE -> SERVING -> DRAINING -> DEAD. A worker without the current weights is STALE and gets no requests.
Failed health checks, requests and weight syncs are counted separately: an engine that passes health checks may not
answer requests, and an engine that misses syncs may pass health checks and answer requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from t2g.config import EngineConfig, HealthConfig, LearnerConfig

Event = Literal[
    "started", "weights_verified", "sync_missed", "sync_aborted", "request_answered", "request_failed",
    "check_passed", "check_failed", "unreachable", "dismissed", "drained", "died",
]  # fmt: skip


class State(StrEnum):
    STARTING = "starting"  # waits for its placement, or loads the model
    STALE = "stale"  # loaded, without the current weights
    SERVING = "serving"
    DRAINING = "draining"  # finishes its requests, gets no new ones
    DEAD = "dead"


@dataclass(frozen=True, kw_only=True)
class Health:
    """One worker. Times are seconds of the caller's clock."""

    since: float  # when it entered its state
    state: State = State.STARTING
    failed_checks: int = 0  # in a row
    failed_requests: int = 0  # in a row
    missed_syncs: int = 0  # in a row
    reachable: bool = True  # an unreachable worker gets no requests, only health checks
    suspect: bool = False  # a call failed and none was answered since: requests prefer other workers
    reason: str = ""  # reason of the last failure, until the worker serves again


def apply_event(health: Health, event: Event, *, now: float, config: HealthConfig, reason: str = "") -> Health:
    """Return the health of a worker after `event`. DEAD is final.

    >>> worker = apply_event(Health(since=0), "started", now=9, config=HealthConfig())
    >>> worker.state, apply_event(worker, "weights_verified", now=10, config=HealthConfig()).state
    (<State.STALE: 'stale'>, <State.SERVING: 'serving'>)
    """
    if health.state is State.DEAD:
        return health
    match event:
        case "started" if health.state is State.STARTING:
            return _enter_state(health, State.STALE, now)
        case "weights_verified" if health.state in (State.STALE, State.SERVING):
            return _forget_reason(replace(_enter_state(health, State.SERVING, now), missed_syncs=0))
        case "sync_missed" if health.state in (State.STALE, State.SERVING):
            stale = _enter_state(health, State.STALE, now)
            stale = replace(stale, missed_syncs=health.missed_syncs + 1, reason=reason)
            return _apply_failure_limit(stale, now, config)
        case "sync_aborted" if health.state in (State.STALE, State.SERVING):
            return replace(_enter_state(health, State.STALE, now), reason=reason)
        case "request_answered":
            return _forget_reason(replace(health, failed_requests=0, suspect=False, reachable=True))
        case "unreachable":  # many requests report it at once, perhaps for a moment: only health checks are counted
            return replace(health, reachable=False, suspect=True, reason=reason)
        case "request_failed":
            failed = replace(health, failed_requests=health.failed_requests + 1, suspect=True, reason=reason)
            return _apply_failure_limit(failed, now, config)
        case "check_passed":
            return _forget_reason(replace(health, failed_checks=0, suspect=False, reachable=True))
        case "check_failed":
            failed = replace(health, failed_checks=health.failed_checks + 1, suspect=True, reason=reason)
            return _apply_failure_limit(failed, now, config)
        case "dismissed" if health.state is State.SERVING:
            return _enter_state(health, State.DRAINING, now)
        case "dismissed" | "drained" | "died":
            return replace(_enter_state(health, State.DEAD, now), reason=reason or event)
    return health


def describe_overdue(health: Health, *, now: float, config: EngineConfig) -> str:
    """Return why a worker is too long in its state, "" if it is not. Waiting for a placement is not counted here."""
    waited = now - health.since
    if health.state is State.STARTING and waited > config.start_timeout_s:
        return f"did not start within start_timeout_s={config.start_timeout_s:g}"
    if health.state is State.DRAINING and waited > config.deadline_s:
        return f"did not finish its requests within {config.deadline_s:g} s"
    return ""


def restarts_left(restart_times: Sequence[float], *, now: float, config: HealthConfig | LearnerConfig) -> int:
    """Return how many restarts are allowed now: max_restarts less those of the last restart_window_s seconds.

    >>> config = HealthConfig(max_restarts=2, restart_window_s=60)
    >>> [restarts_left([0, 50], now=now, config=config) for now in (55, 60, 110)]
    [0, 1, 2]
    """
    num_recent = sum(now - time < config.restart_window_s for time in restart_times)
    return max(0, config.max_restarts - num_recent)


def _enter_state(health: Health, state: State, now: float) -> Health:
    if health.state is state:
        return health
    return replace(health, state=state, since=now)


def _forget_reason(health: Health) -> Health:
    """Return the health without its reason if the worker serves and has recovered from every failure."""
    num_failures = max(health.failed_checks, health.failed_requests, health.missed_syncs)
    is_healthy = health.reachable and not health.suspect and num_failures == 0
    has_recovered = health.state is State.SERVING and is_healthy
    return replace(health, reason="") if has_recovered else health


def _apply_failure_limit(health: Health, now: float, config: HealthConfig) -> Health:
    """Return DEAD once a count of successive failures reaches max_failures."""
    num_failures = max(health.failed_checks, health.failed_requests, health.missed_syncs)
    if num_failures < config.max_failures:
        return health
    return _enter_state(health, State.DEAD, now)
