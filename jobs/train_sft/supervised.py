"""Supervised training in a run folder: of a policy, of the span reward model, of a reviser."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict

from actors.learner.lora import check_adapters
from actors.learner.sft import run_sft
from actors.learner.sft_rank import SFTProgress
from jobs.common.cli import StopFlag
from jobs.common.run_folder import SMOKE_STEPS, begin_folder, make_trackers, sole_process
from t2g.config import SFTJob, SFTOptions, with_overrides
from t2g.config.run_values import MODEL
from t2g.data.batching import count_steps
from t2g.data.load import load_records
from t2g.feedback.examples import make_policy_examples
from t2g.metrics import SFT
from t2g.report.model_card import write_model_card
from t2g.runs import identity
from t2g.runs.log import RunLog
from t2g.runs.progress import ProgressBar, format_duration, show_progress
from t2g.tasks.base import get_task
from t2g.text.policy_chat import load_policy_tokenizer
from t2g.text.thinking import find_thinking_tags
from t2g.types import TrainSequence


def read_examples(config: SFTJob) -> list[TrainSequence]:
    """Return the training examples of a policy. Raises UserError if the data cannot be used."""
    if config.sft.lora is not None:
        check_adapters(config.sft.lora, config.model)
    task = get_task(config.task)
    tokenizer = load_policy_tokenizer(config.model)
    records = load_records(config.data)
    length = config.sft.max_length
    tags = find_thinking_tags(tokenizer, config.model.thinking_tags)
    return make_policy_examples(records, task, tokenizer, max_length=length, too_long=config.data.too_long, tags=tags)


def train_supervised(
    config: SFTJob, examples: Sequence[TrainSequence], *, title: str, stop: StopFlag | None = None
) -> dict[str, float]:
    """Train `config.model` on `examples` into `model` in the run folder, with a progress bar and metrics.jsonl.

    Continues after the last checkpoint of an earlier start; a finished model is kept.

    Args:
        stop: Ends the training by Stopped; without it a signal waits for the model.

    Returns:
        The last metrics.
    """
    with sole_process(config.run.folder):
        return _train_supervised(config, examples, title, stop)


def _limit_smoke(config: SFTJob, num_examples: int) -> SFTOptions:
    """Return the options of the training; a smoke run has some steps only."""
    options = config.sft
    if not config.run.smoke:
        return options
    num_epochs = SMOKE_STEPS * options.batch_size / num_examples
    return with_overrides(options, {"num_epochs": min(options.num_epochs, num_epochs)})


def _train_supervised(
    config: SFTJob, examples: Sequence[TrainSequence], title: str, stop: StopFlag | None
) -> dict[str, float]:
    folder = begin_folder(config)
    run_identity = identity.load_identity(folder)
    whole = count_steps(len(examples), config.sft.num_epochs, config.sft.batch_size)
    options = _limit_smoke(config, len(examples))
    num_steps = count_steps(len(examples), options.num_epochs, options.batch_size)
    with closing(make_trackers(config)) as trackers, ExitStack() as bars:
        log = RunLog(folder, config.log, [trackers])
        bar: ProgressBar | None = None  # a model that is kept shows none, and keeps its lines

        def on_start(done: int) -> None:
            nonlocal bar
            log.truncate(first_step=done + 1)
            bar = bars.enter_context(show_progress(title, num_steps, done=done))

        def on_report(step: int, progress: SFTProgress | None) -> None:
            assert bar is not None
            if progress:
                fields = asdict(progress)
                del fields["step"]
                log.write_step(step, {SFT + key: value for key, value in fields.items()})
            bar.advance_to(step)

        def should_stop() -> bool:
            return bool(stop)

        metrics = run_sft(
            model=config.model, examples=examples, options=options, cluster=config.cluster,
            out_folder=folder / MODEL, seed=config.run.seed, run_identity=run_identity,
            skip_unreadable=config.run.resume == "readable", on_start=on_start,
            on_report=on_report, should_stop=should_stop,
        )  # fmt: skip
    write_model_card(folder / MODEL, config)
    print(_format_result(metrics, whole if config.run.smoke else None))
    return metrics


def _format_result(metrics: dict[str, float], whole: int | None) -> str:
    """Return the result in one line; with `whole` also the duration of a training of so many steps."""
    steps_done = metrics["step"]
    line = f"loss {metrics['loss']:.4f} after {steps_done:.0f} steps, {metrics['tokens_per_s']:.0f} tokens/s"
    if whole is not None:
        step_s = metrics["train_s"] / steps_done
        line += f"; the whole training of {whole} steps takes about {format_duration(step_s * whole)}"
    return line
