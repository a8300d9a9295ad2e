"""What a result was made of: one answer to "is this the same run?", for runs, checkpoints, stages and trained models.

Beside what was made lies `identity.json`, and where it is whole the file with its result, written last:

    runs/own/                           identity.json, summary.json
    runs/own/checkpoints/step-00000010  identity.json, among the files that the manifest seals
    runs/demo/base/                     identity.json, stage.json
    runs/own-sft/model/                 identity.json, sft.json

    {"format": 1, "config": {"model.policy": "my/model", "rollout.temperature": 0.6, ...},
     "weights": "9a0364b9e99bb480", "data": "83f1c2...", "feedback": "my-critic-2"}

What a resume may change (`t2g.config.marks.may_differ`) is not in it. Whoever makes something calls `keep` with what
it is made of; whoever finds something calls `check` before it goes on, or `finished` for the result.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import xxhash
from pydantic import BaseModel, ValidationError

from t2g.config import Section
from t2g.config.loading import identity_of
from t2g.config.words import show
from t2g.errors import UserError
from t2g.files import write_atomic

if TYPE_CHECKING:
    import numpy as np  # a job's --help answers without it

IDENTITY_FILE = "identity.json"
FORMAT = 1  # of what lies beside an identity: goes up when this program can no longer go on from what it wrote before
WORDS = {
    "weights": "the weights of model.policy",
    "data": "what data.path holds",
    "feedback": "the version of the feedback",
}


class Identity(Section):
    """Each part changes when what it stands for does; "" for a part that this kind of result does not have."""

    format: int = FORMAT
    config: dict[str, Any]  # dotted key -> JSON value, of keys that may not differ
    weights: str = ""  # version of the weights that it starts from, see `t2g.files.weights_version`
    data: str = ""  # see `data_hash`
    feedback: str = ""  # version of the source

    @classmethod
    def of(cls, config: BaseModel, *, weights: str = "", data: str = "", feedback: str = "", **more: Any) -> Self:
        """more: JSON values that decide the result and stand in no config, by a name for messages: `method="dpo"`."""
        return cls(config=identity_of(config) | more, weights=weights, data=data, feedback=feedback)


def keep(folder: Path, identity: Identity) -> None:
    """What is made in `folder`, which is created, is made of this."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / IDENTITY_FILE, identity.model_dump_json(indent=1).encode())


def check(folder: Path, identity: Identity) -> None:
    """UserError, naming what differs, unless what lies in `folder` was made of the same."""
    if changed := changes(folder, identity):
        raise UserError(f"{folder} was made otherwise: {', '.join(changed)}; go back to that, or take another run.name")


def changes(folder: Path, identity: Identity) -> list[str]:
    """What differs between what `folder` was made of and `identity`, in words; [] where they are the same.

    >>> changes(Path("runs/own"), identity)  # doctest: +SKIP
    ['rollout.temperature (0.6 -> 0.9)', 'the version of the feedback ("critic-1" -> "critic-2")']
    """
    path = folder / IDENTITY_FILE
    try:
        kept = Identity.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return [f"by another version of this program, for its {IDENTITY_FILE} is missing or none of ours"]
    if kept.format != identity.format:
        return [f"by another version of this program (format {kept.format}, and this one has {identity.format})"]
    was, now = ({**one.config, **one.model_dump(include=set(WORDS))} for one in (kept, identity))
    return [
        f"{WORDS.get(key, key)} ({show(was.get(key))} -> {show(now.get(key))})"
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key)
    ]


def finished(folder: Path, identity: Identity, result_file: str) -> dict[str, Any] | None:
    """The result that lies in `folder`, None where it is not finished. UserError where it was made of something else.

    result_file: a JSON object that is written when all else is there.
    """
    path = folder / result_file
    if not path.exists():
        return None
    check(folder, identity)
    return json.loads(path.read_text())


def data_hash(rows: "Iterable[Iterable[str | np.ndarray]]") -> str:
    """A text that changes with any value and with their order: of prompts, or of examples that are learnt."""
    digest = xxhash.xxh3_128()
    for row in rows:
        for value in row:
            content = value.encode() if isinstance(value, str) else value.tobytes()
            digest.update(len(content).to_bytes(8) + content)
    return digest.hexdigest()
