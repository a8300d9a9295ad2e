"""What a start writes into the run folder."""

import sys
from pathlib import Path

import pytest

from jobs.common.run_folder import begin_folder
from t2g.config import PolicyJob, loading

ROOT = Path(__file__).resolve().parents[3]


def test_the_command_is_kept_without_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = loading.load(PolicyJob, ROOT / "configs/tiny/policy.yaml", [f"run.root={tmp_path}"], environ={})
    monkeypatch.setenv("OTHER_API_KEY", "value-of-a-variable")
    secrets = ["--text=sk-proj-4rT9secret", "http://me:secret@proxy/x?api_key=secret", "of value-of-a-variable"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "jobs.train_policy", *secrets, "num_steps=3"])
    folder = begin_folder(config)
    (line,) = (folder / "commands.log").read_text().splitlines()
    assert line.endswith("--text=*** 'http://***@proxy/x?***' 'of ***' num_steps=3")
    for file in folder.iterdir():
        assert "secret" not in file.read_text() and "value-of-a-variable" not in file.read_text()
