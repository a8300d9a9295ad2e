import math

import pytest
import torch

from t2g.algo.corrections import importance_metrics, truncated_importance


def test_truncation() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    weights = truncated_importance(old, torch.tensor([-1.0, -4.0, -0.5]), 2.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, math.exp(-0.5)]))
    assert not weights.requires_grad


def test_metrics_count_only_tokens_that_count() -> None:
    weights = [1.0, 1.05, 1.2, 0.5, 4.0, 99.0]
    metrics = importance_metrics(
        torch.tensor(weights).log(), torch.zeros(6), torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]), 2.0
    )
    assert metrics["importance/mean"] == pytest.approx(sum(weights[:5]) / 5)
    assert metrics["importance/outside_share"] == pytest.approx(3 / 5)
    assert metrics["importance/truncated_share"] == pytest.approx(1 / 5)
    assert metrics["importance/p95"] == pytest.approx(1.2 + 0.8 * 2.8)  # 95 % of the way along 5 sorted: rank 3.8
