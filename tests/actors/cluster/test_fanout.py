"""What one call to several actors raises, on references that this process settles; on actors in tests/integration."""

from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from actors.cluster import fanout
from t2g.errors import Diverged, LearnerLost, RankFailed, RunStopped, UserError


class FakeRay:
    """References are numbers; `answers` has the calls that have ended, with their values or errors."""

    def __init__(self, answers: dict[int, Any]) -> None:
        self.answers = answers

    def wait(
        self, refs: Sequence[int], *, num_returns: int = 1, timeout: float, fetch_local: bool = True
    ) -> tuple[list[int], list[int]]:
        done = [ref for ref in refs if ref in self.answers][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: int) -> Any:
        answer = self.answers[ref]
        if isinstance(answer, Exception):
            raise answer
        return answer


def raised(cause: Exception) -> RayTaskError:
    return RayTaskError("update", f"{type(cause).__name__}: {cause}", cause)


def collect(
    monkeypatch: pytest.MonkeyPatch, answers: dict[int, Any], num_ranks: int, limit_s: float | None = None
) -> list[Any]:
    monkeypatch.setattr(fanout, "ray", FakeRay(answers))
    refs: Any = list(range(num_ranks))
    return fanout.collect(refs, actor_name="learner rank", call="update", timeout_s=0.1, limit_s=limit_s)


def fail(monkeypatch: pytest.MonkeyPatch, answers: dict[int, Any], num_ranks: int) -> Exception:
    with pytest.raises((RunStopped, UserError)) as caught:
        collect(monkeypatch, answers, num_ranks)
    return caught.value


def test_results_come_in_order_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collect(monkeypatch, {1: "b", 0: "a"}, 2) == ["a", "b"]


def test_a_broken_connection_while_others_wait_is_a_lost_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reports the rank that died later than its connections break."""
    broken = raised(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711"))
    assert type(fail(monkeypatch, {0: broken}, 2)) is LearnerLost
    assert type(fail(monkeypatch, {0: broken, 1: broken}, 2)) is RunStopped


def test_a_rank_that_fails_alone_is_named_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits in a collective, which no later call could pass."""
    out_of_memory = raised(MemoryError("CUDA out of memory"))
    error = fail(monkeypatch, {1: out_of_memory}, 3)
    assert type(error) is RankFailed
    assert str(error) == "learner rank 1 failed in update, and others wait for it: MemoryError: CUDA out of memory"
    diverged = fail(monkeypatch, {1: raised(Diverged("the loss is not finite"))}, 2)
    assert type(diverged) is RankFailed
    assert str(diverged) == "learner rank 1 failed in update, and others wait for it: the loss is not finite"


def test_an_error_after_which_every_rank_answers_leaves_the_ranks_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    error = fail(monkeypatch, {0: "a", 1: raised(OSError(28, "No space left"))}, 2)
    assert type(error) is RunStopped
    assert type(fail(monkeypatch, {0: "a", 1: raised(Diverged("the loss is not finite"))}, 2)) is Diverged


def test_a_death_and_a_wrong_setting_are_reported_as_such_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start helps after the first, another setting after the second."""
    assert type(fail(monkeypatch, {1: ActorDiedError()}, 2)) is LearnerLost
    wrong = fail(monkeypatch, {1: raised(UserError("model.policy='x' cannot be loaded"))}, 2)
    assert type(wrong) is UserError


@pytest.mark.parametrize(("limit_s", "expected"), [(None, "0.1"), (600.0, "600")])
def test_every_silent_rank_is_named_with_the_limit_that_the_user_set(
    monkeypatch: pytest.MonkeyPatch, limit_s: float | None, expected: str
) -> None:
    with pytest.raises(LearnerLost) as caught:
        collect(monkeypatch, {1: "b"}, 3, limit_s)
    assert str(caught.value) == f"learner rank 0, 2 timed out: update did not finish within {expected} s"
