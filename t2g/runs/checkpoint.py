"""Checkpoints as files: written beside, sealed with hashes, renamed, pruned. Knows nothing of models or processes.

folder/step-00000010/   what `fill` wrote, state.json, manifest.json (size and xxh3 of every other file)
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from t2g.files import TEMPORARY_PREFIX, describe_file, describe_write_failure, make_write_error, sync_path, write_atomic

log = logging.getLogger(__name__)

FileHashes = Mapping[str, dict[str, Any]]  # by the names of files in a folder, see `t2g.files.describe_file`
Fill = Callable[[Path], FileHashes | Any]  # anything else tells no hashes

MANIFEST = "manifest.json"
STATE = "state.json"
SCORE = "t2g_score.json"
_FULL_BELOW_BYTES = 1 << 20  # a writer that hides the errno (torch's zip writer) is believed to be out of space below


class CheckpointStore:
    """The checkpoints of one run, newest `keep` kept. One process writes; any may read."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self._best: tuple[Path, float] | None = None  # was whole when this process last looked

    def write(self, step: int, fill: Fill, state: dict[str, Any]) -> Path:
        """Checkpoint of `step`; a step that already stands intact is returned as it is and not written again.

        `fill` writes model and optimizer into the existing empty folder it is given, and returns what it knows of their
        hashes; `state` is everything else a resume needs and must be JSON. Until the rename the former checkpoints
        stand untouched.

        Raises:
            UserError: The checkpoint cannot be written, see `t2g.files.describe_write_failure`. Other errors of `fill`
                pass through, and the temporary folder is removed.
        """
        return self.begin(step, fill, state)()

    def begin(self, step: int, fill: Fill, state: dict[str, Any]) -> Callable[[], Path]:
        """As `write`, but for the end, which is what it returns: until that is called and done there is no checkpoint.
        It may be in another thread; nothing else is written to this folder meanwhile.
        """
        final = self.folder / f"step-{step:08d}"
        if os.path.lexists(final):
            if not isinstance(_read_sealed(final, STATE), str):
                return lambda: final
            _remove(final)
        seal = self._fill(final, fill, STATE, state, f"the checkpoint of step {step}")

        def finish() -> Path:
            seal()
            # A newer one is torn, or the run would not have come to write this one: it is not among those to keep.
            for old in [folder for folder in self._steps() if folder <= final][self.keep :]:
                _remove(old)
            return final

        return finish

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """Newest intact checkpoint and its state; one that is torn or cannot be read is skipped with a warning. None
        when there is none.
        """
        for folder in self._steps():
            state = _read_sealed(folder, STATE)
            if not isinstance(state, str):
                return folder, state
            log.warning("checkpoint %s is torn (%s) and is skipped", folder, state)
        return None

    def find_step_after(self, step: int) -> int | None:
        """Return the step of the newest intact checkpoint where it is later than `step`, else None."""
        if not any(int(folder.name.removeprefix("step-")) > step for folder in self._steps()):
            return None
        found = self.latest()
        return found[1]["step"] if found and found[1]["step"] > step else None

    def keep_best(self, step: int, export: Fill, score: float) -> bool:
        """Export the policy if `score` (higher is better) beats the best so far; `folder/best` then points at it.

        The first of equal scores stays; a score that is no number is never the best. Raises as `write` does.
        """
        best = self._best = self._best or self.best()
        if not math.isfinite(score) or (best is not None and score <= best[1]):
            return False

        number = int(best[0].name.removeprefix("best-")) + 1 if best else 1
        final = self.folder / f"best-{number:04d}"
        _remove(final)  # sealed, but the run ended before the link was moved; or torn
        self._fill(final, export, SCORE, {"step": step, "score": score}, f"the best policy of step {step}")()
        link = self.folder / f"{TEMPORARY_PREFIX}best-link"
        _remove(link)
        link.symlink_to(final.name)
        if not (best_link := self.folder / "best").is_symlink():
            _remove(best_link)
        link.replace(best_link)
        sync_path(self.folder)
        for old in self.folder.glob("best-*"):
            if old != final:
                _remove(old)
        self._best = final, score
        return True

    def best(self) -> tuple[Path, float] | None:
        """Folder of the best exported policy and its score. None when there is none; or, with a warning, when it is
        torn or cannot be read.
        """
        link = self.folder / "best"
        if not link.is_symlink():
            return None
        folder = self.folder / link.readlink()
        content = _read_sealed(folder, SCORE) if re.fullmatch(r"best-\d{4,}", folder.name) else "no name of ours"
        score = content if isinstance(content, str) else content.get("score")
        if isinstance(score, float | int):
            return folder, score
        log.warning("the best policy %s is torn (%s) and is passed over", folder, score)
        return None

    def _steps(self) -> list[Path]:
        """Folders of checkpoints, newest first, torn ones too."""
        if not self.folder.is_dir():
            return []
        return sorted((p for p in self.folder.iterdir() if re.fullmatch(r"step-\d{8,}", p.name)), reverse=True)

    def _fill(self, final: Path, fill: Fill, name: str, content: dict[str, Any], what: str) -> Callable[[], None]:
        """`fill` a sibling of `final`, with `content` as JSON. What is returned brings it to the disk with a manifest,
        and renames it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.glob(f"{TEMPORARY_PREFIX}*-*"):
            _remove(left_over)
        temporary = self.folder / f"{TEMPORARY_PREFIX}{final.name}"
        temporary.mkdir()
        with self._whole_or_not_there(temporary, what):
            returned = fill(temporary)
            known = returned if isinstance(returned, Mapping) else {}
            (temporary / name).write_text(json.dumps(content, indent=1), encoding="utf-8")

        def seal() -> None:
            with self._whole_or_not_there(temporary, what):
                _seal(temporary, known)
            temporary.rename(final)
            sync_path(self.folder)

        return seal

    @contextmanager
    def _whole_or_not_there(self, temporary: Path, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            reason = describe_write_failure(error) or _hidden_reason(temporary)
            shutil.rmtree(temporary)
            if isinstance(error, Exception) and reason:
                last = self.latest()
                kept = f"the last good one, {last[0].name}, is kept" if last else "there is none before it"
                raise make_write_error(what, self.folder, reason, kept) from error
            raise


def _seal(folder: Path, known: FileHashes) -> None:
    """Bring every file to the disk and write their sizes and hashes into the manifest, which comes last.

    known: of files that their writer has hashed.
    """
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {name: known.get(name) or describe_file(folder / name) for name in names}
    for path in folder.rglob("*"):
        sync_path(path)
    write_atomic(folder / MANIFEST, json.dumps({"files": files}, indent=1).encode())


def _read_sealed(folder: Path, content: str) -> dict[str, Any] | str:
    """Return the content of a file of a sealed folder, or a sentence why the folder cannot be trusted."""
    try:
        files = json.loads(_regular(folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, expected in files.items():
            path = _regular(folder / name)
            if path.stat().st_size != expected["bytes"] or describe_file(path) != expected:
                return f"{name} differs from {MANIFEST}"
        held = json.loads((folder / content).read_text(encoding="utf-8")) if content in files else None
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is not readable"
    return held if isinstance(held, dict) else f"{content} is missing"


def _regular(path: Path) -> Path:
    """`path`, unless a pipe or a device stands there, which would keep its reader for ever, or a folder. OSError."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "no file", str(path))
    return path


def _hidden_reason(folder: Path) -> str:
    """Return the reason that a writer's error hides, in the form of `describe_write_failure`; "" if it is unknown."""
    if shutil.disk_usage(folder).free < _FULL_BELOW_BYTES:
        return describe_write_failure(OSError(errno.ENOSPC, ""))
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    cut = limit != resource.RLIM_INFINITY and any(path.stat().st_size >= limit for path in folder.rglob("*"))
    return describe_write_failure(OSError(errno.EFBIG, "")) if cut else ""


def _remove(path: Path) -> None:
    """Whatever stands there: a folder, a file, a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
