"""The state machine of a worker, against tables worked out by hand and against what must hold for any history."""

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.fleet.health import Event, Health, State, apply_event, describe_overdue, restarts_left
from t2g.config import EngineConfig, HealthConfig, LearnerConfig

CONFIG = HealthConfig(max_failures=2)
EVENTS: tuple[Event, ...] = get_args(Event)
ALIVE = ("starting", "stale", "serving", "draining")


def life(*events: Event) -> list[Health]:
    """The worker after each event; event i happens at second i + 1."""
    start = Health(since=0)
    steps = itertools.accumulate(
        enumerate(events, start=1),
        lambda health, event: apply_event(health, event[1], now=event[0], config=CONFIG, reason=f"r{event[0]}"),
        initial=start,
    )
    return list(steps)


@pytest.mark.parametrize(
    ("events", "states"),
    [
        (("started", "weights_verified", "dismissed", "drained"), "stale serving draining dead"),
        (("started", "weights_verified", "sync_missed", "weights_verified"), "stale serving stale serving"),
        (("started", "sync_missed", "sync_missed"), "stale stale dead"),
        (("started", "sync_missed", "weights_verified", "sync_missed"), "stale stale serving stale"),
        (("started", "weights_verified", *(3 * ("sync_aborted",))), "stale serving stale stale stale"),
        (("started", "weights_verified", "request_failed", "request_failed"), "stale serving serving dead"),
        (
            ("started", "weights_verified", "request_failed", "check_passed", "request_failed"),
            "stale serving serving serving dead",  # health checks say nothing about requests
        ),
        (
            ("started", "weights_verified", "request_failed", "request_answered", "request_failed"),
            "stale serving serving serving serving",
        ),
        (("started", "check_failed", "check_passed", "check_failed", "check_failed"), "stale stale stale stale dead"),
        (("started", "weights_verified", *["unreachable"] * 3), "stale serving serving serving serving"),
        (("dismissed",), "dead"),
        (("started", "dismissed"), "stale dead"),
        (("weights_verified",), "starting"),
        (("started", "weights_verified", "died", "started"), "stale serving dead dead"),
    ],
)
def test_lives(events: tuple[Event, ...], states: str) -> None:
    assert [str(h.state) for h in life(*events)[1:]] == states.split()


@pytest.mark.parametrize("answer", ["check_passed", "request_answered"])
def test_where_nothing_arrives_no_request_is_sent_until_something_is_answered(answer: Event) -> None:
    lived = life("started", "weights_verified", "unreachable", "check_failed", answer)
    assert [h.reachable for h in lived] == [True, True, True, False, False, True]


def test_what_failed_makes_it_suspect_until_it_answers_and_the_last_reason_is_kept() -> None:
    lived = life("started", "weights_verified", "request_failed", "check_passed")
    assert [h.suspect for h in lived] == [False, False, False, True, False]
    assert lived[-1].reason == "r3"
    assert lived[-1].failed_requests == 1


def test_a_reason_ends_with_the_recovery_of_a_serving_worker() -> None:
    assert life("started", "weights_verified", "check_failed", "check_passed")[-1].reason == ""
    assert life("started", "weights_verified", "request_failed", "request_answered")[-1].reason == ""
    missed = life("started", "weights_verified", "sync_missed", "check_passed", "weights_verified")
    assert [health.reason for health in missed[-3:]] == ["r3", "r3", ""]


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_death_is_final_and_time_in_a_state_starts_when_it_changes(events: list[Event]) -> None:
    lived = life(*events)
    for number, (before, now) in enumerate(itertools.pairwise(lived), start=1):
        if before.state is State.DEAD:
            assert now == before
        elif now.state is before.state:
            assert now.since == before.since
        else:
            assert now.since == number
        if now.state is not State.DEAD:
            assert max(now.failed_checks, now.failed_requests, now.missed_syncs) < CONFIG.max_failures


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_no_worker_serves_without_weights(events: list[Event]) -> None:
    lived = life(*events)
    for event, before, now in zip(events, lived, lived[1:], strict=False):
        if now.state is State.SERVING and before.state is not State.SERVING:
            assert event == "weights_verified" and before.state is State.STALE


def test_a_restart_budget_counts_the_last_seconds_alone() -> None:
    config = HealthConfig(max_restarts=3, restart_window_s=100)
    times = [0.0, 10.0, 60.0, 90.0]
    assert [restarts_left(times, now=now, config=config) for now in (95, 100, 110, 189, 190)] == [0, 0, 1, 2, 3]
    assert restarts_left([], now=0, config=HealthConfig(max_restarts=0)) == 0
    assert HealthConfig().restart_window_s == LearnerConfig().restart_window_s == 6 * 3600


def test_a_missed_deadline_is_reported() -> None:
    config = EngineConfig(start_timeout_s=10, request_timeout_s=5)
    starting = Health(since=100)
    assert describe_overdue(starting, now=110, config=config) == ""
    assert describe_overdue(starting, now=110.5, config=config) == "did not start within start_timeout_s=10"
    draining = life("started", "weights_verified", "dismissed")[-1]
    assert describe_overdue(draining, now=8, config=config) == ""
    assert describe_overdue(draining, now=8.5, config=config) == "did not finish its requests within 5 s"
    serving = life("started", "weights_verified")[-1]
    assert describe_overdue(serving, now=1e9, config=config) == ""
