"""Annotations of config fields: whether a value can change on resume, and whether it is a path.

    num_steps: ResumeMutable[int] = Field(100, ge=1)
    path: PathOrName[str] = Field(..., description="a file, or a dataset on the hub")

`loading.identity_values` and `loading.load` read them.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ValidationInfo

from t2g.config.validation_errors import find_fields

Value = TypeVar("Value")


@dataclass(frozen=True)
class PathContext:
    """Pydantic's context while a config file is read: the base of relative paths. Without it paths stay unchanged."""

    cwd: Path
    is_ray_job: bool = False
    is_uploaded: bool = False  # cwd is a Ray job's copy; the job that resumes the run has another copy


def _absolute(value: Any, info: ValidationInfo) -> Any:
    context: PathContext | None = info.context
    if isinstance(value, tuple):
        return tuple(_absolute(path, info) for path in value)
    is_remote = info.data.get("url") is not None  # the value is a model name that the server knows
    if value is None or context is None or context.is_uploaded or is_remote:
        return value
    path = os.path.normpath(context.cwd / Path(value).expanduser())
    return type(value)(path) if os.path.exists(path) else value


_RESUME_MUTABLE = "can change on resume"
_PATH = AfterValidator(_absolute)

# Marks fields that decide where, how fast and how long a run continues and what it records. Such a field never decides
# what one step computes, except by rounding. On a section, the mark holds for each of its fields.
ResumeMutable = Annotated[Value, _RESUME_MUTABLE]
# Marks a file or folder, made absolute if it exists, or a name on the hub, left unchanged.
PathOrName = Annotated[Value, _PATH]


def can_change_on_resume(schema: type[BaseModel], key: str) -> bool:
    """Return whether the field of a dotted key, or a section that holds it, can change; False for an unknown key."""
    return any(_RESUME_MUTABLE in info.metadata for info in find_fields(schema, key.split(".")))


def paths(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the dotted key and the values of each field that may name files or folders, not models of a server."""
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from paths(value, f"{prefix}{name}.")
        elif isinstance(value, dict):
            for key, section in value.items():
                if isinstance(section, BaseModel):
                    yield from paths(section, f"{prefix}{name}.{key}.")
        elif _PATH in info.metadata and getattr(config, "url", None) is None:
            yield prefix + name, _list_values(value)


def _list_values(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, tuple):
        return value
    return (value,)
