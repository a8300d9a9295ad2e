"""What a result was made of: one answer to "is this the same run?", for runs, checkpoints, stages and trained models.

Beside the result lies `identity.json`. A finished folder also has a result file, which is written last:

    runs/own/                           identity.json, summary.json
    runs/own/checkpoints/step-00000010  identity.json, among the files that the manifest seals
    runs/demo/base/                     identity.json, stage.json
    runs/own-sft/model/                 identity.json, sft.json

    {"format": 3, "config": {"rollout.temperature": 0.6, ...},
     "contents": {"data.path": "9a0364b9e99bb480", "feedback.source": "83f1c2...", ...},
     "accepted": [{"key": "feedback.source", "before": "5be2...", "after": "83f1..."}]}

`config` lacks what can change on resume (`t2g.config.field_marks`) and each local path: the content behind it
counts, so that a moved folder goes on. A name on a hub stays in `config`, with its revision. A job that makes
something calls `keep`; a job that finds something calls `check` before it goes on, or `finished` for the result.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError

from t2g.config import AnyJob, PolicyJob, Section
from t2g.config.field_marks import paths
from t2g.config.loading import identity_values
from t2g.config.validation_errors import format_value
from t2g.errors import UserError
from t2g.files import write_atomic
from t2g.runs.contents import content_hash, source_hash

IDENTITY_FILE = "identity.json"
IMPORTED = ("task", "feedback.source", "annotate.source")  # keys that may hold an import path
SCHEDULE = "learner.schedule_steps"


class ContentChange(Section):
    """Another content behind the same config key."""

    key: str
    before: str
    after: str  # "" where the content is missing now: no entry of run.accept has an empty hash

    @property
    def token(self) -> str:
        """The entry of run.accept that accepts it: "feedback:83f1c2d4e5a69788"."""
        return f"{self.key.partition('.')[0]}:{self.after}"


class Identity(Section):
    """Settings and contents that decide a result, and the changes that the user has accepted since the first start."""

    format: Literal[3] = 3  # goes up when this program can no longer go on from what an earlier version wrote
    config: dict[str, Any]  # dotted key -> JSON value, of keys that may not differ
    contents: dict[str, str] = Field({})  # dotted key -> hash, where the content is on this machine
    accepted: tuple[ContentChange, ...] = ()  # oldest first
    accept: tuple[str, ...] = Field((), exclude=True)  # run.accept of this start

    @classmethod
    def from_config(cls, config: BaseModel, **more: Any) -> Self:
        """Return the identity of what `config` makes now; reads the content behind each local path.

        A path with nothing behind it yet, such as a stage that is still to be made, has no content to compare.

        Args:
            more: JSON values and paths that decide the result and stand in no config: `method="dpo"`.
        """
        settings, contents = identity_values(config) | more, dict[str, str]()
        if isinstance(config, PolicyJob):
            settings[SCHEDULE] = config.schedule_steps
        named = {key: str(value) for key, value in paths(config) if value}
        named |= {key: value for key, value in more.items() if os.path.isabs(str(value))}
        for key, value in named.items():
            if key in settings and (os.path.isabs(value) or os.path.exists(value)):
                del settings[key]
                contents[key] = content_hash(Path(value))
        for key in IMPORTED:
            if ":" in str(settings.get(key)):
                contents[key] = source_hash(settings[key])
        contents = {key: found for key, found in contents.items() if found}
        accept = config.run.accept if isinstance(config, AnyJob) else ()
        return cls(config=settings, contents=contents, accept=accept)

    def since(self, kept: "Identity") -> tuple[list[str], list[ContentChange]]:
        """Return the differences from an earlier identity: settings as text, and contents not accepted yet."""
        was, now = kept.config, self.config
        settings = [
            f"{key} ({format_value(was.get(key))} -> {format_value(now.get(key))})"
            for key in sorted(was.keys() | now.keys())
            if was.get(key) != now.get(key)
        ]
        accepted = {(change.key, change.before) for change in self.accepted}
        changes = [
            ContentChange(key=key, before=before, after=self.contents.get(key, ""))
            for key, before in sorted(kept.contents.items())
            if before != self.contents.get(key, "") and (key, before) not in accepted
        ]
        return settings, changes


def save_identity(folder: Path, identity: Identity) -> None:
    """Write the identity of what is made in `folder`, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / IDENTITY_FILE, identity.model_dump_json(indent=1).encode())


def load_identity(folder: Path) -> Identity:
    """Read the identity of what lies in `folder`. UserError where this program cannot go on from it."""
    try:
        return Identity.model_validate_json((folder / IDENTITY_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        reason = f"its {IDENTITY_FILE} is missing or has another format"
        sentence = f"{folder} was made by another version of this program ({reason}): take another run.name"
        raise UserError(sentence) from None


def check_identity(folder: Path, identity: Identity) -> Identity:
    """Compare what lies in `folder` with what would be made now.

    An entry of run.accept counts once for each time that it is given: after it accepted a change, it accepts no later
    one. Accepted changes are written into the folder.

    Returns: `identity`, with the accepted changes of the folder.
    Raises: UserError that names each difference, and the entries of run.accept that would accept them.
    """
    kept = load_identity(folder)
    settings, changes = identity.since(kept)
    used = Counter(change.token for change in kept.accepted)
    refused = [change for change in changes if identity.accept.count(change.token) <= used[change.token]]
    if settings or refused:
        contents = [f"the content of {c.key} (hash {c.before} -> {c.after or 'missing'})" for c in refused]
        advice = "restore that, or take another run.name"
        if tokens := dict.fromkeys(change.token for change in refused if change.after):
            entries = [token for token in tokens for _ in range(used[token] + 1)]
            advice += f"; run.accept=[{','.join(entries)}] goes on with the changed content"
        if (steps := kept.config.get(SCHEDULE)) and steps != identity.config.get(SCHEDULE):
            advice += f"; {SCHEDULE}={steps} keeps the learning-rate schedule whatever num_steps is"
        raise UserError(f"{folder} was made with other inputs: {', '.join(settings + contents)}; {advice}")
    # An identity that `load` gave has the accepted changes of the run already, and a checkpoint in it may be older.
    identity = identity.model_copy(update={"accepted": identity.accepted or (*kept.accepted, *changes)})
    if changes:
        save_identity(folder, identity)
    return identity


def load_result(folder: Path, identity: Identity, result_file: str) -> dict[str, Any] | None:
    """Return the result in `folder`, None where it is not finished. UserError where its inputs were others.

    result_file: a JSON object that is written when all else is there.
    """
    path = folder / result_file
    if not path.exists():
        return None
    check_identity(folder, identity)
    return json.loads(path.read_text())
