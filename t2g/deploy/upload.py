"""What `jobs.deploy submit` sends to a cluster: the code and the configs around it, never data, runs or secrets."""

import os
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from t2g.errors import UserError

MIB = 2**20
MAX_BYTES = 50 * MIB  # Ray's own limit is 100 MiB, and every node fetches the package at its first start
IGNORE_FILE = ".rayignore"
EXCLUDED = (
    "/runs", "/build", ".git", ".venv", "venv", "node_modules", "wandb", "*.egg-info", "__pycache__", "*.pyc",
    ".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis", ".import_linter_cache", ".benchmarks",
    ".env", ".env.*", ".netrc", ".ray",  # where secrets are kept
)  # fmt: skip
NUM_NAMED = 5  # largest files in the refusal


def files_to_upload(root: Path) -> list[Path]:
    """Files under `root`, sorted and relative to it, without those of EXCLUDED and of its .rayignore.

    Links to folders are not followed. UserError for a line of .rayignore that is not understood.
    """
    patterns, found = (*EXCLUDED, *_ignored(root / IGNORE_FILE)), list[Path]()
    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        folders[:] = [name for name in folders if not _is_excluded(here / name, True, patterns)]
        names = [here / name for name in files if not _is_excluded(here / name, False, patterns)]
        found += [name for name in names if (root / name).is_file()]
    return sorted(found)


def refuse_large(root: Path, files: Sequence[Path]) -> None:
    """UserError, naming the largest files, for more than MAX_BYTES."""
    sizes = {file: (root / file).stat().st_size for file in files}
    total = sum(sizes.values())
    if total <= MAX_BYTES:
        return
    largest = sorted(sizes, key=lambda file: -sizes[file])[:NUM_NAMED]
    named = ", ".join(f"{file} ({sizes[file] / MIB:.1f} MiB)" for file in largest)
    raise UserError(
        f"the upload has {total / MIB:.1f} MiB, and at most {MAX_BYTES / MIB:.0f} MiB are sent; the largest files: "
        f"{named}. Name what the run does not need in {IGNORE_FILE}, and put data and models on the shared storage"
    )


def write_package(root: Path, files: Sequence[Path], target: Path) -> None:
    """A zip file of `files`; the same files give the same bytes, so that a cluster that has them gets nothing again."""
    with zipfile.ZipFile(target, "w") as package:
        for file in files:
            entry = zipfile.ZipInfo(file.as_posix())  # dated 1980: the time of a checkout is no part of it
            entry.external_attr = ((root / file).stat().st_mode & 0o777) << 16
            package.writestr(entry, (root / file).read_bytes(), zipfile.ZIP_DEFLATED)


def _is_excluded(name: Path, is_folder: bool, patterns: Sequence[str]) -> bool:
    """As git does: a pattern with a slash before its end is a path from the root, any other a name at any depth."""
    for pattern in patterns:
        path = pattern.rstrip("/")
        if pattern.endswith("/") and not is_folder:
            continue
        if fnmatchcase(name.as_posix() if "/" in path else name.name, path.removeprefix("/")):
            return True
    return False


def _ignored(file: Path) -> list[str]:
    """Patterns of an ignore file. Those parts of git's language that are not understood here are refused."""
    if not file.exists():
        return []
    patterns = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        pattern = line.strip()
        if pattern.startswith("!") or "**" in pattern:
            raise UserError(f"{file}:{number}: got {pattern!r}; needs names or paths with * and ?, without ! and **")
        if pattern and not pattern.startswith("#"):
            patterns.append(pattern)
    return patterns
