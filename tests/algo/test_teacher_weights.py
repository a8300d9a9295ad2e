"""A teacher's weights of token advantages: bounds, sums, signs, and the equations as a plain loop."""

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.algo.teacher_weights import weigh_by_teacher

NUMBERS = st.floats(-50, 50, width=32)
TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=12)


def columns(tokens: list[tuple[float, float, bool]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    advantages, gap, is_trained = zip(*tokens, strict=True)
    return np.array(advantages, np.float32), np.array(gap, np.float32), np.array(is_trained)


@given(tokens=TOKENS, bound=st.floats(1.01, 100))
def test_weights_keep_every_sign_and_stay_within_their_bound(
    tokens: list[tuple[float, float, bool]], bound: float
) -> None:
    advantages, gap, is_trained = columns(tokens)
    factors = weigh_by_teacher(advantages, gap, is_trained, bound=bound)
    rounding = 1 + 1e-6
    assert (factors >= 1 / bound / rounding).all()
    assert (factors <= bound * rounding).all()
    assert (np.sign(advantages * factors) == np.sign(advantages)).all()
    assert (factors[~is_trained] == 1).all()


@given(tokens=TOKENS, bound=st.floats(1.01, 100))
def test_praise_and_criticism_of_a_response_keep_their_sums(
    tokens: list[tuple[float, float, bool]], bound: float
) -> None:
    advantages, gap, is_trained = columns(tokens)
    factors = weigh_by_teacher(advantages, gap, is_trained, bound=bound)
    for has_sign in (advantages > 0, advantages < 0):
        before = advantages[is_trained & has_sign].astype(np.float64)
        after = before * factors[is_trained & has_sign]
        assert after.sum() == pytest.approx(before.sum(), rel=1e-5)


@given(tokens=TOKENS, bound=st.floats(1.01, 100))
def test_the_weights_are_those_of_the_plain_loop(tokens: list[tuple[float, float, bool]], bound: float) -> None:
    clip = log(bound) / 2
    expected: list[float] = []
    for advantage, gap, is_trained in tokens:
        if not is_trained or advantage == 0:
            expected.append(1.0)
            continue
        sign = 1 if advantage > 0 else -1
        total = 0.0
        weighed = 0.0
        for other, other_gap, other_is_trained in tokens:
            if other_is_trained and other * sign > 0:
                total += abs(other)
                weighed += abs(other) * exp(sign * min(max(other_gap, -clip), clip))
        expected.append(exp(sign * min(max(gap, -clip), clip)) * total / weighed)
    np.testing.assert_allclose(weigh_by_teacher(*columns(tokens), bound=bound), expected, rtol=1e-5)


def test_the_bound_is_reached_only_by_a_token_against_all_others() -> None:
    """One token at the upper clip among many at the lower one: e^c over almost e^-c."""
    gap = np.array([99.0] + [-99.0] * 999)
    factors = weigh_by_teacher(np.ones(1000), gap, np.ones(1000, bool), bound=4.0)
    assert factors[0] == pytest.approx(4.0, rel=0.01)
    assert factors[1] == pytest.approx(1.0, rel=0.01)


def test_a_criticised_token_counts_more_if_the_critique_makes_it_less_likely() -> None:
    advantages = np.array([2.0, 2.0, -3.0, -3.0])
    gap = np.array([0.5, -0.5, 0.5, -0.5])
    factors = weigh_by_teacher(advantages, gap, np.ones(4, bool), bound=9.0)
    assert factors[0] == factors[3] > 1 > factors[1] == factors[2]
    assert factors[0] / factors[1] == pytest.approx(exp(1))


@pytest.mark.parametrize("gap", [-7.0, 0.3])
def test_a_teacher_to_which_all_tokens_are_equally_unlikely_changes_nothing(gap: float) -> None:
    """One that cannot follow critiques finds whole responses unlikely: praise must not shrink beside criticism."""
    advantages = np.array([2.0, 0.5, 0.0, -1.0, -3.0])
    factors = weigh_by_teacher(advantages, np.full(5, gap), np.ones(5, bool), bound=4.0)
    assert factors.tolist() == pytest.approx([1] * 5)
