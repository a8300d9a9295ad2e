"""Load a config from a YAML file and `key=value` overrides, and write it. All defaults are in the schemas.

    load(PolicyJob, Path("configs/tiny/policy.yaml"), ["rollout.temperature=0.6", "data={path: my.jsonl}"])

All problems are reported at once, one sentence per line:

    policy.yaml:7: rollout.temprature is unknown; did you mean rollout.temperature?
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, to_jsonable_python

from t2g.config.auto import auto_keys, count_auto, resolve_auto
from t2g.config.common import with_value_at
from t2g.config.earlier_versions import upgrade_config
from t2g.config.field_annotations import PathContext, can_change_on_resume
from t2g.config.secrets import mask_secrets, text_problems
from t2g.config.validation_errors import (
    Keys,
    dotted_key,
    find_fields,
    format_errors,
    format_value,
    section_type,
    without_removed_defaults,
)
from t2g.errors import UserError
from t2g.files import write_atomic

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=BaseModel)

TOO_DEEP = "values are nested too deeply"
FILE_NAME = "config.yaml"  # the resolved config in the run folder
JOB_ENV = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray's job manager sets it for a driver
QUOTES = (
    "; put the whole key=value in quotes where it has spaces, brackets or braces: 'learner.lora={r: 16, alpha: 32}'"
)
UPLOAD_PREFIX = "_ray_pkg_"  # name of the folders into which Ray unpacks an uploaded working directory


def load(
    schema: type[Config],
    file: Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    find_resources: Callable[[str | None], Mapping[str, float]] | None = lambda address: {},
    origin: str = "command line",
) -> Config:
    """Return the validated config of `file` with `overrides` applied.

    run.root becomes absolute, and each `PathOrName` of an existing file or folder; hub names stay. Relative paths in
    the uploaded working directory of a Ray job stay, too: the job that resumes the run has another copy. The paths of
    artifacts are those of their files (`t2g.config.artifacts`).

    Args:
        file: YAML file, or its values.
        overrides: `dotted.key=YAML value`.
        environ: Shows, with `cwd`, whether this process is the driver of a Ray job.
        find_resources: Returns the resources of a cluster by address (see `auto.resolve_auto`); called if a value is
            `auto`. By default there is no GPU; None refuses `auto`. `math.inf` GPUs are as many as the processes need.
        origin: Where the overrides come from.

    Raises:
        UserError: One sentence per problem, with the line of the file or, if the file alone is valid, `origin`.
    """
    lines: dict[Keys, int] = {}
    if isinstance(file, Path):
        values, lines = read_yaml(file)
    else:
        values = _check_texts(file, lambda keys: "config")
    values = upgrade_config(without_removed_defaults(values))

    merged, parsed = _apply_overrides(schema, values, overrides, origin)

    resources: Mapping[str, float] = {}
    chosen_keys = list(auto_keys(merged))
    if chosen_keys:
        resources = _read_resources(merged, chosen_keys, find_resources)
        merged = resolve_auto(merged, resources)
        values = resolve_auto(values, {})

    artifacts_error: UserError | None = None
    if "artifacts" in schema.model_fields:
        from t2g.config.artifacts import find_demo, resolve_artifacts  # which loads a config

        try:
            demo = find_demo(merged, environ=environ, cwd=cwd)
        except UserError as error:  # the job's own problems come first
            artifacts_error = error
            demo = None
        if demo is not None:
            merged = resolve_artifacts(merged, demo)
            values = resolve_artifacts(values, demo)

    context = path_context(environ, cwd)
    try:
        config = schema.model_validate(merged, context=context)
    except ValidationError as error:
        inputs = _Inputs(file, values, lines, parsed, origin)
        raise UserError(_format_problems(schema, error, inputs, context)) from None
    if artifacts_error is not None:
        raise artifacts_error
    if chosen_keys and resources:
        logger.warning(format_auto(config, chosen_keys, resources))
    return config


def _apply_overrides(
    schema: type[BaseModel], values: Any, overrides: Sequence[str], origin: str
) -> tuple[Any, list[tuple[Keys, Any]]]:
    """Return the values with the overrides, and keys and value of each override."""
    try:
        parsed = [_override(text, schema) for text in overrides]
        for keys, value in parsed:
            values = with_value_at(values, keys, value)
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None
    return values, parsed


def _read_resources(
    values: Mapping[str, Any],
    chosen_keys: Sequence[Keys],
    find_resources: Callable[[str | None], Mapping[str, float]] | None,
) -> Mapping[str, float]:
    """Return the resources from which the values of `chosen_keys` are derived, see `load`."""
    if find_resources is None:
        names = ", ".join(map(dotted_key, chosen_keys))
        raise UserError(
            f"{names}: got auto, but this job needs values, as rollout.gpus=1 and rollout.dtype=bfloat16: the "
            "resources of the processes are not known here"
        )
    cluster = values.get("cluster")
    address = cluster.get("address") if isinstance(cluster, Mapping) else None
    resources = find_resources(address)
    if resources.get("GPU") == inf:
        return {**resources, "GPU": count_auto(values, "gpus")}
    return resources


class _Inputs(NamedTuple):
    """The values of a config, and where they come from."""

    file: Path | Mapping[str, Any]
    values: Mapping[str, Any]  # read from the file
    lines: Mapping[Keys, int]  # read from the file
    overrides: Sequence[tuple[Keys, Any]]
    origin: str  # source of the overrides


def _format_problems(schema: type[BaseModel], error: ValidationError, inputs: _Inputs, context: PathContext) -> str:
    """Return one sentence per line for each problem, see `load`."""
    file_errors = _find_file_errors(schema, inputs, context)
    overridden = [keys for keys, _ in inputs.overrides]

    def format_origin(detail: ErrorDetails) -> str:
        place = detail["loc"]
        sections = [place[:length] for length in range(len(place), 0, -1)]
        is_overridden = any(keys in sections for keys in overridden)
        if is_overridden or (place, detail["msg"]) not in file_errors:
            return f"{inputs.origin}: "

        for keys in sections:
            if keys in inputs.lines:
                return f"{inputs.file}:{inputs.lines[keys]}: "
        name = inputs.file if isinstance(inputs.file, Path) else "config"
        return f"{name}: "

    sentences = format_errors(schema, error, format_origin)
    advice = QUOTES if _has_split_override(error, overridden) else ""
    other_job = _find_other_job(schema, inputs.values)
    if other_job:
        sentences.insert(0, f"{inputs.file} has the sections of a config of {other_job}")
    return "\n".join(sentences) + advice


def _find_other_job(schema: type[BaseModel], values: Mapping[str, Any]) -> str:
    """Return the name of the job that has all sections of the file, "" if there is none or it is this job."""
    from t2g.config.base_jobs import AnyJob  # which imports this module

    sections = values.keys()
    if not issubclass(schema, AnyJob) or sections <= schema.model_fields.keys():
        return ""
    fitting = [job for job in _list_subclasses(AnyJob) if sections <= job.model_fields.keys()]
    if not fitting:
        return ""
    nearest = min(fitting, key=lambda job: len(job.model_fields))
    name, _, _ = (nearest.__doc__ or "").partition(":")
    return name


def _list_subclasses(base: type) -> list[Any]:
    subclasses: list[Any] = []
    for cls in base.__subclasses__():
        subclasses += [cls, *_list_subclasses(cls)]
    return subclasses


def _find_file_errors(
    schema: type[BaseModel], inputs: _Inputs, context: PathContext
) -> list[tuple[tuple[int | str, ...], str]]:
    """Return place and message of the errors that the file alone has."""
    values = inputs.values
    errors = _collect_errors(schema, values, context)
    gaps = [detail["loc"] for detail in errors if detail["type"] == "missing"]
    for keys, value in inputs.overrides:
        if any(keys == gap[: len(keys)] or gap == keys[: len(gap)] for gap in gaps):
            values = with_value_at(values, keys, value)  # a missing value would hide other errors of the file
    errors = _collect_errors(schema, values, context)
    return [(detail["loc"], detail["msg"]) for detail in errors]


def _has_split_override(error: ValidationError, overridden: Sequence[Keys]) -> bool:
    """Return whether a key with an error was given twice: a shell makes {a:1,b:2} two arguments."""
    counts = Counter(overridden)
    repeated = [keys for keys, number in counts.items() if number > 1]
    places = [detail["loc"] for detail in error.errors()]
    return any(place[: len(keys)] == keys for keys in repeated for place in places)


def format_auto(config: BaseModel, keys: Sequence[Keys], resources: Mapping[str, float]) -> str:
    """Return the values chosen for `auto`: "auto (2 CPUs, no GPU): rollout.gpus=0, rollout.threads=2"."""
    chosen = flatten(config.model_dump(mode="json"))
    if not resources.get("GPU"):
        keys = [key for key in keys if key[-1] != "memory_gib"]  # estimated from the model, once its shape is read
    cpus = resources.get("CPU", 1)
    gpus = f"{resources['GPU']:g} GPUs" if resources.get("GPU") else "no GPU"
    formatted: list[str] = []
    for key in map(dotted_key, keys):
        value = format_value(chosen.get(key))
        formatted.append(f"{key}={value}")
    values = ", ".join(formatted)
    return f"auto ({cpus:g} CPUs, {gpus}): {values}"


def path_context(environ: Mapping[str, str] = os.environ, cwd: Path | None = None) -> PathContext:
    """Return the base of relative paths in a process with this environment and working directory."""
    cwd = cwd or Path.cwd()
    uploaded = any(part.startswith(UPLOAD_PREFIX) for part in cwd.parts)
    return PathContext(cwd, is_ray_job=uploaded or JOB_ENV in environ, is_uploaded=uploaded)


def _collect_errors(schema: type[BaseModel], values: Mapping[str, Any], context: PathContext) -> list[ErrorDetails]:
    try:
        schema.model_validate(values, context=context)
    except ValidationError as error:
        return error.errors()
    return []


def to_yaml(config: BaseModel) -> str:
    """Return the config as YAML, defaults included; `load` reads it back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def write(config: BaseModel, folder: Path) -> Path:
    """Write the resolved config into the run folder and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / FILE_NAME, to_yaml(config).encode())
    return folder / FILE_NAME


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by dotted key: {"a": {"b": 1}} -> {"a.b": 1}; lists and empty sections count as values."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{key}.")
        else:
            flat[key] = value
    return flat


def identity_values(config: BaseModel) -> dict[str, Any]:
    """Return JSON values by dotted key, for the keys that cannot change on resume."""
    schema = type(config)
    values = flatten(config.model_dump(mode="json"))
    return {key: value for key, value in values.items() if not can_change_on_resume(schema, key)}


def default_values(schema: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Return the JSON defaults by dotted key, without those of sections that may be missing."""
    values: dict[str, Any] = {}
    for name, info in schema.model_fields.items():
        section = section_type(info.annotation)
        if section is None and not info.is_required() and info.default_factory is None:
            values[prefix + name] = to_jsonable_python(info.default)
        elif section is info.annotation and section is not None:
            values |= default_values(section, f"{prefix}{name}.")
    return values


def read_yaml(file: Path) -> tuple[dict[str, Any], dict[Keys, int]]:
    """Return the values of a file and the line of each key; raise UserError if it is not a mapping."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{file}: the config cannot be read: {reason}") from None
    try:
        node, values = _parse(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{file}:{line}: broken YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        message = " ".join(str(error).split())
        raise UserError(f"{file}: broken YAML: {message}") from None
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise UserError(f"{file}:1: got {format_value(values)}, needs a mapping of keys to values")
    try:
        lines = _find_lines(file, node)
        checked = _check_texts(values, lambda keys: f"{file}:{lines.get(keys, 1)}")
    except RecursionError:  # an alias inside its own anchor
        raise UserError(f"{file}: broken YAML: {TOO_DEEP}") from None
    return checked, lines


def _find_lines(file: Path, node: yaml.Node | None) -> dict[Keys, int]:
    """Return the line of each key; raise UserError for a key that is given twice."""
    lines: dict[Keys, int] = {}
    for keys, line in _key_lines((), node):
        if keys in lines:
            first_line = lines[keys]
            raise UserError(f"{file}:{line}: {dotted_key(keys)} is given twice, first in line {first_line}")
        lines[keys] = line
    return lines


def _check_texts(values: Mapping[str, Any], find_origin: Callable[[Keys], str]) -> dict[str, Any]:
    """Return the values, or raise UserError for texts that a config may not hold."""
    problems = [f"{find_origin(keys)}: {sentence}" for keys, sentence in text_problems(values)]
    if problems:
        raise UserError("\n".join(problems))
    return {**values}


def _parse(text: str) -> tuple[yaml.Node | None, Any]:
    """Return node and value of a YAML text; raise ValueError for values that are nested too deeply."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def _key_lines(prefix: Keys, node: yaml.Node | None) -> Iterator[tuple[Keys, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            keys = (*prefix, str(key.value))
            yield keys, key.start_mark.line + 1
            yield from _key_lines(keys, value)


def _is_text(schema: type[BaseModel], keys: Keys) -> bool:
    fields = find_fields(schema, keys)
    return len(fields) == len(keys) and fields[-1].annotation in (str, str | None)


def _override(text: str, schema: type[BaseModel]) -> tuple[Keys, Any]:
    """Parse "rollout.temperature=0.6" as (("rollout", "temperature"), 0.6), and "run.name=2026" as a text."""
    name, equals, value = text.partition("=")
    keys = tuple(name.split("."))
    if not equals or not all(keys):
        advice = "" if equals else QUOTES  # a shell splits what is not quoted at its spaces
        raise UserError(f"got {mask_secrets(text)!r}, needs the form section.key=value{advice}")
    try:
        node, parsed = _parse(value)
    except (yaml.YAMLError, ValueError):
        raise UserError(f"{name}: {mask_secrets(value)!r} is not valid YAML{QUOTES}") from None
    is_other_scalar = isinstance(node, yaml.ScalarNode) and parsed is not None and not isinstance(parsed, str)
    if is_other_scalar and _is_text(schema, keys):  # YAML makes numbers, dates and booleans of some names
        parsed = value.strip()
    counts = Counter(inner for inner, _ in _key_lines(keys, node))
    for inner, number in counts.items():
        if number > 1:
            raise UserError(f"{dotted_key(inner)} is given twice")
    for _, sentence in text_problems({name: parsed}):
        raise UserError(sentence)
    return keys, parsed
