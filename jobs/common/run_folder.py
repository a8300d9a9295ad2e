"""The folder of a run: whether this config may go on in it, what is finished there, and that one process has it."""

import fcntl
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from t2g.config import JobConfig, loading
from t2g.config.texts import mask_secrets
from t2g.errors import UserError
from t2g.runs import identity
from t2g.runs.control import now
from t2g.runs.identity import Identity
from t2g.runs.log import COMMANDS_FILE
from t2g.runs.progress import PROGRESS_FILE, record_lines

LOCK = "lock"
SMOKE_STEPS = 3
_held: set[Path] = set()  # by this process


def check_folder(config: JobConfig, *leftovers: str, **more: Any) -> Identity:
    """Refuse a run folder with one of `leftovers` that this config may not go on with. Writes accepted changes alone.

    Args:
        leftovers: files and folders that bind the next start; by default the config of the last start.
        more: see `Identity.from_config`.

    Returns: the identity with which the run goes on. A smoke run goes on with nothing.
    Raises: UserError, see `identity.check_identity`.
    """
    folder, made_of = config.run.folder, Identity.from_config(config, **more)
    found = [name for name in leftovers or (loading.FILE_NAME,) if (folder / name).exists()]
    if config.run.smoke or not found:
        return made_of
    if config.run.resume == "never":
        raise UserError(f"run.resume=never, and {folder / found[0]} exists: remove it or choose another run.name")
    return identity.check_identity(folder, made_of)


def begin_folder(config: JobConfig, *leftovers: str, **more: Any) -> Path:
    """The run folder with identity and resolved config in it; see `check_folder`. A smoke run's is emptied first."""
    made_of, folder = check_folder(config, *leftovers, **more), config.run.folder
    if config.run.smoke and folder.exists():
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in (LOCK, PROGRESS_FILE):
                path.unlink()
    identity.save_identity(folder, made_of)
    loading.write(config, folder)
    with (folder / COMMANDS_FILE).open("a", encoding="utf-8", errors="replace") as file:
        file.write(f"{now().isoformat()} {mask_secrets(shlex.join(sys.orig_argv))}\n")
    return folder


@contextmanager
def sole_process(folder: Path) -> Iterator[None]:
    """The run folder for this process alone. UserError when another process has it. A block within a block is free."""
    if folder in _held:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)) as file:  # not where a link points
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back by the kernel when this process ends
        except BlockingIOError:
            sentence = f"another process works in {folder}: wait for it, or take another run.name"
            raise UserError(sentence) from None
        _held.add(folder)
        try:
            with record_lines(folder):  # not before: another process writes there
                yield
        finally:
            _held.remove(folder)
