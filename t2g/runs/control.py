"""Control and status files in the run folder: target sizes from the operator, the state of the run from its driver.

control.json, written by `jobs.deploy scale`:  {"rollouts": 3, "rewards": null}
status.json, written by the driver every few seconds: see `Status`

Other users may write into a run folder on a shared mount. A file that does not parse, or a size outside the config's
bounds, causes a warning and never ends a run.
"""

import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from t2g.config import PolicyJob, Section, WorkersConfig, loading
from t2g.config.validation_errors import format_first_error
from t2g.errors import Stopped, UserError
from t2g.files import write_atomic

logger = logging.getLogger(__name__)

CONTROL_FILE = "control.json"
STATUS_FILE = "status.json"
MAX_BYTES = 1 << 20  # read limit of either file; valid files are smaller
SECTIONS = {"rollouts": "rollout.workers", "rewards": "feedback.engine.workers"}  # field of TargetSizes -> its bounds


class TargetSizes(Section):
    """Target number of workers of each fleet; None keeps its size."""

    rollouts: int | None = Field(None, strict=True)
    rewards: int | None = Field(None, strict=True)


class WorkerStatus(Section):
    name: str
    state: str  # see actors.fleet.health
    reason: str = ""  # reason of its last failure
    version: int | None = None  # policy version, for workers whose weights change
    restarts: int = 0
    restarts_left: int | None = None  # now, within the window of its fleet
    load: int = 0  # unfinished sequences


class FleetStatus(Section):
    role: str
    target_size: int
    restart_window_s: float | None = None  # older restarts do not count
    workers: tuple[WorkerStatus, ...]


Phase = Literal["starting", "loading", "running", "exporting", "stopped", "failed", "done"]
# Phases in which the driver's steering, which writes the status every few seconds, does not run.
RENEWED_PHASES = ("starting", "loading", "exporting")
RENEW_S = 10.0
_status_lock = threading.RLock()  # held from the read to the write: else an update overwrites a newer status


class Status(Section):
    """Status of a run: {"step": 12, "num_steps": 100, "samples": 768, "updated": "2026-11-21T12:00:00Z", ...}"""

    phase: Phase = "running"
    reason: str = ""  # why the run failed
    step: int  # finished steps
    num_steps: int
    samples: int  # sampled for training so far
    updated: datetime
    fleets: tuple[FleetStatus, ...] = ()
    idle: dict[str, float] = Field({}, description="learner, rollout, reward -> share of the last step without work")


def get_scalable_fleets(config: PolicyJob) -> dict[str, WorkersConfig]:
    """Return the fleets that an operator may scale, as fields of TargetSizes, and their bounds.

    The rollout fleet of an autoscaled run is left out: the autoscaler would undo the change.
    """
    bounds: dict[str, WorkersConfig] = {}
    if not config.rollout.autoscale:
        bounds["rollouts"] = config.rollout.workers
    source = config.feedback.engine_source
    if source:
        bounds["rewards"] = source.engine.workers
    return bounds


def write_target_sizes(folder: Path, target_sizes: TargetSizes) -> TargetSizes:
    """Update control.json with the sizes that are set in `target_sizes`, and return the result.

    Raises:
        UserError: The folder holds no run, the run has no such scalable fleet, or a size is out of its bounds.
    """
    if not (folder / loading.FILE_NAME).exists():
        raise UserError(f"{folder} holds no run (no {loading.FILE_NAME}); check --run and --root")
    config = loading.load(PolicyJob, folder / loading.FILE_NAME)
    bounds = get_scalable_fleets(config)
    requested = target_sizes.model_dump(exclude_none=True)
    if not requested:
        raise UserError("no target is given: rollouts or rewards needs a number")
    why_not = {
        "rollouts": "this run chooses their number itself; start it again with rollout.autoscale=false to choose",
        "rewards": f"feedback.source={config.feedback.describe()} has no engines of this run that could be scaled",
    }
    for field, number in requested.items():
        if field not in bounds:
            raise UserError(f"{field}: {why_not[field]}")
        workers = bounds[field]
        if not workers.min <= number <= workers.max:
            raise UserError(
                f"{field}: got {number}, and {SECTIONS[field]} of this run allows {workers.min} to {workers.max}"
            )
    current = read_target_sizes(folder) or TargetSizes()
    merged = current.model_copy(update=requested)
    write_atomic(folder / CONTROL_FILE, merged.model_dump_json().encode())
    return merged


def read_target_sizes(folder: Path) -> TargetSizes | None:
    """Return the sizes in control.json: None without a readable file, `TargetSizes()` if it is invalid."""
    path = folder / CONTROL_FILE
    content = _read_bytes(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        logger.warning("%s is ignored: it is not a regular file", path)
        return TargetSizes()
    try:
        return TargetSizes.model_validate_json(content) if content else None
    except ValidationError as error:
        logger.warning("%s is ignored: %s", path, format_first_error(error))
        return TargetSizes()


class Control:
    """The driver's reader of control.json: sizes are clamped to their bounds, with one warning for each content."""

    def __init__(self, folder: Path, bounds: Mapping[str, WorkersConfig]) -> None:
        """bounds: from `get_scalable_fleets(config)`; other fleets in the file are ignored."""
        self._folder = folder
        self._bounds = bounds
        self._read_ns: int | None = None  # mtime of the content that was read last

    def read_changes(self) -> dict[str, int]:
        """Return the sizes in the file, by fields of `TargetSizes`, once for each time that it is written.

        A missing or unreadable file changes nothing: the last target stays. A call is cheap enough for every second.
        """
        path = self._folder / CONTROL_FILE
        try:
            written_ns = path.lstat().st_mtime_ns
        except OSError:
            return {}
        if written_ns == self._read_ns:
            return {}
        target_sizes = read_target_sizes(self._folder)
        if target_sizes is None:
            return {}
        self._read_ns = written_ns

        requested = target_sizes.model_dump(exclude_none=True)
        sizes: dict[str, int] = {}
        for name, number in requested.items():
            if name in self._bounds:
                workers = self._bounds[name]
                sizes[name] = min(max(number, workers.min), workers.max)
        if sizes != requested:
            logger.warning(
                "%s asks for %s, and this run allows %s: applying %s",
                path,
                requested,
                self._describe_bounds(),
                sizes or "nothing",
            )
        return sizes

    def _describe_bounds(self) -> str:
        allowed = [f"{SECTIONS[name]} from {workers.min} to {workers.max}" for name, workers in self._bounds.items()]
        return " and ".join(allowed) or "no change of workers"


def write_status(folder: Path, status: Status) -> None:
    """Replace status.json; the run continues, with a warning, if it cannot be written."""
    try:
        with _status_lock:
            write_atomic(folder / STATUS_FILE, status.model_dump_json(indent=1).encode())
    except (OSError, UserError) as error:
        logger.warning("the status of the run was not written: %s", error)


@contextmanager
def publish_phases(folder: Path, num_steps: int) -> Iterator[Callable[[Phase], None]]:
    """Publish the status of a run from its start to its end; yields a function that publishes a new phase.

    An error of the block becomes the reason of phase "failed". The status is renewed while engines or ranks start,
    since a reader takes a driver whose status is old for dead.
    """

    def publish(phase: Phase, reason: str = "") -> None:
        status = Status(step=0, num_steps=num_steps, samples=0, updated=now())
        with _status_lock:
            with suppress(UserError):  # no status yet
                status = read_status(folder)
            changes: dict[str, Any] = {"phase": phase, "reason": reason, "updated": now()}
            if phase == "starting":  # the run may be longer now, and the fleets of an earlier process have ended
                changes |= {"num_steps": num_steps, "fleets": (), "idle": {}}
            write_status(folder, status.model_copy(update=changes))

    publish("starting")
    try:
        with _renew_periodically(folder):
            yield publish
    except (Stopped, KeyboardInterrupt):
        publish("stopped")
        raise
    except BaseException as error:
        cause = getattr(error, "cause", error)
        publish("failed", str(cause) or type(error).__name__)
        raise
    publish("done")


@contextmanager
def _renew_periodically(folder: Path) -> Iterator[None]:
    """Renew the time of the status in a thread while the block runs."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEW_S):
            _renew_status(folder)

    thread = threading.Thread(target=renew, name="t2g-status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _renew_status(folder: Path) -> None:
    with _status_lock, suppress(UserError):  # it cannot be read now
        status = read_status(folder)
        if status.phase in RENEWED_PHASES:
            write_status(folder, status.model_copy(update={"updated": now()}))


def read_status(folder: Path) -> Status:
    """Return the status of a run.

    Raises:
        UserError: There is no status file, or it is invalid.
    """
    path = folder / STATUS_FILE
    content = _read_bytes(path)
    if not content:
        raise UserError(f"{path} is not there: no run was started in this folder, or it has not come to its first step")
    try:
        return Status.model_validate_json(content)
    except ValidationError as error:
        raise UserError(f"{path} is not the status of a run: {format_first_error(error)}") from None


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _read_bytes(path: Path) -> bytes:
    """Return the content of a regular file, b"" if it cannot be read, for example while a mount is unavailable.

    A pipe or device is not read: it would block its reader for ever.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            return file.read(MAX_BYTES) if stat.S_ISREG(mode) else b""
    except OSError:
        return b""
