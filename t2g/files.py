"""Files that are whole or not there: written at once, hashed, brought to the disk; a full disk in one sentence."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from t2g.errors import UserError

TEMPORARY = ".tmp-"  # begins the name of what is not whole yet
FULL = (errno.ENOSPC, errno.EDQUOT)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data` at once: a reader, or a crash, finds the old content or the new one, never a part.

    Raises UserError when the disk is full; the old content then stands.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    with full_disk_in_words(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        temporary.replace(path)
        sync_path(path.parent)


@contextmanager
def full_disk_in_words(path: Path) -> Iterator[None]:
    """What the block writes to `path` does not fit on the disk: UserError with file, folder and what is left."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        free = shutil.disk_usage(path.parent).free
        raise UserError(
            f"{path.name} does not fit on the disk of {path.parent} ({free / 2**20:.0f} MiB left; what was written "
            "before is kept): free some space, then start the same command again"
        ) from error


def weights_version(model: str, revision: str | None) -> str:
    """A text that changes with a model's weights: its revision, else a hash of the safetensors in its folder.

    Reads them all, once in a process. A name on the hub without a revision is "unpinned": what it gives may change, and
    nobody would see.
    """
    files = sorted(Path(model).glob("*.safetensors"))
    if revision or not files:
        return revision or "unpinned"
    return _hash_of(tuple((file.resolve(), file.stat().st_size, file.stat().st_mtime_ns) for file in files))


@cache
def _hash_of(files: tuple[tuple[Path, int, int], ...]) -> str:
    """files: each with its size and time of change."""
    return xxhash.xxh3_64_hexdigest("".join(entry(file)["xxh3"] for file, _, _ in files).encode())


def entry(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "xxh3": digest.hexdigest()}


def sync_path(path: Path) -> None:
    """fsync of a file, or of a folder, without which a rename may not survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
