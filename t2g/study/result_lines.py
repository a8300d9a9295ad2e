"""Finished runs of a comparison as JSON lines, so that it can go on where the folders of its runs are not kept.

A line belongs to a run if the settings are equal. Local paths and their contents are not compared: a start that was
trained again has other weights.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from t2g.config import PolicyJob
from t2g.runs.control import now
from t2g.runs.identity import Identity
from t2g.runs.journal import Journal, read_journal
from t2g.runs.versions import collect_versions
from t2g.study.comparison import Run
from t2g.study.policy_eval import content_key


class ResultLine(BaseModel):
    """A finished run."""

    method: str
    seed: int
    lr: float
    key: str  # see `make_key`
    date: str
    minutes: float  # of the whole run, evaluations included
    versions: dict[str, str]
    run: Run


def make_key(arm: PolicyJob, **more: Any) -> str:
    """Return a hash of a run's settings. more: See `Identity.from_config`."""
    return content_key(Identity.from_config(arm, **more).config)


def read_results(path: Path | None) -> dict[str, ResultLine]:
    """Return the lines of a file by their keys; {} without a file. Raises UserError for a broken line."""
    return {line.key: line for line in read_journal(path, ResultLine)} if path else {}


def append_result(path: Path, method: str, arm: PolicyJob, run: Run, *, seconds: float, **more: Any) -> None:
    """Append the line of a finished run. more: See `make_key`."""
    line = ResultLine(
        method=method,
        seed=arm.run.seed,
        lr=arm.learner.policy.lr,
        key=make_key(arm, **more),
        date=now().date().isoformat(),
        minutes=round(seconds / 60, 1),
        versions=collect_versions(),
        run=run,
    )
    with closing(Journal(path)) as journal:
        journal.append(line)
