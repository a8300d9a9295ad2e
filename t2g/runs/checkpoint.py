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
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from t2g.errors import UserError
from t2g.files import FULL, TEMPORARY, entry, sync_path, write_atomic

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"
SCORE = "t2g_score.json"
_FULL_BELOW_BYTES = 1 << 20  # a writer that hides the errno (torch's zip writer) is believed to be out of space below


class CheckpointStore:
    """The checkpoints of one run, newest `keep` kept. One process writes; any may read."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def write(self, step: int, fill: Callable[[Path], None], state: dict[str, Any]) -> Path:
        """Checkpoint of `step`; a step that already stands intact is returned as it is and not written again.

        `fill` writes model and optimizer into the existing empty folder it is given; `state` is everything else a
        resume needs and must be JSON. Until the rename the former checkpoints stand untouched.

        Raises UserError when the disk is full; whatever else `fill` raises passes through, temporary folder removed.
        """
        final = self.folder / f"step-{step:08d}"
        if final.exists():
            if _fault(final) is None:
                return final
            shutil.rmtree(final)

        self._write_sealed(final, fill, STATE, state, f"the checkpoint of step {step}")
        # A newer one is torn, or the run would not have come to write this one: it is not among those that are kept.
        for old in [folder for folder in self._steps() if folder <= final][self.keep :]:
            shutil.rmtree(old)
        return final

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """Newest intact checkpoint and its state; a torn one is skipped with a warning. None when there is none."""
        for folder in self._steps():
            fault = _fault(folder)
            if fault is None:
                return folder, json.loads((folder / STATE).read_text(encoding="utf-8"))
            log.warning("checkpoint %s is torn (%s) and is skipped", folder, fault)
        return None

    def keep_best(self, step: int, export: Callable[[Path], None], score: float) -> bool:
        """Export the policy if `score` (higher is better) beats the best so far; `folder/best` then points at it.

        The first of equal scores stays; a score that is no number is never the best. Raises as `write` does.
        """
        best = self.best()
        if not math.isfinite(score) or (best is not None and score <= best[1]):
            return False

        number = int(best[0].name.removeprefix("best-")) + 1 if best else 1
        final = self.folder / f"best-{number:04d}"
        if final.exists():
            shutil.rmtree(final)  # sealed, but the run ended before the link was moved
        self._write_sealed(final, export, SCORE, {"step": step, "score": score}, f"the best policy of step {step}")
        link = self.folder / f"{TEMPORARY}best-link"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.replace(self.folder / "best")
        sync_path(self.folder)
        for old in self.folder.glob("best-*"):
            if old != final:
                shutil.rmtree(old)
        return True

    def best(self) -> tuple[Path, float] | None:
        """Folder of the best exported policy and its score."""
        link = self.folder / "best"
        if not link.exists():
            return None
        folder = self.folder / os.readlink(link)
        return folder, json.loads((folder / SCORE).read_text(encoding="utf-8"))["score"]

    def _steps(self) -> list[Path]:
        """Folders of checkpoints, newest first, torn ones too."""
        if not self.folder.is_dir():
            return []
        return sorted((p for p in self.folder.iterdir() if re.fullmatch(r"step-\d{8,}", p.name)), reverse=True)

    def _write_sealed(
        self, final: Path, fill: Callable[[Path], None], name: str, content: dict[str, Any], what: str
    ) -> None:
        """`fill` a sibling of `final`, with `content` as JSON; bring it to the disk with a manifest, then rename it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.glob(f"{TEMPORARY}*-*"):
            if left_over.is_dir() and not left_over.is_symlink():
                shutil.rmtree(left_over)
        temporary = self.folder / f"{TEMPORARY}{final.name}"
        temporary.mkdir()
        try:
            fill(temporary)
            (temporary / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
            _seal(temporary)
        except BaseException as error:
            free = shutil.disk_usage(self.folder).free
            shutil.rmtree(temporary)
            if isinstance(error, Exception) and (free < _FULL_BELOW_BYTES or _says_full(error)):
                last = self.latest()
                kept = f"the last good one, {last[0].name}, is kept" if last else "there is none before it"
                raise UserError(
                    f"{what} does not fit on the disk of {self.folder} ({free / 2**20:.0f} MiB left; {kept}): "
                    "free some space or lower checkpoint.keep, then start the same command again"
                ) from error
            raise
        temporary.rename(final)
        sync_path(self.folder)


def _seal(folder: Path) -> None:
    """Bring every file to the disk and write their sizes and hashes into the manifest, which comes last."""
    files = {str(path.relative_to(folder)): entry(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    for path in folder.rglob("*"):
        sync_path(path)
    write_atomic(folder / MANIFEST, json.dumps({"files": files}, indent=1).encode())


def _fault(folder: Path) -> str | None:
    """Why the checkpoint cannot be trusted, or None."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, expected in files.items():
            if entry(folder / name) != expected:
                return f"{name} differs from {MANIFEST}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    return None if STATE in files else f"{STATE} is missing"


def _says_full(error: BaseException | None) -> bool:
    """A full disk, also when another process met it: then only the words of the error cross."""
    while error is not None:
        if getattr(error, "errno", None) in FULL or os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
