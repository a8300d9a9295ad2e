"""Metrics of calls of tools, of training steps and of held-out conversations."""

from collections.abc import Sequence

import numpy as np

from t2g import metrics as m
from t2g.types import Rollout


def tool_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the metrics of calls of tools; {} if the policy called no tool."""
    statuses: list[str] = []
    for rollout in rollouts:
        for turn in rollout.turns:
            statuses += [result.status for result in turn.results]
    if not statuses:
        return {}
    is_malformed = [status == "malformed" for status in statuses]
    is_error = [status in ("failed", "lost") for status in statuses]
    return {
        m.CALLS: len(statuses) / len(rollouts),
        m.MALFORMED_SHARE: float(np.mean(is_malformed)),
        m.TOOL_ERROR_SHARE: float(np.mean(is_error)),
    }
