"""The end of a rank of two, after all tests that share their processes."""

from pathlib import Path
from typing import Any

import pytest
import ray
from learner_runs import SharedGroup, learner_spec, random_rollouts

from t2g.errors import LearnerLost


def test_a_dead_rank_is_named(hosts: list[Any], base: Path) -> None:
    group = SharedGroup(learner_spec(base, workers=2), hosts)
    ray.kill(hosts[1], no_restart=True)
    with pytest.raises(LearnerLost, match=r"^learner rank 1 died during stream_weights"):
        list(group.stream_weights("float32"))
    with pytest.raises(LearnerLost, match=r"^learner rank 1 died during stream_weights"):  # what all later calls say
        group.forward(random_rollouts())
    group.close()
