"""A config schema in words: the keys it knows, and what is wrong with an input, one sentence for each problem."""

import json
import re
from collections.abc import Callable
from difflib import get_close_matches
from types import UnionType
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Keys = tuple[str | int, ...]  # ("rollout", "temperature"); a whole number stands for a place in a list


def problems(
    schema: type[BaseModel], error: ValidationError, place: Callable[[ErrorDetails], str] = lambda detail: ""
) -> list[str]:
    """One sentence for each of pydantic's errors: the dotted key, what it got and what it needs.

    `place` tells where it comes from, as the start of the sentence.
    """
    sentences = [
        place(detail) + _sentence(schema, detail["loc"], detail)
        for detail in error.errors()
        if detail["type"] != "default_factory_not_called"  # only says that another field of the section is wrong
    ]
    return list(dict.fromkeys(sentences))


def first_problem(error: ValidationError) -> str:
    """The first of pydantic's errors about data that is no config: "spans.0.start: Input should be a valid integer"."""
    detail = error.errors(include_url=False, include_input=False)[0]
    words = detail["msg"].removeprefix("Value error, ")
    return f"{dotted(detail['loc'])}: {words}" if detail["loc"] else words


def _sentence(schema: type[BaseModel], keys: Keys, detail: ErrorDetails) -> str:
    name, kind = dotted(keys), detail["type"]
    if kind == "extra_forbidden":
        near = _nearest(schema, keys)
        return f"{name} is unknown" + (f"; did you mean {near}?" if near else "")
    if kind == "missing":
        info = _field_of(schema, keys)
        return f"{name} is missing" + (f"; it needs: {info}" if info else "")
    needs = detail["msg"]
    if kind == "value_error":
        needs = needs.removeprefix("Value error, ")
        return needs if name in needs else f"{name}: {needs}"
    needs = re.sub(r"^\w+ should (be |have |match )?", "", needs)  # "Input should be a valid number"
    info = _field_of(schema, keys)
    return f"{name}: got {show(detail['input'])}, needs {needs}" + (f" ({info})" if info else "")


def _nearest(schema: type[BaseModel], keys: Keys) -> str:
    """The known key most like an unknown one: a sibling, else keys of other sections with nearly the same last name."""
    section = _section_of(schema, keys[:-1])
    leaf = str(keys[-1])
    siblings = get_close_matches(leaf, list(section.model_fields), n=1) if section else []
    if siblings:
        return dotted((*keys[:-1], siblings[0]))
    known = dotted_keys(schema)
    last_names = sorted({key.rsplit(".", 1)[-1] for key in known})
    close = get_close_matches(leaf, last_names, n=1, cutoff=0.8)
    return " or ".join(key for key in known if close and key.rsplit(".", 1)[-1] == close[0])


def dotted_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Every value's dotted key, in the schema's order."""
    keys = []
    for name, info in schema.model_fields.items():
        section = section_type(info.annotation)
        keys += dotted_keys(section, f"{prefix}{name}.") if section else [prefix + name]
    return keys


def section_type(annotation: object) -> type[BaseModel] | None:
    """The section behind `Section` or `Section | None`; None for a plain value and for sections by name."""
    options = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def _section_of(schema: type[BaseModel], keys: Keys) -> type[BaseModel] | None:
    section: type[BaseModel] | None = schema
    for key in keys:
        if section is None or key not in section.model_fields:
            return None
        section = section_type(section.model_fields[str(key)].annotation)
    return section


def _field_of(schema: type[BaseModel], keys: Keys) -> str:
    """The field's description; "" where there is none."""
    section = _section_of(schema, keys[:-1])
    info = section.model_fields.get(str(keys[-1])) if section else None
    return (info.description or "") if info else ""


def dotted(keys: Keys) -> str:
    """("rollout", "temperature") -> "rollout.temperature" """
    return ".".join(str(key) for key in keys)


def show(value: object) -> str:
    """A value as the user wrote it, cut to one line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
