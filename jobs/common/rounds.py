"""A run in rounds: between two of them the reward model learns from what the policy says by now (`refresh`).

    <run>/rewards/2/   records.jsonl, model/, stage.json: what serves the second round

Engines, learner and the ranks that train the reward model are up one after the other. The same call again goes on in
the round in which it was.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jobs.common.cli import StopFlag
from jobs.common.fleets import Fleets
from jobs.common.policy_runs import PolicyData, train
from jobs.common.stages import once
from jobs.common.supervised import MODEL, supervise
from t2g.config import DataConfig, ModelConfig, PolicyJob, RefreshConfig, RunConfig, SFTJob, with_overrides
from t2g.feedback.card import make_card, write_card
from t2g.feedback.examples import reward_examples
from t2g.feedback.records import AnnotatedRecord, annotated_record, load_annotated, write_annotated
from t2g.interfaces import FeedbackSource, RolloutSource
from t2g.loop.sampling import sampling_of
from t2g.study.targeting import sample_and_judge
from t2g.text.tokenizer import load_tokenizer


def train_in_rounds(config: PolicyJob, data: PolicyData, stop: StopFlag) -> dict[str, Any]:
    """The summary of the run, see `policy_runs.train`; without `refresh` it has one round. Raises Stopped."""
    served, refresh = config, config.refresh
    for number in range(2, refresh.rounds + 1) if refresh else ():
        job, until = reward_job(served, refresh, number), config.num_steps * (number - 1) // refresh.rounds
        once(job.run.folder, job, partial(_refresh, config, served, refresh, job, data, until, stop))
        model = {"feedback.reward_model": str(job.run.folder / MODEL), "feedback.reward_revision": None}
        served = with_overrides(served, model)
    with Fleets() as fleets:
        return train(config, data, *fleets.for_policy(served, data.task), stop)


def reward_job(served: PolicyJob, refresh: RefreshConfig, number: int) -> SFTJob:
    """The training of the reward model of round 2, 3, ..., from the one that served before."""
    run = RunConfig(root=served.run.folder / "rewards", name=str(number), seed=served.run.seed)
    return SFTJob(
        run=run,
        cluster=served.cluster,
        task=served.task,
        model=ModelConfig(policy=str(served.feedback.reward_model), revision=served.feedback.reward_revision),
        data=DataConfig(path=str(run.folder / "records.jsonl")),
        sft=refresh.sft,
        log=served.log,
    )


def _refresh(
    config: PolicyJob,
    served: PolicyJob,
    refresh: RefreshConfig,
    job: SFTJob,
    data: PolicyData,
    until: int,
    stop: StopFlag,
) -> dict[str, float]:
    """Train until that step, let the annotator judge samples of the policy as it is then, teach the reward model."""
    if not Path(job.data.path).exists():
        with Fleets() as fleets:
            rollouts, feedback = fleets.for_policy(served, data.task)
            train(config, data, rollouts, feedback, stop, until=until)
            asked = with_overrides(refresh.annotator, {"style": config.feedback.style})
            records = _judged(config, data, rollouts, fleets.feedback(asked, data.task, config), refresh.samples, until)
        job.run.folder.mkdir(parents=True, exist_ok=True)
        write_annotated(Path(job.data.path), records)
    style = config.feedback.style
    examples = reward_examples(
        load_annotated(job.data, data.task), data.task, load_tokenizer(job.model.policy, job.model.revision),
        max_length=job.sft.max_length, style=style,
    )  # fmt: skip
    metrics = supervise(job, examples, title=f"reward model of round {job.run.name}")
    write_card(job.run.folder / MODEL, make_card(data.task, style))
    return metrics


def _judged(
    config: PolicyJob, data: PolicyData, rollouts: RolloutSource, annotator: FeedbackSource, count: int, step: int
) -> list[AnnotatedRecord]:
    """Responses to some of the training prompts, one each."""
    order = np.random.default_rng([config.run.seed, step]).permutation(len(data.prompts))
    prompts = [data.prompts[place] for place in order[:count]]
    sampling = sampling_of(config, "refresh", step, num_samples=1)
    judged = asyncio.run(sample_and_judge(prompts, rollouts, annotator, sampling))
    return [annotated_record(prompt, rollout.response_text, said) for prompt, rollout, said in judged]
