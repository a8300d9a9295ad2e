"""What an operator and a run tell each other through the run folder: wanted sizes one way, the state of affairs back.

control.json, written by `jobs.deploy scale`:  {"rollouts": 3, "rewards": null}
status.json, written by the driver every few seconds: see `Status`

Anybody may write into a run folder on a shared mount: what does not parse, or lies outside the config's bounds, is a
warning and never the end of a run.
"""

import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from t2g.config import PolicyJob, Section, WorkersConfig, loading
from t2g.config.validation_errors import format_first_error
from t2g.errors import Stopped, UserError
from t2g.files import write_atomic

logger = logging.getLogger(__name__)

CONTROL_FILE = "control.json"
STATUS_FILE = "status.json"
MAX_BYTES = 1 << 20  # read of either file: a larger one is none of ours
SECTIONS = {"rollouts": "rollout.workers", "rewards": "feedback.engine.workers"}  # field of TargetSizes -> its bounds


class TargetSizes(Section):
    """Target number of workers of each fleet; None: the fleet keeps its size."""

    rollouts: int | None = Field(None, strict=True)
    rewards: int | None = Field(None, strict=True)


class WorkerStatus(Section):
    name: str
    state: str  # of actors.fleet.health
    reason: str = ""  # of its last failure
    version: int | None = None  # of the policy, where the worker has weights that change
    restarts: int = 0
    load: int = 0  # sequences given to it and not finished


class FleetStatus(Section):
    role: str
    wanted: int
    workers: tuple[WorkerStatus, ...]


Phase = Literal["starting", "loading", "running", "stopped", "failed", "done"]


class Status(Section):
    """A picture of a run: {"step": 12, "num_steps": 100, "samples": 768, "updated": "2026-11-21T12:00:00Z", ...}"""

    phase: Phase = "running"
    reason: str = ""  # why it failed
    step: int  # finished steps
    num_steps: int
    samples: int  # sampled for training so far
    updated: datetime
    fleets: tuple[FleetStatus, ...] = ()
    idle: dict[str, float] = Field({}, description="learner, rollout, reward -> share of the last step without work")


def get_scalable_fleets(config: PolicyJob) -> dict[str, WorkersConfig]:
    """The fleets that an operator may scale, as fields of TargetSizes, and their bounds.

    Not the rollout fleet of a run that scales itself: two hands on one wheel would undo each other.
    """
    bounds = {} if config.rollout.autoscale else {"rollouts": config.rollout.workers}
    return bounds | ({"rewards": config.feedback.engine.workers} if config.feedback.own_engines else {})


def write_target_sizes(folder: Path, wanted: TargetSizes) -> TargetSizes:
    """Lay the numbers of `wanted` over what control.json holds; returns what it holds then.

    UserError for a folder without a run, for a fleet that the run does not have and for a number out of its bounds.
    """
    if not (folder / loading.FILE_NAME).exists():
        raise UserError(f"{folder} holds no run (no {loading.FILE_NAME}); check --run and --root")
    config = loading.load(PolicyJob, folder / loading.FILE_NAME)
    bounds, requested = get_scalable_fleets(config), wanted.model_dump(exclude_none=True)
    if not requested:
        raise UserError("no target is given: rollouts or rewards needs a number")
    why_not = {
        "rollouts": "this run chooses their number itself; start it again with rollout.autoscale=false to choose",
        "rewards": f"feedback.source={config.feedback.source} has no engines of this run that could be scaled",
    }
    for field, number in requested.items():
        if field not in bounds:
            raise UserError(f"{field}: {why_not[field]}")
        workers = bounds[field]
        if not workers.min <= number <= workers.max:
            raise UserError(
                f"{field}: got {number}, and {SECTIONS[field]} of this run allows {workers.min} to {workers.max}"
            )
    merged = (read_target_sizes(folder) or TargetSizes()).model_copy(update=requested)
    write_atomic(folder / CONTROL_FILE, merged.model_dump_json().encode())
    return merged


def read_target_sizes(folder: Path) -> TargetSizes | None:
    """Return the sizes in control.json: None without a readable file, `TargetSizes()` if it is invalid."""
    path = folder / CONTROL_FILE
    content = _bytes(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        logger.warning("%s is passed over: it is no file, or a link to one", path)
        return TargetSizes()
    try:
        return TargetSizes.model_validate_json(content) if content else None
    except ValidationError as error:
        logger.warning("%s is passed over: %s", path, format_first_error(error))
        return TargetSizes()


class Control:
    """The driver's view of control.json: always within bounds, one warning for each content that is not."""

    def __init__(self, folder: Path, bounds: Mapping[str, WorkersConfig]) -> None:
        """bounds: those of `get_scalable_fleets(config)`; what the file says about other fleets is passed over."""
        self._folder, self._bounds = folder, bounds
        self._seen: int | None = None

    def read_changes(self) -> dict[str, int]:
        """Return the sizes in the file, by fields of `TargetSizes`, once for each time that it is written.

        A missing or unreadable file changes nothing: the last target stays. A call is cheap enough for every second.
        """
        path = self._folder / CONTROL_FILE
        try:
            written_ns = path.lstat().st_mtime_ns
        except OSError:
            return {}
        if written_ns == self._seen or (wanted := read_target_sizes(self._folder)) is None:
            return {}
        self._seen = written_ns
        requested, bounds = wanted.model_dump(exclude_none=True), self._bounds
        known = {name: number for name, number in requested.items() if name in bounds}
        kept = {name: min(max(number, bounds[name].min), bounds[name].max) for name, number in known.items()}
        if kept != requested:
            allowed = [f"{SECTIONS[name]} from {workers.min} to {workers.max}" for name, workers in bounds.items()]
            logger.warning(
                "%s asks for %s, and in this run are scaled by hand %s: %s it is",
                path, requested, " and ".join(allowed) or "no workers", kept or "nothing",
            )  # fmt: skip
        return kept


def write_status(folder: Path, status: Status) -> None:
    """Replace status.json."""
    write_atomic(folder / STATUS_FILE, status.model_dump_json(indent=1).encode())


@contextmanager
def publish_phases(folder: Path, num_steps: int) -> Iterator[Callable[[Phase], None]]:
    """Status of a run from its start to its end: yields who says that a phase has begun; an error is its reason."""

    def say(phase: Phase, reason: str = "") -> None:
        status = Status(step=0, num_steps=num_steps, samples=0, updated=now())
        with suppress(UserError):  # there is none yet
            status = read_status(folder)
        try:
            write_status(folder, status.model_copy(update={"phase": phase, "reason": reason, "updated": now()}))
        except (OSError, UserError) as error:
            logger.warning("the status of the run was not written: %s", error)

    say("starting")
    try:
        yield say
    except (Stopped, KeyboardInterrupt):
        say("stopped")
        raise
    except BaseException as error:
        say("failed", f"{getattr(error, 'cause', error)}" or type(error).__name__)
        raise
    say("done")


def read_status(folder: Path) -> Status:
    """UserError when there is none, or none of ours."""
    path = folder / STATUS_FILE
    content = _bytes(path)
    if not content:
        raise UserError(f"{path} is not there: no run was started in this folder, or it has not come to its first step")
    try:
        return Status.model_validate_json(content)
    except ValidationError as error:
        raise UserError(f"{path} is no status of a run: {format_first_error(error)}") from None


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _bytes(path: Path) -> bytes:
    """Nothing when it cannot be read, as while a mount is away, or is no file: a pipe keeps its reader for ever."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(MAX_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return b""
