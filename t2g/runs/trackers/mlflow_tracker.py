"""MLflow: the server of MLFLOW_TRACKING_URI, else a database and artifacts beside the run folders."""

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from t2g.config.loading import FILE_NAME
from t2g.runs.log import SampleRow, Split
from t2g.runs.trackers.tracker import TrackedRun, format_page

ID_FILE = "mlflow_id"
URI = "MLFLOW_TRACKING_URI"
OTHER_CHARACTERS = re.compile(r"[^\w\-. :/]")  # that MLflow allows in no name
MAX_PARAMS = 100  # in one call
MAX_METRICS = 1000
MAX_PARAM_CHARS = 6000


class MlflowTracker:
    """A resumed run continues under the id in its folder. Steps that it repeats after a crash have both numbers."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        root = run.folder.parent
        self._client = MlflowClient(tracking_uri=os.environ.get(URI) or f"sqlite:///{root / 'mlflow.db'}")
        saved_id = run.load_id(ID_FILE)
        if saved_id is None:
            self._run_id = self._create(run)
            run.save_id(ID_FILE, self._run_id)
        else:
            self._run_id = saved_id
            self._client.update_run(saved_id, status="RUNNING")

    def _create(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is None:
            location = None if os.environ.get(URI) else (run.folder.parent / "mlartifacts").as_uri()
            experiment_id = self._client.create_experiment(run.project, artifact_location=location)
        else:
            experiment_id = experiment.experiment_id
        run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        params = []
        for key, value in run.config.items():
            params.append(Param(_clean(key), str(value)[:MAX_PARAM_CHARS]))
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(run_id, params=params[start : start + MAX_PARAMS])
        config_file = run.folder / FILE_NAME
        if config_file.exists():
            self._client.log_artifact(run_id, str(config_file))
        return run_id

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        points = []
        for name, value in metrics.items():
            if math.isfinite(value):
                points.append(Metric(_clean(name), float(value), now_ms, step))
        for start in range(0, len(points), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=points[start : start + MAX_METRICS])

    def log_samples(self, step: int, split: Split, rows: Sequence[SampleRow]) -> None:
        self._client.log_text(self._run_id, format_page(rows), f"samples/{split}-{step:08d}.html")

    def log_report(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _clean(name: str) -> str:
    return OTHER_CHARACTERS.sub("_", name)
