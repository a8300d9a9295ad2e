"""A stopped supervised training keeps every step, and reports the same means when it goes on; the ranks are fakes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from synced_paths import record_syncs
from torch.distributed import HashStore

from actors.learner import sft_rank
from actors.learner.export import EXPORT_FILE
from actors.learner.sft import DONE_FILE, Launcher, _publish
from actors.learner.sft_rank import CHECKPOINTS, MODEL, RankJob, SFTProgress, train_loop
from t2g.config import SFTOptions
from t2g.metrics import GRAD_NORM, LEARNING_RATE, POLICY_LOSS, fill
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.identity import Identity

NUM_STEPS = 24
STOP_AT = 7
TENSORS = SimpleNamespace(engine=SimpleNamespace(device=torch.device("cpu")))


class FakeRank:
    """The loss of step n is n."""

    def __init__(self, *_: Any) -> None:
        self.rank = 0
        self.num_updates = 0
        self.models = {"policy": TENSORS}

    def start(self, master: tuple[str, int]) -> None: ...

    def load(self, model: str, folder: Path, *, universal: bool) -> None:
        self.num_updates = int((folder / "updates").read_text())

    def save(self, model: str, folder: Path) -> None:
        (folder / "updates").write_text(str(self.num_updates))

    def update(self, *_: Any) -> dict[str, float]:
        self.num_updates += 1
        grad_norm = fill(GRAD_NORM, "policy")
        rate = fill(LEARNING_RATE, "policy")
        return {POLICY_LOSS: float(self.num_updates), grad_norm: 1.0, rate: 0.1}

    def export(self, folder: Path) -> None:
        folder.write_text(str(self.num_updates))


class Driver(Launcher):
    """Asks for a stop after the step `stop_at`."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self._stop_at = stop_at
        self.report: Any = SimpleNamespace(remote=self._report)

    def _report(self, report: tuple[int, SFTProgress | None]) -> bool:
        if report[0] == self._stop_at:
            self.request_stop()
        return Launcher.report(self, report)


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    context = SimpleNamespace(get_world_rank=lambda: 0)
    train = SimpleNamespace(get_context=lambda: context)
    monkeypatch.setattr(sft_rank, "ray", SimpleNamespace(get=lambda value: value, train=train))
    monkeypatch.setattr(sft_rank, "LearnerWorker", FakeRank)
    monkeypatch.setattr(sft_rank, "select_rank_batch", lambda batch, plan: batch)
    monkeypatch.setattr(sft_rank, "normalize_weights", lambda examples: examples)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def make_job(folder: Path, **checkpoint: Any) -> RankJob:
    examples: Any = [[1, 2, 3]] * 8
    spec: Any = SimpleNamespace(seed=1, plan=lambda batch, num_ranks: [batch])
    options = SFTOptions(num_epochs=NUM_STEPS, batch_size=8, checkpoint_every=None)
    fields = {"checkpoint": None, "done": 0} | checkpoint
    return RankJob(spec=spec, options=options, examples=examples, folder=folder, **fields)


def train(job: RankJob, *, stop_at: int | None = None) -> list[SFTProgress]:
    """Return the progress that was reported."""
    driver = Driver(stop_at)
    train_loop({"job": job, "launcher": driver})
    return [progress for _, progress in driver.take_reports() if progress is not None]


def means(reports: list[SFTProgress]) -> list[tuple[int, float]]:
    return [(progress.step, progress.loss) for progress in reports]


@pytest.fixture
def stopped(tmp_path: Path) -> Callable[[], RankJob]:
    """Return the job that continues a training that was stopped."""

    def stop() -> RankJob:
        assert train(make_job(tmp_path), stop_at=STOP_AT) == []
        checkpoint = CheckpointStore(tmp_path / CHECKPOINTS, keep=1).latest()
        assert checkpoint is not None
        folder, state = checkpoint
        assert state["step"] == STOP_AT
        return make_job(tmp_path, checkpoint=folder, done=state["step"], unreported_metrics=state["unreported_metrics"])

    return stop


def test_a_stopped_training_keeps_its_steps_and_writes_no_model(stopped: Callable[[], RankJob], tmp_path: Path) -> None:
    job = stopped()
    assert not (tmp_path / MODEL).exists()
    train(job)
    assert (tmp_path / MODEL).read_text() == str(NUM_STEPS)


def test_a_resumed_training_reports_the_means_of_one_that_was_never_stopped(
    stopped: Callable[[], RankJob], tmp_path: Path
) -> None:
    resumed = means(train(stopped()))
    assert resumed == [(10, 5.5), (20, 15.5), (24, 22.5)]
    whole = tmp_path / "whole"
    whole.mkdir()
    assert resumed == means(train(make_job(whole)))


def test_a_stop_after_the_last_step_comes_too_late(tmp_path: Path) -> None:
    train(make_job(tmp_path), stop_at=NUM_STEPS)
    assert (tmp_path / MODEL).read_text() == str(NUM_STEPS)
    assert not (tmp_path / CHECKPOINTS).exists()


def test_the_model_is_on_the_disk_before_the_file_that_declares_it_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut that file alone would make a model without weights a finished one."""
    synced = record_syncs(monkeypatch)
    part = tmp_path / "model.part"
    written = part / MODEL
    (written / "adapter").mkdir(parents=True)
    weights = [written / "model.safetensors", written / "adapter" / "adapter_model.safetensors"]
    for file in weights:
        file.write_text("weights")
    (written / EXPORT_FILE).write_text('{"probe_gap": {"largest": 0.5}}')
    out_folder = tmp_path / "model"
    _publish(part, out_folder, {"loss": 1.0}, Identity.from_config(SFTOptions(workers=1), weights="w"))

    assert (out_folder / DONE_FILE).is_file()
    done = next(number for number, path in enumerate(synced) if DONE_FILE in path.name)
    assert {*weights, written / "adapter", written} <= {*synced[:done]}
    assert synced[-1] == tmp_path, "the move"
