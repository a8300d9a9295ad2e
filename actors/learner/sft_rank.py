"""One rank of supervised training under Ray Train: a learner rank with another loss. `sft` starts it."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import ray
import ray.train
import torch

from actors.learner.learner import LearnerWorker
from actors.learner.rank_batches import select_rank_batch
from actors.learner.spec import LearnerSpec
from t2g.algo.losses import Metrics
from t2g.config import SFTOptions
from t2g.config.run_values import MODEL
from t2g.data.batching import draw_steps, normalize_weights
from t2g.metrics import GRAD_NORM, LEARNING_RATE, POLICY_LOSS, fill
from t2g.runs.checkpoint import CheckpointStore
from t2g.types import TrainSequence

LABEL = "supervised training"  # in messages
REPORT_EVERY = 10  # optimizer steps between two reports
CHECKPOINTS = "checkpoints"  # in the folder of an unfinished training
ENGINE = "engine"  # what `LearnerWorker.save` wrote, in a checkpoint


@dataclass(frozen=True, kw_only=True)
class SFTProgress:
    """Progress of the training; loss, gradient norm and speed are means over the steps since the last report."""

    step: int  # optimizer steps done
    num_steps: int
    loss: float  # nats per unit of target weight
    grad_norm: float  # global, before clipping
    lr: float
    tokens_per_s: float  # prompt and target tokens of all ranks, padding not counted
    train_s: float  # since the ranks of this start began to train


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """The settings of a rank."""

    spec: LearnerSpec
    options: SFTOptions
    examples: ray.ObjectRef  # list[TrainSequence]
    folder: Path  # folder of the unfinished training
    checkpoint: Path | None  # folder to resume from
    done: int  # steps of the checkpoint
    unreported_metrics: Sequence[Metrics] = ()  # metrics of its steps since the last progress


Report = tuple[int, SFTProgress | None]  # optimizer steps done; progress every REPORT_EVERY of them


def train_loop(config: dict[str, Any]) -> None:
    """Train as one rank until the last step, or until `launcher` asks for a stop: then a checkpoint has every step.

    Args:
        config: `job`, a RankJob, and `launcher`, the actor that takes the reports of rank 0.
    """
    job: RankJob = config["job"]
    launcher = config["launcher"]
    options = job.options
    worker = LearnerWorker(job.spec, ["policy"], options, ray.train.get_context().get_world_rank())
    worker.start((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    if job.checkpoint is not None:
        worker.load("policy", job.checkpoint / ENGINE, universal=False)
    examples: list[TrainSequence] = ray.get(job.examples)
    steps = draw_steps(len(examples), num_epochs=options.num_epochs, batch_size=options.batch_size, seed=job.spec.seed)

    meter = _Meter(len(steps), job.unreported_metrics)
    for step, indices in enumerate(steps[job.done :], start=job.done + 1):
        chosen = [examples[index] for index in indices]
        label = f"{LABEL}, step {step}, examples {_format_indices(indices)}"
        metrics = _update(worker, job, chosen, step, label)
        meter.add(metrics, num_tokens=sum(map(len, chosen)))

        is_last = step == len(steps)
        progress: SFTProgress | None = None
        if step % REPORT_EVERY == 0 or is_last:
            progress = meter.report(step)
        should_stop = _report(worker, launcher, (step, progress))
        if is_last:
            break
        if should_stop or _should_checkpoint(step, options):
            _checkpoint(worker, job.folder, step, meter.unreported_metrics)
        if should_stop:
            return
    worker.export(job.folder / MODEL)


def _report(worker: LearnerWorker, launcher: Any, report: Report) -> bool:
    """Report from rank 0, and return on every rank whether to stop.

    All ranks must stop after the same step, since each step is a collective.
    """
    should_stop = worker.rank == 0 and ray.get(launcher.report.remote(report))
    flag = torch.tensor([should_stop], dtype=torch.int32, device=worker.models["policy"].engine.device)
    torch.distributed.broadcast(flag, src=0)
    return bool(flag.item())


def _should_checkpoint(step: int, options: SFTOptions) -> bool:
    return options.checkpoint_every is not None and step % options.checkpoint_every == 0


def _update(worker: LearnerWorker, job: RankJob, examples: Sequence[TrainSequence], step: int, label: str) -> Metrics:
    """Make the optimizer step `step`, from 1, on this rank's share of the examples."""
    options = job.options
    step_seed = ((job.spec.seed * 1_000_003 + step) * 1_000_003 + worker.rank) % 2**63
    torch.manual_seed(step_seed)  # dropout is a function of it
    batch = normalize_weights(examples)
    plan = job.spec.plan(batch, options.workers)
    rank_batch = select_rank_batch(batch, plan[worker.rank])
    return worker.update("policy", [rank_batch], 0.0, label)


class _Meter:
    """Measures the steps since the last report."""

    def __init__(self, num_steps: int, unreported_metrics: Sequence[Metrics] = ()) -> None:
        """Begin to measure. unreported_metrics: those of an earlier start since its last report."""
        self._num_steps = num_steps
        self._began = time.monotonic()
        self._reset(self._began)
        self.unreported_metrics.extend(unreported_metrics)

    def _reset(self, now: float) -> None:
        self._since = now
        self._num_tokens = 0
        self.unreported_metrics: list[Metrics] = []  # one for each step since the last report

    def add(self, metrics: Metrics, *, num_tokens: int) -> None:
        self.unreported_metrics.append(metrics)
        self._num_tokens += num_tokens

    def report(self, step: int) -> SFTProgress:
        """Return the progress, and begin to measure for the next report."""
        now = time.monotonic()
        seconds = now - self._since
        losses = [metrics[POLICY_LOSS] for metrics in self.unreported_metrics]
        grad_norms = [metrics[fill(GRAD_NORM, "policy")] for metrics in self.unreported_metrics]
        last = self.unreported_metrics[-1]
        progress = SFTProgress(
            step=step,
            num_steps=self._num_steps,
            loss=fmean(losses),
            grad_norm=fmean(grad_norms),
            lr=last[fill(LEARNING_RATE, "policy")],
            tokens_per_s=self._num_tokens / seconds,
            train_s=now - self._began,
        )
        self._reset(now)
        return progress


def _checkpoint(worker: LearnerWorker, folder: Path, step: int, unreported_metrics: Sequence[Metrics]) -> None:
    """Write the state of every rank, then commit it on rank 0 as the only checkpoint. UserError if the disk is full.

    Args:
        unreported_metrics: Metrics of the steps since the last report: a resumed training reports the same means.
    """
    partial = folder / f"{ENGINE}.part"  # only rank 0 knows the name of the store's folder
    partial.mkdir(exist_ok=True)

    def save(target: Path) -> None:
        worker.save("policy", partial)
        partial.rename(target / ENGINE)

    if worker.rank == 0:
        CheckpointStore(folder / CHECKPOINTS, keep=1).write(
            step, save, {"step": step, "unreported_metrics": unreported_metrics}
        )
    else:
        worker.save("policy", partial)


def _format_indices(indices: Sequence[int]) -> str:
    """
    >>> _format_indices([7, 1, 2, 9, 4])
    '1, 2, 4 and 2 more'
    """
    first = sorted(indices)[:3]
    text = ", ".join(map(str, first))
    num_more = len(indices) - len(first)
    return f"{text} and {num_more} more" if num_more else text
