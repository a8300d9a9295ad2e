"""Preference pairs, and DPO written out in plain PyTorch, one response at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from t2g.study.baselines import PreferencePair


def make_pairs(count: int = 6) -> list[PreferencePair]:
    """Of different lengths, so that rows are padded."""
    rng = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return rng.integers(5, 270, length).astype(np.int32)

    return [
        PreferencePair(prompt_ids=ids(3 + i % 3), chosen_ids=ids(2 + i % 4), rejected_ids=ids(5 - i % 3))
        for i in range(count)
    ]


def logprob(model: Any, pair: PreferencePair, response: np.ndarray) -> torch.Tensor:
    ids = torch.from_numpy(np.concatenate([pair.prompt_ids, response]).astype(np.int64))[None]
    logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logprobs[len(pair.prompt_ids) - 1 :].sum()


def margins(model: Any, pairs: Sequence[PreferencePair]) -> torch.Tensor:
    return torch.stack([logprob(model, p, p.chosen_ids) - logprob(model, p, p.rejected_ids) for p in pairs])
