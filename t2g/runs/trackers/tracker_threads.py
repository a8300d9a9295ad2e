"""Trackers in threads: what fails or is slow costs a warning, never a step."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from queue import Queue
from typing import Any

from t2g.config import LogConfig
from t2g.config.common import TrackerName
from t2g.config.secrets import mask_secrets
from t2g.runs.log import SampleRow, Sink, Split
from t2g.runs.trackers.tracker import TrackedRun, Tracker

logger = logging.getLogger(__name__)

CLASSES: dict[TrackerName, str] = {  # late: each imports a package of its own
    "tensorboard": "t2g.runs.trackers.tensorboard_tracker:TensorBoardTracker",
    "wandb": "t2g.runs.trackers.wandb_tracker:WandbTracker",
    "mlflow": "t2g.runs.trackers.mlflow_tracker:MlflowTracker",
    "trackio": "t2g.runs.trackers.trackio_tracker:TrackioTracker",
}
MAX_WAITING = 200  # calls that a slow tracker may be behind
MAX_REASONS = 3  # different failures of a tracker that are reported
END_S = 60.0  # deadline of all trackers together for their last calls

Make = Callable[[TrackedRun], Tracker]
Call = Callable[[Tracker], None]


class TrackerThread:
    """A tracker whose calls run one after the other in a thread."""

    def __init__(self, name: str, make: Make) -> None:
        self.name = name
        self._make = make
        self._tracker: Tracker | None = None
        self._reasons: set[str] = set()  # failures that were reported
        self._calls: Queue[Callable[[], None] | None] = Queue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def start(self, run: TrackedRun) -> None:
        """Open the tracker; again, after the calls before, if a lost learner is replaced."""
        self._calls.put(partial(self._open, run))

    def submit(self, call: Call) -> None:
        """Have the thread call the tracker. A call is dropped if MAX_WAITING are waiting."""
        if self._calls.qsize() >= MAX_WAITING:
            self._warn(f"is slow: it is {MAX_WAITING} calls behind, and further calls are left out")
        else:
            self._calls.put(partial(self._call, call))

    def end(self) -> None:
        """Have the thread close the tracker and end; `join` waits for it."""
        self._calls.put(self._close)
        self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("log.trackers: %s did not take everything within %g s", self.name, END_S)

    def _work(self) -> None:
        while True:
            work = self._calls.get()
            if work is None:
                return
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the run goes on without the tracker
                text = " ".join(mask_secrets(str(error)).split())  # masked first: a secret may hold white space
                self._warn(f"failed: {text or type(error).__name__}")

    def _open(self, run: TrackedRun) -> None:
        self._close()
        self._tracker = self._make(run)

    def _call(self, call: Call) -> None:
        if self._tracker is not None:
            call(self._tracker)

    def _close(self) -> None:
        tracker = self._tracker
        self._tracker = None
        if tracker is not None:
            tracker.close()

    def _warn(self, reason: str) -> None:
        if reason not in self._reasons and len(self._reasons) < MAX_REASONS:
            self._reasons.add(reason)
            logger.warning("log.trackers: %s %s; the run goes on", self.name, reason)


class Trackers(Sink):
    """The trackers of `log.trackers`, for one run."""

    def __init__(
        self, folder: Path, options: LogConfig, config: Mapping[str, Any], makers: Mapping[str, Make] | None = None
    ) -> None:
        """Start a thread for each tracker; `start` opens them.

        Args:
            config: Config of the run, by dotted key.
            makers: In place of the classes of `options.trackers`.
        """
        self._folder = folder
        self._project = options.project
        self._config = config
        if makers is None:
            makers = {name: partial(_make, CLASSES[name]) for name in options.trackers}
        self._threads = [TrackerThread(name, make) for name, make in makers.items()]

    def start(self, first_step: int) -> None:
        run = TrackedRun(folder=self._folder, project=self._project, first_step=first_step, config=self._config)
        for thread in self._threads:
            thread.start(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        copied = dict(metrics)
        self._submit(lambda tracker: tracker.log_metrics(step, copied))

    def log_samples(self, step: int, split: Split, rows: Sequence[SampleRow]) -> None:
        self._submit(lambda tracker: tracker.log_samples(step, split, rows))

    def log_report(self, path: Path) -> None:
        """Log the report of a finished run, where it was written."""
        if path.exists():
            self._submit(lambda tracker: tracker.log_report(path))

    def close(self) -> None:
        """Close the trackers; wait END_S at most."""
        for thread in self._threads:
            thread.end()
        deadline = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _submit(self, call: Call) -> None:
        for thread in self._threads:
            thread.submit(call)


def _make(class_name: str, run: TrackedRun) -> Tracker:
    return resolve_name(class_name)(run)
