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
from actors.learner.parts import LearnerSpec
from t2g.algo.losses import Metrics
from t2g.config import SFTOptions
from t2g.data.batching import draw_steps, microbatches, normalize_weights
from t2g.runs.checkpoint import CheckpointStore
from t2g.types import TrainSequence

LABEL = "supervised training"  # in messages
REPORT_EVERY = 10  # optimizer steps between two reports
CHECKPOINTS, MODEL = "checkpoints", "model"  # in the folder of an unfinished training
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
    folder: Path  # of the unfinished training
    checkpoint: Path | None  # folder to resume from
    done: int  # steps of the checkpoint


Report = tuple[int, SFTProgress | None]  # optimizer steps done; progress every REPORT_EVERY of them


def train_loop(config: dict[str, Any]) -> None:
    """Train as one rank. config: `job`, a RankJob, and `launcher`, the actor that takes the reports of rank 0."""
    job: RankJob = config["job"]
    options, seed = job.options, job.spec.seed
    rank = ray.train.get_context().get_world_rank()
    worker = LearnerWorker(job.spec, ["policy"], options, rank)
    worker.start((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    if job.checkpoint is not None:
        worker.load("policy", job.checkpoint / ENGINE, universal=False)
    examples: list[TrainSequence] = ray.get(job.examples)
    steps = draw_steps(len(examples), num_epochs=options.num_epochs, batch_size=options.batch_size, seed=seed)
    recent: list[Metrics] = []  # of the steps since the last report
    began = since = time.monotonic()
    num_tokens = 0
    for step, chosen in enumerate(steps[job.done :], start=job.done + 1):
        torch.manual_seed(((seed * 1_000_003 + step) * 1_000_003 + rank) % 2**63)  # dropout is a function of it
        batch = normalize_weights([examples[i] for i in chosen])
        plan = microbatches(batch, num_ranks=options.workers, token_budget=options.tokens_per_microbatch)
        share = [[batch[i] for i in members] for members in plan[rank]]
        label = f"{LABEL}, step {step}, examples {_format_indices(chosen)}"
        recent.append(worker.update("policy", [share], 0.0, label))
        num_tokens += sum(len(examples[i]) for i in chosen)
        progress: SFTProgress | None = None
        if step % REPORT_EVERY == 0 or step == len(steps):
            now = time.monotonic()
            progress = SFTProgress(
                step=step,
                num_steps=len(steps),
                loss=fmean(metrics["policy/loss"] for metrics in recent),
                grad_norm=fmean(metrics["policy/grad_norm"] for metrics in recent),
                lr=recent[-1]["policy/lr"],
                tokens_per_s=num_tokens / (now - since),
                train_s=now - began,
            )
            since, num_tokens, recent = now, 0, []
        if rank == 0:
            ray.get(config["launcher"].report.remote((step, progress)))
        if options.checkpoint_every is not None and step % options.checkpoint_every == 0 and step < len(steps):
            _checkpoint(worker, job.folder, step)
    worker.export(job.folder / MODEL)


def _checkpoint(worker: LearnerWorker, folder: Path, step: int) -> None:
    """Write the state of every rank, then commit it on rank 0 as the only checkpoint. UserError if the disk is full."""
    partial = folder / f"{ENGINE}.part"  # only rank 0 knows the name of the store's folder
    partial.mkdir(exist_ok=True)

    def save(target: Path) -> None:
        worker.save("policy", partial)
        partial.rename(target / ENGINE)

    if worker.rank == 0:
        CheckpointStore(folder / CHECKPOINTS, keep=1).write(step, save, {"step": step})
    else:
        worker.save("policy", partial)


def _format_indices(indices: Sequence[int]) -> str:
    """
    >>> _format_indices([7, 1, 2, 9, 4])
    '1, 2, 4 and 2 more'
    """
    text = ", ".join(str(index) for index in sorted(indices)[:3])
    return f"{text} and {len(indices) - 3} more" if len(indices) > 3 else text
