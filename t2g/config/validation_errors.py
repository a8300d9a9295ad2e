"""Format pydantic's validation errors as one sentence per problem, with the dotted key and the nearest known key."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Any, LiteralString, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from t2g.config.secrets import mask_secrets

REMOVED_KEYS = {
    "refresh": "removed: annotate responses of the last checkpoint with jobs.annotate, train on them with "
    "jobs.train_reward",
    "objective.w_span": "renamed to objective.span_coef",
    "objective.w_end": "replaced by 'objective.outcome_rewards=[{source: task, weight: W}]'",
    "objective.rewards.cut": "renamed to objective.truncation_penalty",
    "objective.rewards.cover": "removed: a span covers a token if they share a non-blank character",
    "rewards.cover": "removed: a span covers a token if they share a non-blank character",
    "reflections": "removed: the method reflection of t2g compare has a policy revise its answers",
    "objective.loss_mean": "renamed to objective.loss_aggregation",
    "objective.importance": "renamed to objective.rollout_correction",
    "objective.importance_cap": "renamed to objective.rollout_correction_cap",
    "objective.teacher.where": "removed: the teacher's KL is over all tokens of a response",
    "objective.teacher.sibling": "removed: the teacher reads the critique alone",
    "cluster.colocate": "replaced by cluster.gpu_sharing=alternate for true, none for false",
    ".health.probe_every_s": "renamed to check_interval_s in the same section",
    ".health.probe_timeout_s": "renamed to check_timeout_s in the same section",
    "serve.then": "renamed to serve.command",
    "log.tensorboard": "replaced by log.trackers: [tensorboard] for true, [] for false",
    "log.wandb_project": "replaced by log.project, and log.trackers=[tensorboard,wandb]",
    "arms": "renamed to methods",
    "stages": "renamed to artifacts, and ${stages} to ${artifacts}",
}
REMOVED_DEFAULTS: dict[str, Any] = {  # values of removed keys that an earlier version wrote, and that change nothing
    "objective.rewards.cover": "any",
    "rewards.cover": "any",
    "reflections": {},
}
Keys = tuple[str | int, ...]  # ("rollout", "temperature"); an integer is an index into a list


def without_removed_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without those of REMOVED_DEFAULTS, so that the config of an earlier run can be read.

    >>> without_removed_defaults({"rewards": {"cover": "any", "good": 1}})
    {'rewards': {'good': 1}}
    """
    remaining: Any = values
    for name, default in REMOVED_DEFAULTS.items():
        remaining = _remove_default(remaining, name.split("."), default)
    return {**remaining}


def _remove_default(values: Any, keys: Sequence[str], default: Any) -> Any:
    key, *inner_keys = keys
    if not isinstance(values, Mapping) or key not in values:
        return values
    if inner_keys:
        return {**values, key: _remove_default(values[key], inner_keys, default)}
    if values[key] != default:
        return values
    return {name: value for name, value in values.items() if name != key}


def format_errors(
    schema: type[BaseModel], error: ValidationError, format_origin: Callable[[ErrorDetails], str] = lambda detail: ""
) -> list[str]:
    """Return one sentence for each of pydantic's errors: the dotted key, the value found and what is needed.

    Args:
        format_origin: Returns the origin of an error, "policy.yaml:7: ", which begins its sentence.
    """
    sentences: dict[str, None] = {}
    for detail in error.errors():
        if detail["type"] == "default_factory_not_called":  # another field of the section is invalid, and reported
            continue
        sentence = mask_secrets(_format_error(schema, detail["loc"], detail))
        sentences[format_origin(detail) + sentence] = None
    return list(sentences)


@contextmanager
def errors_at(*keys: str | int) -> Iterator[None]:
    """Give a ValueError of the block the place of a key, as if its field had refused it.

    For validators of a whole job, which check what several sections need.
    """
    try:
        yield
    except ValueError as error:
        kind = PydanticCustomError("value_error", cast(LiteralString, str(error)))
        detail = InitErrorDetails(type=kind, loc=keys, input=None)
        raise ValidationError.from_exception_data("", [detail]) from None


def format_first_error(error: ValidationError) -> str:
    """Return the first error about data other than a config: "spans.0.start: Input should be a valid integer"."""
    detail = error.errors(include_url=False, include_input=False)[0]
    message = detail["msg"].removeprefix("Value error, ")
    if not detail["loc"]:
        return message
    return f"{dotted_key(detail['loc'])}: {message}"


def _format_error(schema: type[BaseModel], keys: Keys, detail: ErrorDetails) -> str:
    name = dotted_key(keys)
    kind = detail["type"]
    needs = detail["msg"]
    fields = find_fields(schema, keys)
    field = fields[-1] if fields else None
    about = (field and field.description) or ""
    removed = REMOVED_KEYS.get(re.sub(r".*(?=\.health\.)", "", name))  # `health` has no section of its own
    if kind == "extra_forbidden" and removed:
        return f"{name} was {removed}"
    if kind == "extra_forbidden":
        near = _nearest_key(schema, keys)
        advice = f"; did you mean {near}?" if near else ""
        return f"{name} is unknown{advice}"
    if kind == "missing":
        advice = f"; it needs: {about}" if about else ""
        return f"{name} is missing{advice}"
    if kind == "value_error":
        needs = needs.removeprefix("Value error, ")
        if name in needs:
            return needs
        return f"{name}: {needs}"
    if detail["input"] == "none" and field and type(None) in get_args(field.annotation):
        return f"{name}: got the text none, needs null for no value"
    needs = re.sub(r"^\w+ should (be |have |match )?", "", needs)  # "Input should be a valid number"
    needs = needs.replace("valid tuple", "list")
    needs = re.sub(r"valid dictionary or instance of \w+", "mapping of keys", needs)
    sentence = f"{name}: got {format_value(detail['input'])}, needs {needs}"
    return f"{sentence} ({about})" if about else sentence


def _nearest_key(schema: type[BaseModel], keys: Keys) -> str:
    """Return the known key nearest to an unknown one: a sibling, else keys elsewhere with nearly the same last name."""
    *parents, last_key = keys
    leaf = str(last_key)
    section: type[BaseModel] | None = schema
    parent_fields = find_fields(schema, parents)
    if parent_fields:
        annotation = parent_fields[-1].annotation
        section = section_type(annotation) or mapped_section_type(annotation)
    siblings = section.model_fields if section else ()
    nearest_siblings = get_close_matches(leaf, siblings, n=1)
    if nearest_siblings:
        return dotted_key((*parents, nearest_siblings[0]))

    by_leaf: defaultdict[str, list[str]] = defaultdict(list)
    for key, info in list_fields(schema).items():
        if section_type(info.annotation) is None:
            by_leaf[key.rpartition(".")[2]].append(key)
    nearest = get_close_matches(leaf, sorted(by_leaf), n=1, cutoff=0.8)
    if not nearest:
        return ""
    return " or ".join(by_leaf[nearest[0]])


@cache
def list_fields(schema: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return every section and value of the schema in its order, by dotted key."""
    fields: dict[str, FieldInfo] = {}
    for name, info in schema.model_fields.items():
        fields[prefix + name] = info
        if section := section_type(info.annotation):
            fields |= list_fields(section, f"{prefix}{name}.")
    return fields


def find_fields(schema: type[BaseModel], keys: Sequence[str | int]) -> list[FieldInfo]:
    """Return the fields on the way to a key, up to the first unknown one. Keys of a mapping of sections have none."""
    fields: list[FieldInfo] = []
    section: type[BaseModel] | None = schema
    names = iter(keys)
    while section and (info := section.model_fields.get(str(next(names, "")))):
        fields.append(info)
        section = section_type(info.annotation)
        if section is None and (section := mapped_section_type(info.annotation)):
            next(names, None)
    return fields


def mapped_section_type(annotation: object) -> type[BaseModel] | None:
    """Return the section of `dict[str, Section]` or `tuple[Section, ...]`, each perhaps with `| None`."""
    for option in _list_options(annotation):
        if get_origin(option) not in (dict, tuple):
            continue
        for inner in get_args(option):
            section = section_type(inner)
            if section is not None:
                return section
    return None


def section_type(annotation: object) -> type[BaseModel] | None:
    """Return the section of `Section` or `Section | None`; None for a plain value and for a dict of sections."""
    for option in _list_options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _list_options(annotation: object) -> tuple[Any, ...]:
    if isinstance(annotation, UnionType):
        return get_args(annotation)
    return (annotation,)


def dotted_key(keys: Keys) -> str:
    """Return ("rollout", "temperature") as "rollout.temperature"."""
    return ".".join(str(key) for key in keys)


def format_value(value: object) -> str:
    """Return a value as JSON without secrets, at most 80 characters."""
    text = mask_secrets(json.dumps(value, ensure_ascii=False, default=str))
    if len(text) <= 80:
        return text
    return text[:77] + "..."
