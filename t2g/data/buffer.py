"""Judged responses that wait for their step, and how a checkpoint keeps them.

folder/groups.json   of each group its step, its prompt's id, and everything of its samples that is no array
folder/arrays.npz    response_ids [N] int32 and rollout_logprobs [N] float32 of all samples, one after the other
"""

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from t2g.errors import UserError
from t2g.types import Prompt, Rollout, SpanFeedback, read_feedback

GROUPS, ARRAYS = "groups.json", "arrays.npz"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The responses to one prompt of a step with their feedback, in order of sample_index."""

    prompt: Prompt
    samples: tuple[tuple[Rollout, SpanFeedback], ...]  # none where the prompt could not be sampled
    failure: str = ""  # why it could not


Groups = Mapping[int, Sequence[Group]]  # by step


def write_groups(folder: Path, groups: Groups) -> None:
    """Groups that have samples, into a folder that is made. Every number comes back as it is, floats bit by bit."""
    folder.mkdir()
    rollouts = [rollout for some in groups.values() for group in some for rollout, _ in group.samples]
    records = [
        {
            "step": step,
            "prompt_id": group.prompt.prompt_id,
            "samples": [
                {
                    "num_tokens": len(rollout.response_ids),
                    "response_text": rollout.response_text,
                    "finish_reason": rollout.finish_reason,
                    "policy_versions": rollout.policy_versions,
                    "feedback": asdict(feedback),
                }
                for rollout, feedback in group.samples
            ],
        }
        for step, some in groups.items()
        for group in some
    ]
    (folder / GROUPS).write_text(json.dumps(records), encoding="ascii")
    np.savez(
        folder / ARRAYS,
        response_ids=np.concatenate([np.zeros(0, np.int32), *(r.response_ids for r in rollouts)]),
        rollout_logprobs=np.concatenate([np.zeros(0, np.float32), *(r.rollout_logprobs for r in rollouts)]),
    )


def read_groups(folder: Path, prompts: Mapping[str, Prompt]) -> dict[int, list[Group]]:
    """What `write_groups` wrote; {} for no folder. prompts: by prompt_id. UserError for anything else."""
    if not folder.exists():
        return {}
    try:
        records = json.loads((folder / GROUPS).read_text(encoding="ascii"))
        with np.load(folder / ARRAYS, allow_pickle=False) as arrays:
            ids, logprobs = arrays["response_ids"], arrays["rollout_logprobs"]
        ends = np.cumsum([sample["num_tokens"] for record in records for sample in record["samples"]], dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        if (ids.dtype, logprobs.dtype) != (np.int32, np.float32) or not ids.shape == logprobs.shape == (total,):
            raise ValueError(f"its arrays are not those of {total} tokens")
        pieces = iter(zip(np.split(ids, ends[:-1]), np.split(logprobs, ends[:-1]), strict=True))
        groups: dict[int, list[Group]] = {}
        for record in records:
            prompt = prompts[record["prompt_id"]]
            samples = tuple(_sample(s, i, prompt, *next(pieces)) for i, s in enumerate(record["samples"]))
            groups.setdefault(int(record["step"]), []).append(Group(prompt=prompt, samples=samples))
    except (OSError, ValueError, KeyError, TypeError, StopIteration, MemoryError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{folder} holds no sample buffer of this run ({type(error).__name__}: {error!s:.200}): remove the "
            "checkpoint it is in; the run then goes on from the one before"
        ) from error
    return groups


def _sample(
    record: Mapping[str, Any], index: int, prompt: Prompt, response_ids: np.ndarray, rollout_logprobs: np.ndarray
) -> tuple[Rollout, SpanFeedback]:
    rollout = Rollout(
        prompt_id=prompt.prompt_id,
        sample_index=index,
        prompt_ids=prompt.prompt_ids,
        response_ids=response_ids,
        rollout_logprobs=rollout_logprobs,
        response_text=record["response_text"],
        finish_reason=record["finish_reason"],
        policy_versions=tuple((start, end, version) for start, end, version in record["policy_versions"]),
    )
    return rollout, read_feedback(record["feedback"])
