"""Checkpoint files: written to a temporary folder, sealed with hashes, renamed, pruned. Independent of their content.

folder/step-00000010/   the files of `fill`, state.json, manifest.json (size and xxh3 of every other file)
folder/best             symbolic link to folder/best-0003, the exported policy with the best score so far
"""

import errno
import json
import logging
import math
import os
import re
import resource
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t2g.errors import UserError
from t2g.files import (
    NOT_FOUND_ERRORS,
    TEMPORARY_PREFIX,
    describe_file,
    describe_write_failure,
    make_read_error,
    make_write_error,
    sync_folder,
    sync_path,
    write_json,
)

log = logging.getLogger(__name__)

FileHashes = Mapping[str, dict[str, Any]]  # by the names of files in a folder, see `t2g.files.describe_file`
Fill = Callable[[Path], FileHashes | Any]  # a result that is no Mapping holds no hashes

MANIFEST = "manifest.json"
STATE = "state.json"
SCORE = "t2g_score.json"
SKIP_KEY = "run.resume=readable"  # how a user skips checkpoints that cannot be read
_FULL_BELOW_BYTES = 1 << 20  # with less free space, an error without errno (torch's zip writer) means a full disk


@dataclass(frozen=True, kw_only=True)
class Defect:
    """Why a sealed folder cannot be used."""

    reason: str
    is_damage: bool  # False if the disk did not answer: the folder may be intact


class CheckpointStore:
    """The checkpoints of one run; the newest `keep` are kept. One process writes; any process may read."""

    def __init__(self, folder: Path, keep: int, *, skip_unreadable: bool = False) -> None:
        """Open the store; nothing is read.

        Args:
            skip_unreadable: Whether a run may go on without checkpoints that cannot be read, see `latest`.
        """
        self.folder = folder
        self.keep = keep
        self.skip_unreadable = skip_unreadable
        self._best: tuple[Path, float] | None = None  # the best policy that this process has verified

    def write(self, step: int, fill: Fill, state: dict[str, Any]) -> Path:
        """Write the checkpoint of `step`, or return it if it exists intact.

        Earlier checkpoints are not touched before the new one is renamed.

        Args:
            fill: Writes model and optimizer into an existing empty folder; returns the hashes that it knows.
            state: Everything else that a resume needs; JSON values.

        Raises:
            UserError: The checkpoint cannot be written, see `t2g.files.describe_write_failure`. Other errors of `fill`
                pass through, and the temporary folder is removed.
        """
        return self.begin(step, fill, state)()

    def begin(self, step: int, fill: Fill, state: dict[str, Any]) -> Callable[[], Path]:
        """Do the first part of `write` and return the second, which completes the checkpoint.

        The second part may run in another thread; nothing else may write to this folder meanwhile.
        """
        final = self.folder / f"step-{step:08d}"
        if os.path.lexists(final):
            content = _read_sealed(final, STATE)
            if not isinstance(content, Defect):
                return lambda: final
            self._check_removable(final, content)
            _remove(final)
        seal = self._fill(final, fill, STATE, state, f"the checkpoint of step {step}")

        def finish() -> Path:
            seal()
            # A newer one must be incomplete, or the run would have resumed from it: it does not count among `keep`.
            not_newer = [folder for folder in self._list_steps() if folder <= final]
            for old in not_newer[self.keep :]:
                _remove(old)
            return final

        return finish

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest intact checkpoint and its state, or None if there are no checkpoints.

        A damaged checkpoint with an intact one before it is skipped with a warning.

        Raises:
            UserError: All checkpoints are damaged, or the disk does not return one that may be intact. With
                `skip_unreadable` both are skipped.
        """
        defects: dict[Path, Defect] = {}
        intact = None
        for folder in self._list_steps():
            content = _read_sealed(folder, STATE)
            if not isinstance(content, Defect):
                intact = folder, content
                break
            defects[folder] = content
        is_damage = all(defect.is_damage for defect in defects.values())
        if defects and not self.skip_unreadable and not (intact and is_damage):
            raise UserError(self._describe_defects(defects))
        for folder, defect in defects.items():
            log.warning("checkpoint %s is incomplete (%s) and is skipped", folder, defect.reason)
        return intact

    def _describe_defects(self, defects: Mapping[Path, Defect]) -> str:
        listed = ", ".join(f"{folder.name} ({defect.reason})" for folder, defect in defects.items())
        return (
            f"{self.folder}: cannot read {listed}; nothing was deleted: make a checkpoint readable, or take another "
            f"run.name; {SKIP_KEY} goes on from an earlier checkpoint, or from the start if there is none"
        )

    def find_step_after(self, step: int) -> int | None:
        """Return the step of the newest intact checkpoint where it is later than `step`, else None."""
        if not any(int(folder.name.removeprefix("step-")) > step for folder in self._list_steps()):
            return None
        latest = self.latest()
        if latest is None:
            return None
        _, state = latest
        return state["step"] if state["step"] > step else None

    def keep_best(self, step: int, export: Fill, score: float) -> bool:
        """Export the policy and point `folder/best` at it, if `score` beats the best so far.

        Higher is better; the first of equal scores is kept; a score that is not finite never counts. Raises as `write`.
        """
        best = self._best or self.best()  # an error here keeps the best policy
        self._best = best
        if not math.isfinite(score) or (best is not None and score <= best[1]):
            return False

        number = int(best[0].name.removeprefix("best-")) + 1 if best else 1
        final = self.folder / f"best-{number:04d}"
        _remove(final)  # incomplete, or the run ended between the seal and the move of the link
        content = {"step": step, "score": score}
        seal = self._fill(final, export, SCORE, content, f"the best policy of step {step}")
        seal()
        link = self.folder / f"{TEMPORARY_PREFIX}best-link"
        _remove(link)
        link.symlink_to(final.name)
        best_link = self.folder / "best"
        if not best_link.is_symlink():
            _remove(best_link)
        link.replace(best_link)
        sync_path(self.folder)
        for old in self.folder.glob("best-*"):
            if old != final:
                _remove(old)
        self._best = final, score
        return True

    def best(self) -> tuple[Path, float] | None:
        """Return the folder of the best policy and its score, or None. A damaged one is skipped with a warning.

        Raises:
            UserError: The disk does not return it, and it may be intact.
        """
        link = self.folder / "best"
        if not link.is_symlink():
            return None
        folder = self.folder / link.readlink()
        content: dict[str, Any] | Defect = Defect(reason="its name is invalid", is_damage=True)
        if re.fullmatch(r"best-\d{4,}", folder.name):
            content = _read_sealed(folder, SCORE)
        if isinstance(content, Defect):
            self._check_removable(folder, content)
            reason = content.reason
        else:
            score = content.get("score")
            if isinstance(score, float | int):
                return folder, score
            reason = f"{SCORE} has no score"
        log.warning("the best policy %s is incomplete (%s) and is skipped", folder, reason)
        return None

    def _check_removable(self, folder: Path, defect: Defect) -> None:
        """Raise UserError if a folder that is about to be replaced may be intact."""
        if not defect.is_damage and not self.skip_unreadable:
            raise UserError(self._describe_defects({folder: defect}))

    def _find_intact(self) -> Path | None:
        """Return the newest intact checkpoint; errors count as damage, for a message about another error."""
        for folder in self._list_steps():
            if not isinstance(_read_sealed(folder, STATE), Defect):
                return folder
        return None

    def _list_steps(self) -> list[Path]:
        """Return the folders of checkpoints, newest first, incomplete ones included."""
        try:
            entries = [*self.folder.iterdir()]
        except NOT_FOUND_ERRORS:
            return []
        except OSError as error:
            raise make_read_error(self.folder, error) from error
        folders = [path for path in entries if re.fullmatch(r"step-\d{8,}", path.name)]
        return sorted(folders, reverse=True)

    def _fill(self, final: Path, fill: Fill, name: str, content: dict[str, Any], label: str) -> Callable[[], None]:
        """Fill a temporary folder beside `final`, with `content` as the JSON file `name`.

        Returns a function that syncs the folder to the disk with a manifest, and renames it to `final`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.glob(f"{TEMPORARY_PREFIX}*-*"):
            _remove(left_over)
        temporary = self.folder / f"{TEMPORARY_PREFIX}{final.name}"
        temporary.mkdir()
        with self._remove_on_error(temporary, label):
            filled = fill(temporary)
            hashes = filled if isinstance(filled, Mapping) else {}
            (temporary / name).write_text(json.dumps(content, indent=1), encoding="utf-8")

        def seal() -> None:
            with self._remove_on_error(temporary, label):
                _seal(temporary, hashes)
            temporary.rename(final)
            sync_path(self.folder)

        return seal

    @contextmanager
    def _remove_on_error(self, temporary: Path, label: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            reason = describe_write_failure(error) or _find_hidden_reason(temporary)
            _remove(temporary)  # an export that was refused is gone already
            if not isinstance(error, Exception) or not reason:
                raise
            last = self._find_intact()
            consequence = f"the last good one, {last.name}, is kept" if last else "there is none before it"
            raise make_write_error(label, self.folder, reason, consequence) from error


def _seal(folder: Path, hashes: FileHashes) -> None:
    """Sync every file to the disk and write sizes and hashes into the manifest, which is the last file.

    Args:
        hashes: Entries of files that their writer has hashed already.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = str(path.relative_to(folder))
            files[name] = hashes.get(name) or describe_file(path)
    sync_folder(folder)
    write_json(folder / MANIFEST, {"files": files})


def _read_sealed(folder: Path, name: str) -> dict[str, Any] | Defect:
    """Return the content of a JSON file of a sealed folder, or why the folder cannot be used."""
    try:
        return _read_verified(folder, name)
    except _DamagedFolder as damage:
        return Defect(reason=str(damage), is_damage=True)
    except NOT_FOUND_ERRORS as error:
        return Defect(reason=f"{Path(error.filename).name} is missing", is_damage=True)
    except OSError as error:
        is_link_loop = error.errno == errno.ELOOP  # no wait mends it
        return Defect(reason=f"{error.filename or folder}: {error.strerror}", is_damage=is_link_loop)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Defect(reason=f"{MANIFEST} is not readable", is_damage=True)


class _DamagedFolder(Exception):
    """A file of a sealed folder is not what its manifest describes."""


def _read_verified(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file of a sealed folder, every file of which has the hash in its manifest."""
    manifest = _require_regular(folder / MANIFEST)
    files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    for file, expected in files.items():
        path = _require_regular(folder / file)
        if path.stat().st_size != expected["bytes"] or describe_file(path) != expected:
            raise _DamagedFolder(f"{file} differs from {MANIFEST}")
    content = None
    if name in files:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise _DamagedFolder(f"{name} is missing")
    return content


def _require_regular(path: Path) -> Path:
    """Return `path`; a pipe or device would block its reader for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise _DamagedFolder(f"{path}: no file")
    return path


def _find_hidden_reason(folder: Path) -> str:
    """Return the reason that a writer's error hides, in the form of `describe_write_failure`; "" if it is unknown."""
    if shutil.disk_usage(folder.parent).free < _FULL_BELOW_BYTES:
        return describe_write_failure(OSError(errno.ENOSPC, ""))
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return ""
    is_cut = any(path.stat().st_size >= limit for path in folder.rglob("*"))
    return describe_write_failure(OSError(errno.EFBIG, "")) if is_cut else ""


def _remove(path: Path) -> None:
    """Remove a folder, file or link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
