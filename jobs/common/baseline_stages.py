"""The baselines of method.md, section 5, that are not PPO: DPO, ILF and reflection, on the harness of PPO.

The same base policy, prompts, seeds, feedback source, number of samples and evaluation:

    dpo         the samples of all steps, from the base; of each prompt the better against the worse; `learner.dpo`
    ilf         imitation learning from language feedback (Scheurer et al., arXiv 2303.16755): of the samples of a
                prompt one is a response and the others are revisions of it, written with its critique in view; the
                base is fine-tuned on the best of these
    reflection  nothing is trained: the policy answers a held-out prompt, reads the critique and answers again

The reviser of the latter two is the policy itself, asked through `Task.revise_messages`, or another model. In the tiny
world it must be another: a base policy of a million random weights never read a critique, so one is taught to revise by
the world's own corrections (`stages.make_reviser`, `tasks.tiny.revision`). There, both baselines know how a
critique is followed before they begin, which PPO does not.

Called by jobs.compare. A finished run is kept; one that is not finished starts again.
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
from jobs.common.policy_runs import PolicyData, finished, write_summary
from jobs.common.run_folder import begin_folder, sole_process
from t2g.config import ModelConfig, PolicyJob, RolloutConfig
from t2g.errors import Stopped
from t2g.feedback.examples import SFTExample, count_steps
from t2g.interfaces import RolloutSource
from t2g.runs.metrics import RunLog
from t2g.runs.progress import stage
from t2g.study import baselines
from t2g.study.baseline_runs import Arm, Metrics, Result, dpo, ilf, reflection
from t2g.study.baselines import Baseline, PreferencePair
from t2g.text.tokenizer import load_tokenizer

POLICY = "policy"  # folder of the result, where something was trained
METHODS: dict[Baseline, Callable[[Arm], Metrics]] = {"dpo": dpo, "ilf": ilf, "reflection": reflection}


def run_baseline(
    method: Baseline, job: PolicyJob, data: PolicyData, fleets: Fleets, stop: StopFlag, *, reviser: str | None = None
) -> dict[str, Any]:
    """The summary of the run in `job.run.folder`. Raises Stopped when `stop` ended it.

    fleets: whose feedback source is used. Its rollout engines are not: they have the weights of whoever used them
    last. Engines of the base, of the reviser and of the result live here, one after the other.
    reviser: a model folder or hub name; none: the policy itself.

    UserError for settings with which the method makes no sense, and for a folder of another run.
    """
    baselines.check(method, job)
    folder = job.run.folder
    made_of = {"method": method, "reviser": reviser}  # config.yaml does not tell baselines apart
    summary = finished(job, **made_of)
    if summary is not None:
        return summary
    begin_folder(job, **made_of)
    started = time.monotonic()
    with sole_process(folder), closing(RunLog(folder, job.log)) as log:
        log.truncate(0)
        for leftover in (POLICY, f"{POLICY}.part"):
            shutil.rmtree(folder / leftover, ignore_errors=True)
        revising = job.model if reviser is None else ModelConfig(policy=reviser)
        arm = Arm(
            job=job,
            **vars(data),
            feedback=fleets.feedback(job.feedback, data.task, job),
            reviser=revising,
            reviser_tokenizer=load_tokenizer(revising.policy, revising.revision),
            result=ModelConfig(policy=str(folder / POLICY)),
            log=log,
            stop=lambda: bool(stop),
            serve=partial(own_engines, job),
            train_pairs=partial(train_pairs, job, stop),
            train_examples=partial(train_examples, job, stop),
        )
        log.step(job.num_steps, METHODS[method](arm))
    return write_summary(job, seconds=time.monotonic() - started)


def own_engines(
    job: PolicyJob,
    model: ModelConfig,
    rollout: RolloutConfig,
    ask: Callable[[RolloutSource], Coroutine[Any, Any, Result]],
) -> Result:
    """What `ask` returns of engines of `model`, which live as long as that takes."""
    with Fleets() as own:
        return asyncio.run(ask(own.rollouts(model, rollout, job)))


# ------------------------------------------------------------------------------------------------------------ training
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


def train_examples(job: PolicyJob, stop: StopFlag, examples: Sequence[SFTExample]) -> Metrics:
    """Supervised fine-tuning of the base into the run's `policy`, which no stop interrupts."""
    from actors.learner.sft import run_sft

    options = baselines.sft_options(job, len(examples))
    num_steps = count_steps(len(examples), options.num_epochs, options.batch_size)
    with stage(f"{job.run.name}: imitation", num_steps) as bar:
        metrics = run_sft(
            model=job.model, examples=examples, options=options, cluster=job.cluster,
            out_folder=job.run.folder / POLICY, seed=job.run.seed,
            on_start=lambda done: None, on_progress=lambda progress: bar.reach(progress.step),
        )  # fmt: skip
    if stop:
        raise Stopped
    return metrics
