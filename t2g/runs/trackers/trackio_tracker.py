"""trackio; its variables TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL say where it logs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from t2g.runs.log import SampleRow, Split
from t2g.runs.trackers.tracker import TrackedRun, format_page

ID_FILE = "trackio_id"
ID_CHARS = 8  # how much of the id is in the name: runs of one project may have one name


class TrackioTracker:
    """A resumed run continues under the id in its folder. Steps that it repeats after a crash have both numbers."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        run_id = run.load_or_make_id(ID_FILE)
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run_id[:ID_CHARS]}",
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._run.log(finite, step=step)

    def log_samples(self, step: int, split: Split, rows: Sequence[SampleRow]) -> None:
        import trackio

        self._run.log({f"samples/{split}": trackio.Html(format_page(rows))}, step=step)

    def log_report(self, path: Path) -> None:
        self._run.log_artifact(str(path), name="report", type="report")

    def close(self) -> None:
        self._run.finish()
