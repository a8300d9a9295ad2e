"""Direct preference optimization (Rafailov et al., arXiv 2305.18290): the learner's ranks with `losses.dpo_loss`.

Log-probabilities are those of softmax(logits), as in the paper, for any sampling temperature of the pairs, and of the
sampled ids.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from actors.learner.learner import LearnerGroup
from actors.learner.spec import LearnerSpec
from t2g import metrics as m
from t2g.config import ClusterConfig, LearnerConfig, ModelConfig
from t2g.data.batching import draw_steps, normalize_weights
from t2g.study.baselines import PreferencePair
from t2g.types import PairedSequence, TrainBatch, TrainSequence


def train_dpo(
    model: ModelConfig,
    learner: LearnerConfig,
    pairs: Sequence[PreferencePair],
    *,
    cluster: ClusterConfig,
    stop: Callable[[], bool],
    on_progress: Callable[[int], None],
    batch_size: int,
    seed: int,
    out_folder: Path,
) -> dict[str, float] | None:
    """Train `model` on `pairs` for `learner.num_epochs` and write it to `out_folder`.

    Args:
        batch_size: Pairs of one optimizer step; a microbatch has room for `learner.tokens_per_microbatch` tokens.
        on_progress: Called with the number of finished optimizer steps.

    Returns:
        loss, accuracy, margin (see `dpo_loss`) and grad_norm of the last step, and steps; None if `stop()` ended it.

    Raises:
        UserError: The ranks do not fit.
        Diverged: A loss or gradient is not finite.
        LearnerLost: A rank died, or a step exceeded `learner.step_timeout_s`.
    """
    steps = draw_steps(len(pairs), num_epochs=learner.num_epochs, batch_size=batch_size, seed=seed)
    spec = LearnerSpec(model=model, learner=learner, loss="dpo", num_updates=len(steps), seed=seed)
    with closing(LearnerGroup(spec, placement_timeout_s=cluster.placement_timeout_s)) as group:
        group.wait_ready()
        sequences = paired_sequences(pairs, group)
        for step, indices in enumerate(steps, start=1):
            if stop():
                return None
            minibatch: list[PairedSequence] = []
            for pair in indices:
                minibatch += sequences[2 * pair : 2 * pair + 2]  # chosen, rejected
            batch = TrainBatch(minibatches=(normalize_weights(minibatch),))
            metrics = group.update(batch).metrics
            on_progress(step)
        group.export(out_folder)
    return {
        "loss": metrics[m.POLICY_LOSS],
        "accuracy": metrics[m.ACCURACY],
        "margin": metrics[m.MARGIN],
        "grad_norm": metrics[m.fill(m.GRAD_NORM, "policy")],
        "steps": float(len(steps)),
    }


def paired_sequences(pairs: Sequence[PreferencePair], group: LearnerGroup) -> list[PairedSequence]:
    """Return the chosen and the rejected response of each pair, with equal weights and reference logprobs."""
    sequences: list[TrainSequence] = []
    for pair in pairs:
        for ids in (pair.chosen_ids, pair.rejected_ids):
            weights = np.full(len(ids), 1 / len(ids), np.float32)
            sequence = TrainSequence(prompt_ids=pair.prompt_ids, response_ids=ids, weights=weights)
            sequences.append(sequence)

    paired: list[PairedSequence] = []
    for sequence, stats in zip(sequences, group.forward(sequences), strict=True):
        with_reference = PairedSequence(**vars(sequence), ref_logprobs=stats.ref_logprobs)
        paired.append(with_reference)
    return paired
