"""Which files and folders were written to the disk, in order."""

import os
from pathlib import Path

import pytest


def record_syncs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list that gets the path of each fsync from now on."""
    synced: list[Path] = []

    def record(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append(Path(path))

    monkeypatch.setattr("os.fsync", record)
    return synced
