"""A teacher's weights of token advantages: bounds, mean, what noise becomes, and the equations as a plain loop."""

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.algo.teacher_weights import weigh_by_teacher

NUMBERS = st.floats(-50, 50, width=32)
TOKENS = st.lists(st.tuples(NUMBERS, st.booleans()), min_size=1, max_size=12)


def columns(tokens: list[tuple[float, bool]]) -> tuple[np.ndarray, np.ndarray]:
    gap, is_trained = zip(*tokens, strict=True)
    return np.array(gap, np.float32), np.array(is_trained)


@given(tokens=TOKENS, bound=st.floats(1.01, 100))
def test_weights_are_positive_within_their_bound_and_have_the_mean_1(
    tokens: list[tuple[float, bool]], bound: float
) -> None:
    gap, is_trained = columns(tokens)
    factors = weigh_by_teacher(gap, is_trained, bound=bound)
    rounding = 1 + 1e-6
    assert (factors >= 1 / bound / rounding).all()
    assert (factors <= bound * rounding).all()
    assert (factors[~is_trained] == 1).all()
    assert factors.mean() == pytest.approx(1, rel=1e-5)


@given(tokens=TOKENS, bound=st.floats(1.01, 100))
def test_the_weights_are_those_of_the_plain_loop(tokens: list[tuple[float, bool]], bound: float) -> None:
    clip = log(bound)
    total = 0.0
    num_trained = 0
    for gap, is_trained in tokens:
        if is_trained:
            total += exp(min(abs(gap), clip))
            num_trained += 1
    expected: list[float] = []
    for gap, is_trained in tokens:
        weight = exp(min(abs(gap), clip)) * num_trained / total if is_trained else 1.0
        expected.append(weight)
    np.testing.assert_allclose(weigh_by_teacher(*columns(tokens), bound=bound), expected, rtol=1e-5)


@given(tokens=TOKENS)
def test_advantages_that_are_noise_move_the_policy_nowhere(tokens: list[tuple[float, bool]]) -> None:
    """The mean update over A and -A is 0, whatever the teacher says: it is not distilled by way of noise."""
    gap, is_trained = columns(tokens)
    noise = np.sin(np.arange(len(gap)) + 1)
    updates = [advantages * weigh_by_teacher(gap, is_trained, bound=4.0) for advantages in (noise, -noise)]
    assert (updates[0] + updates[1] == 0).all()
    assert (weigh_by_teacher(-gap, is_trained, bound=4.0) == weigh_by_teacher(gap, is_trained, bound=4.0)).all()


def test_the_bound_is_reached_only_by_a_token_against_all_others() -> None:
    """One token beyond the clip among many that the critique leaves alone: e^c over almost 1."""
    gap = np.array([-99.0] + [0.0] * 999)
    factors = weigh_by_teacher(gap, np.ones(1000, bool), bound=4.0)
    assert factors[0] == pytest.approx(4.0, rel=0.01)
    assert factors[1] == pytest.approx(1.0, rel=0.01)


def test_a_token_counts_more_if_the_critique_changes_its_probability() -> None:
    gap = np.array([0.5, -0.5, 0.0, 0.0])
    factors = weigh_by_teacher(gap, np.ones(4, bool), bound=4.0)
    assert factors[0] == factors[1] > 1 > factors[2] == factors[3]
    assert factors[0] / factors[2] == pytest.approx(exp(0.5))


@pytest.mark.parametrize("gap", [-7.0, 0.3])
def test_a_teacher_to_which_all_tokens_are_equally_unlikely_changes_nothing(gap: float) -> None:
    assert weigh_by_teacher(np.full(5, gap), np.ones(5, bool), bound=4.0).tolist() == [1] * 5
