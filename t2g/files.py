"""Files that are whole or not there: written at once, hashed, brought to the disk; in words why they cannot be."""

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

TEMPORARY_PREFIX = ".tmp-"  # begins the name of what is not whole yet
_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EROFS: "make it writable, or take another folder",
    errno.EACCES: "give this user the right to it, or take another folder",
    errno.ELOOP: "remove the link in its place",
    errno.EISDIR: "remove the folder in its place",
}


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data` at once: a reader, or a crash, finds the old content or the new one, never a part.

    Raises UserError for what `describe_write_failure` knows; the old content then stands.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
    with raise_if_unwritable(path):
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
def raise_if_unwritable(path: Path) -> Iterator[None]:
    """What the block writes to `path` cannot be written: UserError with file, folder, reason and what is left."""
    try:
        yield
    except OSError as error:
        if not (reason := describe_write_failure(error)):
            raise
        raise make_write_error(path.name, path.parent, reason, "what was written before is kept") from error


def make_write_error(what: str, folder: Path, reason: str, kept: str) -> UserError:
    """reason: see `describe_write_failure`. kept: what the user need not fear for."""
    free = f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB left"
    return UserError(
        f"{what} cannot be written to {folder} ({free}; {kept}): {reason}; then start the same command again"
    )


def describe_write_failure(error: BaseException | None) -> str:
    """What keeps a file from being written, and what helps: "No space left on device: free some space". "" for another
    error. Another process may have met it: then only the words of the error cross.
    """
    while error is not None:
        for number, remedy in _REMEDIES.items():
            if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
                return f"{os.strerror(number)}: {remedy}"
        error = error.__cause__ or error.__context__
    return ""


def match_folder_permissions(folder: Path) -> None:
    """Whoever may read the folder may read what lies in it: safetensors writes for the owner alone."""
    mode = folder.stat().st_mode
    for path in folder.rglob("*"):
        path.chmod(mode & (0o777 if path.is_dir() else 0o666))


def hash_file(file: Path) -> str:
    """Return the hash of a file's bytes, which are read once in a process until size or time of change differ."""
    found = file.stat()
    return _hash_bytes(file.resolve(), found.st_size, found.st_mtime_ns)


@cache
def _hash_bytes(file: Path, size: int, changed_ns: int) -> str:
    return describe_file(file)["xxh3"]


def describe_file(path: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
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
