from dataclasses import replace

import pytest

from actors.fleet.meter import EngineStats, Meter, summary


def test_time_counts_once_however_many_requests_there_are() -> None:
    meter = Meter()
    meter.enter(10.0)
    meter.enter(12.0)
    meter.step(generated=5, preempted=0, queued=3, cache_use=0.2)
    meter.step(generated=6, preempted=2, queued=0, cache_use=0.1)
    meter.leave(13.0)
    first = meter.read(15.0, cache_tokens=640)
    assert first == EngineStats(
        busy_s=5.0, num_generated=11, num_preempted=2, num_steps=2, sum_queued=3, cache_use=0.2, cache_tokens=640
    )
    meter.leave(16.0)
    assert meter.read(99.0, cache_tokens=640) == EngineStats(busy_s=1.0, cache_tokens=640)


def test_a_fleet_is_the_sum_of_its_engines() -> None:
    one = EngineStats(busy_s=4.0, num_generated=400, num_preempted=1, num_steps=3, sum_queued=6, cache_use=0.5)
    other = replace(one, busy_s=1.0, num_generated=350, num_steps=1, sum_queued=0, cache_use=0.9)
    assert summary([one, other]) == {
        "tokens_per_s": pytest.approx(150.0), "queued": 1.5, "cache_use": 0.9, "preemptions": 2.0
    }  # fmt: skip
    assert summary([]) == summary([EngineStats(busy_s=3.0)]) == {}
