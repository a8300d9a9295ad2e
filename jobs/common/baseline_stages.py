"""A baseline that is not PPO as a run of jobs.compare: whose engines it asks, and who trains (`t2g.study.baselines`).

The reviser of ilf and reflection is the policy itself, asked through `Task.revise_messages`, or another model. In the
tiny world it must be another: a base policy of a million random weights never read a critique, so one is taught to
revise by the world's own corrections (`stages.make_reviser`, `tasks.tiny.revision`). There, both know how a critique is
followed before they begin, which PPO does not.

A run that is not finished starts again.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from jobs.common.cli import StopFlag
from jobs.common.fleets import Fleets
from jobs.common.policy_runs import PolicyData, write_summary
from jobs.common.run_folder import begin_folder, sole_process
from jobs.common.supervised import MODEL, supervise
from t2g.config import ModelConfig, PolicyJob, RolloutConfig, RunConfig, SFTJob
from t2g.data.batching import count_steps
from t2g.errors import Stopped
from t2g.interfaces import FeedbackSource, RolloutSource
from t2g.runs.log import RunLog
from t2g.runs.progress import stage
from t2g.study import baselines
from t2g.study.baselines import METHODS, POLICY, Arm, Metrics, PreferencePair
from t2g.text.tokenizer import load_tokenizer
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
    **more: Any,
) -> dict[str, Any]:
    """The summary of a run in `job.run.folder`, made from its beginning. Raises Stopped when `stop` ended it.

    Engines of the base, of the reviser and of the result live here, one after the other.
    reviser: a model folder or hub name; none: the policy itself. more: see `Identity.of`.

    UserError for settings with which the method makes no sense, and for a folder of another run.
    """
    baselines.check(procedure, job)
    folder = job.run.folder
    started = time.monotonic()
    with sole_process(folder), closing(RunLog(folder, job.log)) as log:
        begin_folder(job, procedure=procedure, reviser=reviser, **more)
        log.truncate(0)
        for leftover in (POLICY, f"{POLICY}.part", IMITATION):
            shutil.rmtree(folder / leftover, ignore_errors=True)
        revising = job.model if reviser is None else ModelConfig(policy=reviser)
        arm = Arm(
            job=job,
            **vars(data),
            feedback=feedback,
            reviser=revising,
            reviser_tokenizer=load_tokenizer(revising.policy, revising.revision),
            log=log,
            stop=lambda: bool(stop),
            serve=partial(own_engines, job),
            train=partial(train_pairs if procedure == "dpo" else train_examples, job, stop),
        )
        log.step(job.num_steps, METHODS[procedure](arm))
    return write_summary(job, seconds=time.monotonic() - started)


def own_engines(
    job: PolicyJob,
    model: ModelConfig,
    rollout: RolloutConfig,
    ask: Callable[[RolloutSource], Coroutine[Any, Any, Any]],
) -> Any:
    """What `ask` returns of engines of `model`, which live as long as that takes."""
    with Fleets() as own:
        return asyncio.run(ask(own.rollouts(model, rollout, job)))


def train_pairs(job: PolicyJob, stop: StopFlag, pairs: Sequence[PreferencePair]) -> Metrics:
    """DPO of the base into the run's `policy`."""
    from actors.learner.dpo import train_dpo

    part = job.run.folder / f"{POLICY}.part"
    size = baselines.batch_size(job, len(pairs))
    with stage(f"{job.run.name}: DPO", count_steps(len(pairs), job.learner.num_epochs, size)) as bar:
        trained = train_dpo(
            job.model, job.learner, pairs,
            cluster=job.cluster, stop=lambda: bool(stop), on_progress=bar.reach,
            batch_size=size, seed=job.run.seed, out_folder=part,
        )  # fmt: skip
    if trained is None:
        raise Stopped
    part.rename(job.run.folder / POLICY)
    return trained


def train_examples(job: PolicyJob, stop: StopFlag, examples: Sequence[TrainSequence]) -> Metrics:
    """Supervised fine-tuning of the base into the run's `policy`, which no stop interrupts."""
    run = RunConfig(root=job.run.folder, name=IMITATION, seed=job.run.seed)
    sft = baselines.sft_options(job, len(examples))
    imitation = SFTJob(
        run=run, cluster=job.cluster, task=job.task, model=job.model, data=job.data, sft=sft, log=job.log
    )
    metrics = supervise(imitation, examples, title=f"{job.run.name}: imitation")
    (run.folder / MODEL).rename(job.run.folder / POLICY)
    if stop:
        raise Stopped
    return metrics
