from math import gamma, pi, sqrt

import numpy as np
import pytest

from t2g.study.tables import markdown, t_interval, t_quantile


def half(values: list[float]) -> float:
    bounds = t_interval(values)
    return bounds["high"] - bounds["mean"]


def test_half_intervals_by_hand() -> None:
    assert half([0.5, 0.5, 0.5]) == 0.0
    assert half([0.0, 1.0]) == pytest.approx(12.706 * sqrt(0.5) / sqrt(2))
    assert half([1.0, 2.0, 3.0]) == pytest.approx(4.303 / sqrt(3))


def test_quantiles_of_student_hold_19_of_20() -> None:
    for freedom in (*range(1, 20), 100):
        bound = t_quantile(freedom)
        t = np.linspace(-bound, bound, 200_001)
        density = gamma((freedom + 1) / 2) / sqrt(freedom * pi) / gamma(freedom / 2)
        inside = np.trapezoid(density * (1 + t**2 / freedom) ** (-(freedom + 1) / 2), t)
        assert inside == pytest.approx(0.95, abs=3e-4)


def test_an_interval_lies_around_the_mean_and_one_value_has_none() -> None:
    bounds = t_interval([1.0, 2.0, 3.0])
    assert bounds["mean"] == 2.0
    assert (bounds["low"], bounds["high"]) == (pytest.approx(2 - 2.484, abs=1e-3), pytest.approx(2 + 2.484, abs=1e-3))
    assert t_interval([7.0]) == {"mean": 7.0, "low": None, "high": None}
    assert t_interval([]) == {"mean": None, "low": None, "high": None}


def test_a_table_is_markdown() -> None:
    assert markdown(("a", "b"), [(1, "x"), (None, 2.5)]) == "| a | b |\n| --- | --- |\n| 1 | x |\n| None | 2.5 |"
