import doctest
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.config import WorkersConfig
from t2g.loop import scaling
from t2g.loop.scaling import MIN_SPARE_WORKERS, WINDOW_STEPS, StepLoad, compute_target_workers

WORKERS = WorkersConfig(min=1, max=4)
SHORT = {"seconds": 2.0, "learner_idle": 0.4, "rollout_idle": 0.0, "buffered": 0.0}
AMPLE = {"seconds": 2.0, "learner_idle": 0.0, "rollout_idle": 0.7, "buffered": 1.0}
EVEN = {"seconds": 2.0, "learner_idle": 0.1, "rollout_idle": 0.1, "buffered": 0.5}
# Two steps' samples come together: long waiting for the one, none for the other.
LONG = {"seconds": 3.0, "learner_idle": 0.8, "rollout_idle": 0.0, "buffered": 1.0}
BRIEF = {"seconds": 0.6, "learner_idle": 0.0, "rollout_idle": 0.0, "buffered": 0.0}

share = st.floats(0, 1)
loads = st.fixed_dictionaries(
    {"seconds": st.floats(0.1, 1e3), "learner_idle": share, "rollout_idle": share, "buffered": st.floats(0, 3)}
)
bounds = st.tuples(st.integers(1, 9), st.integers(0, 9)).map(lambda b: WorkersConfig(min=b[0], max=b[0] + b[1]))


def decide(*steps: dict[str, float], current: int = 2, joining: bool = False, workers: WorkersConfig = WORKERS) -> int:
    records = [StepLoad(num_workers=current, **step) for step in steps]
    return compute_target_workers(records, current=current, joining=joining, workers=workers)


def test_the_worked_example() -> None:
    assert doctest.testmod(scaling).failed == 0


@pytest.mark.parametrize(
    ("steps", "size"),
    [
        ([SHORT] * 3, 3),
        ([AMPLE] * 3, 1),
        ([EVEN] * 3, 2),
        ([SHORT] * 2, 2),  # not yet
        ([SHORT, EVEN, EVEN, SHORT], 2),
        ([AMPLE, SHORT, SHORT, SHORT], 3),
        ([LONG, BRIEF, LONG], 3),  # .73 of the time
        ([BRIEF, LONG, BRIEF], 3),  # .57
        ([{**LONG, "seconds": 0.6}, BRIEF, BRIEF], 2),  # .27: its waiting is short
        ([SHORT, AMPLE, AMPLE], 2),
        ([], 2),
        ([{**SHORT, "rollout_idle": 0.6}] * 3, 2),  # the engines wait as well: feedback or sync is what is slow
        ([{**SHORT, "buffered": 1.0}] * 3, 2),  # samples are there, and wait for feedback
        ([{**AMPLE, "rollout_idle": 0.6}] * 3, 2),  # 2 x .6: less than MIN_SPARE_WORKERS
        ([{**AMPLE, "learner_idle": 0.4}] * 3, 1),  # it waits for feedback, not for rollouts
        ([{**AMPLE, "learner_idle": 0.4, "buffered": 0.0}] * 3, 2),  # it waits for rollouts, whose engines wait too
    ],
)
def test_what_is_done(steps: list[dict[str, float]], size: int) -> None:
    assert decide(*steps) == size


def test_steps_of_another_size_do_not_count() -> None:
    steps = [StepLoad(num_workers=n, **SHORT) for n in (1, 2, 2)]
    assert compute_target_workers(steps, current=2, joining=False, workers=WORKERS) == 2
    assert compute_target_workers([*steps, steps[-1]], current=2, joining=False, workers=WORKERS) == 3


def test_nothing_changes_while_a_worker_joins() -> None:
    assert decide(*[SHORT] * 9, joining=True) == 2


def test_bounds_hold_at_once() -> None:
    assert decide(*[SHORT] * 3, current=4) == 4
    assert decide(*[AMPLE] * 3, current=1) == 1
    assert decide(current=9) == 4
    assert decide(current=1, workers=WorkersConfig(min=2, max=4)) == 2


@given(st.lists(loads, max_size=6), st.integers(1, 20), bounds, st.booleans())
def test_the_size_stays_within_bounds_and_moves_by_one(
    steps: list[dict[str, float]], current: int, workers: WorkersConfig, joining: bool
) -> None:
    size = decide(*steps, current=current, joining=joining, workers=workers)
    assert workers.min <= size <= workers.max
    if workers.min <= current <= workers.max:
        assert abs(size - current) <= (0 if joining or len(steps) < WINDOW_STEPS else 1)


@given(loads, st.integers(1, 9), share, share, st.floats(0, 3))
def test_more_waiting_by_the_learner_never_shrinks_and_more_by_the_engines_never_grows(
    load: dict[str, float], current: int, learner: float, rollout: float, buffered: float
) -> None:
    workers = WorkersConfig(min=1, max=10)

    def size(**change: float) -> int:
        return decide(*[{**load, **change}] * WINDOW_STEPS, current=current, workers=workers)

    low, high = sorted((load["learner_idle"], learner))
    assert size(learner_idle=low) <= size(learner_idle=high)
    low, high = sorted((load["rollout_idle"], rollout))
    assert size(rollout_idle=low) >= size(rollout_idle=high)
    low, high = sorted((load["buffered"], buffered))
    assert size(buffered=low) >= size(buffered=high)


@given(loads, bounds, st.integers(1, 18))
def test_the_same_load_at_any_size_moves_it_one_way_and_then_stays(
    load: dict[str, float], workers: WorkersConfig, start: int
) -> None:
    sizes = [min(max(start, workers.min), workers.max)]
    for _ in range(20):
        sizes.append(decide(*[load] * WINDOW_STEPS, current=sizes[-1], workers=workers))
    assert sizes in (sorted(sizes), sorted(sizes, reverse=True))
    assert sizes[-1] == sizes[-2]


def in_turn(num_workers: int, generate_s: float, learn_s: float) -> dict[str, float]:
    """Staleness 0: the fleet samples, then the learner learns; `generate_s` with one worker."""
    sample_s = generate_s / num_workers
    idle = sample_s / (sample_s + learn_s)
    return {"seconds": sample_s + learn_s, "learner_idle": idle, "rollout_idle": 1 - idle, "buffered": 0.0}


def overlapped(num_workers: int, generate_s: float, learn_s: float) -> dict[str, float]:
    """Staleness 1: the slower of the two sets the pace, and the faster fleet runs one step ahead."""
    sample_s = generate_s / num_workers
    step_s = max(sample_s, learn_s)
    return {
        "seconds": step_s,
        "learner_idle": 1 - learn_s / step_s,
        "rollout_idle": 1 - sample_s / step_s,
        "buffered": float(sample_s < learn_s),
    }


@pytest.mark.parametrize("model", [in_turn, overlapped])
@given(generate_s=st.floats(0.1, 100), learn_s=st.floats(0.1, 100), start=st.integers(1, 9))
def test_a_fleet_whose_load_follows_its_size_comes_to_rest(
    model: Callable[[int, float, float], dict[str, float]], generate_s: float, learn_s: float, start: int
) -> None:
    """Growth changes the load; a rule that then took the worker back would start and kill engines all day."""
    workers = WorkersConfig(min=1, max=9)
    sizes = [start]
    for _ in range(12):
        load = model(sizes[-1], generate_s, learn_s)
        sizes.append(decide(*[load] * WINDOW_STEPS, current=sizes[-1], workers=workers))
    assert sizes in (sorted(sizes), sorted(sizes, reverse=True))
    assert sizes[-1] == sizes[-2]


def test_a_step_that_takes_the_learner_longer_than_the_engines_frees_those_that_are_too_many() -> None:
    """30 s of generation by one worker against 20 s of learning: 2 are enough, 4 idle for 1.5 of them more."""
    assert overlapped(4, 30, 20)["rollout_idle"] * 4 == pytest.approx(2.5)
    assert MIN_SPARE_WORKERS < 2.5
    assert decide(*[overlapped(4, 30, 20)] * 3, current=4) == 3
    assert decide(*[overlapped(3, 30, 20)] * 3, current=3) == 2
    assert decide(*[overlapped(2, 30, 20)] * 3, current=2) == 2
    assert decide(*[overlapped(1, 30, 20)] * 3, current=1) == 2
