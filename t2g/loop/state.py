"""What a checkpoint holds beside the learner's own files, and what must still be as it was when a run goes on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from t2g.config import PolicyJob
from t2g.files import weights_version
from t2g.interfaces import FeedbackSource
from t2g.runs.identity import Identity, data_hash
from t2g.types import Prompt


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The run's identity and the groups that wait for later steps (`t2g.data.buffer`) are written beside it."""

    step: int = 0  # finished steps
    num_samples: int = 0  # responses sampled for training so far
    policy_version: int = 0
    kl_coef: float
    wall_s: float = 0.0  # seconds of all sessions that led here


def run_identity(config: PolicyJob, prompts: Sequence[Prompt], feedback: FeedbackSource) -> Identity:
    """What the numbers of a run come from: the step number points into the prompts, the reference is model.policy."""
    return Identity.of(
        config,
        weights=weights_version(config.model.policy, config.model.revision),
        data=data_hash((prompt.prompt_id, prompt.prompt_ids.astype(np.int32)) for prompt in prompts),
        feedback=feedback.version,
    )
