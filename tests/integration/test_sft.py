"""Supervised training on the real stack: Ray Train, gloo, ZeRO-3, a tiny random Llama."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from heads import free_port
from learner_runs import as_a_rank
from processes import title
from safetensors.torch import load_file
from sft_runs import (
    MEMORISED,
    assert_writes_the_targets,
    make_base,
    make_examples,
    make_options,
    stand_in_the_way,
    step_aside,
    train,
)

from actors.learner.sft import run_sft
from actors.learner.sft_rank import MODEL, SFTProgress
from t2g.config import ClusterConfig, ModelConfig, OptimConfig
from t2g.errors import RunStopped, UserError
from t2g.runs.identity import Identity

SETTINGS = {"num_epochs": 50, "checkpoint_every": 20}  # of all eight examples in each step
WEIGHT_TOLERANCE = 2e-3  # float32, 50 steps of AdamW at 5e-3: what the order of sums may come to


@pytest.fixture(scope="module")
def cluster(cluster: None) -> ClusterConfig:
    return ClusterConfig()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@dataclass(frozen=True)
class Trained:
    """A training on two ranks that lost one, and went on after its checkpoint."""

    folder: Path
    metrics: dict[str, float]
    before: list[SFTProgress]  # reports of the start that was cut short
    after: list[SFTProgress]
    done: list[int]  # steps that each start found done
    steps: list[int]  # told between the reports of the second start
    raylet_lines: list[str]  # that Ray printed on the driver in the second start


def cut_off_export(part: Path) -> None:
    """Where the ranks write the model: what lies there would be moved with it."""
    (part / MODEL).mkdir(parents=True)
    (part / MODEL / "half.safetensors").touch()


@pytest.fixture(scope="module")
def trained(base: Path, cluster: ClusterConfig, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained") / "model"
    part = folder.with_name("model.part")
    before = list[SFTProgress]()
    done = list[int]()

    def on_start(steps: int) -> None:
        done.append(steps)
        stand_in_the_way(part, 20)

    with pytest.raises(RunStopped, match=r"rank 0: FileExistsError.*checkpoints"):
        train(base, folder, cluster, on_start, seen=before, **SETTINGS, workers=2)
    assert not folder.exists()
    step_aside(part)
    cut_off_export(part)
    steps = list[int]()
    raylet_lines = list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray._private.worker.print_to_stdstream", lambda data, **_: raylet_lines.extend(data["lines"]))
        metrics, after = train(base, folder, cluster, done.append, on_step=steps.append, **SETTINGS, workers=2)
        time.sleep(1.5)  # Ray's thread prints what a raylet says of a dead worker
    assert not part.exists()
    return Trained(folder, metrics, before, after, done, steps, raylet_lines)


def test_memorises_and_reports(trained: Trained) -> None:
    last = trained.after[-1]
    assert all(progress.num_steps == 50 for progress in trained.before + trained.after)
    assert trained.before[0].loss > 1 > MEMORISED > last.loss
    assert trained.metrics["loss"] == last.loss
    assert trained.metrics["wall_s"] > trained.metrics["train_s"] > 0


def test_a_training_that_lost_a_rank_goes_on_after_its_checkpoint(trained: Trained) -> None:
    """With the numbers that it had: reports are of the ten steps before them."""
    assert trained.done == [0, 20]
    assert [progress.step for progress in trained.before[:3]] == [10, 20, 30]
    assert [progress.step for progress in trained.after] == [30, 40, 50]
    cut = trained.before[2]
    resumed = trained.after[0]
    assert (resumed.loss, resumed.grad_norm) == pytest.approx((cut.loss, cut.grad_norm), rel=1e-5)
    written = {path.name for path in trained.folder.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= written and "half.safetensors" not in written


def test_every_step_is_reported_and_a_planned_exit_of_the_controller_is_not(trained: Trained) -> None:
    assert trained.steps == sorted(trained.steps)
    assert set(trained.steps) <= set(range(21, 51))
    assert set(trained.steps) - {30, 40, 50}, "steps between two reports"
    assert trained.raylet_lines == []


def test_the_exported_folder_generates_the_targets(trained: Trained) -> None:
    assert_writes_the_targets(trained.folder)


def test_a_finished_folder_is_kept_and_another_training_refused(
    trained: Trained, base: Path, cluster: ClusterConfig
) -> None:
    folder = trained.folder
    metrics = trained.metrics
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert train(base, folder, cluster, **SETTINGS, workers=2, timeout_s=300) == (metrics, [])
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(UserError, match=r"num_epochs \(50\.0 -> 51\.0\)"):
        train(base, folder, cluster, **SETTINGS | {"num_epochs": 51}, workers=2)


@pytest.mark.slow  # another training
def test_one_rank_gives_the_same_weights(trained: Trained, base: Path, cluster: ClusterConfig, tmp_path: Path) -> None:
    folder = trained.folder
    seen_by_two = trained.before
    leftover = tmp_path / "one.part"
    cut_off_export(leftover)  # of a training that was killed: it starts again
    _, seen_by_one = train(base, tmp_path / "one", cluster, **SETTINGS, workers=1)
    assert not leftover.exists()
    assert not (tmp_path / "one" / "half.safetensors").exists()
    # Adam hides a gradient of the wrong size from the weights; its norm does not.
    assert math.isclose(seen_by_one[0].grad_norm, seen_by_two[0].grad_norm, rel_tol=1e-3)
    assert math.isclose(seen_by_one[0].loss, seen_by_two[0].loss, rel_tol=1e-3)
    one = load_file(tmp_path / "one" / "model.safetensors")
    two = load_file(folder / "model.safetensors")
    start = load_file(base / "model.safetensors")
    assert one.keys() == two.keys() == start.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < WEIGHT_TOLERANCE
    assert max(float((one[name] - start[name]).abs().max()) for name in one) > 10 * WEIGHT_TOLERANCE
    assert all(tensor.dtype == torch.float32 for tensor in two.values())


def gradient_that_is_no_number() -> tuple[str, bool]:
    """What a step says whose loss is 0 and whose gradient is 0 * inf, and whether the weights are as before."""
    from actors.learner import zero3
    from actors.learner.full_weights import FullWeights

    zero3.init_distributed(0, 1, "127.0.0.1", free_port(), "gloo", timeout_s=60)
    model = torch.nn.Linear(2, 1)
    engine = zero3.build_engine(model, OptimConfig(lr=1.0), num_steps=1, dtype="float32", world_size=1)

    def weights() -> list[torch.Tensor]:
        return [w.clone() for bucket in FullWeights(engine).buckets(1 << 20, "float32") for _, w in bucket]

    def loss_fn(wrapped: Any, microbatch: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        return (wrapped(microbatch).sum() * 0).sqrt(), {}

    before = weights()
    message = ""
    try:
        zero3.train_step(engine, [torch.ones(1, 2)], loss_fn, label="step 7")
    except RunStopped as error:
        message = str(error)
    return message, all(torch.equal(a, b) for a, b in zip(before, weights(), strict=True))


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    with as_a_rank():
        message, untouched = gradient_that_is_no_number()
    assert message == "step 7: the gradient is not finite; the optimizer step was not applied"
    assert untouched


@pytest.mark.slow  # another training
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_no_model(
    base: Path, cluster: ClusterConfig, tmp_path: Path
) -> None:
    with pytest.raises(RunStopped, match=r"step \d+, examples 0, 1, 2 and 5 more.*not finite"):
        train(base, tmp_path / "bad", cluster, optim=OptimConfig(lr=1e25, schedule="constant"))
    assert not (tmp_path / "bad").exists()


@pytest.mark.slow  # another training
def test_a_training_that_is_given_up_leaves_no_process(base: Path, cluster: ClusterConfig, tmp_path: Path) -> None:
    seen: list[psutil.Process] = []

    def give_up(step: int, progress: SFTProgress | None) -> None:
        names = ("ray::TrainController", "ray::RayTrainWorker")
        started = psutil.Process().children(recursive=True)
        seen.extend(process for process in started if title(process).startswith(names))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sft(
            model=ModelConfig(policy=str(base)), examples=make_examples(base), options=make_options(num_epochs=10_000),
            cluster=cluster, out_folder=tmp_path / "up", seed=0, run_identity=Identity.from_config(make_options()),
            on_start=lambda done: None, on_report=give_up,
        )  # fmt: skip
    assert len(seen) == 2
    assert psutil.wait_procs(seen, timeout=10)[1] == []


def test_missing_room_for_the_ranks_is_reported_in_time(base: Path, cluster: ClusterConfig, tmp_path: Path) -> None:
    short = cluster.model_copy(update={"placement_timeout_s": 2})
    with pytest.raises(UserError, match=r"no place .* 3 sft workers: each needs 1000 CPUs"):
        train(base, tmp_path / "big", short, workers=3, cpus=1000)


def test_no_examples_are_refused(base: Path, cluster: ClusterConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no examples"):
        run_sft(
            model=ModelConfig(policy=str(base)), examples=[], options=make_options(), cluster=cluster,
            out_folder=tmp_path / "none", seed=0, run_identity=Identity.from_config(make_options()),
            on_start=lambda done: None, on_report=lambda step, progress: None,
        )  # fmt: skip
