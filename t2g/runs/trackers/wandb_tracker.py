"""Weights & Biases; its variables WANDB_API_KEY, WANDB_MODE and WANDB_BASE_URL say where it logs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from t2g.runs.log import SampleRow, Split
from t2g.runs.trackers.tracker import COLUMNS, TrackedRun, make_cells

ID_FILE = "wandb_id"


class WandbTracker:
    """A resumed run continues under the id in its folder.

    W&B refuses to log a step twice. For steps that a run repeats after a crash the dashboard keeps the first numbers,
    and metrics.jsonl the second.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        run_id = run.load_or_make_id(ID_FILE)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.folder),
            id=run_id,
            resume="allow",
            config=dict(run.config),
        )
        self._run_id = run_id

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, split: Split, rows: Sequence[SampleRow]) -> None:
        import wandb

        table = wandb.Table(columns=list(COLUMNS))
        for row in rows:
            cells = make_cells(row)
            response = wandb.Html(cells.response_html)
            table.add_data(
                cells.prompt_id, cells.prompt, response, cells.critique, cells.status, cells.reward, cells.outcomes
            )
        self._run.log({f"samples/{split}": table}, step=step)

    def log_report(self, path: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"report-{self._run_id}", type="report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()
