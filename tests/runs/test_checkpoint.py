import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from t2g.errors import RunStopped, UserError
from t2g.feedback.records import AnnotatedRecord
from t2g.files import describe_file, write_atomic
from t2g.runs.checkpoint import MANIFEST, SCORE, SKIP_KEY, STATE, CheckpointStore
from t2g.runs.journal import read_journal

ROOT = Path(__file__).parents[2]


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
    latest = store.latest()
    assert latest == (path, state)
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


def test_a_crash_before_the_seal_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    first = store.write(1, weights("one"), {"step": 1})
    store.begin(2, weights("two"), {"step": 2})  # never finished
    assert store.latest() == (first, {"step": 1})
    seal = CheckpointStore(tmp_path, keep=1).begin(3, weights("three"), {"step": 3})
    assert names(tmp_path) == {"step-00000001", ".tmp-step-00000003"}
    third = seal()
    assert store.latest() == (third, {"step": 3})
    assert names(tmp_path) == {"step-00000003"}


def test_a_hash_that_the_writer_knows_is_taken(tmp_path: Path) -> None:
    def fill(folder: Path) -> dict[str, Any]:
        weights("one")(folder)
        return {"learner/rank0.pt": describe_file(folder / "learner" / "rank0.pt") | {"by": "rank 0"}}

    path = CheckpointStore(tmp_path, keep=1).write(1, fill, {"step": 1})
    files = json.loads((path / MANIFEST).read_text())["files"]
    assert files["learner/rank0.pt"]["by"] == "rank 0"
    assert "by" not in files[STATE]


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


def break_no_file(path: Path) -> None:
    break_missing(path)
    (path / "learner" / "rank0.pt").mkdir()


def break_pipe(path: Path) -> None:
    break_missing(path)
    os.mkfifo(path / "learner" / "rank0.pt")


def break_endless(path: Path) -> None:
    break_missing(path)
    (path / "learner" / "rank0.pt").symlink_to("/dev/zero")


def break_loop(path: Path) -> None:
    break_missing(path)
    (path / "learner" / "rank0.pt").symlink_to("rank0.pt")


def break_deep_manifest(path: Path) -> None:
    (path / MANIFEST).write_text("[" * 100_000)


def break_manifest_pipe(path: Path) -> None:
    break_no_manifest(path)
    os.mkfifo(path / MANIFEST)


def break_no_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file in its place")


def break_link(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (break_size, "rank0.pt differs"),
        (break_bit, "rank0.pt differs"),
        (break_missing, "rank0.pt is missing"),
        (break_manifest, "manifest.json is not readable"),
        (break_manifest_shape, "manifest.json is not readable"),
        (break_no_manifest, "manifest.json is missing"),
        (break_no_file, "rank0.pt: no file"),
        (break_pipe, "rank0.pt: no file"),
        (break_endless, "rank0.pt: no file"),
        (break_deep_manifest, "manifest.json is not readable"),
        (break_manifest_pipe, "manifest.json: no file"),
        (break_no_folder, "manifest.json is missing"),
    ],
)
def test_torn_checkpoint_is_skipped_and_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object, word: str
) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    good = store.write(5, weights("five"), {"step": 5})
    damaged = store.write(10, weights("ten"), {"step": 10})
    damage(damaged)
    with caplog.at_level(logging.WARNING):
        assert store.latest() == (good, {"step": 5})
    assert "step-00000010 is incomplete" in caplog.text
    assert word in caplog.text
    assert store.write(10, weights("ten again"), {"step": 10}) == damaged
    assert store.latest() == (damaged, {"step": 10})


def unreadable(monkeypatch: pytest.MonkeyPatch, *folders: Path, number: int = errno.ESTALE) -> None:
    """Let the disk return an error for the files of these folders."""

    def read(path: Path) -> dict[str, object]:
        if any(folder in path.parents for folder in folders):
            raise OSError(number, os.strerror(number), str(path))
        return describe_file(path)

    monkeypatch.setattr("t2g.runs.checkpoint.describe_file", read)


def list_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
def test_a_checkpoint_that_the_disk_does_not_return_is_neither_skipped_nor_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    good, other = (store.write(step, weights(str(step)), {"step": step}) for step in (5, 10))
    files = list_files(tmp_path)
    with monkeypatch.context() as patch:
        unreadable(patch, other, number=number)
        for read in (store.latest, lambda: store.find_step_after(7), lambda: store.write(10, weights("new"), {})):
            with pytest.raises(UserError, match=rf"step-00000010 \(.*{os.strerror(number)}\)") as refusal:
                read()
            assert "step-00000005" not in str(refusal.value)
            assert SKIP_KEY in str(refusal.value)
        assert list_files(tmp_path) == files
        skipping = CheckpointStore(tmp_path, keep=2, skip_unreadable=True)
        assert skipping.latest() == (good, {"step": 5})
        assert os.strerror(number) in caplog.text
    assert store.latest() == (other, {"step": 10})


@pytest.mark.parametrize("damage", [break_loop, break_link])
def test_a_link_to_itself_is_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    damage(store.write(10, weights("ten"), {"step": 10}))
    with pytest.raises(UserError, match=r"step-00000010 \(.*Too many levels of symbolic links\)"):
        store.latest()


def test_all_checkpoints_damaged_is_a_sentence_that_names_each(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    damages = {5: break_bit, 10: break_missing, 15: break_no_manifest}
    paths = {step: store.write(step, weights("ten"), {"step": step}) for step in damages}
    for step, damage in damages.items():
        damage(paths[step])
    files = list_files(tmp_path)
    with pytest.raises(UserError) as refusal:
        store.latest()
    sentence = str(refusal.value)
    assert "step-00000015 (manifest.json is missing), step-00000010 (rank0.pt is missing)" in sentence
    assert "step-00000005 (learner/rank0.pt differs from manifest.json)" in sentence
    assert SKIP_KEY in sentence and list_files(tmp_path) == files
    assert CheckpointStore(tmp_path, keep=3, skip_unreadable=True).latest() is None


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> Iterator[Path]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(folder))

    monkeypatch.setattr(Path, "iterdir", fail)
    with pytest.raises(UserError, match="Stale file handle"):
        CheckpointStore(tmp_path, keep=1).latest()


def test_an_export_that_removed_its_folder_ends_with_its_own_error(tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        shutil.rmtree(folder)
        raise RunStopped("the model written is not the trained one")

    with pytest.raises(RunStopped, match="is not the trained one"):
        CheckpointStore(tmp_path, keep=1).keep_best(1, refuse, 0.5)
    assert not names(tmp_path)


def test_the_best_policy_that_the_disk_does_not_return_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CheckpointStore(tmp_path, keep=1).keep_best(1, lambda folder: (folder / "w").write_text("one"), 0.75)
    best = (tmp_path / "best").resolve()
    with monkeypatch.context() as patch:
        unreadable(patch, best)
        with pytest.raises(UserError, match="Stale file handle"):
            CheckpointStore(tmp_path, keep=1).keep_best(2, lambda folder: (folder / "w").write_text("two"), 0.5)
    assert CheckpointStore(tmp_path, keep=1).best() == (best, 0.75)


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


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from t2g.errors import RunStopped, UserError
from t2g.files import write_atomic
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.journal import Journal
from t2g.feedback.records import AnnotatedRecord

folder = Path(sys.argv[1])
store, journal = CheckpointStore(folder / "checkpoints", keep=2), Journal(folder / "journal.jsonl")
store.write(1, lambda to: (to / "w").write_text("one"), {"step": 1})
write_atomic(folder / "summary.json", b"old")
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
record = AnnotatedRecord(prompt_id="1", prompt="p" * 1000, response="r", critique="c")
for write in (
    lambda: write_atomic(folder / "summary.json", b"n" * 2**17),
    lambda: store.write(2, lambda to: (to / "w").write_bytes(b"w" * 2**17), {"step": 2}),
    lambda: store.write(2, lambda to: torch.save({"w": torch.zeros(2**17)}, to / "w.pt"), {"step": 2}),
    lambda: [journal.append(record) for _ in range(1000)],
):
    try:
        write()
    except UserError as error:
        print(error)
"""


def test_a_limit_of_a_files_size_is_one_sentence_and_leaves_what_was(tmp_path: Path) -> None:
    """Python ignores SIGXFSZ, so that the write fails; torch's own writer hides why."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    whats = ["summary.json", "the checkpoint of step 2", "the checkpoint of step 2", "journal.jsonl"]
    assert [line.partition(" cannot be written to ")[0] for line in lines] == whats
    assert all("File too large" in line and "ulimit -f" in line for line in lines)
    assert (tmp_path / "summary.json").read_bytes() == b"old"
    assert CheckpointStore(tmp_path / "checkpoints", keep=2).latest()[1] == {"step": 1}
    assert names(tmp_path / "checkpoints") == {"step-00000001"}
    assert len(read_journal(tmp_path / "journal.jsonl", AnnotatedRecord)) > 50


@pytest.mark.parametrize("fill", [full_disk, remote_full_disk])
def test_full_disk_is_one_sentence_and_keeps_the_last_good_one(tmp_path: Path, fill: object) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    good = store.write(5, weights("five"), {"step": 5})
    with pytest.raises(
        UserError, match=r"the checkpoint of step 6 cannot be written .* the last good one, step-00000005, is kept"
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
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match="Input/output"):
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


def break_score(best: Path) -> None:
    (best / SCORE).write_text('{"step": 1, "sco')


def break_score_kind(best: Path) -> None:
    (best / SCORE).write_text('{"step": 1, "score": "high"}')
    manifest = json.loads((best / MANIFEST).read_text())
    manifest["files"][SCORE] = describe_file(best / SCORE)
    (best / MANIFEST).write_text(json.dumps(manifest))


def break_weights(best: Path) -> None:
    (best / "w").write_text("two")


def break_best_link(best: Path) -> None:
    (best.parent / "best").unlink()
    (best.parent / "best").symlink_to("best")


def break_best_name(best: Path) -> None:
    (best.parent / "best").unlink()
    (best.parent / "best").symlink_to(best.rename(best.parent / "elsewhere").name)


@pytest.mark.parametrize("damage", [break_score, break_score_kind, break_weights, break_best_link, break_best_name])
def test_a_torn_best_is_none_and_the_next_one_takes_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object
) -> None:
    CheckpointStore(tmp_path, keep=1).keep_best(1, lambda folder: (folder / "w").write_text("one"), 0.75)
    damage((tmp_path / "best").resolve())
    store = CheckpointStore(tmp_path, keep=1)
    assert store.best() is None and "is incomplete" in caplog.text
    assert store.keep_best(2, lambda folder: (folder / "w").write_text("two"), 0.5)
    assert store.best() == ((tmp_path / "best").resolve(), 0.5)


def test_best_survives_a_failed_export(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.keep_best(1, lambda folder: (folder / "w").write_text("one"), 0.5)
    with pytest.raises(UserError, match="the best policy of step 2 cannot be written"):
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
    with pytest.raises(
        UserError, match=r"^summary\.json cannot be written to .*: No space left on device: free some space"
    ):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == {"summary.json"}


def test_write_atomic_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == {"summary.json"}
