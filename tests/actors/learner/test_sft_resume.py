"""From which checkpoint a supervised training goes on, and how long its driver waits for a sign of life."""

import json
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from ray.train import ControllerError

from actors.learner.sft import _explain, _follow, _report_step, _resume_point
from actors.learner.sft_rank import SFTProgress
from t2g.config import SFTOptions
from t2g.errors import RunStopped
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.identity import Identity, keep

MADE_OF = Identity.of(SFTOptions(workers=2), weights="w", data="d")


def checkpoint(part: Path, step: int) -> Path:
    def fill(folder: Path) -> None:
        (folder / "weights").write_text("w")

    return CheckpointStore(part / "checkpoints", keep=1).write(step, fill, {"step": step})


def test_the_last_whole_checkpoint_of_the_same_training(tmp_path: Path) -> None:
    part = tmp_path / "model.part"
    assert _resume_point(part, MADE_OF) == (None, 0)
    keep(part, MADE_OF)
    assert _resume_point(part, MADE_OF) == (None, 0)
    folder = checkpoint(part, 500)
    assert _resume_point(part, MADE_OF) == (folder, 500)
    less_memory = SFTOptions(workers=2, offload="cpu", gradient_checkpointing=True)
    assert _resume_point(part, Identity.of(less_memory, weights="w", data="d")) == (folder, 500)
    assert _resume_point(part, Identity.of(SFTOptions(workers=2), weights="w", data="e")) == (None, 0)
    assert _resume_point(part, Identity.of(SFTOptions(workers=1), weights="w", data="d")) == (None, 0)
    (folder / "weights").write_text("torn")
    assert _resume_point(part, MADE_OF) == (None, 0)


def test_what_another_version_of_the_program_left_is_not_gone_on_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path, 500)
    assert _resume_point(tmp_path, MADE_OF) == (None, 0)
    assert "by another version of this program" in caplog.text
    assert "starts from the base model" in caplog.text


def ranks(reports: Path, *, pause_s: float, then_silent: bool, end: threading.Event) -> threading.Thread:
    """Three reports, one each `pause_s`; then the empty one, or nothing any more."""

    def work() -> None:
        for step in (10, 20, 30):
            time.sleep(pause_s)
            progress = SFTProgress(
                step=step, num_steps=40, loss=1, grad_norm=1, lr=1, tokens_per_s=1, train_s=1, left_s=1
            )
            with reports.open("a") as file:
                file.write(json.dumps(asdict(progress)) + "\n")
        if then_silent:
            end.wait(30)
        else:
            with reports.open("a") as file:
                file.write("{}\n")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(0.05)
    return not thread.is_alive()


def test_the_deadline_begins_again_with_each_report(tmp_path: Path) -> None:
    end, steps = threading.Event(), []
    thread = ranks(tmp_path / "r", pause_s=0.6, then_silent=False, end=end)
    last = _follow(lambda: ended(thread), tmp_path / "r", 1.5, lambda progress: steps.append(progress.step))
    assert steps == [10, 20, 30]
    assert last["step"] == 30


def test_an_end_without_the_last_report_is_no_model(tmp_path: Path) -> None:
    assert _follow(lambda: True, tmp_path / "r", 1, lambda progress: None) is None


def test_ranks_that_fall_silent_are_late_in_a_sentence(tmp_path: Path) -> None:
    end = threading.Event()
    thread = ranks(tmp_path / "r", pause_s=0, then_silent=True, end=end)
    with pytest.raises(RunStopped, match=r"late: nothing was heard .* for 0\.5 s.*stood at step 30 of 40"):
        _follow(lambda: ended(thread), tmp_path / "r", 0.5, lambda progress: None)
    end.set()


def test_steps_are_told_between_two_reports(tmp_path: Path) -> None:
    steps: list[int] = []
    for content in (None, "", "3", "4"):
        if content is not None:
            (tmp_path / "step").write_text(content)
        _report_step(tmp_path / "step", steps.append)
    assert steps == [3, 4]


def test_a_start_that_failed_is_told_with_what_happened_and_not_with_the_trace() -> None:
    trace = "One of the worker actors failed to initialize due to error:\nTraceback\n  File\nActorDied: out of memory"
    said = str(_explain(ControllerError(RuntimeError(trace))))
    assert said.endswith("failed to initialize due to error: ActorDied: out of memory") and "File" not in said
    assert str(_explain(ControllerError(ValueError("one line")))).endswith("ValueError: one line")
