"""Supervised training on the real stack: Ray Train, gloo, ZeRO-3, a tiny random Llama."""

import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file
from sft_runs import (
    MEMORISED,
    assert_writes_the_targets,
    make_base,
    make_examples,
    make_options,
    train,
    two_cpus,
)

from actors.learner.sft import run_sft
from actors.learner.sft_rank import SFTProgress
from t2g.config import ClusterConfig, ModelConfig, OptimConfig
from t2g.errors import RunStopped, UserError

WEIGHT_TOLERANCE = 2e-3  # float32, 40 steps of AdamW at 5e-3: what the order of sums may come to


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterConfig]:
    with two_cpus():
        yield ClusterConfig()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trained(base: Path, cluster: ClusterConfig, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder, metrics and reports of a training on two ranks."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    return folder, *train(base, folder, cluster, workers=2)


def test_memorises_and_reports(trained: Any) -> None:
    _, metrics, seen = trained
    assert [progress.step for progress in seen] == [10, 20, 30, 40]
    assert all(progress.num_steps == 40 for progress in seen)
    assert seen[0].loss > 1 > MEMORISED > seen[-1].loss
    assert metrics["loss"] == seen[-1].loss
    assert metrics["left_s"] == 0
    assert metrics["wall_s"] > metrics["train_s"] > 0


def test_the_exported_folder_generates_the_targets(trained: Any) -> None:
    folder, _, _ = trained
    assert_writes_the_targets(folder)


def test_a_finished_folder_is_kept_and_another_training_refused(
    trained: Any, base: Path, cluster: ClusterConfig
) -> None:
    folder, metrics, _ = trained
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert train(base, folder, cluster, workers=2, timeout_s=300) == (metrics, [])
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(UserError, match=r"num_epochs \(40\.0 -> 41\.0\)"):
        train(base, folder, cluster, workers=2, num_epochs=41)


@pytest.mark.slow  # another training
def test_one_rank_gives_the_same_weights(trained: Any, base: Path, cluster: ClusterConfig, tmp_path: Path) -> None:
    folder, _, seen_by_two = trained
    leftover = tmp_path / "one.part"
    leftover.mkdir()
    (leftover / "half.safetensors").touch()  # of a training that was killed: it starts again
    _, seen_by_one = train(base, tmp_path / "one", cluster, workers=1)
    assert not leftover.exists()
    assert not (tmp_path / "one" / "half.safetensors").exists()
    # Adam hides a gradient of the wrong size from the weights; its norm does not.
    assert math.isclose(seen_by_one[0].grad_norm, seen_by_two[0].grad_norm, rel_tol=1e-3)
    assert math.isclose(seen_by_one[0].loss, seen_by_two[0].loss, rel_tol=1e-3)
    one, two = load_file(tmp_path / "one" / "model.safetensors"), load_file(folder / "model.safetensors")
    start = load_file(base / "model.safetensors")
    assert one.keys() == two.keys() == start.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < WEIGHT_TOLERANCE
    assert max(float((one[name] - start[name]).abs().max()) for name in one) > 10 * WEIGHT_TOLERANCE
    assert all(tensor.dtype == torch.float32 for tensor in two.values())


def test_a_training_that_lost_a_rank_goes_on_after_its_checkpoint(
    trained: Any, base: Path, cluster: ClusterConfig, tmp_path: Path
) -> None:
    folder, _, seen_by_uninterrupted = trained
    part = tmp_path / "model.part"
    done: list[int] = []

    def stand_in_the_way(steps: int) -> None:
        """Of the checkpoint of step 24: rank 0 dies there, after that of step 12."""
        done.append(steps)
        (part / "checkpoints").mkdir()
        (part / "checkpoints" / ".tmp-step-00000024").touch()

    shared = {"workers": 2, "checkpoint_every": 12}
    with pytest.raises(RunStopped, match=r"rank 0: .*tmp-step-00000024"):
        train(base, tmp_path / "model", cluster, stand_in_the_way, **shared)
    assert not (tmp_path / "model").exists()
    (part / "checkpoints" / ".tmp-step-00000024").unlink()
    (part / "half.safetensors").touch()  # of an export that was cut off

    _, seen = train(base, tmp_path / "model", cluster, done.append, **shared)
    assert done == [0, 12]
    assert [progress.step for progress in seen] == [20, 30, 40]
    assert [progress.loss for progress in seen[1:]] == pytest.approx(
        [progress.loss for progress in seen_by_uninterrupted[2:]], rel=1e-3
    )
    assert not part.exists()
    assert {path.name for path in (tmp_path / "model").iterdir()} == {path.name for path in folder.iterdir()}
    resumed, whole = load_file(tmp_path / "model" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert max(float((resumed[name] - whole[name]).abs().max()) for name in whole) < 1e-5


@ray.remote(num_cpus=0.5)
def gradient_that_is_no_number() -> tuple[str, bool]:
    """What a step says whose loss is 0 and whose gradient is 0 * inf, and whether the weights are as before."""
    from actors.learner import zero3
    from actors.learner.whole_weights import WholeWeights

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    zero3.init_distributed(0, 1, "127.0.0.1", port, "gloo", timeout_s=60)
    model = torch.nn.Linear(2, 1)
    engine = zero3.build_engine(model, OptimConfig(lr=1.0), num_steps=1, dtype="float32", world_size=1)

    def weights() -> list[torch.Tensor]:
        return [w.clone() for bucket in WholeWeights(engine).buckets(1 << 20, "float32") for _, w in bucket]

    def loss_fn(wrapped: Any, microbatch: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        return (wrapped(microbatch).sum() * 0).sqrt(), {}

    before, said = weights(), ""
    try:
        zero3.train_step(engine, [torch.ones(1, 2)], loss_fn, label="step 7")
    except RunStopped as error:
        said = str(error)
    return said, all(torch.equal(a, b) for a, b in zip(before, weights(), strict=True))


def test_a_gradient_that_is_not_finite_is_not_applied(cluster: ClusterConfig) -> None:
    said, untouched = ray.get(gradient_that_is_no_number.remote(), timeout=120)
    assert said == "step 7: the gradient is not finite; the optimizer step was not applied"
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

    def give_up(progress: SFTProgress) -> None:
        names = ("ray::TrainController", "ray::RayTrainWorker")
        started = psutil.Process().children(recursive=True)
        seen.extend(process for process in started if "".join(process.cmdline()).startswith(names))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sft(
            model=ModelConfig(policy=str(base)), examples=make_examples(base), options=make_options(num_epochs=10_000),
            cluster=cluster, out_folder=tmp_path / "up", seed=0, on_start=lambda done: None, on_progress=give_up,
        )  # fmt: skip
    assert len(seen) == 2
    assert psutil.wait_procs(seen, timeout=10)[1] == []


def test_no_place_for_the_ranks_is_said_in_time(base: Path, cluster: ClusterConfig, tmp_path: Path) -> None:
    short = cluster.model_copy(update={"placement_timeout_s": 2})
    with pytest.raises(UserError, match=r"no place .* 3 sft workers: each needs 1 CPUs"):
        train(base, tmp_path / "big", short, workers=3, cpus=1)


def test_no_examples_are_refused(base: Path, cluster: ClusterConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no examples"):
        run_sft(
            model=ModelConfig(policy=str(base)), examples=[], options=make_options(), cluster=cluster,
            out_folder=tmp_path / "none", seed=0, on_start=lambda done: None, on_progress=lambda progress: None,
        )  # fmt: skip
