"""The folder of a run: the check of its identity, its begin, and its lock for one process."""

import errno
import fcntl
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from t2g.config import AnyJob, loading
from t2g.config.secrets import mask_secrets
from t2g.errors import UserError
from t2g.files import check_regular
from t2g.runs import identity
from t2g.runs.control import now
from t2g.runs.identity import Identity
from t2g.runs.log import COMMANDS_FILE, FEEDBACK_LOG, METRICS_FILE
from t2g.runs.progress import PROGRESS_FILE, record_lines
from t2g.runs.trackers.tracker_threads import Trackers

LOCK = "lock"
NO_LOCK_ERRORS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # errors of file systems that have no locks
SMOKE_STEPS = 3  # steps of a training
SMOKE_PROMPTS = 3  # prompts of an evaluation
SMOKE_INPUTS = 8  # inputs of an annotation
_locked: set[Path] = set()  # folders locked by this process


def check_folder(config: AnyJob, *leftovers: str, should_save: bool = True, **identity_extras: Any) -> Identity:
    """Refuse a run folder that has one of `leftovers` of another config. Only accepted changes are written.

    Args:
        leftovers: Files and folders that bind the next start; by default those of the job.
        should_save: See `identity.check_identity`.
        identity_extras: See `Identity.from_config`.

    Returns:
        The identity of the continued run. A smoke run never continues.

    Raises:
        UserError: See `identity.check_identity`.
    """
    folder = config.run.folder
    run_identity = Identity.from_config(config, **identity_extras)
    binding = leftovers or config.leftovers
    existing = [name for name in binding if (folder / name).exists()]
    if config.run.smoke or not existing:
        return run_identity
    if config.run.resume == "never":
        raise UserError(f"run.resume=never, and {folder / existing[0]} exists: remove it or choose another run.name")
    try:
        return identity.check_identity(folder, run_identity, should_save=should_save)
    except UserError as error:
        metrics = folder / METRICS_FILE
        has_step = metrics.exists() and metrics.stat().st_size > 0
        has_config_alone = binding == (loading.FILE_NAME,)  # what binds other jobs are results
        if has_step or not has_config_alone:
            raise
        raise UserError(f"{error}. No step was made in it: it can be removed") from error


def check_methods_folder(folder: Path) -> None:
    """Refuse a folder whose runs an earlier version wrote to `arms`: all of them would be made again.

    Raises:
        UserError: There is such a folder, and none of today's name.
    """
    earlier = folder / "arms"
    today = folder / "methods"
    if earlier.is_dir() and not today.exists():
        raise UserError(f"{earlier} has the runs of an earlier version: rename it to {today}, and they are kept")


def check_own_folder(config: AnyJob) -> None:
    """Refuse, before anything is started, a run folder that binds the job to other inputs. Nothing is written.

    Raises:
        UserError: See `identity.check_identity`.
    """
    if config.leftovers and config.run.folder.is_dir():  # else no content is read
        check_folder(config, should_save=False)


def begin_folder(config: AnyJob, **identity_extras: Any) -> Path:
    """Write identity and resolved config into the run folder and return it; see `check_folder`.

    The folder of a smoke run is emptied first.
    """
    run_identity = check_folder(config, **identity_extras)
    folder = config.run.folder
    check_regular(folder / COMMANDS_FILE)
    check_regular(folder / FEEDBACK_LOG)
    if config.run.smoke and folder.exists():
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in (LOCK, PROGRESS_FILE):
                path.unlink()
    identity.save_identity(folder, run_identity)
    loading.write(config, folder)
    command = mask_secrets(shlex.join(sys.orig_argv))
    with (folder / COMMANDS_FILE).open("a", encoding="utf-8", errors="replace") as file:
        file.write(f"{now().isoformat()} {command}\n")
    return folder


def make_trackers(config: AnyJob) -> Trackers:
    """Return the trackers of the job, which get its config."""
    values = loading.flatten(config.model_dump(mode="json"))
    return Trackers(config.run.folder, config.log_options, values)


@contextmanager
def sole_process(folder: Path) -> Iterator[None]:
    """Lock the run folder for this process. Blocks can be nested.

    Raises:
        UserError: Another process has locked it, or its file system has no locks.
    """
    if folder in _locked:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)  # follows no link
    with open(descriptor) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it when this process ends
        except BlockingIOError:
            sentence = f"another process works in {folder}: wait for it, or take another run.name"
            raise UserError(sentence) from None
        except OSError as error:
            if error.errno not in NO_LOCK_ERRORS:
                raise
            reason = os.strerror(error.errno)
            advice = "mount the file system with lock support, or set another run.root"
            raise UserError(f"{folder} cannot be locked ({reason}): {advice}") from None
        _locked.add(folder)
        try:
            with record_lines(folder):  # not before: another process may write there
                yield
        finally:
            _locked.remove(folder)
