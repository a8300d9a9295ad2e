"""What a place is worth, by counting: every pair of responses of a world of K facts, with its probability.

A response states each of K facts rightly (1) or wrongly (-1), a token each, rightly with p by a policy of one logit a
fact. With two samples a prompt the estimator of fact k's gradient is the mean over them of A_ik (a_ik - p), a 0 or 1.
Written out: with d_l the difference of the samples' a at fact l, g_k = d_k sum_l d_l, over the facts from k on where
rewards are paid in place (the return from a token on holds no others), over all where their sum is paid at the end.
With v = E d^2 = 2 p (1 - p): E g_k = v, Var g_k = v - v^2 + m v^2 for m facts beside k in the sum.
"""

from itertools import product

import numpy as np
import pytest
import torch

from t2g.algo.advantages import group_advantages
from t2g.config import Placement
from t2g.feedback.rewards import apply_placement

NUM_FACTS = 5
RESPONSES = np.array(list(product((0, 1), repeat=NUM_FACTS)))  # [32, K]


def moments(placement: Placement, p: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of each fact's gradient, [K] each, over all pairs of responses."""
    pairs = np.array(list(product(range(len(RESPONSES)), repeat=2)))
    rows = RESPONSES[pairs.flatten()]  # [2 * pairs, K], the two of a pair beside each other
    steps = np.zeros(NUM_FACTS, np.int32)
    paid = np.stack(
        [apply_placement((2.0 * row - 1).astype(np.float32), placement, sentence_ids=steps) for row in rows]
    )
    groups = torch.arange(len(pairs)).repeat_interleave(2)
    mask = torch.ones(len(rows), NUM_FACTS)
    advantages, _ = group_advantages(torch.from_numpy(paid), mask, groups, 1.0, normalize=False)
    gradients = (advantages.numpy() * (rows - p)).reshape(-1, 2, NUM_FACTS).mean(1)
    chance = np.where(rows == 1, p, 1 - p).prod(1).reshape(-1, 2).prod(1)
    assert chance.sum() == pytest.approx(1)
    mean = chance @ gradients
    return mean, chance @ np.square(gradients - mean)


@pytest.mark.parametrize("p", [0.5, 0.7])
def test_a_place_leaves_the_gradient_and_takes_variance(p: float) -> None:
    v = 2 * p * (1 - p)
    later = np.arange(NUM_FACTS)[::-1]
    split_by_sequence = moments("span", p)
    at_the_end = moments("scalar", p)
    for mean, _ in (split_by_sequence, at_the_end):
        np.testing.assert_allclose(mean, v, rtol=1e-5)  # the same gradient: both are without bias
    np.testing.assert_allclose(split_by_sequence[1], v - v**2 + later * v**2, rtol=1e-5)
    np.testing.assert_allclose(at_the_end[1], v - v**2 + (NUM_FACTS - 1) * v**2, rtol=1e-5)


def test_at_even_odds_the_scalar_has_five_thirds_of_the_variance() -> None:
    """And with more facts twice of it: (K + 1) / 2 places on the average against K."""
    ratio = moments("scalar", 0.5)[1].sum() / moments("span", 0.5)[1].sum()
    assert ratio == pytest.approx(NUM_FACTS / ((NUM_FACTS + 1) / 2), rel=1e-5)
