"""Calls of a learner group after one of its ranks was lost; the group has no ranks here."""

import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from actors.learner.learner import LearnerGroup
from t2g.config import LearnerConfig
from t2g.errors import LearnerLost, RankFailed, RunStopped

FAILED = RankFailed("learner rank 1 failed in save, and others wait for it: OSError: No space left on device")


def make_group(**config: Any) -> Any:
    """Return a group that makes calls on no rank."""
    group = LearnerGroup.__new__(LearnerGroup)
    group.spec = SimpleNamespace(learner=LearnerConfig(**config))  # type: ignore[assignment]
    group._lock = threading.Lock()
    group._lost = None
    group.models = {}
    return group


def fail(group: Any, error: Exception) -> None:
    """Make a call that ends in an error."""
    with group._exclusive():
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
    with group._exclusive():
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
            with group._exclusive():
                reached.append("ranks")
        except RunStopped as error:
            errors.append(error)

    later = threading.Thread(target=call_later)
    with suppress(RankFailed), group._exclusive():
        later.start()
        assert is_waiting.wait(20)
        raise FAILED
    later.join(20)
    assert errors == [FAILED]
    assert reached == []
