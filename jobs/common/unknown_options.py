"""Say which key was meant by an option that does not exist: `--seed 3` means run.seed=3."""

import shlex
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from pydantic import BaseModel

from t2g.config.validation_errors import list_fields, section_type

MAX_KEYS = 3  # that a sentence names
OTHER_NAMES = {"learning_rate": "lr"}  # names of keys in other trainers


def describe_unknown(schema: type[BaseModel], unknown: Sequence[str], argv: Sequence[str]) -> str:
    """Return a sentence for each unknown option, with the key to write instead.

    >>> describe_unknown(schema, ["--seed"], ["--config", "policy.yaml", "--seed", "3"])
    '--seed is no option: write run.seed=3'

    Args:
        unknown: The arguments that the parser does not know.
        argv: All arguments, in which an option's value may follow it.
    """
    sentences = [_describe(schema, option, argv) for option in unknown if option.startswith("-")]
    return "\n".join(sentences) or f"arguments that are not known: {shlex.join(unknown)}"


def _describe(schema: type[BaseModel], argument: str, argv: Sequence[str]) -> str:
    option, equals, value = argument.partition("=")
    keys = find_keys(schema, option)
    if not keys:
        return f"{option} is no option: settings are written as key=value, and --help lists the keys"
    fields = list_fields(schema)
    if not equals:
        is_flag = fields[keys[0]].annotation is bool
        default = "true" if is_flag else "VALUE"
        value = _following_value(argument, argv, default)
    pairs = [shlex.quote(f"{key}={value}") for key in keys[:MAX_KEYS]]
    return f"{option} is no option: write {' or '.join(pairs)}"


def _following_value(argument: str, argv: Sequence[str], default: str) -> str:
    """Return the argument behind this one; `default` if that is no value."""
    position = argv.index(argument) + 1
    if position == len(argv):
        return default
    following = argv[position]
    if following.startswith("--") or "=" in following:
        return default
    return following


def find_keys(schema: type[BaseModel], option: str) -> list[str]:
    """Return the keys that an option may mean: of its name, whole or at their end, else of a similar name."""
    fields = list_fields(schema)
    name = option.lstrip("-").replace("-", "_")
    name = OTHER_NAMES.get(name, name)
    if name in fields and section_type(fields[name].annotation) is None:
        return [name]
    keys = list(_list_values(schema))
    if name in fields:  # a section: its own keys, required ones first
        section_keys = [key for key in keys if key.rpartition(".")[0] == name]
        return sorted(section_keys, key=lambda key: not fields[key].is_required())[:1]

    by_last: dict[str, list[str]] = {}
    for key in sorted(keys, key=lambda key: key.count(".")):
        last = key.rpartition(".")[2]
        by_last.setdefault(last, []).append(key)
    if name in by_last:
        return by_last[name]
    similar = get_close_matches(name, by_last, n=1)
    return by_last[similar[0]] if similar else []


def _list_values(schema: type[BaseModel]) -> Iterator[str]:
    for key, info in list_fields(schema).items():
        if section_type(info.annotation) is None:
            yield key
