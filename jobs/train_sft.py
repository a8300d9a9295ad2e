"""Supervised fine-tuning of a policy on references, with DeepSpeed ZeRO-3 under Ray Train.

    python -m jobs.train_sft --config configs/own/sft.yaml model.policy=my/model data.path=my.jsonl

Leaves `<run folder>/model` (safetensors and tokenizer), metrics.jsonl and the resolved config. The same command again
keeps a finished model, and goes on after the last checkpoint of an unfinished one. run.smoke=true makes three steps in
the folder `smoke` and says how long all of them will take.
"""

import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.common.cli import main
from t2g.config import JobConfig, RewardJob, RunConfig, SFTJob, loading, with_overrides
from t2g.config.describe import describe_sft
from t2g.errors import UserError
from t2g.runs import identity
from t2g.runs.identity import Identity

if TYPE_CHECKING:
    from actors.learner.sft_rank import SFTProgress
    from t2g.feedback.examples import SFTExample

MODEL = "model"
LEFTOVERS = (MODEL, f"{MODEL}.part")  # what a training leaves, finished or not
SMOKE_STEPS = 3


def train_sft(config: SFTJob) -> dict[str, float]:
    """The whole job on the Ray that is connected; returns the last metrics of the training."""
    return supervise(config, read_examples(config), title="supervised fine-tuning")


def read_examples(config: SFTJob) -> "list[SFTExample]":
    """What the job learns from, read before any process is started. UserError for what cannot be used."""
    from t2g.data.load import load_records
    from t2g.feedback.examples import policy_examples
    from t2g.tasks.base import get_task
    from t2g.text.tokenizer import load_tokenizer

    task, tokenizer = get_task(config.task), load_tokenizer(config.model.policy, config.model.revision)
    return policy_examples(load_records(config.data), task, tokenizer, max_length=config.sft.max_length)


def supervise(config: SFTJob | RewardJob, examples: "Sequence[SFTExample]", *, title: str) -> dict[str, float]:
    """Train `config.model` on `examples` into `model` in the run folder, with a progress bar and metrics.jsonl.

    Goes on after the last checkpoint of an earlier start; a finished model is kept.
    """
    from actors.learner.sft import run_sft
    from t2g.feedback.examples import count_steps
    from t2g.runs.metrics import RunLog
    from t2g.runs.progress import Stage, stage

    folder = begin_folder(config, *LEFTOVERS)
    options = config.sft
    if config.run.smoke:
        share = SMOKE_STEPS * options.batch_size / len(examples)
        options = with_overrides(options, {"num_epochs": min(options.num_epochs, share)})
    num_steps = count_steps(len(examples), options.num_epochs, options.batch_size)
    with closing(RunLog(folder, config.log)) as log, ExitStack() as shown:
        bar: Stage | None = None  # a model that is kept shows none, and keeps its lines

        def on_start(done: int) -> None:
            nonlocal bar
            log.truncate(first_step=done + 1)
            bar = shown.enter_context(stage(title, num_steps, done=done))
            if done:
                bar.say(f"going on after step {done}, from its checkpoint")

        def on_progress(progress: "SFTProgress") -> None:
            assert bar is not None
            log.step(progress.step, {f"sft/{key}": value for key, value in asdict(progress).items() if key != "step"})
            bar.reach(progress.step)

        metrics = run_sft(
            model=config.model, examples=examples, options=options, cluster=config.cluster,
            out_folder=folder / MODEL, seed=config.run.seed, on_start=on_start, on_progress=on_progress,
        )  # fmt: skip
    print(_summary(config, metrics, len(examples)))
    return metrics


def work_folder(run: RunConfig) -> Path:
    """The run folder; a smoke run has `smoke` in it, and touches nothing else there."""
    return run.folder / "smoke" if run.smoke else run.folder


def check_folder(config: JobConfig, *leftovers: str, **more: Any) -> None:
    """UserError where the run folder has one of the files `leftovers` and this config may not go on with it.

    Writes nothing. A smoke run goes on with nothing. more: see `Identity.of`.
    """
    folder = config.run.folder
    found = [name for name in leftovers if (folder / name).exists()]
    if config.run.smoke or not found:
        return
    if config.run.resume == "never":
        raise UserError(f"run.resume=never, and {folder / found[0]} exists: remove it or choose another run.name")
    identity.check(folder, Identity.of(config, **more))


def begin_folder(config: JobConfig, *leftovers: str, **more: Any) -> Path:
    """The `work_folder` with identity and resolved config in it; see `check_folder`. A smoke run's is emptied first."""
    check_folder(config, *leftovers, **more)
    folder = work_folder(config.run)
    if config.run.smoke:
        shutil.rmtree(folder, ignore_errors=True)
    identity.keep(folder, Identity.of(config, **more))
    loading.write(config, folder)
    return folder


def _summary(config: SFTJob | RewardJob, metrics: dict[str, float], num_examples: int) -> str:
    from t2g.feedback.examples import count_steps
    from t2g.runs.progress import duration

    line = f"loss {metrics['loss']:.4f} after {metrics['step']:.0f} steps, {metrics['tokens_per_s']:.0f} tokens/s"
    if config.run.smoke:
        whole = count_steps(num_examples, config.sft.num_epochs, config.sft.batch_size)
        left = duration(metrics["train_s"] / metrics["step"] * whole)
        line += f"; the whole training of {whole} steps takes about {left}"
    return line


def run(config: SFTJob) -> None:
    from actors.cluster.placement import connect

    check_folder(config, *LEFTOVERS)
    examples = read_examples(config)
    connect(config.cluster, {"sft": config.sft})
    supervise(config, examples, title="supervised fine-tuning")


if __name__ == "__main__":
    sys.exit(main(SFTJob, run, describe_sft))
