"""Folders of data: the files of a split, and folders that `datasets` wrote with `save_to_disk`."""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from t2g.config import DataConfig
from t2g.data.formats import is_data_file
from t2g.errors import UserError

logger = logging.getLogger(__name__)

# Files that only `save_to_disk` writes.
SAVED = "state.json"
SAVED_SPLITS = "dataset_dict.json"
MAX_NAMES = 5  # names of files in a warning
_CONFIGS = re.compile(r"^configs:", re.MULTILINE)  # in the front matter of README.md


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `datasets` wrote the folder with `save_to_disk`."""
    is_dataset = (folder / SAVED).is_file() and (folder / "dataset_info.json").is_file()
    return is_dataset or (folder / SAVED_SPLITS).is_file()


def read_saved_dataset(folder: Path, config: DataConfig, key: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a folder that `datasets` wrote with `save_to_disk`.

    Args:
        key: The config's section, for error messages.

    Raises:
        UserError: The split does not exist, or a file is missing or damaged.
    """
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except (datasets.exceptions.DatasetsError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{key}.path={folder}: the saved data set cannot be loaded: {error}") from error
    if not isinstance(saved, datasets.DatasetDict):
        if config.split not in ("train", str(saved.split)):
            raise UserError(f"{key}.split={config.split}: {folder} was saved as one data set, without splits")
        return iter(saved.with_format(None))
    if config.split not in saved:
        raise UserError(f"{key}.split={config.split}: {folder} holds the splits {', '.join(saved)}")
    return iter(saved[config.split].with_format(None))


def list_split(folder: Path, config: DataConfig) -> list[Path]:
    """Return the files of `config.split` in a folder, by their names as `datasets` finds them.

    All formats are read, where `datasets` keeps the files of one. A warning names the files that are not read. The
    result is empty if `datasets` has to read the folder itself.

    Raises:
        UserError: The folder's README names a file outside of the folder.
    """
    import datasets

    try:
        names_by_split = _find_splits(folder, config)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError):
        return []  # load_dataset raises the same
    _check_inside(folder, chain.from_iterable(names_by_split.values()))
    files_by_split = {split: list(map(Path, names)) for split, names in names_by_split.items()}
    files = files_by_split.get(config.split, [])
    data_files = [file for file in files if is_data_file(file)]
    names = [file.name for file in files if file not in data_files]
    names += _find_unassigned(folder, files_by_split)
    if data_files and names:
        skipped = ", ".join(names[:MAX_NAMES])
        more = ""
        if len(names) > MAX_NAMES:
            more = f" and {len(names) - MAX_NAMES} more"
        logger.warning("%s: not read as split %s: %s%s", folder, config.split, skipped, more)
    return data_files


def _check_inside(folder: Path, names: Iterable[str]) -> None:
    """Check that local files are in a folder by their paths; the files of the hub's cache are links out of it.

    Raises:
        UserError: A file is outside: the README of somebody's data would choose what is read on this machine.
    """
    roots = (os.path.abspath(folder), os.path.realpath(folder))  # the library resolves links to the folder itself
    for name in names:
        path = name.rpartition("::")[2]  # the archive of a file in an archive
        if "://" in path:
            continue
        file = Path(os.path.abspath(path))
        if not any(file.is_relative_to(root) for root in roots):
            raise UserError(f"{folder / 'README.md'}: names the file {path}; it needs files in its own folder")


def _find_unassigned(folder: Path, splits: Mapping[str, Sequence[Path]]) -> list[str]:
    """Return the data files in a folder that belong to no split, by their paths in it."""
    from datasets.data_files import FILES_TO_IGNORE

    root = Path(os.path.abspath(folder))  # as the library names the files: links are kept
    assigned = set(map(str, chain.from_iterable(splits.values())))
    names = []
    for file in sorted(root.rglob("*")):
        name = file.relative_to(root)
        is_hidden = any(part.startswith(".") for part in name.parts)
        is_data = is_data_file(file) and file.is_file() and file.name not in FILES_TO_IGNORE
        is_assigned = str(file) in assigned
        if is_data and not is_hidden and not is_assigned:
            names.append(str(name))
    return names


def _find_splits(folder: Path, config: DataConfig) -> dict[str, list[str]]:
    """Return the paths of each split's files: by the README's configs if any, else by the names of files."""
    import datasets
    from datasets.data_files import DataFilesDict, get_data_patterns

    readme = folder / "README.md"
    has_configs = readme.is_file() and _CONFIGS.search(readme.read_text(errors="replace"))
    if config.subset is not None or has_configs:
        builder = datasets.load_dataset_builder(str(folder), config.subset)
        data_files = builder.config.data_files or {}
    else:
        patterns = get_data_patterns(str(folder))
        data_files = DataFilesDict.from_patterns(patterns, base_path=str(folder))
    return {str(split): list(map(str, files)) for split, files in data_files.items()}
