"""Trackers: their own readers find curves and samples, and what fails or is slow leaves the run as it is."""

import errno
import json
import os
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from fakes import letter_tokenizer
from heads import free_port
from trainer_bench import NUM_STEPS, Bench, job

from t2g.config import LogConfig
from t2g.config.common import TrackerName
from t2g.runs.log import RunLog, SampleRecord, SampleRow, Split
from t2g.runs.trackers import tracker_threads
from t2g.runs.trackers.tracker import TrackedRun, format_markdown, format_page
from t2g.runs.trackers.tracker_threads import Trackers
from t2g.types import Span, SpanFeedback

DEADLINE_S = 60
CONFIG = {"num_steps": 6, "model.policy": "unused", "rollout.temperature": 0.6}
SECRET = "sk-proj-0123456789abcdef"
GREEN = "#c6efce"
RED = "#ffc7ce"
FULL = 1  # kinds of pieces of a record in W&B's files
LAST = 4


class FakeTracker:
    """Keeps what it gets; `on_call` may raise or wait."""

    def __init__(self, on_call: Callable[[str], None] = lambda name: None) -> None:
        self.on_call = on_call
        self.runs: list[TrackedRun] = []
        self.metrics: list[tuple[int, Mapping[str, float]]] = []
        self.tables: list[tuple[int, str]] = []
        self.reports: list[Path] = []
        self.num_closed = 0

    def make(self, run: TrackedRun) -> "FakeTracker":
        self.on_call("make")
        self.runs.append(run)
        return self

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.on_call("log_metrics")
        self.metrics.append((step, metrics))

    def log_samples(self, step: int, split: Split, rows: Sequence[SampleRow]) -> None:
        self.on_call("log_samples")
        self.tables.append((step, split))

    def log_report(self, path: Path) -> None:
        self.on_call("log_report")
        self.reports.append(path)

    def close(self) -> None:
        self.num_closed += 1


def make_row(step: int = 1) -> SampleRow:
    spans = (Span(start=0, end=4, label=1), Span(start=9, end=12, label=-1))
    feedback = SpanFeedback(critique="a|b", spans=spans, status="ok", source="program", version="v")
    sample = SampleRecord(
        step=step, split="train", prompt_id="p0", sample_index=0, prompt="Say\n<it>", response="good *and bad",
        finish_reason="stop", feedback=feedback,
    )  # fmt: skip
    return SampleRow(sample, 0.5)


def make_trackers(folder: Path, **makers: Any) -> Trackers:
    return Trackers(folder, LogConfig(project="own"), CONFIG, makers)


def log_run(folder: Path, name: TrackerName) -> None:
    """Log steps 1 to 3 of a run, of which the last is lost; then 3 and 4 by a second process, and the report."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.html"
    report.write_text("<html>the report</html>")
    (folder / "config.yaml").write_text("num_steps: 6\n")
    for steps in ((1, 2, 3), (3, 4)):
        with closing(Trackers(folder, LogConfig(trackers=(name,), project="own"), CONFIG)) as trackers:
            trackers.start(steps[0])
            for step in steps:
                trackers.log(
                    step, {"policy/kl": step / 4, "feedback/metrics/tone (odd!)": 1.0, "eval/none": float("nan")}
                )
            trackers.log_samples(steps[-1], "train", [make_row(steps[-1])])
            trackers.log_report(report)


# ------------------------------------------------------------------------------------------------------------ isolation
def test_a_tracker_gets_everything_in_order_and_is_opened_again_for_a_new_learner(tmp_path: Path) -> None:
    fake = FakeTracker()
    report = tmp_path / "report.html"
    with closing(make_trackers(tmp_path, fake=fake.make)) as trackers:
        trackers.log_report(report)
        trackers.start(0)
        trackers.log(0, {"a": 0.5})
        trackers.start(1)
        trackers.log(1, {"a": 0.25})
        trackers.log_samples(1, "eval", [make_row()])
        report.touch()
        trackers.log_report(report)
    assert [run.first_step for run in fake.runs] == [0, 1]
    assert (fake.runs[0].project, fake.runs[0].name, fake.runs[0].config) == ("own", tmp_path.name, CONFIG)
    assert fake.metrics == [(0, {"a": 0.5}), (1, {"a": 0.25})]
    assert (fake.tables, fake.reports, fake.num_closed) == ([(1, "eval")], [report], 2)


@pytest.mark.parametrize("error", [ConnectionError("no network"), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("failing", ["make", "log_metrics"])
def test_what_fails_costs_one_warning_and_no_other_tracker(
    tmp_path: Path, error: Exception, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        if name == failing:
            raise error

    broken = FakeTracker(fail)
    fake = FakeTracker()
    with closing(make_trackers(tmp_path, broken=broken.make, fake=fake.make)) as trackers:
        trackers.start(0)
        for step in range(20):
            trackers.log(step, {"a": 0.5})
        trackers.log_samples(1, "eval", [make_row()])
    assert [step for step, _ in fake.metrics] == [*range(20)]
    assert broken.tables == ([] if failing == "make" else [(1, "eval")])
    warnings = [message for message in caplog.messages if "broken failed: " in message]
    assert len(warnings) == 1
    assert str(error) in warnings[0]


def test_few_of_many_failures_are_reported_and_without_credentials(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = iter(range(100))

    def fail(name: str) -> None:
        if name == "log_metrics":
            raise PermissionError(f"wrong key {SECRET} in request {next(numbers)}")

    with closing(make_trackers(tmp_path, fake=FakeTracker(fail).make)) as trackers:
        trackers.start(0)
        for step in range(20):
            trackers.log(step, {})
    assert len(caplog.messages) == 3
    assert SECRET not in caplog.text


def test_a_tracker_that_hangs_delays_neither_steps_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()
    hanging = FakeTracker(lambda name: released.wait(DEADLINE_S) and None)
    monkeypatch.setattr(tracker_threads, "END_S", 0.2)
    trackers = make_trackers(tmp_path, hanging=hanging.make)
    trackers.start(0)
    num_calls = tracker_threads.MAX_WAITING + 50
    started = time.monotonic()
    for step in range(num_calls):
        trackers.log(step, {"a": 0.5})
    trackers.close()
    assert time.monotonic() - started < DEADLINE_S / 4
    assert "hanging is slow: it is 200 calls behind" in caplog.text
    assert "hanging did not take everything within 0.2 s" in caplog.text
    released.set()
    deadline = time.monotonic() + DEADLINE_S
    while hanging.num_closed == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert hanging.num_closed == 1, "the calls that waited are made, and the last one closes the tracker"


def test_a_run_with_broken_trackers_has_the_same_numbers(tmp_path: Path) -> None:
    tokenizer = letter_tokenizer(tmp_path)
    released = threading.Event()

    def fail(name: str) -> None:
        raise ConnectionError(name)

    plain = Bench(tmp_path / "plain", tokenizer, job())
    plain.run()
    broken = FakeTracker(fail)
    hanging = FakeTracker(lambda name: released.wait(DEADLINE_S) and None)
    fake = FakeTracker()
    trackers = make_trackers(tmp_path / "own", broken=broken.make, hanging=hanging.make, fake=fake.make)
    bench = Bench(tmp_path / "own", tokenizer, job())
    bench.trainer.log = RunLog(tmp_path / "own", job().log, [trackers])
    bench.run()
    assert bench.metrics() == plain.metrics()
    released.set()
    trackers.close()
    assert [step for step, _ in fake.metrics] == [*range(NUM_STEPS + 1)]
    assert fake.tables == [(0, "eval"), (1, "train"), (3, "eval"), (6, "eval")]


# --------------------------------------------------------------------------------------------------------------- tables
def test_the_page_of_samples_has_colored_spans_and_escaped_text() -> None:
    page = format_page([make_row()])
    assert f'<mark style="background:{GREEN}">good</mark>' in page
    assert f'<mark style="background:{RED}"> ba</mark>' in page
    assert "Say\n&lt;it&gt;" in page
    assert "<td>0.5</td>" in page


def test_markdown_of_samples_keeps_their_text() -> None:
    from tensorboard import plugin_util

    rendered = plugin_util.markdown_to_safe_html(format_markdown([make_row()]))
    assert "<strong>good</strong> *and<em> ba</em>d" in rendered
    assert "<td>a&#124;b</td>" in rendered and "Say<br>&lt;it&gt;" in rendered
    assert rendered.count("<tr>") == 2


# -------------------------------------------------------------------------------------------------------- TensorBoard
def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_run(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    curve = [(event.step, event.value) for event in events.Scalars("policy/kl")]
    assert curve == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    table = events.Tensors("samples/train/text_summary")[-1]
    assert b"<strong>good</strong>" in table.tensor_proto.string_val[0]
    assert b"rollout.temperature: 0.6" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


# ---------------------------------------------------------------------------------------------------- Weights & Biases
class FakeWandb:
    """The part of W&B's module that a run uses."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.options: list[dict[str, Any]] = []
        self.artifacts: list[tuple[str, str]] = []

    def init(self, **options: Any) -> "FakeWandb":
        self.options.append(options)
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts.append((artifact.type, artifact.path))

    def finish(self) -> None: ...

    def Html(self, text: str) -> str:  # noqa: N802 the name of W&B
        return f"html:{text}"

    class Artifact:
        def __init__(self, name: str, type: str) -> None:  # noqa: A002 the name of W&B
            self.type = type

        def add_file(self, path: str) -> None:
            self.path = path

    class Table:
        def __init__(self, columns: list[str]) -> None:
            self.columns = columns
            self.rows = list[dict[str, Any]]()

        def add_data(self, *values: Any) -> None:
            self.rows.append(dict(zip(self.columns, values, strict=True)))


def test_wandb_has_a_table_of_samples_with_colored_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log_run(tmp_path / "run", "wandb")
    tables = [(step, values["samples/train"].rows) for step, values in wandb.logged if "samples/train" in values]
    assert [step for step, _ in tables] == [3, 4]
    (row,) = tables[0][1]
    assert re.search(rf"^html:<div.*<mark style=\"background:{GREEN}\">good</mark>", row.pop("response"))
    assert row == {
        "prompt_id": "p0", "prompt": "Say\n<it>", "critique": "a|b", "status": "ok", "reward": 0.5, "outcomes": "{}"
    }  # fmt: skip
    curve = [(step, values["policy/kl"]) for step, values in wandb.logged if "policy/kl" in values]
    assert curve == [(1, 0.25), (2, 0.5), (3, 0.75), (3, 0.75), (4, 1.0)]
    first, second = wandb.options
    assert first["config"] == CONFIG
    assert (first["id"], first["project"], first["name"], first["resume"]) == (second["id"], "own", "run", "allow")
    assert wandb.artifacts == [("report", str(tmp_path / "run" / "report.html"))] * 2


def read_wandb(file: Path) -> Iterator[Any]:
    """Yield the records of a file of W&B's offline mode, a log in the format of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    content = file.read_bytes()
    assert content[:4] == b":W&B"
    position = 7
    data = b""
    while position + 7 <= len(content):
        rest_of_block = 32768 - position % 32768
        if rest_of_block < 7:  # padding
            position += rest_of_block
            continue
        _checksum, length, kind = struct.unpack("<IHB", content[position : position + 7])
        position += 7
        data += content[position : position + length]
        position += length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            yield record
            data = b""


@pytest.mark.slow  # W&B starts a process of its own
def test_the_files_of_wandb_offline_have_curves_config_samples_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setattr(tracker_threads, "END_S", 3 * DEADLINE_S)
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "run"
    log_run(folder, "wandb")
    logs = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    assert {file.stem.removeprefix("run-") for file in logs} == {(folder / "wandb_id").read_text()}
    records = [record for file in logs for record in read_wandb(file)]
    curve: list[tuple[int, float]] = []
    tables: list[str] = []
    for record in records:
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if "policy/kl" in items:
            curve.append((record.history.step.num, json.loads(items["policy/kl"])))
        if "samples/train/path" in items:
            tables.append(items["samples/train/path"])
    assert curve == [(1, 0.25), (2, 0.5), (3, 0.75), (3, 0.75), (4, 1.0)]
    assert len(tables) == 2
    updates = [update for record in records for update in record.run.config.update]
    config = {update.key: json.loads(update.value_json) for update in updates}
    assert config["rollout.temperature"] == 0.6
    files: dict[str, str] = {}
    for record in records:
        for entry in record.artifact.manifest.contents:
            files[f"{record.artifact.type}/{entry.path}"] = Path(entry.local_path).read_text()
    assert files["report/report.html"] == "<html>the report</html>"
    pages = [text for path, text in files.items() if path.endswith(".html") and path.startswith("run_table")]
    assert pages and all(GREEN in page for page in pages)


# --------------------------------------------------------------------------------------------------------------- MLflow
@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """A local server of MLflow in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder / 'server.db'}",
        "--artifacts-destination",
        str(folder / "art"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 10 * DEADLINE_S
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 15)
        process.wait(timeout=DEADLINE_S)


@pytest.mark.slow  # creates a database; a server process
@pytest.mark.parametrize("kind", ["folder", "server"])
def test_mlflow_has_curves_config_samples_and_report(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setattr(tracker_threads, "END_S", 3 * DEADLINE_S)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "run"
    if kind == "folder":
        log_run(folder, "mlflow")
        check_mlflow(mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}"), tmp_path)
        return
    with mlflow_server(tmp_path) as url:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        log_run(folder, "mlflow")
        check_mlflow(mlflow.MlflowClient(tracking_uri=url), tmp_path)


def check_mlflow(client: Any, folder: Path) -> None:
    experiment = client.get_experiment_by_name("own")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["rollout.temperature"] == "0.6"
    history = client.get_metric_history(run.info.run_id, "policy/kl")
    assert sorted({(point.step, point.value) for point in history}) == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert run.data.metrics["feedback/metrics/tone _odd__"] == 1.0
    names = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert names == {"config.yaml", "report.html", "samples"}
    page = client.download_artifacts(run.info.run_id, "samples/train-00000003.html", str(folder))
    assert f'<mark style="background:{GREEN}">good</mark>' in Path(page).read_text()
    report = client.download_artifacts(run.info.run_id, "report.html", str(folder))
    assert "the report" in Path(report).read_text()


# -------------------------------------------------------------------------------------------------------------- trackio
READ_TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage

(run,) = SQLiteStorage.get_runs("own")
print(json.dumps([run, SQLiteStorage.get_run_config("own", run), SQLiteStorage.get_logs("own", run)]))
"""


@pytest.mark.slow  # trackio waits for its writer
def test_trackio_has_curves_config_samples_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    home = tmp_path / "trackio"
    monkeypatch.setattr(tracker_threads, "END_S", 3 * DEADLINE_S)
    write = (
        f"import sys, test_trackers; test_trackers.log_run(test_trackers.Path({str(tmp_path / 'run')!r}), 'trackio')"
    )
    environ = {**os.environ, "TRACKIO_DIR": str(home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", write], env=environ, check=True, timeout=4 * DEADLINE_S)
    done = subprocess.run(
        [sys.executable, "-c", READ_TRACKIO], env=environ, check=True, timeout=2 * DEADLINE_S, capture_output=True
    )
    run, config, logs = json.loads(done.stdout.splitlines()[-1])
    assert run.startswith("run-")
    assert config["rollout.temperature"] == 0.6
    curve = {(line["step"], line["policy/kl"]) for line in logs if "policy/kl" in line}
    assert sorted(curve) == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    pages = [path.read_text() for path in home.glob("media/own/**/*.html")]
    assert len(pages) == 2 and all(GREEN in page for page in pages)
    blobs = [path.read_bytes() for path in home.glob("artifacts/own/blobs/**/*") if path.is_file()]
    assert b"<html>the report</html>" in blobs
