import errno
import json
import logging
import os
from pathlib import Path

import pytest

from t2g.errors import UserError
from t2g.files import weights_version, write_atomic
from t2g.runs.checkpoint import MANIFEST, STATE, CheckpointStore


def weights(text: str) -> object:
    def fill(folder: Path) -> None:
        (folder / "learner").mkdir()
        (folder / "learner" / "rank0.pt").write_text(text)

    return fill


def full_disk(folder: Path) -> None:
    (folder / "half.bin").write_bytes(b"0" * 100)
    with open("/dev/full", "w") as file:  # the kernel's own "No space left on device"
        file.write("x" * 10)
        file.flush()


def remote_full_disk(folder: Path) -> None:
    raise RuntimeError("task failed: OSError: [Errno 28] No space left on device")


def killed(folder: Path) -> None:
    (folder / "half.bin").write_bytes(b"0" * 100)
    raise KeyboardInterrupt


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_latest_gives_back_what_was_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.latest() is None
    state = {"step": 10, "kl_coef": 0.0625, "rng": [1, 2**40]}
    path = store.write(10, weights("ten"), state)
    found = store.latest()
    assert found == (path, state)
    assert (path / "learner" / "rank0.pt").read_text() == "ten"
    manifest = json.loads((path / MANIFEST).read_text())["files"]
    assert set(manifest) == {"learner/rank0.pt", STATE}
    assert manifest["learner/rank0.pt"]["bytes"] == 3


def test_old_checkpoints_go_only_after_the_new_one_stands(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    standing: list[set[str]] = []
    for step in (1, 2, 3, 100_000_000):
        store.write(step, lambda folder: standing.append(names(tmp_path)), {"step": step})
    assert {"step-00000001", "step-00000002"} <= standing[2]
    assert names(tmp_path) == {"step-00000003", "step-100000000"}
    assert store.latest()[1] == {"step": 100_000_000}  # longer than eight digits and still the newest


def break_size(path: Path) -> None:
    with (path / "learner" / "rank0.pt").open("a") as file:
        file.write("more")


def break_bit(path: Path) -> None:
    (path / "learner" / "rank0.pt").write_text("tan")  # same size


def break_missing(path: Path) -> None:
    (path / "learner" / "rank0.pt").unlink()


def break_manifest(path: Path) -> None:
    (path / MANIFEST).write_text('{"files": {"lear')


def break_manifest_shape(path: Path) -> None:
    (path / MANIFEST).write_text('{"files": []}')


def break_no_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (break_size, "rank0.pt differs"),
        (break_bit, "rank0.pt differs"),
        (break_missing, "rank0.pt is missing"),
        (break_manifest, "manifest.json is not readable"),
        (break_manifest_shape, "manifest.json is not readable"),
        (break_no_manifest, "manifest.json is missing"),
    ],
)
def test_torn_checkpoint_is_skipped_and_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object, word: str
) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    good = store.write(5, weights("five"), {"step": 5})
    torn = store.write(10, weights("ten"), {"step": 10})
    damage(torn)
    with caplog.at_level(logging.WARNING):
        assert store.latest() == (good, {"step": 5})
    assert "step-00000010 is torn" in caplog.text
    assert word in caplog.text
    assert store.write(10, weights("ten again"), {"step": 10}) == torn
    assert store.latest() == (torn, {"step": 10})


def test_weights_have_another_version_once_they_are_trained_again(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(name.encode())
    before = weights_version(str(tmp_path), None)
    (tmp_path / "config.json").write_text("{}")
    assert weights_version(str(tmp_path), None) == before
    (tmp_path / "b.safetensors").write_bytes(b"c")
    assert weights_version(str(tmp_path), None) != before
    assert weights_version(str(tmp_path), "v2") == "v2" and weights_version("org/model", None) == "unpinned"


@pytest.mark.parametrize("keep", [1, 2])
def test_torn_checkpoints_of_later_steps_do_not_push_out_the_one_just_written(tmp_path: Path, keep: int) -> None:
    store = CheckpointStore(tmp_path, keep=keep)
    for step in (10, 20)[:keep]:
        break_no_manifest(store.write(step, weights(str(step)), {"step": step}))
    good = store.write(5, weights("five"), {"step": 5})
    assert store.latest() == (good, {"step": 5})


def test_a_step_that_stands_intact_is_not_written_twice(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    path = store.write(4, weights("four"), {"step": 4})
    assert store.write(4, killed, {"step": 4}) == path
    assert store.latest() == (path, {"step": 4})


@pytest.mark.parametrize("fill", [full_disk, remote_full_disk])
def test_full_disk_is_one_sentence_and_keeps_the_last_good_one(tmp_path: Path, fill: object) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    good = store.write(5, weights("five"), {"step": 5})
    with pytest.raises(
        UserError, match=r"the checkpoint of step 6 does not fit .* the last good one, step-00000005, is kept"
    ):
        store.write(6, fill, {"step": 6})
    assert names(tmp_path) == {good.name}
    assert store.latest() == (good, {"step": 5})


def test_full_disk_at_the_first_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is none before it"):
        CheckpointStore(tmp_path, keep=1).write(1, full_disk, {})


def test_other_errors_pass_through_and_leave_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)

    def broken(folder: Path) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with pytest.raises(PermissionError):
        store.write(1, broken, {})
    with pytest.raises(KeyboardInterrupt):
        store.write(1, killed, {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.write(1, weights("one"), {"rng": object()})
    assert names(tmp_path) == set()


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-00000007").mkdir()
    (tmp_path / ".tmp-step-00000007" / "half.bin").write_bytes(b"0")
    store = CheckpointStore(tmp_path, keep=1)
    assert store.latest() is None
    store.write(8, weights("eight"), {"step": 8})
    assert names(tmp_path) == {"step-00000008"}


def test_best_moves_only_upwards(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    assert store.best() is None

    def export(text: str) -> object:
        return lambda folder: (folder / "model.safetensors").write_text(text)

    assert not store.keep_best(0, export("nan"), float("nan"))
    assert not store.keep_best(0, export("none"), float("-inf"))
    assert store.keep_best(0, export("base"), 0.5)
    assert not store.keep_best(5, export("equal"), 0.5)
    assert store.keep_best(10, export("better"), 0.625)
    assert not store.keep_best(15, export("worse"), 0.25)
    assert (tmp_path / "best" / "model.safetensors").read_text() == "better"
    folder, score = store.best()
    assert score == 0.625
    assert names(tmp_path) == {"best", folder.name}
    assert CheckpointStore(tmp_path, keep=1).keep_best(10, export("the step again, after a resume"), 0.75)


def test_best_survives_a_failed_export(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.keep_best(1, lambda folder: (folder / "w").write_text("one"), 0.5)
    with pytest.raises(UserError, match="the best policy of step 2 does not fit"):
        store.keep_best(2, full_disk, 0.75)
    assert store.best()[1] == 0.5
    assert (tmp_path / "best" / "w").read_text() == "one"


def test_best_and_steps_do_not_prune_each_other(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.write(1, weights("one"), {"step": 1})
    store.keep_best(1, lambda folder: None, 0.5)
    store.write(2, weights("two"), {"step": 2})
    assert names(tmp_path) == {"best", "best-0001", "step-00000002"}


def test_a_file_that_does_not_fit_keeps_its_old_content(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, b"old")
    (tmp_path / ".tmp-summary.json").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"^summary\.json does not fit on the disk of .* free some space"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == {"summary.json"}


def test_write_atomic_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == {"summary.json"}
