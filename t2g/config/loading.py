"""From a YAML file and `key=value` overrides to a checked config, and back. No defaults here: those are the schema's.

    load(PolicyJob, Path("configs/tiny/policy.yaml"), ["rollout.temperature=0.6", "data={path: my.jsonl}"])

Everything that is wrong is reported at once, one sentence a line:

    policy.yaml:7: rollout.temprature is unknown; did you mean rollout.temperature?
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from t2g.config.marks import Here, may_differ
from t2g.config.words import Keys, dotted, problems, show
from t2g.errors import UserError

Config = TypeVar("Config", bound=BaseModel)

FILE_NAME = "config.yaml"  # the resolved config in the run folder
JOB_ENV = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray's job manager sets it for a driver
UPLOAD_PREFIX = "_ray_pkg_"  # name of the folders into which Ray unpacks an uploaded working directory


@dataclass(frozen=True)
class _Source:
    """The merged input, and where each of its keys was given."""

    file: Path
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[Keys, int] = field(default_factory=dict)
    overridden: set[Keys] = field(default_factory=set)

    def place(self, keys: Keys) -> str:
        """ "policy.yaml:7: ", of the key itself or of the nearest section around it."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.overridden:
                return "command line: "
            if keys[:length] in self.lines:
                return f"{self.file}:{self.lines[keys[:length]]}: "
        return f"{self.file}: "


def load(
    schema: type[Config],
    file: Path,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> Config:
    """The checked config of `file` with `overrides` (`dotted.key=YAML value`) laid over it.

    run.root is absolute, and so is each `PathOrName` of an existing file or folder; hub names stay. So do relative
    paths in a Ray job's uploaded working directory: in the job that resumes the run the copy has another name.
    Raises UserError with one sentence for each problem. `environ` and `cwd` tell whether this is a Ray job.
    """
    values, lines = _read_yaml(file)
    source = _Source(file, values, lines)
    for override in overrides:
        _apply(override, source)
    cwd = cwd or Path.cwd()
    uploaded = any(part.startswith(UPLOAD_PREFIX) for part in cwd.parts)
    here = Here(cwd, is_ray_job=uploaded or JOB_ENV in environ, uploaded=uploaded)
    try:
        return schema.model_validate(source.values, context=here)
    except ValidationError as error:
        raise UserError("\n".join(problems(schema, error, source.place))) from None


def resolved(config: BaseModel) -> str:
    """The whole config as YAML, defaults included; `load` reads it back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def write(config: BaseModel, folder: Path) -> Path:
    """The resolved config into the run folder, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / FILE_NAME
    partial = target.with_suffix(".partial")
    partial.write_text(resolved(config), encoding="utf-8")
    partial.replace(target)
    return target


def flat(config: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> JSON value; lists and empty sections are values. {"a": {"b": 1}} -> {"a.b": 1}"""
    values = config.model_dump(mode="json") if isinstance(config, BaseModel) else config
    return dict(_leaves("", values))


def diff(a: BaseModel | Mapping[str, Any], b: BaseModel | Mapping[str, Any]) -> list[str]:
    """Sorted dotted keys that differ, those that only one of the two has included."""
    left, right, absent = flat(a), flat(b), object()
    return sorted(key for key in left.keys() | right.keys() if left.get(key, absent) != right.get(key, absent))


def identity_of(config: BaseModel) -> dict[str, Any]:
    """`flat`, of the keys alone in which a run may not differ when it goes on."""
    return {key: value for key, value in flat(config).items() if not may_differ(type(config), key)}


def _read_yaml(file: Path) -> tuple[dict[str, Any], dict[Keys, int]]:
    """Values of the file, and the line of each key."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{file}: the config cannot be read: {reason}") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{file}:{line}: broken YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{file}: broken YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise UserError(f"{file}:1: got {show(values)}, but a config is a mapping of keys to values")
    lines: dict[Keys, int] = {}
    for keys, line in _key_lines((), node):
        if keys in lines:
            raise UserError(f"{file}:{line}: {dotted(keys)} is given twice, first in line {lines[keys]}")
        lines[keys] = line
    return values, lines


def _key_lines(prefix: Keys, node: yaml.Node) -> Iterator[tuple[Keys, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            keys = (*prefix, str(key.value))
            yield keys, key.start_mark.line + 1
            yield from _key_lines(keys, value)


def _apply(override: str, source: _Source) -> None:
    """Lay one `dotted.key=value` over the values."""
    name, equals, text = override.partition("=")
    if not equals or not all(name.split(".")):
        raise UserError(f"command line: got {override!r}, but an override has the form section.key=value")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        raise UserError(f"command line: {name}: {text!r} is no YAML value; put quotes around text") from None
    keys = tuple(name.split("."))
    section = source.values
    for depth, key in enumerate(keys[:-1], start=1):
        inner = section.get(key)
        if not isinstance(inner, dict | None):
            raise UserError(f"command line: {name}: {dotted(keys[:depth])} is a value, not a section")
        section[key] = dict(inner or {})  # a copy: a YAML alias shares one section between two keys
        section = section[key]
    section[keys[-1]] = value
    source.overridden.add(keys)


def _leaves(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(f"{prefix}{key}.", value)
        else:
            yield prefix + str(key), value
