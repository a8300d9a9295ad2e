"""From which checkpoint a supervised training goes on, and how long its driver waits for a sign of life."""

import time
from functools import partial
from pathlib import Path

import pytest
from ray.train import ControllerError

from actors.learner.sft import _explain, _find_checkpoint, _follow
from actors.learner.sft_rank import Report, SFTProgress
from t2g.config import SFTOptions
from t2g.errors import RunStopped, Stopped, UserError
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.identity import Identity, save_identity

MADE_OF = Identity.from_config(SFTOptions(workers=2), weights="w", data="d")
NO_CHECKPOINT = (None, {"step": 0})


find_checkpoint = partial(_find_checkpoint, skip_unreadable=False)


def checkpoint(part: Path, step: int) -> Path:
    def fill(folder: Path) -> None:
        (folder / "weights").write_text("w")

    return CheckpointStore(part / "checkpoints", keep=1).write(step, fill, {"step": step})


def test_the_last_whole_checkpoint_of_the_same_training(tmp_path: Path) -> None:
    part = tmp_path / "model.part"
    assert find_checkpoint(part, MADE_OF) == NO_CHECKPOINT
    save_identity(part, MADE_OF)
    assert find_checkpoint(part, MADE_OF) == NO_CHECKPOINT
    folder = checkpoint(part, 500)
    assert find_checkpoint(part, MADE_OF) == (folder, {"step": 500})
    less_memory = SFTOptions(workers=2, offload="cpu", gradient_checkpointing=True)
    assert find_checkpoint(part, Identity.from_config(less_memory, weights="w", data="d")) == (folder, {"step": 500})
    assert find_checkpoint(part, Identity.from_config(SFTOptions(workers=2), weights="w", data="e")) == NO_CHECKPOINT
    assert find_checkpoint(part, Identity.from_config(SFTOptions(workers=1), weights="w", data="d")) == NO_CHECKPOINT
    (folder / "weights").write_text("torn")
    with pytest.raises(UserError, match=r"step-00000500 \(weights differs from manifest\.json\)"):
        find_checkpoint(part, MADE_OF)
    assert _find_checkpoint(part, MADE_OF, skip_unreadable=True) == NO_CHECKPOINT
    (part / "identity.json").unlink()
    (part / "identity.json").mkdir()
    with pytest.raises(UserError, match=r"identity\.json is a folder"):
        find_checkpoint(part, MADE_OF)


def test_what_another_version_of_the_program_left_is_not_gone_on_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path, 500)
    assert find_checkpoint(tmp_path, MADE_OF) == NO_CHECKPOINT
    assert "by another version of this program" in caplog.text
    assert "starts from the base model" in caplog.text


class Ranks:
    """Three reports of progress, `pause_s` apart, with a step between them; then the end, or silence."""

    def __init__(self, *, pause_s: float, then_silent: bool = False) -> None:
        self.pause_s = pause_s
        self.then_silent = then_silent
        self.steps = [10, 15, 20, 25, 30]

    def read(self) -> tuple[list[Report], bool]:
        time.sleep(0.05)
        if not self.steps:
            return [], not self.then_silent
        time.sleep(self.pause_s / 2)
        step = self.steps.pop(0)
        progress = SFTProgress(step=step, num_steps=40, loss=1, grad_norm=1, lr=1, tokens_per_s=1, train_s=1)
        return [(step, progress if step % 10 == 0 else None)], False


def test_the_deadline_begins_again_with_each_report() -> None:
    reports: list[tuple[int, bool]] = []
    last = _follow(Ranks(pause_s=0.6).read, 1.5, lambda step, progress: reports.append((step, progress is not None)))
    assert reports == [(10, True), (15, False), (20, True), (25, False), (30, True)]
    assert last is not None and last.step == 30


def test_a_stop_is_passed_to_the_ranks_once_and_their_end_is_awaited() -> None:
    """Another step is reported before they end."""
    ranks = Ranks(pause_s=0)
    reports: list[int] = []
    requests: list[int] = []

    def request_stop() -> None:
        requests.append(reports[-1])
        del ranks.steps[1:]

    last = _follow(ranks.read, 5, lambda step, _: reports.append(step), lambda: 15 in reports, request_stop)
    assert requests == [15]
    assert reports == [10, 15, 20]
    assert last is not None and last.step == 20


def test_a_stop_before_the_first_step_waits_for_no_rank() -> None:
    with pytest.raises(Stopped):
        _follow(lambda: ([], False), 5, lambda step, progress: None, lambda: True)


def test_ranks_that_do_not_end_after_a_stop_are_late() -> None:
    with pytest.raises(RunStopped, match="timed out"):
        _follow(Ranks(pause_s=0, then_silent=True).read, 0.3, lambda step, progress: None, lambda: True)


def test_an_end_without_a_report_has_no_progress() -> None:
    assert _follow(lambda: ([], True), 1, lambda step, progress: None) is None


def test_ranks_that_fall_silent_are_late_in_a_sentence() -> None:
    ranks = Ranks(pause_s=0, then_silent=True)
    with pytest.raises(RunStopped, match=r"timed out: its ranks reported nothing for 0\.5 s.*stood at step 30 of 40"):
        _follow(ranks.read, 0.5, lambda step, progress: None)
    with pytest.raises(RunStopped, match=r"no rank has reported yet"):
        _follow(lambda: ([], False), 0, lambda step, progress: None)


def test_a_failed_start_is_reported_without_a_trace() -> None:
    trace = "One of the worker actors failed to initialize due to error:\nTraceback\n  File\nActorDied: out of memory"
    message = str(_explain(ControllerError(RuntimeError(trace)), SFTOptions()))
    assert "failed to initialize due to error: ActorDied: out of memory; if it was short of memory, " in message
    assert message.endswith("lower sft.tokens_per_microbatch (4096) or set sft.gradient_checkpointing=true")
    assert "File" not in message
    assert str(_explain(ControllerError(ValueError("one line")), SFTOptions())).endswith("ValueError: one line")
