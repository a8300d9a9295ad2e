"""Calls of a learner group after one of its ranks was lost; the group has no ranks here."""

import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from actors.learner.learner import LearnerGroup
from actors.learner.ranks import Ranks
from t2g.config import LearnerConfig
from t2g.errors import LearnerLost, RankFailed, RunStopped

FAILED = RankFailed("learner rank 1 failed in save, and others wait for it: OSError: No space left on device")


def make_group(**config: Any) -> Any:
    """Return a group that makes calls on no rank."""
    group = LearnerGroup.__new__(LearnerGroup)
    group.spec = SimpleNamespace(learner=LearnerConfig(**config))  # type: ignore[assignment]
    group._lock = threading.Lock()
    group._running_call = ""
    group._lost = None
    group.models = {}
    return group


def fail(group: Any, error: Exception) -> None:
    """Make a call that ends in an error."""
    with group._exclusive("update"):
        raise error


@pytest.mark.parametrize("error", [FAILED, LearnerLost("learner rank 1 died during update: ActorDiedError")])
def test_a_group_that_lost_a_rank_refuses_every_later_call(error: RunStopped) -> None:
    group = make_group()
    with pytest.raises(type(error)):
        fail(group, error)
    with pytest.raises(type(error)) as caught:
        group.offload_states()
    assert caught.value is error
    assert not group._lock.locked()


def test_a_group_in_which_every_rank_answered_goes_on() -> None:
    group = make_group()
    with pytest.raises(RunStopped):
        fail(group, RunStopped("learner rank 1 failed in update: RuntimeError: all ranks raised it"))
    with group._exclusive("save"):
        pass


def test_a_call_that_waited_for_the_failed_one_reaches_no_rank() -> None:
    group = make_group()
    is_waiting = threading.Event()
    reached: list[str] = []
    errors: list[BaseException] = []

    class Lock:
        """Announces that a call waits for it."""

        def __init__(self) -> None:
            self._lock = threading.Lock()
            self.release = self._lock.release

        def acquire(self, timeout: float) -> bool:
            if self._lock.locked():
                is_waiting.set()
            return self._lock.acquire(timeout=timeout)

    group._lock = Lock()

    def call_later() -> None:
        try:
            with group._exclusive("save"):
                reached.append("ranks")
        except RunStopped as error:
            errors.append(error)

    later = threading.Thread(target=call_later)
    with suppress(RankFailed), group._exclusive("update"):
        later.start()
        assert is_waiting.wait(20)
        raise FAILED
    later.join(20)
    assert errors == [FAILED]
    assert reached == []


def test_a_call_that_waits_too_long_names_the_one_that_runs() -> None:
    group = make_group(step_timeout_s=0.05)

    def save_meanwhile() -> None:
        with group._exclusive("save"):
            pass

    sentence = r"^the learner timed out: stream_weights did not end within 0\.05 s, so save could not begin$"
    with group._exclusive("stream_weights"), pytest.raises(LearnerLost, match=sentence):
        save_meanwhile()


class SilentStream:
    """A stream of weights that has no bucket yet; itself the reference of its end."""

    def completed(self) -> "SilentStream":
        return self


def test_ranks_that_send_no_bucket_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may wait in a collective for another one."""

    def wait(refs: list[Any], num_returns: int = 1, **_: Any) -> tuple[list[Any], list[Any]]:
        return [], refs

    for module in ("actors.learner.learner", "actors.cluster.fanout"):
        monkeypatch.setattr(f"{module}.ray", SimpleNamespace(wait=wait))
    ranks = Ranks.__new__(Ranks)
    ranks.actor_name = "learner rank"
    ranks._memory_advice = ""
    ranks._limit_s = 0.05
    ranks.workers = []
    group = make_group(step_timeout_s=0.05)
    with pytest.raises(LearnerLost) as caught:
        next(group._buckets(ranks, [SilentStream(), SilentStream()]))
    assert str(caught.value) == "learner rank 0, 1 timed out: stream_weights did not finish within 0.05 s"


@pytest.mark.parametrize("error", [ObjectStoreFullError("no room"), OutOfDiskError("no room")])
def test_a_batch_for_which_the_object_store_has_no_room_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def put(value: Any) -> None:
        raise error

    monkeypatch.setattr("actors.learner.ranks.ray", SimpleNamespace(put=put, kill=lambda *_, **__: None))
    ranks = Ranks.__new__(Ranks)
    ranks.actor_name = "learner rank"
    ranks.workers = []
    group = make_group()
    group.spec.plan = lambda sequences, num_ranks: [[[0]]]
    group.models = {"policy": ranks}
    ranks.workers = [object()]
    sentence = rf"^the batch of learner rank 0 cannot be stored: {type(error).__name__}: .*object_store_gib"
    with pytest.raises(RunStopped, match=sentence):
        group._split(["policy"], [[1]])
