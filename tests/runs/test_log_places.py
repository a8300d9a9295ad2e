"""A folder, a pipe or an unreadable file where a run writes a log: one sentence, and no wait."""

import errno
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from jobs.common.run_folder import begin_folder, sole_process
from t2g.config import LogConfig, PolicyJob
from t2g.errors import Unreadable, UserError
from t2g.feedback.records import AnnotatedRecord
from t2g.runs.identity import load_identity, load_result
from t2g.runs.journal import Journal, read_journal
from t2g.runs.log import ALARMS_FILE, DROPPED_FILE, METRICS_FILE, SAMPLES_FILE, RunLog, read_records

PLAIN = LogConfig()
FEEDBACK = {"num_steps": 2, "feedback": {"source": "pkg:judge"}}
RECORD = AnnotatedRecord(prompt_id="1", prompt="p", response="r", critique="c")


def start_log(path: Path) -> None:
    RunLog(path.parent, PLAIN).truncate(0)


def append_journal(path: Path) -> None:
    with closing(Journal(path)) as journal:
        journal.append(RECORD)


def load_journal(path: Path) -> None:
    read_journal(path, AnnotatedRecord)


def load_own_identity(path: Path) -> None:
    load_identity(path.parent)


def load_own_result(path: Path) -> None:
    load_result(path.parent, None, path.name)


READERS: list[tuple[str, Callable[[Path], None]]] = [
    (METRICS_FILE, start_log),
    (SAMPLES_FILE, start_log),
    (DROPPED_FILE, start_log),
    (ALARMS_FILE, start_log),
    ("journal.jsonl", load_journal),
    ("journal.jsonl", append_journal),
    ("identity.json", load_own_identity),
    ("stage.json", load_own_result),
]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize(("name", "read"), READERS)
def test_a_folder_or_pipe_in_a_logs_place(
    tmp_path: Path, name: str, read: Callable[[Path], Any], make: Callable[[Path], None]
) -> None:
    path = tmp_path / name
    make(path)
    kind = "folder" if make is os.mkdir else "pipe"
    with pytest.raises(UserError, match=rf"{name} is a {kind}.*: remove it"):
        read(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["commands.log", "progress.log", "feedback.log"])
def test_a_run_starts_with_no_folder_or_pipe_in_a_logs_place(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    run = {"root": str(tmp_path), "name": "own"}
    job = PolicyJob.model_validate({"run": run, "model": {"policy": "p"}, "data": {"path": "d"}, **FEEDBACK})
    job.run.folder.mkdir(parents=True)
    make(job.run.folder / name)
    with pytest.raises(UserError, match=f"{name} is a"), sole_process(job.run.folder):
        begin_folder(job)


def test_a_log_that_the_disk_does_not_return_is_not_taken_for_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1}\n')

    def fail(self: Path) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        with pytest.raises(Unreadable, match="Stale file handle"):
            RunLog(tmp_path, PLAIN).truncate(0)
    assert [*read_records(path)] == [{"step": 1}]
