"""When requests may be made, on a clock of our own."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.feedback.sources.ratelimit import MAX_PAUSE_S, Gate, Pace, retry_pause_s


def test_requests_are_apart() -> None:
    pace = Pace(60)
    assert pace.take(10.0) == 0.0
    assert pace.take(10.25) == 0.75
    assert pace.take(11.0) == 0.0
    assert pace.take(11.0) == 1.0


def test_an_idle_minute_is_not_saved_up() -> None:
    pace = Pace(60)
    assert pace.take(0.0) == 0.0
    assert pace.take(100.0) == 0.0
    assert pace.take(100.0) == 1.0


def test_without_a_bound_only_a_hold_stops_requests() -> None:
    pace = Pace(None)
    assert [pace.take(5.0) for _ in range(3)] == [0.0] * 3
    pace.hold(8.0)
    pace.hold(7.0)  # a shorter one shortens nothing
    assert (pace.take(6.0), pace.take(8.0)) == (2.0, 0.0)


@given(st.lists(st.floats(0, 5), min_size=1, max_size=60), st.integers(1, 600))
def test_no_minute_has_more_than_its_share(gaps: list[float], per_minute: int) -> None:
    pace, now, made = Pace(per_minute), 0.0, []
    for gap in gaps:
        now += gap
        while (wait_s := pace.take(now)) > 0:
            now += wait_s
        made.append(now)
    for start in made:
        assert sum(start <= at < start + 59.999 for at in made) <= per_minute


def test_pauses_double_up_to_a_bound() -> None:
    assert [retry_pause_s(n, asked_s=None, jitter=0) for n in (1, 2, 3)] == [0.25, 0.5, 1.0]
    assert retry_pause_s(10_000, asked_s=None, jitter=1 - 1e-9) == pytest.approx(MAX_PAUSE_S)
    assert retry_pause_s(9, asked_s=0.1, jitter=0.5) == 0.1


def test_a_gate_lets_so_many_through_and_holds_all() -> None:
    inside = most = 0

    async def request(gate: Gate) -> None:
        nonlocal inside, most
        async with gate.request():
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.005)
            inside -= 1

    async def many() -> float:
        gate = Gate(concurrency=3, per_minute=None)
        await asyncio.gather(*(request(gate) for _ in range(10)))
        gate.hold(0.1)
        started = time.monotonic()
        await asyncio.gather(*(request(gate) for _ in range(2)))
        return time.monotonic() - started

    assert asyncio.run(many()) >= 0.1
    assert most == 3
