"""The thread that copies a job's run folder to its mirror, see `t2g.runs.mirror`."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jobs.common.run_folder import sole_process
from t2g.config import AnyJob
from t2g.config.common import MIRROR_END_S
from t2g.runs.mirror import Mirror, TakenOver, describe_error
from t2g.runs.progress import log_duration

logger = logging.getLogger(__name__)

INTERVAL_S = 30.0  # between two copies; a new checkpoint is copied at once
POLL_S = 2.0  # how often the thread looks for a new checkpoint


@contextmanager
def mirror_run_folder(config: AnyJob) -> Iterator[None]:
    """Restore an empty run folder from `run.mirror`, and copy the folder there while the block runs.

    Args:
        config: One with a `run.mirror_url`.

    Raises:
        UserError: Another process works in the folder; or see `Mirror.open`.
    """
    folder = config.run.folder
    with sole_process(folder):
        mirror = Mirror(folder, str(config.run.mirror_url))
        mirror.open(may_continue=config.run.resume != "never")
        with copy_periodically(mirror):
            yield


@contextmanager
def copy_periodically(
    mirror: Mirror, *, interval_s: float = INTERVAL_S, final_s: float = MIRROR_END_S
) -> Iterator[None]:
    """Copy the run folder in a thread while the block runs, and once more at its end.

    A copy that fails causes a warning; the next one tries again. At most `final_s` is spent at the end.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_copy_until, args=(mirror, ended, interval_s), name="mirror", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(1.0)
        if thread.is_alive():
            with log_duration(f"copying the last files to {mirror.url}"):
                thread.join(final_s)
        if thread.is_alive():
            logger.warning("%s does not have the last files: %g s were not enough", mirror.url, final_s)


def _copy_until(mirror: Mirror, ended: threading.Event, interval_s: float) -> None:
    failure = ""
    is_last = False
    while not is_last:
        is_last = _wait_until_due(mirror, ended, interval_s)
        try:
            mirror.copy()
        except TakenOver as error:
            logger.warning("%s", error)
            return
        except Exception as error:  # noqa: BLE001 - the run goes on without its mirror
            reason = describe_error(error)
            if reason != failure or is_last:
                later = "" if is_last else "; the next copy tries again"
                logger.warning("%s was not brought up to date: %s%s", mirror.url, reason, later)
            failure = reason
        else:
            if failure:
                logger.warning("%s is up to date again", mirror.url)
            failure = ""


def _wait_until_due(mirror: Mirror, ended: threading.Event, interval_s: float) -> bool:
    """Wait for the time of the next copy, for a new checkpoint or for the end; return whether it is the end."""
    deadline = time.monotonic() + interval_s
    while time.monotonic() < deadline:
        if ended.wait(min(POLL_S, interval_s)):
            return True
        if mirror.list_checkpoints() != mirror.copied_checkpoints:
            return False
    return ended.is_set()
