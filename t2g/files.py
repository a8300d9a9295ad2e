"""Atomic writes, hashes and fsync of files, and messages that explain why a file cannot be written."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import file_digest
from pathlib import Path
from typing import Any

import xxhash

from t2g.errors import Unreadable, UserError

FileVersion = tuple[Path, int, int]  # path, bytes and time of modification in ns
TEMPORARY_PREFIX = ".tmp-"  # begins the name of an unfinished file or folder
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
NOT_FOUND_ERRORS = FileNotFoundError, NotADirectoryError  # errors of a path where nothing is
_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EROFS: "make it writable, or take another folder",
    errno.EACCES: "give this user the right to it, or take another folder",
    errno.ELOOP: "remove the link in its place",
    errno.EISDIR: "remove the folder in its place",
    errno.EEXIST: "remove the file in its place",
    errno.ESTALE: "mount its file system again",
}


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the file atomically: a reader, or a crash, finds the old content or the new content, never a mixture.

    Raises:
        UserError: The file cannot be written, see `describe_write_failure`; the old content is kept.
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


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON; see `write_atomic`."""
    write_atomic(path, json.dumps(value, indent=1).encode())


def check_regular(path: Path) -> None:
    """Check that nothing but a regular file is in the place of a file that is read or appended to.

    A pipe would block its reader and its writer for ever.

    Raises:
        UserError: There is something else, or the path cannot be read.
    """
    try:
        mode = path.stat().st_mode
    except NOT_FOUND_ERRORS:
        return
    except OSError as error:
        raise make_read_error(path, error) from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or device"
        raise Unreadable(f"{path} is {kind}, and a file is needed there: remove it, or take another run.name")


def read_regular(path: Path) -> bytes | None:
    """Return the content of a regular file, or None if there is none. Raises as `check_regular`."""
    check_regular(path)
    try:
        return path.read_bytes()
    except NOT_FOUND_ERRORS:
        return None
    except OSError as error:
        raise make_read_error(path, error) from error


def make_read_error(path: Path, error: OSError) -> Unreadable:
    """Return the error for a file or folder that exists and cannot be read."""
    reason = error.strerror or str(error)
    return Unreadable(f"{path} cannot be read ({reason}): make it readable, then start the same command again")


@contextmanager
def raise_if_unwritable(path: Path) -> Iterator[None]:
    """Turn an OSError of the block that `describe_write_failure` knows into a UserError about `path`."""
    try:
        yield
    except OSError as error:
        reason = describe_write_failure(error)
        if not reason:
            raise
        raise make_write_error(path.name, path.parent, reason, "what was written before is kept") from error


def make_write_error(name: str, folder: Path, reason: str, consequence: str) -> UserError:
    """Return the error for `name`, which cannot be written to `folder`.

    Args:
        reason: The result of `describe_write_failure`.
        consequence: A clause that says which data are kept.
    """
    free_mib = shutil.disk_usage(folder).free / 2**20
    free = f"{free_mib:.0f} MiB left"
    return UserError(
        f"{name} cannot be written to {folder} ({free}; {consequence}): {reason}; then start the same command again"
    )


def describe_write_failure(error: BaseException | None) -> str:
    """Return why a file cannot be written, and the remedy: "No space left on device: free some space".

    Returns "" for another error. The message is searched too: an error from another process may have lost its errno.
    """
    while error is not None:
        for number, remedy in _REMEDIES.items():
            reason = os.strerror(number)
            if getattr(error, "errno", None) == number or reason in str(error):
                return f"{reason}: {remedy}"
        error = error.__cause__ or error.__context__
    return ""


def match_folder_permissions(folder: Path) -> None:
    """Give the content of the folder the folder's permissions: safetensors creates files for their owner only."""
    mode = folder.stat().st_mode
    for path in folder.rglob("*"):
        mask = 0o777 if path.is_dir() else 0o666
        path.chmod(mode & mask)


def identify_file(file: Path) -> FileVersion:
    """Return what changes with the content of a file: its path, its size and its time of modification."""
    status = file.stat()
    return file.resolve(), status.st_size, status.st_mtime_ns


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is what git writes in place of a large one where Git LFS is not installed."""
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def hash_file(file: Path) -> str:
    """Return the hash of a file's bytes. A process reads the file again only if its size or mtime changes."""
    return _hash_bytes(*identify_file(file))


@cache
def _hash_bytes(file: Path, size: int, mtime_ns: int) -> str:
    return describe_file(file)["xxh3"]


def describe_file(path: Path) -> dict[str, Any]:
    """Return the manifest entry of a file: its size and its hash."""
    with path.open("rb") as file:
        digest = file_digest(file, xxhash.xxh3_128)
    return {"bytes": path.stat().st_size, "xxh3": digest.hexdigest()}


def sync_path(path: Path) -> None:
    """Call fsync on a file or folder; without fsync of its folder a rename may not survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Call `sync_path` on every file and folder in a folder, and on itself.

    Call it before a file that declares the folder complete: after a power cut that file could be there without them.
    """
    for path in folder.rglob("*"):
        if not path.is_symlink():
            sync_path(path)
    sync_path(folder)
