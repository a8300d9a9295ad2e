"""Supervised fine-tuning of a policy on references, with DeepSpeed ZeRO-3 under Ray Train.

    python -m jobs.train_sft --config configs/own/sft.yaml model.policy=my/model data.path=my.jsonl

Leaves `<run folder>/model` (safetensors and tokenizer), metrics.jsonl and the resolved config. The same command again
keeps a finished model.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from jobs.cli import main
from t2g import configio
from t2g.config import RewardJob, SFTJob
from t2g.describe import describe_sft
from t2g.errors import UserError

if TYPE_CHECKING:
    from actors.sft_rank import SFTProgress
    from t2g.data.sft import SFTExample

SMOKE_STEPS = 3


def train_sft(config: SFTJob) -> dict[str, float]:
    """The whole job on the Ray that is connected; returns the last metrics of the training."""
    return supervise(config, read_examples(config), title="supervised fine-tuning")


def read_examples(config: SFTJob) -> "list[SFTExample]":
    """What the job learns from, read before any process is started. UserError for what cannot be used."""
    from t2g.data.chat import load_tokenizer
    from t2g.data.load import load_records
    from t2g.data.sft import policy_examples
    from t2g.tasks.base import get_task

    task, tokenizer = get_task(config.task), load_tokenizer(config.model.policy, config.model.revision)
    return policy_examples(load_records(config.data), task, tokenizer, max_length=config.sft.max_length)


def supervise(config: SFTJob | RewardJob, examples: "Sequence[SFTExample]", *, title: str) -> dict[str, float]:
    """Train `config.model` on `examples` into `<run folder>/model`, with a progress bar and metrics.jsonl."""
    from actors.sft import run_sft
    from t2g.data.sft import count_steps
    from t2g.metrics import RunLog
    from t2g.progress import stage

    folder, options = config.run.folder, config.sft
    configio.write(config, folder)
    if config.run.smoke:
        share = SMOKE_STEPS * options.batch_size / len(examples)
        options = options.model_copy(update={"num_epochs": min(options.num_epochs, share)})
    out_folder = folder / ("smoke" if config.run.smoke else "model")
    if config.run.resume == "never" and out_folder.exists():
        raise UserError(f"run.resume=never, and {out_folder} exists: remove it or choose another run.name")
    num_steps = count_steps(len(examples), options.num_epochs, options.batch_size)
    with closing(RunLog(folder, config.log)) as log, stage(title, num_steps) as bar:
        done = 0

        def on_progress(progress: "SFTProgress") -> None:
            nonlocal done
            if done == 0:
                log.truncate(first_step=1)  # only now: a model that is kept keeps its metrics
            log.step(progress.step, {f"sft/{key}": value for key, value in asdict(progress).items() if key != "step"})
            bar.advance(progress.step - done)
            done = progress.step

        metrics = run_sft(
            model=config.model, examples=examples, options=options, cluster=config.cluster, out_folder=out_folder,
            seed=config.run.seed, on_progress=on_progress,
        )  # fmt: skip
        bar.say(_summary(config, metrics, len(examples)))
    return metrics


def _summary(config: SFTJob | RewardJob, metrics: dict[str, float], num_examples: int) -> str:
    from t2g.data.sft import count_steps
    from t2g.progress import duration

    line = f"loss {metrics['loss']:.4f} after {metrics['step']:.0f} steps, {metrics['tokens_per_s']:.0f} tokens/s"
    if config.run.smoke:
        whole = count_steps(num_examples, config.sft.num_epochs, config.sft.batch_size)
        left = duration(metrics["train_s"] / metrics["step"] * whole)
        line += f"; the whole training of {whole} steps takes about {left}"
    return line


def run(config: SFTJob) -> None:
    from actors.placement import connect

    examples = read_examples(config)
    connect(config.cluster, {"sft": config.sft})
    supervise(config, examples, title="supervised fine-tuning")


if __name__ == "__main__":
    sys.exit(main(SFTJob, run, describe_sft))
