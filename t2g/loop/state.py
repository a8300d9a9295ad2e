"""What a checkpoint holds beside the learner's own files, and what must still be as it was when a run goes on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from t2g.config import PolicyJob
from t2g.config.loading import identity_of
from t2g.errors import UserError
from t2g.files import weights_version
from t2g.interfaces import FeedbackSource
from t2g.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What the numbers of a run come from; each as a text that changes with it."""

    config: str  # hash of every key that a resume may not change
    policy: str  # version of the weights of model.policy: the reference stays what it was
    prompts: str  # hash of ids and tokens of all training prompts, in order: the step number points into these
    feedback: str  # version of the source, "" where it has none

    @classmethod
    def of(cls, config: PolicyJob, prompts: Sequence[Prompt], feedback: FeedbackSource) -> Self:
        seen = xxhash.xxh3_128()
        for prompt in prompts:
            seen.update(json.dumps([prompt.prompt_id, len(prompt.prompt_ids)]).encode())
            seen.update(prompt.prompt_ids.astype(np.int32).tobytes())
        return cls(
            config=xxhash.xxh3_128_hexdigest(json.dumps(identity_of(config), sort_keys=True).encode()),
            policy=weights_version(config.model.policy, config.model.revision),
            prompts=seen.hexdigest(),
            feedback=getattr(feedback, "version", ""),
        )


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """`origin` and the groups that wait for later steps (`t2g.data.buffer`) are written beside it."""

    step: int = 0  # finished steps
    num_samples: int = 0  # responses sampled for training so far
    policy_version: int = 0
    kl_coef: float
    wall_s: float = 0.0  # seconds of all sessions that led here


def read_state(folder: Path, saved: Mapping[str, Any], origin: Origin) -> TrainerState:
    """The state of a checkpoint of this run. UserError, saying what changed, where going on would mix two runs."""
    saved = dict(saved)
    was = saved.pop("origin", None)
    names = {field.name for field in fields(TrainerState)}
    if was is None or was.keys() != vars(origin).keys() or saved.keys() != names:
        raise UserError(f"checkpoint {folder} was written by another version of this program: take another run.name")
    words = {
        "config": "with another config",
        "policy": "from other weights than model.policy has now",
        "prompts": "on other prompts than data.path has now",
        "feedback": f"with feedback of {was['feedback'] or 'no version'}, and now it is {origin.feedback or 'of none'}",
    }
    changed = [words[name] for name, value in vars(origin).items() if was[name] != value]
    if changed:
        raise UserError(
            f"checkpoint {folder} was written {', and '.join(changed)}: put that back, or take another run.name"
        )
    return TrainerState(**saved)
