"""A job that is handed to Ray's job server: its name, command and environment, and what is uploaded with it: the code
and the configs around it, never data, runs or secrets.
"""

import os
import shlex
import zipfile
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from t2g.config import (
    AnnotateJob,
    CompareJob,
    EvaluateJob,
    JobConfig,
    PolicyEvaluationJob,
    PolicyJob,
    RewardJob,
    SFTJob,
    loading,
)
from t2g.errors import UserError

RUN_KEY = "t2g_run"  # in a job's metadata: the run's name
STOP_WAIT_KEY = "t2g_stop_wait_s"  # in a job's metadata: how long it may need after a stop request
CALLS_TO_FINISH = 3  # of the learner after a stop request: update, sync, checkpoint
LONGEST_ANSWER_S = 300  # of a model whose request is paid
MARGIN_S = 60

MIB = 2**20
MAX_BYTES = 50 * MIB  # Ray's own limit is 100 MiB, and every node fetches the package at its first start
IGNORE_FILE = ".rayignore"
EXCLUDED = (
    "/runs", "/build", ".git", ".venv", "venv", "node_modules", "wandb", "*.egg-info", "__pycache__", "*.pyc",
    ".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis", ".import_linter_cache", ".benchmarks",
    ".env", ".env.*", ".netrc", ".ray", ".ssh", ".aws", "*.pem", "*.key", "id_*", "credentials*",  # secrets
)  # fmt: skip
NUM_NAMED = 5  # largest files in the refusal


class Stage(NamedTuple):
    """A program that runs on a cluster, behind `python -m`, and what its config is."""

    program: str
    schema: type[JobConfig]


STAGES = {
    "annotate": Stage("jobs.annotate", AnnotateJob),
    "sft": Stage("jobs.train_sft", SFTJob),
    "reward": Stage("jobs.train_reward", RewardJob),
    "policy": Stage("jobs.train_policy", PolicyJob),
    "evaluate": Stage("jobs.evaluate", EvaluateJob),
    "evaluate_policy": Stage("jobs.evaluate --what policy", PolicyEvaluationJob),
    "compare": Stage("jobs.compare", CompareJob),
}


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
        """Return the metadata with the stop deadline; without it Ray kills a stopped job after 3 s."""
        return {"working_dir": str(package), "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(self.stop_wait_s)}}

    def job_id(self, taken: Container[str | None]) -> str:
        """own, then own-2, own-3, ...: a cluster uses an id once."""
        names = chain([self.name], (f"{self.name}-{attempt}" for attempt in count(2)))
        return next(name for name in names if name not in taken)


def submission(stage: str, config: JobConfig, file: Path, overrides: Sequence[str]) -> Submission:
    """The run of `config`, which was read from `file` (relative to what is uploaded) and `overrides`."""
    program, wait_s = STAGES[stage].program, int(seconds_to_stop(config)) + MARGIN_S
    return Submission(
        name=config.run.name,
        arguments=(*program.split(), "--config", str(file), *overrides),
        stop_wait_s=wait_s,
        metadata={RUN_KEY: config.run.name, STOP_WAIT_KEY: str(wait_s)},
    )


def seconds_to_stop(config: JobConfig) -> float:
    """Return the seconds that a run may need after a stop request to save its state."""
    if isinstance(config, PolicyJob):
        return CALLS_TO_FINISH * config.learner.step_timeout_s
    return config.sft.timeout_s if isinstance(config, SFTJob) else LONGEST_ANSWER_S


def read_config(stage: str, file: Path, overrides: Sequence[str], root: Path, **how: Any) -> Any:
    """The config as the job will read it: run.root must be absolute. how, and UserError: see `loading.load`."""
    environ = {**os.environ, loading.JOB_ENV: "{}"}
    return loading.load(STAGES[stage].schema, file, overrides, environ=environ, cwd=root, **how)


def uploaded_path(file: Path, root: Path) -> Path:
    """`file` relative to `root`. UserError for one that is not among the files that are uploaded from there."""
    path = file.resolve()
    if path.is_relative_to(root) and path.relative_to(root) in files_to_upload(root):
        return path.relative_to(root)
    raise UserError(f"--config: {file} is not among the files that are uploaded from {root}; put it under configs/")


def is_attempt(run_name: str, job_id: str | None, metadata: Mapping[str, str] | None) -> bool:
    """Whether a job is an attempt at this run; one that was submitted without us goes by its id."""
    return (metadata or {}).get(RUN_KEY, job_id) == run_name


def stop_wait_s(metadata: Mapping[str, str] | None) -> float:
    """Of a job; MARGIN_S for one that was submitted without us, or whose metadata is none of ours."""
    text = (metadata or {}).get(STOP_WAIT_KEY, "")
    return float(text) if text.isascii() and text.isdigit() else float(MARGIN_S)


def files_to_upload(root: Path) -> list[Path]:
    """Files under `root`, sorted and relative to it, without those of EXCLUDED and of its .rayignore.

    Links to folders are not followed. UserError for a line of .rayignore that is not understood.
    """
    patterns, found = (*EXCLUDED, *_ignored(root / IGNORE_FILE)), list[Path]()
    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        folders[:] = [name for name in folders if not _is_excluded(here / name, True, patterns)]
        names = [here / name for name in files if not _is_excluded(here / name, False, patterns)]
        found += [name for name in names if (root / name).is_file()]
    return sorted(found)


def refuse_large(root: Path, files: Sequence[Path]) -> None:
    """UserError, naming the largest files, for more than MAX_BYTES."""
    sizes = {file: (root / file).stat().st_size for file in files}
    total = sum(sizes.values())
    if total <= MAX_BYTES:
        return
    largest = sorted(sizes, key=lambda file: -sizes[file])[:NUM_NAMED]
    named = ", ".join(f"{file} ({sizes[file] / MIB:.1f} MiB)" for file in largest)
    raise UserError(
        f"the upload has {total / MIB:.1f} MiB, and at most {MAX_BYTES / MIB:.0f} MiB are sent; the largest files: "
        f"{named}. Name what the run does not need in {IGNORE_FILE}, and put data and models on the shared storage"
    )


def write_package(root: Path, files: Sequence[Path], target: Path) -> None:
    """A zip file of `files`; the same files give the same bytes, so that a cluster that has them gets nothing again."""
    with zipfile.ZipFile(target, "w") as package:
        for file in files:
            entry = zipfile.ZipInfo(file.as_posix())  # dated 1980: the time of a checkout is no part of it
            entry.external_attr = ((root / file).stat().st_mode & 0o777) << 16
            package.writestr(entry, (root / file).read_bytes(), zipfile.ZIP_DEFLATED)


def _is_excluded(name: Path, is_folder: bool, patterns: Sequence[str]) -> bool:
    """As git does: a pattern with a slash before its end is a path from the root, any other a name at any depth."""
    paths = [pattern.rstrip("/") for pattern in patterns if is_folder or not pattern.endswith("/")]
    return any(fnmatchcase(name.as_posix() if "/" in path else name.name, path.removeprefix("/")) for path in paths)


def _ignored(file: Path) -> Iterator[str]:
    """Yield the patterns of an ignore file. Parts of git's language that are not understood here are refused."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for number, line in enumerate(lines, start=1):
        pattern = line.strip()
        if pattern.startswith("!") or "**" in pattern:
            raise UserError(f"{file}:{number}: got {pattern!r}; needs names or paths with * and ?, without ! and **")
        if pattern and not pattern.startswith("#"):
            yield pattern
