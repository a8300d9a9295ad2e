"""The files of a run folder at one moment, while the run goes on."""

import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from t2g.files import TEMPORARY_PREFIX

STAGING = f"{TEMPORARY_PREFIX}mirror"  # folder of links to the files of a snapshot
CHECKPOINTS = "checkpoints"
LOCK = "lock"
SMOKE = "smoke"

CHUNK_BYTES = 8 << 20
NUM_TRIES = 5  # snapshots, while the run removes files
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)  # a file system without hard links


class Source(NamedTuple):
    """A file of a snapshot."""

    path: str
    link: Path  # hard link, which stays when the run removes or replaces the file; else the file itself
    status: os.stat_result  # `st_size` bytes belong to the snapshot: a log grows meanwhile

    @property
    def version(self) -> tuple[int, int, int]:
        return self.status.st_ino, self.status.st_size, self.status.st_mtime_ns


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    sources: list[Source]
    links: dict[str, str]


def take_snapshot(folder: Path) -> Snapshot:
    """Link the files of the run folder into its STAGING folder, as of one moment.

    Raises:
        OSError: The run removed files during each of several tries, or the disk is full.
    """
    staging = folder / STAGING
    for _ in range(NUM_TRIES):
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            return _link_files(folder, staging)
        except FileNotFoundError as error:
            missing = error
    raise missing


def _link_files(folder: Path, staging: Path) -> Snapshot:
    """Link checkpoints and results before all other files.

    The run writes a checkpoint after the logs of its steps, and a result after what it describes. So the snapshot has
    all that its checkpoints and results need.
    """
    sources: list[Source] = []
    links: dict[str, str] = {}
    for is_early in (True, False):
        for path in walk(folder):
            relative = path.relative_to(folder)
            name = relative.as_posix()
            if path.is_symlink():
                target = os.readlink(path)
                if is_early and "/" not in target and path.exists():
                    links[name] = target
            elif _is_early(relative) == is_early and path.is_file():
                link = _hold(path, staging / str(len(sources)))
                sources.append(Source(name, link, link.stat()))
    return Snapshot(sources=sources, links=links)


def _hold(path: Path, link: Path) -> Path:
    """Return a hard link to a file, or the file itself where there are none."""
    try:
        os.link(path, link)
    except OSError as error:
        if error.errno in NO_LINKS:
            return path
        raise
    return link


def _is_early(relative: Path) -> bool:
    return CHECKPOINTS in relative.parts or relative.suffix == ".json"


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files and links of the run folder, without temporary ones, its lock and its smoke run."""
    for parent, folders, files in os.walk(folder):
        folder_path = Path(parent)
        linked = [name for name in folders if (folder_path / name).is_symlink()]
        left_out = {*linked, SMOKE} if folder_path == folder else {*linked}
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(TEMPORARY_PREFIX)]
        for name in [*linked, *files]:
            if not name.startswith(TEMPORARY_PREFIX) and name != LOCK:
                yield folder_path / name


def read_chunks(source: Source) -> Iterator[bytes]:
    left = source.status.st_size
    with source.link.open("rb") as file:
        while left:
            chunk = file.read(min(CHUNK_BYTES, left))
            if not chunk:
                raise OSError(f"{source.path} became shorter while it was copied")
            left -= len(chunk)
            yield chunk
