"""A copy of a run folder in an object store or on another disk, through fsspec.

    MIRROR/NAME/manifest.json       path -> size and hash of every file, written after all of them
    MIRROR/NAME/objects/HASH-FILE   the contents; the name of an object has the hash of its content
    MIRROR/NAME/report.html         the report once more, under its own name

An object is never changed, so that the files of a manifest stay whole until the next manifest replaces it. A start
writes its session into the manifest; another process that finds a foreign session there stops copying.
"""

import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ValidationError

from t2g.config.secrets import mask_secrets
from t2g.errors import UserError
from t2g.files import TEMPORARY_PREFIX, describe_file, read_regular, write_json
from t2g.runs.progress import PROGRESS_FILE, log_duration
from t2g.runs.snapshot import CHECKPOINTS, STAGING, Snapshot, Source, read_chunks, take_snapshot, walk

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SESSIONS_FILE = "mirror.json"  # in the run folder: the sessions that have copied it, oldest first
RESTORING = f"{TEMPORARY_PREFIX}restore"  # folder of downloaded files
MOVING = f"{TEMPORARY_PREFIX}moving"  # in it, once all are verified
FOR_PEOPLE = ("report.html", "summary.json")  # also copied under their own names

PART_BYTES = 50 << 20  # least size of a part of an upload
MAX_PARTS = 5000  # an S3 upload has at most 10,000 parts


class TakenOver(RuntimeError):
    """Another process copies to the mirror."""


class MirroredFile(BaseModel):
    """A file in the manifest; as `t2g.files.describe_file`."""

    bytes: int
    xxh3: str

    def name_object(self, path: str) -> str:
        return f"objects/{self.xxh3}-{PurePosixPath(path).name}"


class Manifest(BaseModel):
    """The content of the mirror. Paths are relative to the run folder."""

    format: Literal[1] = 1
    session: str
    files: dict[str, MirroredFile] = {}
    links: dict[str, str] = {}  # symbolic link -> its target in the same folder

    @property
    def objects(self) -> set[str]:
        return {entry.name_object(path) for path, entry in self.files.items()}


# ------------------------------------------------------------------------------------------------------------- mirror
class Mirror:
    """The mirror of one run folder. `open` it first, then `copy` as often as needed, in one thread."""

    def __init__(self, folder: Path, url: str, *, filesystem: Any = None) -> None:
        """Connect to the file system; nothing is read.

        Args:
            url: URL of the run's own folder there.
            filesystem: In place of fsspec's for the URL.

        Raises:
            UserError: The package for this kind of URL is missing.
        """
        self.folder = folder
        self.url = url
        protocol = url.partition("://")[0]
        options = {"auto_mkdir": True} if protocol in LocalFileSystem.protocol else {}
        with self._explain("cannot be opened"):
            own_filesystem, self._root = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
        self._filesystem = filesystem or own_filesystem
        self.copied_checkpoints: list[str] = []  # at the start of the last copy
        self._session = uuid.uuid4().hex
        self._sessions: list[str] = []
        self._manifest = Manifest(session=self._session)
        self._present: set[str] | None = None  # objects, incomplete ones included; None until they are listed
        self._published: dict[str, MirroredFile] = {}  # objects that lie under their own names too
        self._hashed: dict[tuple[int, int, int], MirroredFile] = {}  # by the version of a file

    # -------------------------------------------------------------------------------------------------------- opening
    def open(self, *, may_continue: bool = True) -> None:
        """Restore the run folder if it is empty, and take the mirror over for this process.

        Args:
            may_continue: False if the run must begin here.

        Raises:
            UserError: The mirror cannot be read or written, it is damaged, or it holds another run.
        """
        with self._explain("cannot be read"):
            manifest = self._read_manifest()
        self._sessions = self._read_sessions()
        if manifest is not None and manifest.files:
            if not may_continue:
                raise UserError(f"run.resume=never, and {self.url} holds a run: take another run.name or run.mirror")
            if self._must_restore():
                with log_duration(f"restoring {self.folder} from {self.url}"):
                    self._restore(manifest)
                self._sessions = [*self._read_sessions(), manifest.session]
            elif manifest.session not in self._sessions:
                raise UserError(self._describe_foreign())
            self._manifest = manifest
        self._sessions.append(self._session)
        write_json(self.folder / SESSIONS_FILE, {"sessions": self._sessions})
        claimed = self._manifest.model_copy(update={"session": self._session})
        with self._explain("cannot be written"):
            self._write_manifest(claimed)

    def _must_restore(self) -> bool:
        """Return whether the run folder has no files of a run, or some of a restore that did not end."""
        if (self.folder / RESTORING / MOVING).exists():
            return True
        names = {path.name for path in walk(self.folder) if not path.name.startswith("records-")}
        return names <= {PROGRESS_FILE}

    def _describe_foreign(self) -> str:
        if self._sessions:
            return (
                f"{self.url} was continued from another folder since {self.folder} copied to it: remove this folder to "
                "go on from the mirror, or take another run.mirror"
            )
        return (
            f"{self.url} holds another run than {self.folder}: remove the folder to go on from the mirror, or take "
            "another run.name or run.mirror"
        )

    def _read_sessions(self) -> list[str]:
        content = read_regular(self.folder / SESSIONS_FILE)
        if content is None:
            return []
        try:
            return [*map(str, json.loads(content)["sessions"])]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.folder / SESSIONS_FILE} is damaged: remove the run folder") from error

    def _restore(self, manifest: Manifest) -> None:
        """Download and verify all files, then move them into the run folder, the sessions last.

        An incomplete checkpoint is left to `CheckpointStore`, which takes the one before it.
        """
        staging = self.folder / RESTORING
        staging.mkdir(parents=True, exist_ok=True)  # MOVING, of an interrupted restore, stays until its end
        verified: list[str] = []
        for path, entry in manifest.files.items():
            if not _is_inside(path):
                raise UserError(f"{self.url}: {MANIFEST} names {path!r}, which is not inside the run folder")
            if self._download(path, entry, staging / path):
                verified.append(path)
            elif CHECKPOINTS in PurePosixPath(path).parts:
                logger.warning("%s: %s is missing or damaged", self.url, path)
            else:
                raise UserError(
                    f"{self.url}: {path} is missing or damaged, so the run cannot be restored; nothing was changed: "
                    "take another run.name"
                )
        (staging / MOVING).touch()
        verified.sort(key=lambda path: path == SESSIONS_FILE)
        for path in verified:
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            (staging / path).replace(target)
        for path, linked in manifest.links.items():
            if _is_inside(path) and _is_inside(linked):
                link = self.folder / path
                link.unlink(missing_ok=True)
                link.symlink_to(linked)
        manifest.files = {path: manifest.files[path] for path in verified}  # others are uploaded again
        shutil.rmtree(staging)

    def _download(self, path: str, entry: MirroredFile, target: Path) -> bool:
        """Download a file; return whether it is there and whole."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._explain("cannot be read"):
            try:
                self._filesystem.get_file(self._locate(entry.name_object(path)), str(target))
            except FileNotFoundError:
                return False
        return describe_file(target) == entry.model_dump()

    # -------------------------------------------------------------------------------------------------------- copying
    def list_checkpoints(self) -> list[str]:
        """Return the names of the checkpoints in the run folder; [] if the disk does not answer."""
        try:
            names = os.listdir(self.folder / CHECKPOINTS)
        except OSError:
            return []
        return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))

    def copy(self) -> None:
        """Copy the files that changed, then the manifest; then remove objects that no file needs any more.

        Raises:
            TakenOver: Another process has opened the mirror since.
            Exception: The file system or the disk failed. The manifest of the last copy stays valid.
        """
        self.copied_checkpoints = self.list_checkpoints()
        self._check_session()
        if self._present is None:
            self._present = self._list_objects()
        try:
            snapshot = take_snapshot(self.folder)
            self._copy_snapshot(snapshot)
        finally:
            shutil.rmtree(self.folder / STAGING, ignore_errors=True)

    def _check_session(self) -> None:
        """Raise TakenOver if another process has opened the mirror since."""
        current = self._read_manifest()
        if current is not None and current.session not in self._sessions:
            raise TakenOver(f"another process copies to {self.url}, so this one stops copying")

    def _copy_snapshot(self, snapshot: Snapshot) -> None:
        assert self._present is not None
        whole = self._manifest.objects
        files: dict[str, MirroredFile] = {}
        for source in snapshot.sources:
            entry = self._describe(source)
            name = entry.name_object(source.path)
            if name not in whole:
                self._present.add(name)
                self._upload(source, entry, name)
                whole.add(name)
            files[source.path] = entry
        manifest = Manifest(session=self._session, files=files, links=snapshot.links)
        self._check_session()  # again: the uploads may have taken minutes
        if manifest != self._manifest:
            self._write_manifest(manifest)
        self._publish(manifest)
        self._hashed = {source.version: files[source.path] for source in snapshot.sources}
        unneeded = self._present - manifest.objects
        if unneeded:
            self._filesystem.rm([self._locate(name) for name in sorted(unneeded)])
            self._present -= unneeded

    def _describe(self, source: Source) -> MirroredFile:
        known = self._hashed.get(source.version)
        if known is not None:
            return known
        digest = xxhash.xxh3_128()
        for chunk in read_chunks(source):
            digest.update(chunk)
        return MirroredFile(bytes=source.status.st_size, xxh3=digest.hexdigest())

    def _upload(self, source: Source, entry: MirroredFile, name: str) -> None:
        part_bytes = max(PART_BYTES, entry.bytes // MAX_PARTS)
        digest = xxhash.xxh3_128()
        with self._filesystem.open(self._locate(name), "wb", block_size=part_bytes) as remote:
            for chunk in read_chunks(source):
                digest.update(chunk)
                remote.write(chunk)
        if digest.hexdigest() != entry.xxh3:
            raise OSError(f"{source.path} changed while it was copied")

    def _publish(self, manifest: Manifest) -> None:
        """Copy FOR_PEOPLE to their own names."""
        for path in FOR_PEOPLE:
            entry = manifest.files.get(path)
            if entry is not None and entry != self._published.get(path):
                self._filesystem.cp_file(self._locate(entry.name_object(path)), self._locate(path))
                self._published[path] = entry

    # ----------------------------------------------------------------------------------------------------- the remote
    def _locate(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _list_objects(self) -> set[str]:
        """Return the names of all objects; those of a copy that did not end may be incomplete."""
        self._filesystem.invalidate_cache()
        paths = self._filesystem.find(self._locate("objects"))
        return {f"objects/{PurePosixPath(path).name}" for path in paths}

    def _read_manifest(self) -> Manifest | None:
        try:
            content = self._filesystem.cat_file(self._locate(MANIFEST))
        except FileNotFoundError:
            return None
        try:
            return Manifest.model_validate_json(content)
        except ValidationError as error:
            raise UserError(f"{self.url}/{MANIFEST} is no manifest of this program: take another run.mirror") from error

    def _write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest at once: an object store does so itself."""
        content = manifest.model_dump_json(indent=1).encode()
        target = self._locate(MANIFEST)
        if isinstance(self._filesystem, LocalFileSystem):
            self._filesystem.pipe_file(f"{target}.part", content)
            self._filesystem.mv(f"{target}.part", target)
        else:
            self._filesystem.pipe_file(target, content)
        self._manifest = manifest

    @contextmanager
    def _explain(self, what: str) -> Iterator[None]:
        """Turn an error of the file system within the block into a UserError."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"run.mirror: {self.url} {what}: {describe_error(error)}") from error


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts and not path.startswith("/")


def describe_error(error: BaseException) -> str:
    """Return an error of a file system in one line without credentials."""
    text = " ".join(mask_secrets(str(error)).split())  # masked first: a secret may hold white space
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
