"""The buffer of judged responses for later steps; a checkpoint stores it as one JSON file."""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from t2g.errors import UserError
from t2g.types import PolicyTurn, Prompt, Rollout, SpanFeedback, read_feedback

GROUPS = "groups.json"
ARRAYS = {"response_ids": np.int32, "rollout_logprobs": np.float32}  # arrays of a rollout, stored as base64
PROMPT_FIELDS = ("prompt_id", "prompt_ids")  # fields of a rollout that its prompt has too
TURNS = "conversation"  # key of the environment turns
_TURNS = TypeAdapter(tuple[PolicyTurn, ...])


@dataclass(frozen=True, kw_only=True)
class Group:
    """The responses to one prompt of a step with their feedback, in order of sample_index."""

    prompt: Prompt
    samples: tuple[tuple[Rollout, SpanFeedback], ...]  # empty if the prompt could not be sampled
    failure: str = ""  # why it could not be sampled


Groups = Mapping[int, Sequence[Group]]  # by step


def write_groups(folder: Path, groups: Groups) -> None:
    """Write groups with samples into a new folder. Numbers are stored exactly, floats bit by bit."""
    folder.mkdir()
    records = []
    for step, step_groups in groups.items():
        for group in step_groups:
            samples = [_make_record(rollout, feedback) for rollout, feedback in group.samples]
            records.append({"step": step, "prompt_id": group.prompt.prompt_id, "samples": samples})
    (folder / GROUPS).write_text(json.dumps(records), encoding="ascii")


def _make_record(rollout: Rollout, feedback: SpanFeedback) -> dict[str, Any]:
    """Return the sample as JSON values, without the fields of its prompt."""
    record: dict[str, Any] = {}
    for field in fields(rollout):
        if field.name not in PROMPT_FIELDS:
            record[field.name] = getattr(rollout, field.name)
    for name in ARRAYS:
        array: np.ndarray = record[name]
        record[name] = b64encode(array.tobytes()).decode()
    record[TURNS] = [asdict(turn) for turn in record.pop("environment_turns")]
    record["feedback"] = asdict(feedback)
    return record


def read_groups(folder: Path, prompts: Mapping[str, Prompt]) -> dict[int, list[Group]]:
    """Return the groups of `write_groups`, {} if there is no folder.

    Args:
        prompts: The prompts of the run by prompt_id.

    Raises:
        UserError: The folder holds no buffer of this run.
    """
    if not folder.exists():
        return {}
    groups: dict[int, list[Group]] = {}
    try:
        text = (folder / GROUPS).read_text(encoding="ascii")
        for record in json.loads(text):
            prompt = prompts[record["prompt_id"]]
            samples = tuple(_read_sample(sample, prompt) for sample in record["samples"])
            step = int(record["step"])
            groups.setdefault(step, []).append(Group(prompt=prompt, samples=samples))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder} holds no sample buffer of this run ({type(error).__name__}: {error}): remove the "
            "checkpoint it is in; the run then goes on from the one before"
        ) from error
    return groups


def _read_sample(record: dict[str, Any], prompt: Prompt) -> tuple[Rollout, SpanFeedback]:
    feedback = read_feedback(record.pop("feedback"))
    for name, dtype in ARRAYS.items():
        data = b64decode(record[name], validate=True)
        record[name] = np.frombuffer(data, dtype)
    if len(record["response_ids"]) != len(record["rollout_logprobs"]):
        raise ValueError(f"not one logprob for each token of prompt {prompt.prompt_id}")
    record["policy_versions"] = tuple((start, end, version) for start, end, version in record["policy_versions"])
    turns = _TURNS.validate_python(record.pop(TURNS, ()))
    rollout = Rollout(prompt_id=prompt.prompt_id, prompt_ids=prompt.prompt_ids, environment_turns=turns, **record)
    return rollout, feedback
