"""A run of a baseline (`t2g.study.baselines`): it has its own engines, and starts again if it is not finished.

The reviser of ilf and reflection is the policy itself, called through `Task.revise_messages`, or another model. The
tiny world needs another model, since its base policy never read a critique: `demo_artifacts.make_corrector` trains it
on the world's corrections (`tasks.tiny.revision`). There, both baselines can follow a critique before they begin, which
PPO cannot.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from jobs.common import run_folder
from jobs.common.cli import StopFlag
from jobs.common.fleets import Fleets
from jobs.train_policy.policy_data import PolicyData
from jobs.train_policy.policy_results import write_summary
from jobs.train_sft.supervised import MODEL, train_supervised
from t2g.config import ModelConfig, PolicyJob, RolloutConfig, RunConfig, SFTJob
from t2g.config.run_values import POLICY
from t2g.data.batching import count_steps
from t2g.errors import Stopped
from t2g.interfaces import FeedbackSource, RolloutSource
from t2g.report.run_page import REPORT_FILE
from t2g.runs import identity
from t2g.runs.judgements import JournaledFeedback
from t2g.runs.log import RunLog
from t2g.runs.progress import show_progress
from t2g.study import baselines
from t2g.study.baselines import METHODS, BaselineRun, Metrics, PreferencePair
from t2g.text.policy_chat import load_policy_tokenizer
from t2g.types import TrainSequence

IMITATION = "imitation"  # folder of ilf's training


def run_baseline(
    job: PolicyJob,
    data: PolicyData,
    feedback: FeedbackSource,
    stop: StopFlag,
    *,
    procedure: str,
    reviser: str | None = None,
    **identity_extras: Any,
) -> dict[str, Any]:
    """Make a baseline run in `job.run.folder` from its beginning, and return its summary.

    The engines of the base, of the reviser and of the result run one after the other.

    Args:
        job: See `baselines.check`.
        reviser: A model folder or hub name; None for the policy itself.
        identity_extras: See `Identity.from_config`.

    Raises:
        UserError: The folder belongs to another run.
        Stopped: `stop` ended the run.
    """
    folder = job.run.folder
    started = time.monotonic()
    with run_folder.sole_process(folder), closing(run_folder.make_trackers(job)) as trackers:
        log = RunLog(folder, job.log, [trackers])
        run_folder.begin_folder(job, procedure=procedure, reviser=reviser, **identity_extras)
        log.truncate(0)
        for leftover in (POLICY, f"{POLICY}.part", IMITATION):
            shutil.rmtree(folder / leftover, ignore_errors=True)

        run_identity = identity.load_identity(folder)
        journaled = JournaledFeedback(feedback, folder, run_identity, keep=1)
        revising = job.model if reviser is None else ModelConfig(policy=reviser)
        reviser_tokenizer = load_policy_tokenizer(revising)
        train_on = train_pairs if procedure == "dpo" else train_examples
        baseline = BaselineRun(
            job=job,
            **data.trainer_inputs,
            feedback=journaled,
            reviser=revising,
            reviser_tokenizer=reviser_tokenizer,
            log=log,
            stop=lambda: bool(stop),
            serve=partial(with_engines, job),
            train=partial(train_on, job, stop),
        )
        with closing(journaled):
            metrics = METHODS[procedure](baseline)
            log.write_step(job.num_steps, metrics)
        summary = write_summary(job, seconds=time.monotonic() - started)
        trackers.log_report(folder / REPORT_FILE)
    return summary


def with_engines(
    job: PolicyJob,
    model: ModelConfig,
    rollout: RolloutConfig,
    use_engines: Callable[[RolloutSource], Coroutine[Any, Any, Any]],
) -> Any:
    """Start engines of `model`, return the result of `use_engines` on them, and end them."""
    with Fleets() as fleets:
        source = fleets.rollouts(model, rollout, job)
        return asyncio.run(use_engines(source))


def train_pairs(job: PolicyJob, stop: StopFlag, pairs: Sequence[PreferencePair]) -> Metrics:
    """Train the base by DPO into the run's `policy`."""
    from actors.learner.dpo import train_dpo

    part = job.run.folder / f"{POLICY}.part"
    size = baselines.batch_size(job, len(pairs))
    num_steps = count_steps(len(pairs), job.learner.num_epochs, size)
    with show_progress(f"{job.run.name}: DPO", num_steps) as bar:
        trained = train_dpo(
            job.model, job.learner, pairs,
            cluster=job.cluster, stop=lambda: bool(stop), on_progress=bar.advance_to,
            batch_size=size, seed=job.run.seed, out_folder=part,
        )  # fmt: skip
    if trained is None:
        raise Stopped
    part.rename(job.run.folder / POLICY)
    return trained


def train_examples(job: PolicyJob, stop: StopFlag, examples: Sequence[TrainSequence]) -> Metrics:
    """Fine-tune the base into the run's `policy`; `stop` does not interrupt it."""
    run = RunConfig(root=job.run.folder, name=IMITATION, seed=job.run.seed)
    sft = baselines.sft_options(job, len(examples))
    imitation = SFTJob(
        run=run, cluster=job.cluster, task=job.task, model=job.model, data=job.data, sft=sft, log=job.log
    )
    metrics = train_supervised(imitation, examples, title=f"{job.run.name}: imitation")
    (run.folder / MODEL).rename(job.run.folder / POLICY)
    if stop:
        raise Stopped
    return metrics
