"""Hashes of the contents behind config keys: data files, models, and the source files of user code."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import xxhash

from t2g.config.python_functions import source_text
from t2g.files import hash_file

OWN_PACKAGES = ("t2g", "actors", "jobs")  # a new version of this program can continue a run
MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".py")
NOTES = ("identity.json", "sft.json")  # written into a model's folder by this program; they hold durations
HIDDEN = re.compile(r"(^|/)\.")


def content_hash(*paths: Path) -> str:
    """Return a hash of files, or of the files in folders by their names, in order; "" if one does not exist.

    A folder with safetensors is a model: weights, config, tokenizer and templates at its top level are hashed. In
    another folder every file is hashed, at any depth and behind links. Hidden files are ignored, and so are the paths
    themselves: a copy has the same hash.
    """
    if len(paths) == 1:
        return _hash_path(*paths)
    hashes = [_hash_path(path) for path in paths]
    if not all(hashes):
        return ""
    return xxhash.xxh3_64_hexdigest(" ".join(hashes).encode())


def _hash_path(path: Path) -> str:
    if path.is_file():
        return _hash_files({"": path})
    if any(path.glob("*.safetensors")):
        files = [file for file in path.iterdir() if file.suffix in MODEL_FILES and file.name not in NOTES]
    else:
        files = list(_list_files(path))
    return _hash_files({str(file.relative_to(path)): file for file in files})


def model_version(model: str, revision: str | None) -> str:
    """Return a key that changes with a model: the hash of its folder, or its hub name and revision.

    A copy of the folder has the same key.
    """
    return content_hash(Path(model)) or f"{model}@{revision or 'unpinned'}"


def format_model_label(model: str, revision: str | None) -> str:
    """Return folder or hub name with a text that changes with the weights, for readers: my/judge@83f1c2d4e5a69788."""
    weights = content_hash(Path(model)) or revision or "unpinned"
    return f"{model}@{weights}"


def source_hash(import_path: str) -> str:
    """Return a hash of the source files behind `pkg.mod:name`; "" without such files, as for built-in functions.

    For a module of a package every .py file of the top-level package is hashed, because its helpers matter too. The
    named module may only import the object, so the module that defines it is hashed as well. Modules of this program
    are ignored. So is an object that cannot be imported: the caller that needs it raises the error. A `__main__:NAME`
    is its own text alone: notebooks have no file, and the other lines of a script do not judge.
    """
    if text := source_text(import_path):
        return xxhash.xxh3_64_hexdigest(text.encode(errors="surrogateescape"))
    module_name, _, attribute = import_path.partition(":")
    try:
        value = getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit):  # noqa: BLE001 a user's module may raise any error
        return ""
    files: dict[str, Path] = {}
    defined_in = getattr(value, "__module__", None) or module_name
    for name in {module_name, defined_in}:
        top = name.partition(".")[0]
        if top in OWN_PACKAGES:
            continue
        package_folders = getattr(sys.modules.get(top), "__path__", ())
        for folder in map(Path, package_folders):
            for file in folder.rglob("*.py"):
                files[f"{top}/{file.relative_to(folder)}"] = file
        module_file = getattr(sys.modules.get(name), "__file__", None)
        files[name] = Path(module_file or "")
    return _hash_files(files)


def _list_files(path: Path, parents: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield the files below `path`. A link to one of its own parent folders is left out: it would never end."""
    if not path.is_dir():
        yield path
    elif (target := path.resolve()) not in parents:
        for child in path.iterdir():
            if not child.name.startswith("."):
                yield from _list_files(child, (*parents, target))


def _hash_files(files: dict[str, Path]) -> str:
    """Return a hash of names and contents of the files that exist and are not hidden; "" without such a file."""
    lines = ""
    for name, file in sorted(files.items()):
        if file.is_file() and not HIDDEN.search(name):
            lines += f"{name}\0{hash_file(file)}\n"
    if not lines:
        return ""
    return xxhash.xxh3_64_hexdigest(lines.encode(errors="surrogateescape"))
