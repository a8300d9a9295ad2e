"""A run folder in another file system: whole or not at all, restored to the byte, and no burden on the run."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
from fakes import letter_tokenizer
from fsspec.implementations.memory import MemoryFileSystem
from trainer_bench import Bench, job

from jobs.common import mirroring
from jobs.common.mirroring import copy_periodically
from t2g.config import with_overrides
from t2g.errors import UserError
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.mirror import MANIFEST, SESSIONS_FILE, Manifest, Mirror, TakenOver, describe_error

DEADLINE_S = 60
NUM_STEPS = 8
CONFIG = with_overrides(job(), {"num_steps": NUM_STEPS})
BUCKET = "runs"
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


class Killed(BaseException):
    """Ends a copy without a last word."""


class DyingFilesystem(MemoryFileSystem):
    """Dies in one of its writes. An object is half written then; a manifest is not, as in every object store."""

    cachable = False
    writes_left: float = inf

    def count_write(self) -> None:
        self.writes_left -= 1
        if self.writes_left < 0:
            raise Killed

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if mode == "wb" and "data" not in options:
            try:
                self.count_write()
            except Killed:
                file.write(b"half")
                file.close()
                raise
        return file

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self.count_write()
        super().pipe_file(path, value, **options)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self.count_write()
        super().cp_file(path1, path2, **options)

    def rm(self, path: Any, **options: Any) -> None:
        self.count_write()
        super().rm(path, **options)


class BlockedFilesystem(MemoryFileSystem):
    """Writes nothing until it is released."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.released = threading.Event()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb" and "data" not in options:
            self.entered.set()
            assert self.released.wait(DEADLINE_S)
        return super()._open(path, mode, **options)


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """A real S3 server in this process, where moto and s3fs are installed."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/mirror/own"
    if request.param == "memory":
        return f"memory://{tmp_path}/own"
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_server"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    import s3fs

    s3fs.S3FileSystem(skip_instance_cache=True).makedirs(BUCKET, exist_ok=True)
    return f"s3://{BUCKET}{tmp_path}/own"


@pytest.fixture
def memory_url(tmp_path: Path) -> str:
    return f"memory://{tmp_path}/own"


def make_run(folder: Path) -> CheckpointStore:
    """A run after step 2: a checkpoint, the best policy, logs, and what is not mirrored."""
    folder.mkdir(exist_ok=True)
    store = CheckpointStore(folder / "checkpoints", keep=2)
    go_on(folder, store, 2)
    store.keep_best(2, lambda to: (to / "weights").write_bytes(b"best"), 0.5)
    (folder / "lock").touch()
    (folder / ".tmp-part").write_text("unfinished")
    (folder / "smoke").mkdir()
    (folder / "smoke" / "metrics.jsonl").write_text("{}\n")
    return store


def go_on(folder: Path, store: CheckpointStore, step: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step}}}\n')
    (folder / "report.html").write_text(f"report of step {step}")
    store.write(step, lambda to: (to / "weights").write_bytes(bytes([step]) * 1000), {"step": step})


def read_tree(folder: Path) -> dict[str, Any]:
    """The content of every mirrored file and link but the sessions, which each start extends."""
    tree: dict[str, Any] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            tree[name] = os.readlink(path)
        elif path.is_file() and name not in ("lock", ".tmp-part", SESSIONS_FILE) and "smoke" not in name:
            tree[name] = path.read_bytes()
    return tree


def copy_once(folder: Path, url: str) -> Mirror:
    mirror = Mirror(folder, url)
    mirror.open()
    mirror.copy()
    return mirror


def read_manifest(mirror: Mirror) -> Manifest:
    return Manifest.model_validate_json(mirror._filesystem.cat_file(f"{mirror._root}/{MANIFEST}"))


def test_an_empty_folder_gets_every_finished_file_back(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "run"
    store = make_run(folder)
    mirror = copy_once(folder, url)
    for step in (4, 6):
        go_on(folder, store, step)
        mirror.copy()
    tree = read_tree(folder)
    assert mirror._filesystem.cat_file(f"{mirror._root}/report.html") == b"report of step 6"

    shutil.rmtree(folder)
    Mirror(folder, url).open()
    assert read_tree(folder) == tree
    assert (folder / "checkpoints" / "best" / "weights").read_bytes() == b"best"
    assert not (folder / "smoke").exists() and not (folder / ".tmp-part").exists()
    latest = CheckpointStore(folder / "checkpoints", keep=2).latest()
    assert latest is not None and latest[1] == {"step": 6}
    assert copy_once(folder, url).folder == folder, "the restored run goes on with its mirror"


def test_the_mirror_keeps_no_object_of_a_removed_file(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "run"
    store = make_run(folder)
    mirror = copy_once(folder, url)
    for step in range(4, 12, 2):
        go_on(folder, store, step)
        mirror.copy()
    manifest = read_manifest(mirror)
    steps = {path.split("/")[1] for path in manifest.files if path.startswith("checkpoints/step-")}
    assert steps == {"step-00000008", "step-00000010"}
    assert mirror._list_objects() == manifest.objects


def test_a_copy_that_dies_anywhere_leaves_the_last_whole_state(tmp_path: Path) -> None:
    """Each write of the second copy is the last one once; a restore then gives the first or the second state."""
    outcomes: list[str] = []
    for num_writes in range(100):
        folder = tmp_path / f"run-{num_writes}"
        url = f"memory://{tmp_path}/{num_writes}"
        store = make_run(folder)
        filesystem = DyingFilesystem()
        mirror = Mirror(folder, url, filesystem=filesystem)
        mirror.open()
        mirror.copy()
        before = read_tree(folder)
        for step in (4, 6):
            go_on(folder, store, step)
        after = read_tree(folder)
        filesystem.writes_left = num_writes
        try:
            mirror.copy()
            died = False
        except Killed:
            died = True
        shutil.rmtree(folder)
        restored = Mirror(folder, url)
        restored.open()
        tree = read_tree(folder)
        assert tree in (before, after)
        outcomes.append("before" if tree == before else "after")
        restored.copy()
        assert restored._list_objects() == read_manifest(restored).objects, "no half object is left"
        if not died:
            break
    assert outcomes == sorted(outcomes, reverse=True), "the manifest is written once, and all is whole before it"
    assert outcomes.count("before") >= 8
    assert outcomes.count("after") >= 3


def test_a_restore_that_dies_is_made_again(tmp_path: Path, memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    make_run(folder)
    copy_once(folder, memory_url)
    tree = read_tree(folder)
    shutil.rmtree(folder)
    moved = 0
    replace = Path.replace

    def die(self: Path, target: Path) -> Path:
        nonlocal moved
        moved += 1
        if moved == 4:
            raise Killed
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        with pytest.raises(Killed):
            Mirror(folder, memory_url).open()
    assert 0 < len([path for path in folder.glob("checkpoints/*/*") if path.is_file()]) < len(tree)

    def die_in_download(*_: Any) -> bool:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_download", die_in_download)
        with pytest.raises(Killed):
            Mirror(folder, memory_url).open()
    Mirror(folder, memory_url).open()
    assert read_tree(folder) == tree


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_damaged_objects_are_never_taken(
    tmp_path: Path, memory_url: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    store = make_run(folder)
    go_on(folder, store, 4)
    mirror = copy_once(folder, memory_url)
    manifest = read_manifest(mirror)

    def spoil(path: str) -> None:
        place = f"{mirror._root}/{manifest.files[path].name_object(path)}"
        content = mirror._filesystem.cat_file(place)
        if damage == "missing":
            mirror._filesystem.rm(place)
        else:
            spoiled = content[:-1] if damage == "cut" else bytes([content[0] ^ 1]) + content[1:]
            mirror._filesystem.pipe_file(place, spoiled)

    spoil("checkpoints/step-00000004/weights")
    shutil.rmtree(folder)
    Mirror(folder, memory_url).open()
    latest = CheckpointStore(folder / "checkpoints", keep=2).latest()
    assert latest is not None and latest[1] == {"step": 2}, "the checkpoint before it is whole"
    assert "step-00000004/weights is missing or damaged" in caplog.text

    spoil("metrics.jsonl")
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=r"metrics\.jsonl is missing or damaged"):
        Mirror(folder, memory_url).open()
    assert not (folder / "checkpoints").exists()


def test_a_damaged_object_is_uploaded_again(tmp_path: Path, memory_url: str) -> None:
    """A step that is repeated bit for bit writes the file that the mirror lost."""
    folder = tmp_path / "run"
    store = make_run(folder)
    go_on(folder, store, 4)
    mirror = copy_once(folder, memory_url)
    path = "checkpoints/step-00000004/weights"
    entry = read_manifest(mirror).files[path]
    mirror._filesystem.pipe_file(f"{mirror._root}/{entry.name_object(path)}", b"damaged")
    shutil.rmtree(folder)

    restored = Mirror(folder, memory_url)
    restored.open()
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    go_on(folder, CheckpointStore(folder / "checkpoints", keep=2), 4)
    restored.copy()
    shutil.rmtree(folder)
    Mirror(folder, memory_url).open()
    latest = CheckpointStore(folder / "checkpoints", keep=2).latest()
    assert latest is not None and latest[1] == {"step": 4}


def test_a_process_that_is_replaced_while_it_uploads_leaves_the_mirror_to_its_successor(
    tmp_path: Path, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    store = make_run(folder)
    replaced = copy_once(folder, memory_url)
    tree = read_tree(folder)
    go_on(folder, store, 4)
    upload = replaced._upload
    successor = tmp_path / "successor"

    def upload_slowly(*arguments: Any) -> None:
        upload(*arguments)
        if not successor.exists():
            copy_once(successor, memory_url)

    monkeypatch.setattr(replaced, "_upload", upload_slowly)
    with pytest.raises(TakenOver):
        replaced.copy()
    Mirror(tmp_path / "third", memory_url).open()
    assert read_tree(tmp_path / "third") == tree


def test_paths_out_of_the_run_folder_are_refused(tmp_path: Path, memory_url: str) -> None:
    folder = tmp_path / "run"
    make_run(folder)
    mirror = copy_once(folder, memory_url)
    content = mirror._filesystem.cat_file(f"{mirror._root}/{MANIFEST}")
    mirror._filesystem.pipe_file(f"{mirror._root}/{MANIFEST}", content.replace(b'"metrics.jsonl"', b'"../../evil"'))
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=r"'\.\./\.\./evil', which is not inside the run folder"):
        Mirror(folder, memory_url).open()


def test_another_run_and_an_older_folder_are_refused(tmp_path: Path, memory_url: str) -> None:
    folder = tmp_path / "run"
    make_run(folder)
    old = copy_once(folder, memory_url)
    with pytest.raises(UserError, match=r"^run\.resume=never, and memory://.* holds a run"):
        Mirror(tmp_path / "new", memory_url).open(may_continue=False)

    other = tmp_path / "other"
    make_run(other)
    with pytest.raises(UserError, match="holds another run than"):
        Mirror(other, memory_url).open()

    moved = tmp_path / "moved"
    copy_once(moved, memory_url)
    with pytest.raises(TakenOver):
        old.copy()
    with pytest.raises(UserError, match="was continued from another folder since"):
        Mirror(folder, memory_url).open()
    copy_once(moved, memory_url)


def test_a_log_that_grows_during_its_copy_is_whole(tmp_path: Path, memory_url: str) -> None:
    """The mirror has the lines of the moment at which the copy began."""
    folder = tmp_path / "run"
    make_run(folder)
    filesystem = BlockedFilesystem()
    mirror = Mirror(folder, memory_url, filesystem=filesystem)
    mirror.open()
    lines = (folder / "metrics.jsonl").read_bytes()
    thread = threading.Thread(target=mirror.copy)
    thread.start()
    assert filesystem.entered.wait(DEADLINE_S)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3}\n')
    shutil.rmtree(folder / "checkpoints" / "step-00000002")
    filesystem.released.set()
    thread.join(DEADLINE_S)
    restored = tmp_path / "restored"
    Mirror(restored, memory_url).open()
    assert (restored / "metrics.jsonl").read_bytes() == lines
    assert (restored / "checkpoints" / "step-00000002" / "weights").exists()


def test_a_slow_mirror_delays_no_step(tmp_path: Path, memory_url: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    store = make_run(folder)
    filesystem = BlockedFilesystem()
    mirror = Mirror(folder, memory_url, filesystem=filesystem)
    mirror.open()
    with copy_periodically(mirror, interval_s=0.01, final_s=0.1):
        assert filesystem.entered.wait(DEADLINE_S)
        for step in (4, 6, 8):
            go_on(folder, store, step)
    assert "does not have the last files: 0.1 s were not enough" in caplog.text
    filesystem.released.set()


def test_a_new_checkpoint_is_copied_at_once(tmp_path: Path, memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "POLL_S", 0.01)
    folder = tmp_path / "run"
    store = make_run(folder)
    mirror = Mirror(folder, memory_url)
    mirror.open()
    with copy_periodically(mirror, interval_s=DEADLINE_S):
        go_on(folder, store, 4)
        deadline = time.monotonic() + DEADLINE_S / 2
        while "checkpoints/step-00000004/weights" not in read_manifest(mirror).files:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_mirror_that_fails_costs_one_warning_without_credentials(
    tmp_path: Path, memory_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    folder = tmp_path / "run"
    make_run(folder)
    mirror = Mirror(folder, memory_url)
    mirror.open()
    calls = threading.Semaphore(0)

    def refuse(*_: object, **__: object) -> None:
        calls.release()
        raise PermissionError(f"403 for key {SECRET}")

    with caplog.at_level(logging.WARNING), copy_periodically(mirror, interval_s=0.01), monkeypatch.context() as patch:
        patch.setattr(mirror._filesystem, "open", refuse)
        for _ in range(4):
            assert calls.acquire(timeout=DEADLINE_S)
    assert SECRET not in caplog.text
    failures = [record for record in caplog.messages if "403 for key ***" in record]
    assert len(failures) == 1
    assert "is up to date again" in caplog.messages[-1]
    shutil.rmtree(folder)
    Mirror(folder, memory_url).open()
    assert (folder / "metrics.jsonl").exists()


def test_a_secret_with_white_space_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRROR_SECRET", "two  words\tof a secret")
    assert describe_error(OSError("refused two  words\tof a secret\ntwice")) == "OSError: refused *** twice"


def test_a_mirror_that_cannot_be_written_ends_the_start(tmp_path: Path, memory_url: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no right to write")

    filesystem = DyingFilesystem()
    filesystem.pipe_file = refuse
    mirror = Mirror(tmp_path, memory_url, filesystem=filesystem)
    with pytest.raises(UserError, match=r"^run\.mirror: memory://.* cannot be written: .*no right to write"):
        mirror.open()


def test_no_credential_is_in_the_mirror(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    folder = tmp_path / "run"
    make_run(folder)
    mirror = copy_once(folder, url)
    paths = mirror._filesystem.find(mirror._root)
    assert len(paths) > 5
    assert not [path for path in paths if SECRET.encode() in mirror._filesystem.cat_file(path)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def whole(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("whole"), tokenizer, CONFIG)
    assert bench.run().step == NUM_STEPS
    return bench


@pytest.mark.parametrize("url", ["file", "s3"], indirect=True)
def test_a_run_whose_disk_is_lost_after_step_7_has_the_numbers_of_one_that_was_not(
    tokenizer: Any, whole: Bench, tmp_path: Path, url: str
) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    mirror = Mirror(folder, url)
    mirror.open()

    def kill(step: int, _metrics: dict[str, float]) -> None:
        if step == 7:
            mirror.copy()
            raise Killed

    with pytest.raises(Killed):
        Bench(folder, tokenizer, CONFIG, on_step=kill).run()
    shutil.rmtree(folder)
    folder.mkdir()

    Mirror(folder, url).open()
    second = Bench(folder, tokenizer, CONFIG)
    assert second.checkpoint_step() in (4, 6), "that of step 6 may not be complete"
    assert second.run().step == NUM_STEPS
    assert second.metrics() == whole.metrics()
    assert (second.learner.logits == whole.learner.logits).all()
