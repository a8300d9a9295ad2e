"""Judged responses that wait for their step, and how a checkpoint keeps them: one JSON file."""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from t2g.errors import UserError
from t2g.types import Prompt, Rollout, SpanFeedback, read_feedback

GROUPS = "groups.json"
ARRAYS = {"response_ids": np.int32, "rollout_logprobs": np.float32}  # a rollout's arrays: their bytes, in base 64


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
    records = [
        {"step": step, "prompt_id": group.prompt.prompt_id, "samples": [_record(*s) for s in group.samples]}
        for step, some in groups.items()
        for group in some
    ]
    (folder / GROUPS).write_text(json.dumps(records), encoding="ascii")


def _record(rollout: Rollout, feedback: SpanFeedback) -> dict[str, Any]:
    """All of it as JSON, but what the prompt says."""
    said = {name: value for name, value in vars(rollout).items() if name not in ("prompt_id", "prompt_ids")}
    arrays = {name: b64encode(said[name].tobytes()).decode() for name in ARRAYS}
    return said | arrays | {"feedback": asdict(feedback)}


def read_groups(folder: Path, prompts: Mapping[str, Prompt]) -> dict[int, list[Group]]:
    """What `write_groups` wrote; {} for no folder. prompts: by prompt_id. UserError for anything else."""
    if not folder.exists():
        return {}
    try:
        groups: dict[int, list[Group]] = {}
        for record in json.loads((folder / GROUPS).read_text(encoding="ascii")):
            prompt = prompts[record["prompt_id"]]
            samples = tuple(_sample(sample, prompt) for sample in record["samples"])
            groups.setdefault(int(record["step"]), []).append(Group(prompt=prompt, samples=samples))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder} holds no sample buffer of this run ({type(error).__name__}: {error}): remove the "
            "checkpoint it is in; the run then goes on from the one before"
        ) from error
    return groups


def _sample(record: dict[str, Any], prompt: Prompt) -> tuple[Rollout, SpanFeedback]:
    feedback = read_feedback(record.pop("feedback"))
    arrays = {name: np.frombuffer(b64decode(record[name], validate=True), kind) for name, kind in ARRAYS.items()}
    if len(arrays["response_ids"]) != len(arrays["rollout_logprobs"]):
        raise ValueError(f"not one logprob for each token of prompt {prompt.prompt_id}")
    versions = tuple((start, end, version) for start, end, version in record["policy_versions"])
    said = record | arrays | {"policy_versions": versions}
    return Rollout(prompt_id=prompt.prompt_id, prompt_ids=prompt.prompt_ids, **said), feedback
