"""Names, command and environment of a job that is handed to Ray's job server."""

import os
import shlex
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from t2g.config import PolicyJob, loading
from t2g.errors import UserError

RUN_KEY = "t2g_run"  # in a job's metadata: the run's name
STOP_WAIT_KEY = "t2g_stop_wait_s"  # in a job's metadata: how long it may need once it is told to stop
CALLS_TO_FINISH = 3  # of the learner, before a run that is told to stop has: update, sync, checkpoint
MARGIN_S = 60


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A program of ours as a job."""

    name: str  # the job's id is made of it
    arguments: tuple[str, ...]  # behind `python -m`
    stop_wait_s: int = MARGIN_S
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def entrypoint(self) -> str:
        """exec: the signal that stops the job reaches Python, not a shell around it."""
        return f"exec python -m {shlex.join(self.arguments)}"

    def runtime_env(self, package: Path) -> dict[str, object]:
        """Ray kills a stopped job after 3 s unless it is told how long a checkpoint may take."""
        return {"working_dir": str(package), "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(self.stop_wait_s)}}

    def job_id(self, taken: Container[str | None]) -> str:
        """own, then own-2, own-3, ...: a cluster uses an id once."""
        attempt, name = 1, self.name
        while name in taken:
            attempt += 1
            name = f"{self.name}-{attempt}"
        return name


def training(config: PolicyJob, file: Path, overrides: Sequence[str]) -> Submission:
    """The run of `config`, which was read from `file` (relative to what is uploaded) and `overrides`."""
    wait_s = int(CALLS_TO_FINISH * config.learner.step_timeout_s) + MARGIN_S
    return Submission(
        name=config.run.name,
        arguments=("jobs.train_policy", "--config", str(file), *overrides),
        stop_wait_s=wait_s,
        metadata={RUN_KEY: config.run.name, STOP_WAIT_KEY: str(wait_s)},
    )


def read_config(file: Path, overrides: Sequence[str], root: Path) -> PolicyJob:
    """The config as the job will read it: run.root must be absolute. UserError as `loading.load` raises."""
    return loading.load(PolicyJob, file, overrides, environ={**os.environ, loading.JOB_ENV: "{}"}, cwd=root)


def uploaded_path(file: Path, root: Path, files: Container[Path]) -> Path:
    """`file` relative to `root`, from where `files` are uploaded. UserError for one that is not among them."""
    path = file.resolve()
    if path.is_relative_to(root) and path.relative_to(root) in files:
        return path.relative_to(root)
    raise UserError(f"--config: {file} is not among the files that are uploaded from {root}; put it under configs/")


def is_attempt(run_name: str, job_id: str | None, metadata: Mapping[str, str] | None) -> bool:
    """Whether a job is an attempt at this run; one that was submitted without us goes by its id."""
    return (metadata or {}).get(RUN_KEY, job_id) == run_name


def stop_wait_s(metadata: Mapping[str, str] | None) -> float:
    """Of a job; MARGIN_S for one that was submitted without us, or whose metadata is none of ours."""
    text = (metadata or {}).get(STOP_WAIT_KEY, "")
    return float(text) if text.isascii() and text.isdigit() else float(MARGIN_S)
