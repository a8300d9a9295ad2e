"""What a driver reads when one of several actors fails."""

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.cluster.fanout import any_failed, collect
from actors.learner.learner import LearnerGroup
from t2g.config import LearnerConfig
from t2g.errors import LearnerLost, RunStopped, UserError


def rank_class() -> Any:
    """Made in a function, so that Ray sends the code: its workers cannot import this file."""

    class Rank:
        def value(self, x: int) -> int:
            return x

        def fail(self, error: Exception) -> None:
            raise error

        def sleep(self) -> None:
            time.sleep(60)

        def die(self) -> None:
            os._exit(1)

        def stream(self) -> Iterator[int]:
            time.sleep(60)
            yield 0

    return ray.remote(num_cpus=0)(Rank)


@pytest.fixture(scope="module")
def ranks(cluster: None) -> Iterator[list]:
    actor = rank_class()
    ranks = [actor.remote() for _ in range(2)]
    yield ranks
    for rank in ranks:
        ray.kill(rank)


def gather(refs: list, timeout_s: float = 30) -> list:
    return collect(refs, actor_name="learner rank", call="update", timeout_s=timeout_s)


def test_results_in_order(ranks: list) -> None:
    assert gather([ranks[0].value.remote(1), ranks[1].value.remote(2)]) == [1, 2]


@pytest.mark.parametrize("kind", [UserError, RunStopped])
def test_our_own_errors_come_as_they_are(ranks: list, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^in one sentence$") as caught:
        gather([ranks[0].value.remote(1), ranks[1].fail.remote(kind("in one sentence"))])
    assert type(caught.value) is kind


def test_any_other_error_is_one_sentence_with_its_cause(ranks: list) -> None:
    with pytest.raises(RunStopped, match=r"^learner rank 1 failed in update: OSError: .*No space left$") as caught:
        gather([ranks[0].value.remote(1), ranks[1].fail.remote(OSError(28, "No space left"))])
    assert not isinstance(caught.value, LearnerLost)  # another group of ranks would meet it again
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == 28


def test_the_late_one_is_named(ranks: list) -> None:
    late = rank_class().remote()
    with pytest.raises(LearnerLost, match=r"^learner rank 1 timed out: update did not finish within 3 s$"):
        gather([ranks[0].value.remote(1), late.sleep.remote()], timeout_s=3)
    ray.kill(late)


def test_a_death_is_reported_before_its_consequences(ranks: list) -> None:
    """A dead peer shows first as a broken connection in the others."""
    victim = rank_class().remote()
    ray.get(victim.value.remote(1), timeout=30)
    with pytest.raises(LearnerLost, match=r"^learner rank 1 died during update: "):
        gather([ranks[0].fail.remote(RuntimeError("connection closed by peer")), victim.die.remote()])


def test_whether_one_has_failed_by_now(ranks: list) -> None:
    late = rank_class().remote()
    done = ranks[0].value.remote(1)
    failed = ranks[1].fail.remote(ValueError("no"))
    open_ = late.sleep.remote()
    ray.wait([done, failed], num_returns=2, timeout=30)
    assert not any_failed([])
    assert not any_failed([done, open_])
    assert any_failed([open_, done, failed])
    ray.kill(late)


def test_a_rank_that_dies_while_rank_0_hangs_in_a_weight_sync_is_named_before_the_deadline(
    ranks: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.learner.learner.FAILURE_POLL_S", 0.5)
    monkeypatch.setattr("actors.cluster.fanout.GRACE_S", 2.0)
    actors = [rank_class().remote() for _ in range(2)]
    ray.get([actor.value.remote(1) for actor in actors], timeout=30)
    streams = [actor.stream.options(num_returns="streaming").remote() for actor in actors]
    ray.kill(actors[1])
    learner = SimpleNamespace(
        spec=SimpleNamespace(learner=LearnerConfig(step_timeout_s=50)), _deadline=lambda: time.monotonic() + 50
    )
    group = SimpleNamespace(
        collect=lambda refs, call, deadline: collect(refs, actor_name="learner rank", call=call, timeout_s=50)
    )
    with pytest.raises(LearnerLost, match=r"^learner rank 1 died during stream_weights: "):
        next(LearnerGroup._buckets(learner, group, streams))  # type: ignore[arg-type]
