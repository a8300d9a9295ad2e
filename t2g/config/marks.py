"""What a field says of itself beside its type: whether it may differ when a run goes on, and whether it is a path.

    num_steps: ResumeMutable[int] = Field(100, ge=1)
    path: PathOrName[str] = Field(..., description="a file, or a dataset on the hub")

`loading.identity_values` and `loading.load` act on it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ValidationInfo

from t2g.config.validation_errors import list_fields

T = TypeVar("T")


@dataclass(frozen=True)
class PathContext:
    """Pydantic's context while a config file is read: what its relative paths mean. Without one they stay as given."""

    cwd: Path
    is_ray_job: bool = False
    uploaded: bool = False  # cwd is a Ray job's copy, which has another name in the job that resumes the run


def _absolute(value: Any, info: ValidationInfo) -> Any:
    here: PathContext | None = info.context
    served = info.data.get("url") is not None  # by another server, to which the value is a name
    if value is None or here is None or here.uploaded or served:
        return value
    path = os.path.normpath(here.cwd / Path(value).expanduser())
    return type(value)(path) if os.path.exists(path) else value


_RESUME_MUTABLE = "may differ on resume"
_PATH = AfterValidator(_absolute)

# Where, how fast and how long a run goes on and what it writes down; never what one step computes, unless by rounding.
# Of a section: each of its fields.
ResumeMutable = Annotated[T, _RESUME_MUTABLE]
# A file or folder here, which is made absolute, or something on the hub, whose name stays.
PathOrName = Annotated[T, _PATH]


def can_change_on_resume(schema: type[BaseModel], key: str) -> bool:
    """Whether the field of that dotted key, or a section around it, may differ; False for an unknown key."""
    known, names = list_fields(schema), key.split(".")
    around = [".".join(names[:length]) for length in range(1, len(names) + 1)]
    return any(_RESUME_MUTABLE in known[name].metadata for name in around if name in known)


def paths(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every field that may name a file or folder, and no model that a server knows."""
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from paths(value, f"{prefix}{name}.")
        elif _PATH in info.metadata and getattr(config, "url", None) is None:
            yield prefix + name, value
