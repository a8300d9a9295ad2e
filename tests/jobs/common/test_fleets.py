"""The fleets of a job: which are shared, and which end before others take their GPUs."""

from types import SimpleNamespace
from typing import Any

from jobs.common.fleets import Fleets


class FakeFleet:
    def __init__(self, **_: Any) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


JOB: Any = SimpleNamespace(run=SimpleNamespace(seed=1), cluster=SimpleNamespace(placement_timeout_s=1.0))


def test_only_the_engines_of_policies_end() -> None:
    with Fleets() as fleets:
        policy = fleets._get_or_start(("rollout", "base"), JOB, FakeFleet)
        reward = fleets._get_or_start(("reward", "tiny"), JOB, FakeFleet)
        assert fleets._get_or_start(("rollout", "base"), JOB, FakeFleet) is policy
        fleets.end_rollouts()
        assert (policy.num_closed, reward.num_closed) == (1, 0)
        later = fleets._get_or_start(("rollout", "base"), JOB, FakeFleet)
        assert later is not policy
        assert fleets._get_or_start(("reward", "tiny"), JOB, FakeFleet) is reward
    assert later.num_closed == reward.num_closed == 1
