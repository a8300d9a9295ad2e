"""From which checkpoint a supervised training goes on."""

from pathlib import Path

from actors.sft import _resume_point
from t2g.checkpoint import CheckpointStore

IDENTITY = {"fingerprint": "f", "num_ranks": 2}


def checkpoint(part: Path, step: int) -> Path:
    def fill(folder: Path) -> None:
        (folder / "weights").write_text("w")

    return CheckpointStore(part / "checkpoints", keep=1).write(step, fill, {"step": step, **IDENTITY})


def test_the_last_whole_checkpoint_of_the_same_training(tmp_path: Path) -> None:
    part = tmp_path / "model.part"
    assert _resume_point(part, IDENTITY) == (None, 0)
    part.mkdir()
    assert _resume_point(part, IDENTITY) == (None, 0)
    folder = checkpoint(part, 500)
    assert _resume_point(part, IDENTITY) == (str(folder), 500)
    assert _resume_point(part, IDENTITY | {"fingerprint": "g"}) == (None, 0)
    assert _resume_point(part, IDENTITY | {"num_ranks": 1}) == (None, 0)
    (folder / "weights").write_text("torn")
    assert _resume_point(part, IDENTITY) == (None, 0)
