"""Pods from workers: worked examples, and bounds that stay exact."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.config import PolicyJob, WorkersConfig, loading
from t2g.deploy.pods import GPUS_PER_POD, WORKERS_PER_POD, pod_groups, workers_per_pod
from t2g.errors import UserError
from t2g.resources.preflight import matches_selector

ROOT = Path(__file__).resolve().parents[2]


def policy(*overrides: str) -> PolicyJob:
    return loading.load(PolicyJob, ROOT / "configs" / "tiny" / "policy.yaml", overrides, environ={}, cwd=ROOT)


@pytest.mark.parametrize(
    ("workers", "gpus", "expected"),
    [
        ((12, 12, 32), 2, 4),  # 4 of 2 GPUs are a node of 8, and divide 12 and 32
        ((1, 1, 4), 1, 1),  # grows by ones
        ((6, 6, 6), 1, 6),
        ((16, 16, 16), 1, 8),
        ((12, 12, 12), 1, 6),  # two pods of 6, not 8 and 4
        ((13, 13, 13), 1, 1),
        ((2, 2, 2), 8, 1),
        ((4, 4, 4), 0.5, 4),
        ((2, 2, 2), 0, 2),
        ((16, 16, 16), 0, 8),
    ],
)
def test_workers_share_a_pod(workers: tuple[int, int, int], gpus: float, expected: int) -> None:
    low, start, high = workers
    assert workers_per_pod(WorkersConfig(min=low, initial=start, max=high), gpus) == expected


@given(st.lists(st.integers(1, 64), min_size=3, max_size=3), st.sampled_from([0, 0.25, 0.5, 1, 2, 3, 4, 8]))
def test_pods_have_room_for_exactly_the_workers(bounds: list[int], gpus: float) -> None:
    low, start, high = sorted(bounds)
    per_pod = workers_per_pod(WorkersConfig(min=low, initial=start, max=high), gpus)
    assert [count % per_pod for count in (low, start, high)] == [0, 0, 0]
    assert per_pod <= WORKERS_PER_POD
    assert per_pod * gpus <= GPUS_PER_POD


def test_groups_of_the_tiny_run() -> None:
    config = policy("learner.workers=4", "rollout.workers={min: 1, max: 3}")
    groups = {group.name: group for group in pod_groups(config)}
    assert list(groups) == ["learner", "rollout", "reward"]
    assert (groups["learner"].pods.max, groups["learner"].per_pod, groups["learner"].cpus) == (1, 4, 2)  # 4 x .5
    assert (groups["rollout"].pods.min, groups["rollout"].pods.max, groups["rollout"].cpus) == (1, 3, 1)
    assert groups["reward"].section == "feedback.engine"


def test_what_fits_into_no_pod_is_refused() -> None:
    with pytest.raises(UserError, match=r"rollout\.gpus is 16, and a pod has at most 8"):
        pod_groups(policy("rollout.gpus=16"))
    with pytest.raises(UserError, match=r"rollout\.labels: pool is '!spot'"):
        pod_groups(policy("rollout.labels={pool: '!spot'}"))


@pytest.mark.parametrize(
    ("labels", "selector", "expected"),
    [
        ({"rl/role": "learner"}, {}, True),
        ({"rl/role": "learner"}, {"rl/role": "learner"}, True),
        ({"rl/role": "learner"}, {"rl/role": "rollout"}, False),
        ({"rl/role": "learner"}, {"rl/role": "learner", "pool": "a"}, False),
    ],
)
def test_selectors(labels: dict[str, str], selector: dict[str, str], expected: bool) -> None:
    assert matches_selector(labels, selector) is expected
