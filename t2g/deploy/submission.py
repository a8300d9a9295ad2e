"""Prepare a job for Ray's job server: its name, command and environment, and the files uploaded with it.

Code and configs are uploaded; data, runs, secrets and hidden files are not.
"""

import os
import shlex
import zipfile
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import count, product
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
from t2g.config.common import MIRROR_END_S
from t2g.errors import UserError

RUN_KEY = "t2g_run"  # in a job's metadata: the run's name
STOP_WAIT_KEY = "t2g_stop_wait_s"  # in a job's metadata: how long it may need after a stop request
MARGIN_S = 60

MIB = 2**20
MAX_BYTES = 50 * MIB  # Ray's own limit is 100 MiB, and every node fetches the package at its first start
IGNORE_FILE = ".rayignore"
EXCLUDED = (
    ".?*", "/runs", "/build", "venv", "node_modules", "wandb", "*.egg-info", "__pycache__", "*.pyc",
)  # fmt: skip
# Names of files with secrets and of folders with such files, in lower case. Python files of these names are code.
SECRETS = (
    "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*",
    "*credential*", "*secret*", "kubeconfig*", "service-account*.json", "service_account*.json",
)  # fmt: skip
NUM_NAMED = 5  # files in the error message


class ClusterJob(NamedTuple):
    """A program that runs on a cluster (arguments of `python -m`), and the schema of its config."""

    program: str
    schema: type[JobConfig]


JOBS = {
    "annotate": ClusterJob("jobs.annotate", AnnotateJob),
    "sft": ClusterJob("jobs.train_sft", SFTJob),
    "reward": ClusterJob("jobs.train_reward", RewardJob),
    "policy": ClusterJob("jobs.train_policy", PolicyJob),
    "evaluate": ClusterJob("jobs.evaluate", EvaluateJob),
    "evaluate_policy": ClusterJob("jobs.evaluate --what policy", PolicyEvaluationJob),
    "compare": ClusterJob("jobs.compare", CompareJob),
}


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A program of t2g as a Ray job."""

    name: str  # prefix of the job's id
    arguments: tuple[str, ...]  # arguments of `python -m`
    stop_wait_s: int = MARGIN_S
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def entrypoint(self) -> str:
        """Return the command. With exec the stop signal reaches Python instead of a shell around it."""
        return f"exec python -m {shlex.join(self.arguments)}"

    def runtime_env(self, package: Path) -> dict[str, object]:
        """Return Ray's runtime environment with the stop deadline; without it Ray kills a stopped job after 3 s."""
        return {"working_dir": str(package), "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(self.stop_wait_s)}}

    def job_id(self, taken: Container[str | None]) -> str:
        """Return the first free id of own, own-2, own-3, ...: a cluster accepts an id once."""
        if self.name not in taken:
            return self.name
        later_names = (f"{self.name}-{attempt}" for attempt in count(2))
        return next(name for name in later_names if name not in taken)


def submission(job_kind: str, config: JobConfig, file: Path, overrides: Sequence[str]) -> Submission:
    """Return the job that runs `config`, read from `file` (relative to the upload) and `overrides`."""
    program = JOBS[job_kind].program
    wait_s = int(config.stop_deadline_s) + MARGIN_S
    if config.run.mirror_url:
        wait_s += int(MIRROR_END_S)
    return Submission(
        name=config.run.name,
        arguments=(*program.split(), "--config", str(file), *overrides),
        stop_wait_s=wait_s,
        metadata={RUN_KEY: config.run.name, STOP_WAIT_KEY: str(wait_s)},
    )


def read_config(job_kind: str, file: Path, overrides: Sequence[str], root: Path, **how: Any) -> Any:
    """Return the config as the job will read it: run.root must be absolute.

    Args:
        how: See `loading.load`.

    Raises:
        UserError: See `loading.load`.
    """
    environ = {**os.environ, loading.JOB_ENV: "{}"}
    return loading.load(JOBS[job_kind].schema, file, overrides, environ=environ, cwd=root, **how)


def uploaded_path(file: Path, root: Path) -> Path:
    """Return `file` relative to `root`.

    Raises:
        UserError: The file is not among the files that are uploaded from `root`.
    """
    path = file.resolve()
    if path.is_relative_to(root):
        relative = path.relative_to(root)
        if relative in files_to_upload(root):
            return relative
    raise UserError(
        f"--config: {file} is not among the files that are uploaded from {root}; put it under configs/, as a file that "
        "is no link and whose name does not speak of secrets or credentials"
    )


def is_attempt(run_name: str, job_id: str | None, metadata: Mapping[str, str] | None) -> bool:
    """Return whether a job is an attempt at this run. Without t2g's metadata the job id must be the run's name."""
    return (metadata or {}).get(RUN_KEY, job_id) == run_name


def stop_wait_s(metadata: Mapping[str, str] | None) -> float:
    """Return how long a job may need after a stop request: MARGIN_S without t2g's metadata."""
    text = (metadata or {}).get(STOP_WAIT_KEY, "")
    if text.isascii() and text.isdigit():
        return float(text)
    return float(MARGIN_S)


class Upload(NamedTuple):
    """The files of an upload, sorted and relative to the root."""

    files: list[Path]
    left_out: list[Path]  # which no pattern of the user's excludes: names of SECRETS, and links out of the upload


def files_to_upload(root: Path) -> list[Path]:
    """Return the files of `select_files`."""
    return select_files(root).files


def select_files(root: Path) -> Upload:
    """Return the files under `root` without EXCLUDED, SECRETS and its .rayignore.

    Links to folders are not followed. A link to a file is left out unless that file is uploaded, too.

    Raises:
        UserError: .rayignore has an unsupported pattern.
    """
    patterns = (*EXCLUDED, *_read_patterns(root / IGNORE_FILE))
    candidates = list[Path]()
    for folder, folders, files in os.walk(root):
        parent = Path(folder).relative_to(root)
        folders[:] = [name for name in folders if not _is_excluded(parent / name, True, patterns)]
        names = [parent / name for name in files if not _is_excluded(parent / name, False, patterns)]
        candidates += [name for name in names if (root / name).is_file()]
    harmless = [name for name in candidates if not _is_secret(name)]
    real_root = root.resolve()
    real_files = {real_root / name for name in harmless if not (root / name).is_symlink()}
    files = {name for name in harmless if (root / name).resolve() in real_files}
    return Upload(sorted(files), sorted(set(candidates) - files))


def describe_left_out(upload: Upload) -> str:
    """Return the files that are left out, shortened; "" if there are none."""
    if not upload.left_out:
        return ""
    names = ", ".join(map(str, upload.left_out[:NUM_NAMED]))
    num_more = len(upload.left_out) - NUM_NAMED
    more = f" and {num_more} more" if num_more > 0 else ""
    return f"not uploaded, since they may hold secrets or are links to files outside: {names}{more}"


def refuse_large(root: Path, files: Sequence[Path]) -> None:
    """Check the size of an upload.

    Raises:
        UserError: The files have more than MAX_BYTES; the message names the largest files.
    """
    sizes = {file: (root / file).stat().st_size for file in files}
    total = sum(sizes.values())
    if total <= MAX_BYTES:
        return
    largest = sorted(sizes, key=lambda file: -sizes[file])[:NUM_NAMED]
    with_sizes = [f"{file} ({sizes[file] / MIB:.1f} MiB)" for file in largest]
    listed = ", ".join(with_sizes)
    raise UserError(
        f"the upload has {total / MIB:.1f} MiB, and at most {MAX_BYTES / MIB:.0f} MiB are sent; the largest files: "
        f"{listed}. List files that the run does not need in {IGNORE_FILE}, and put data and models on shared storage"
    )


def write_package(root: Path, files: Sequence[Path], target: Path) -> None:
    """Write a zip file of `files`. Equal files give equal bytes, so that a cluster fetches them only once."""
    with zipfile.ZipFile(target, "w") as package:
        for file in files:
            entry = zipfile.ZipInfo(file.as_posix())  # dated 1980, so that the bytes do not depend on file times
            source = root / file
            permissions = source.stat().st_mode & 0o777
            entry.external_attr = permissions << 16
            package.writestr(entry, source.read_bytes(), zipfile.ZIP_DEFLATED)


def _is_secret(name: Path) -> bool:
    """Return whether a file may hold secrets, by its own name and those of its folders."""
    if name.suffix == ".py":
        return False
    parts = [part.lower() for part in name.parts]
    return any(fnmatchcase(part, pattern) for part, pattern in product(parts, SECRETS))


def _is_excluded(name: Path, is_folder: bool, patterns: Sequence[str]) -> bool:
    """Match as git does: a pattern with a slash before its end is a path from the root, else a name at any depth."""
    for pattern in patterns:
        if pattern.endswith("/") and not is_folder:
            continue
        path = pattern.rstrip("/")
        text = name.as_posix() if "/" in path else name.name
        if fnmatchcase(text, path.removeprefix("/")):
            return True
    return False


def _read_patterns(file: Path) -> Iterator[str]:
    """Yield the patterns of an ignore file; git's ! and ** are not supported and refused."""
    if not file.exists():
        return
    lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        pattern = line.strip()
        if pattern.startswith("!") or "**" in pattern:
            raise UserError(f"{file}:{number}: got {pattern!r}; needs names or paths with * and ?, without ! and **")
        if pattern and not pattern.startswith("#"):
            yield pattern
