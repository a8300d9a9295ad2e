"""The inputs of a result, which decide whether a run, checkpoint, artifact or trained model can be continued or reused.

`identity.json` lies in the folder of the result. A finished folder also has a result file, which is written last:

    runs/own/                           identity.json, summary.json
    runs/own/checkpoints/step-00000010  identity.json, among the files that the manifest seals
    runs/demo/base/                     identity.json, stage.json
    runs/own-sft/model/                 identity.json, sft.json

    {"format": 3, "config": {"rollout.temperature": 0.6, ...},
     "contents": {"data.path": "9a0364b9e99bb480", "feedback.source": "83f1c2...", ...},
     "accepted": [{"key": "feedback.source", "before": "5be2...", "after": "83f1..."}]}

`config` lacks the keys that can change on resume (`t2g.config.field_annotations`) and each local path: its content
is compared, so that a moved folder can be continued. A hub name stays in `config`, with its revision. A job that
starts a folder calls `save_identity`. A job that continues one calls `check_identity`. `save_result` finishes a folder,
and `load_result` returns the result of a finished one.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError

from t2g.config import AnyJob, Section
from t2g.config.artifacts import PLACEHOLDER
from t2g.config.earlier_versions import upgrade_settings
from t2g.config.field_annotations import paths
from t2g.config.loading import default_values, identity_values
from t2g.config.validation_errors import REMOVED_DEFAULTS, format_value
from t2g.errors import UserError
from t2g.files import read_regular, write_atomic, write_json
from t2g.runs.contents import content_hash, source_hash

IDENTITY_FILE = "identity.json"
IMPORTED = re.compile(  # keys that may hold an import path
    r"task|environment|(feedback|annotate)(\.sources\.\w+)?\.(source|align)"
)
SCHEDULE = "learner.schedule_steps"


class ContentChange(Section):
    """A changed content behind the same config key."""

    key: str
    before: str
    after: str  # "" if the content is missing now, which run.accept cannot accept

    @property
    def token(self) -> str:
        """Return the entry of run.accept that accepts it: "feedback:83f1c2d4e5a69788"."""
        section, _, _ = self.key.partition(".")
        return f"{section}:{self.after}"

    @property
    def description(self) -> str:
        return f"the content of {self.key} (hash {self.before} -> {self.after or 'missing'})"


class Identity(Section):
    """Settings and contents that decide a result, and the changes that the user has accepted since the first start."""

    format: Literal[3] = 3  # raised when this program can no longer continue what an earlier version wrote
    config: dict[str, Any]  # dotted key -> JSON value, of keys that cannot change
    contents: dict[str, str] = Field({})  # dotted key -> hash, for contents on this machine
    accepted: tuple[ContentChange, ...] = ()  # oldest first
    accept: tuple[str, ...] = Field((), exclude=True)  # run.accept of this start
    defaults: dict[str, Any] = Field({}, exclude=True)  # values of keys that an earlier version did not have

    @classmethod
    def from_config(cls, config: BaseModel, **identity_extras: Any) -> Self:
        """Return the identity of the result of `config`; reads the content behind each local path.

        A path that does not exist yet, such as a later artifact, has no content to compare.

        Args:
            identity_extras: JSON values and paths that decide the result and are not in the config: `method="dpo"`.
        """
        job = config if isinstance(config, AnyJob) else None
        settings = identity_values(config) | identity_extras
        if job is not None:
            settings |= job.identity_settings()

        contents: dict[str, str] = {}
        for key, values in _find_locations(config, identity_extras).items():
            if key in settings and all(_is_local(value) for value in values):
                del settings[key]
                contents[key] = content_hash(*map(Path, values))
        for key, value in settings.items():
            if IMPORTED.fullmatch(key) and ":" in str(value):
                contents[key] = source_hash(value)
        for function in job.reward_functions() if job is not None else ():
            contents[f"objective.outcome_rewards.{function}"] = source_hash(function)  # imports its module

        known_contents = {key: digest for key, digest in contents.items() if digest}
        accept = job.run.accept if job is not None else ()
        return cls(config=settings, contents=known_contents, accept=accept, defaults=default_values(type(config)))

    def differences_from(self, saved: "Identity") -> tuple[list[str], list[ContentChange]]:
        """Return the differences from an earlier identity: settings as text, and contents not accepted yet."""
        now = self.config
        before = {key: value for key, value in self.defaults.items() if key in now}
        for key, value in upgrade_settings(saved.config).items():
            is_obsolete = key in REMOVED_DEFAULTS and value == REMOVED_DEFAULTS[key]
            if not is_obsolete:
                before[key] = value
        settings = []
        for key in sorted(before.keys() | now.keys()):
            old_value = before.get(key)
            new_value = now.get(key)
            if old_value != new_value:
                settings.append(f"{key} ({format_value(old_value)} -> {format_value(new_value)})")

        accepted = {(change.key, change.before) for change in self.accepted}
        changes = []
        for key, old_hash in sorted(saved.contents.items()):
            new_hash = self.contents.get(key, "")
            if old_hash != new_hash and (key, old_hash) not in accepted:
                changes.append(ContentChange(key=key, before=old_hash, after=new_hash))
        return settings, changes


def _find_locations(config: BaseModel, identity_extras: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the values of each key that may name local files."""
    locations: dict[str, list[str]] = {}
    for key, values in paths(config):
        if values:
            locations[key] = [str(value) for value in values]
    for key, value in identity_extras.items():
        if os.path.isabs(str(value)):
            locations[key] = [value]
    return locations


def _is_local(location: str) -> bool:
    return os.path.isabs(location) or os.path.exists(location)


def save_identity(folder: Path, identity: Identity) -> None:
    """Write the identity of the result in `folder`, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / IDENTITY_FILE, identity.model_dump_json(indent=1).encode())


def load_identity(folder: Path) -> Identity:
    """Read the identity of the result in `folder`.

    Raises:
        UserError: There is none, it cannot be read, or its format is of another version.
    """
    try:
        return Identity.model_validate_json(read_regular(folder / IDENTITY_FILE) or b"")
    except ValidationError:
        reason = f"its {IDENTITY_FILE} is missing or has another format"
        sentence = f"{folder} was made by another version of this program ({reason}): take another run.name"
        raise UserError(sentence) from None


def check_identity(folder: Path, identity: Identity, *, should_save: bool = True) -> Identity:
    """Compare the saved identity of `folder` with the current one, and save the changes that run.accept accepts.

    Each occurrence of an entry in run.accept accepts one change: a later change needs a further occurrence.

    Args:
        should_save: False for a check alone, which writes nothing.

    Returns:
        `identity`, with the accepted changes of the folder.

    Raises:
        UserError: They differ. The message lists the differences and the entries of run.accept that would accept them.
    """
    saved = load_identity(folder)
    _check_resolved(folder, saved)
    settings, changes = identity.differences_from(saved)
    used = Counter(change.token for change in saved.accepted)
    refused = [change for change in changes if identity.accept.count(change.token) <= used[change.token]]
    if settings or refused:
        contents = [change.description for change in refused]
        advice = "restore that, or take another run.name"
        if not settings:
            advice += _advise_on_accept(refused, used)
        steps = saved.config.get(SCHEDULE)
        if steps and steps != identity.config.get(SCHEDULE):
            advice += f"; {SCHEDULE}={steps} keeps the learning-rate schedule whatever num_steps is"
        raise UserError(f"{folder} was made with other inputs: {', '.join(settings + contents)}; {advice}")

    # A loaded identity already has the accepted changes of its run; a checkpoint of that run may be older.
    accepted = identity.accepted or (*saved.accepted, *changes)
    identity = identity.model_copy(update={"accepted": accepted})
    if changes and should_save:
        save_identity(folder, identity)
    return identity


def _check_resolved(folder: Path, saved: Identity) -> None:
    """Raise UserError for an identity without the contents of artifacts, as teacher evaluations once wrote it."""
    unknown = [key for key, value in saved.config.items() if PLACEHOLDER in str(value)]
    if unknown:
        raise UserError(
            f"{folder} was made by an earlier version of this program, whose {IDENTITY_FILE} has {PLACEHOLDER} "
            f"in place of the contents of {', '.join(unknown)}: they cannot be compared; take another run.name"
        )


def _advise_on_accept(refused: Sequence[ContentChange], used: Mapping[str, int]) -> str:
    """Return the clause about the value of run.accept that accepts the changes; "" if their contents are missing.

    Args:
        used: Number of accepted changes by token.
    """
    tokens = dict.fromkeys(change.token for change in refused if change.after)
    entries: list[str] = []
    for token in tokens:
        num_occurrences = used[token] + 1
        entries += [token] * num_occurrences
    if not entries:
        return ""
    return f"; 'run.accept=[{','.join(entries)}]' goes on with the changed content"


def save_result(folder: Path, identity: Identity, result_file: str, result: Mapping[str, Any]) -> None:
    """Write identity and result into `folder`: it is finished. See `load_result`."""
    save_identity(folder, identity)
    write_json(folder / result_file, result)


def load_result(
    folder: Path, identity: Identity, result_file: str, *, should_save: bool = True
) -> dict[str, Any] | None:
    """Return the result in `folder`, None if it is not finished.

    Args:
        result_file: Name of a JSON object that is written last.
        should_save: See `check_identity`.

    Raises:
        UserError: The result was made from other inputs, see `check_identity`, or it cannot be read.
    """
    content = read_regular(folder / result_file)
    if content is None:
        return None
    check_identity(folder, identity, should_save=should_save)
    return json.loads(content)
