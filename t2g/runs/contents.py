"""Hashes of what a config names: data files, models, and the source files of user code."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import xxhash

from t2g.files import hash_file

OWN_PACKAGES = ("t2g", "actors", "jobs")  # a new version of this program is no other run
MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".py")
NOTES = ("identity.json", "sft.json")  # this program writes them beside a model; they hold durations
HIDDEN = re.compile(r"(^|/)\.")


def content_hash(path: Path) -> str:
    """Return a hash of a file, or of the files in a folder by their names; "" where there is neither.

    A folder with safetensors is a model: weights, config, tokenizer and templates at its top count. Of another folder
    every file counts, at any depth and behind links. Hidden files and the name of `path` never count.
    """
    if path.is_file():
        return _hash_files({"": path})
    if any(path.glob("*.safetensors")):
        files = [file for file in path.iterdir() if file.suffix in MODEL_FILES and file.name not in NOTES]
    else:
        files = list(_list_files(path))
    return _hash_files({str(file.relative_to(path)): file for file in files})


def model_version(model: str, revision: str | None) -> str:
    """Return a text that changes with a model: the hash of its folder, else its name on a hub with the revision."""
    return content_hash(Path(model)) or f"{model}@{revision or 'unpinned'}"


def source_hash(import_path: str) -> str:
    """Return a hash of the source files behind `pkg.mod:name`; "" where there are none, as of built-in functions.

    A module of a package stands for every .py file of the top-level package, whose helpers decide as well. The module
    where the object was defined counts beside the named one, which may only import it. The hash leaves out modules of
    this program, and an object that cannot be imported: the caller that needs the object refuses it.
    """
    module_name, _, attribute = import_path.partition(":")
    try:
        value = getattr(importlib.import_module(module_name), attribute)
    except Exception:  # noqa: BLE001 the module of a user may raise anything
        return ""
    files: dict[str, Path] = {}
    for name in {module_name, getattr(value, "__module__", None) or module_name}:
        top = name.partition(".")[0]
        if top in OWN_PACKAGES:
            continue
        for folder in map(Path, getattr(sys.modules.get(top), "__path__", ())):
            files |= {f"{top}/{file.relative_to(folder)}": file for file in folder.rglob("*.py")}
        files[name] = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    return _hash_files(files)


def _list_files(path: Path, parents: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield the files below `path`; a link to one of its own parent folders would never end and is left out."""
    if not path.is_dir():
        yield path
    elif (target := path.resolve()) not in parents:
        for child in path.iterdir():
            if not child.name.startswith("."):
                yield from _list_files(child, (*parents, target))


def _hash_files(files: dict[str, Path]) -> str:
    """Return a hash of the files by name; "" where no name leads to a file. Hidden files do not count."""
    kept = {name: file for name, file in sorted(files.items()) if file.is_file() and not HIDDEN.search(name)}
    lines = "".join(f"{name}\0{hash_file(file)}\n" for name, file in kept.items())
    return xxhash.xxh3_64_hexdigest(lines.encode(errors="surrogateescape")) if lines else ""
