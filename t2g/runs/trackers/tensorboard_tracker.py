"""TensorBoard event files in the run folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from t2g.runs.log import SampleRow, Split
from t2g.runs.trackers.tracker import TrackedRun, format_markdown


class TensorBoardTracker:
    """Event files; points of the first step and later, from a run that died, are hidden. It has no report."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_step)
        lines = [f"    {key}: {value}" for key, value in run.config.items()]
        self._writer.add_text("config", "\n".join(lines), run.first_step)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, step: int, split: Split, rows: Sequence[SampleRow]) -> None:
        self._writer.add_text(f"samples/{split}", format_markdown(rows), step)
        self._writer.flush()

    def log_report(self, path: Path) -> None:
        """Do nothing: TensorBoard has no artifacts, and the report is in the run folder."""

    def close(self) -> None:
        self._writer.close()
