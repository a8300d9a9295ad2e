import math

import pytest

from actors.learner.ranks import rank_environment
from actors.learner.zero3 import lr_factor
from t2g.config import OptimConfig, RoleConfig


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25, 0]),  # the step after the last has reached the end
        ({"schedule": "linear", "final_lr_ratio": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "cosine"}, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
        ({"schedule": "linear", "warmup_ratio": 0.5}, [0.5, 1, 1, 0.5, 0]),
    ],
)
def test_schedule_over_four_steps(options: dict[str, object], expected: list[float]) -> None:
    optim = OptimConfig(lr=1, **options)
    assert [lr_factor(step, optim, 4) for step in range(5)] == pytest.approx(expected)


def test_cosine_after_a_warm_up() -> None:
    """Eight steps, a quarter of them rising: final + (1 - final) * (1 + cos(pi * k / 6)) / 2 for k = 0 ... 6."""
    optim = OptimConfig(lr=1, schedule="cosine", warmup_ratio=0.25, final_lr_ratio=0.1)
    expected = [0.5, 1, 1, 0.9397114, 0.775, 0.55, 0.325, 0.1602886, 0.1]
    assert [lr_factor(step, optim, 8) for step in range(9)] == pytest.approx(expected)


def test_no_step_past_the_end_goes_below_the_final_rate() -> None:
    assert lr_factor(9, OptimConfig(final_lr_ratio=0.1), 4) == pytest.approx(0.1)


def test_memory_of_a_gpu_that_is_lent_stays_in_one_piece() -> None:
    assert rank_environment(RoleConfig(gpus=1)) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert rank_environment(RoleConfig(gpus=0.5), lends=True) == rank_environment(RoleConfig()) == {}
