"""Select what a rank gets of a batch, and merge what the ranks return. Neither Ray nor a model is needed."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np
import torch

from t2g.algo.corrections import importance_metrics
from t2g.algo.losses import Metrics
from t2g.config import ObjectiveConfig
from t2g.metrics import PEAK_MEMORY
from t2g.types import TokenSequence, TokenStats, TrainBatch, TrainSample, TrainSequence


def select_rank_batch(sequences: Sequence[Any], plan: Iterable[Iterable[int]]) -> list[list[Any]]:
    """Return the sequences of each microbatch that `plan`, of one rank, names by their indices."""
    rank_batch: list[list[Any]] = []
    for indices in plan:
        microbatch = [sequences[index] for index in indices]
        rank_batch.append(microbatch)
    return rank_batch


def make_zero_stats(sequence: TokenSequence) -> dict[str, np.ndarray]:
    """Return the fields of `TokenStats` that every loss has, [R] each, as zeros."""
    num_tokens = len(sequence.response_ids)
    names = ("old_logprobs", "ref_logprobs", "values", "entropy")
    return {name: np.zeros(num_tokens, np.float32) for name in names}


def merge_metrics(models: Iterable[Sequence[Metrics]]) -> Metrics:
    """Return one value of each metric. Utilization and peak memory differ between ranks; all others are equal.

    Args:
        models: The metrics of each rank, for each model.
    """
    metrics: Metrics = {}
    peaks: list[float] = []
    for by_rank in models:
        metrics |= by_rank[0]
        for name in by_rank[0]:
            if name.endswith("/mfu"):
                metrics[name] = fmean(rank_metrics[name] for rank_metrics in by_rank)
        peaks += [rank_metrics[PEAK_MEMORY] for rank_metrics in by_rank]
    metrics[PEAK_MEMORY] = max(peaks)
    return metrics


def with_old_logprobs(batch: TrainBatch, stats: Sequence[TokenStats]) -> TrainBatch:
    """Return a batch of one minibatch with the old log-probabilities of the update's own forward pass."""
    samples: list[TrainSequence] = []
    for sample, sample_stats in zip(batch.minibatches[0], stats, strict=True):
        assert isinstance(sample, TrainSample)
        samples.append(replace(sample, old_logprobs=sample_stats.old_logprobs))
    return replace(batch, minibatches=(tuple(samples),))


def correction_metrics(batch: TrainBatch, objective: ObjectiveConfig) -> Metrics:
    """Return `importance_metrics` over the weighted tokens, each once, for any number of epochs."""
    samples: dict[int, TrainSample] = {}  # by the identity of the array that the epochs of a sample share
    for sample in chain.from_iterable(batch.minibatches):
        assert isinstance(sample, TrainSample)
        samples[id(sample.old_logprobs)] = sample

    old: list[np.ndarray] = []
    rollout: list[np.ndarray] = []
    for sample in samples.values():
        is_weighted = sample.weights > 0
        old.append(sample.old_logprobs[is_weighted])
        rollout.append(sample.rollout_logprobs[is_weighted])

    lengths = torch.tensor([len(tokens) for tokens in old])
    sequence_ids = torch.arange(len(old)).repeat_interleave(lengths)
    return importance_metrics(
        torch.from_numpy(np.concatenate(old)),
        torch.from_numpy(np.concatenate(rollout)),
        sequence_ids,
        objective.rollout_correction,
        objective.rollout_correction_cap,
    )
