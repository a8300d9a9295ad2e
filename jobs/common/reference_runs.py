"""The reference of a comparison, and what each run changed on it; what is measured is said in `t2g.study.targeting`."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from actors.engines.rollout import RolloutFleet
from actors.learner.learner import LearnerGroup, LearnerSpec
from jobs.common.fleets import Fleets
from jobs.common.policy_runs import PolicyData
from jobs.common.stages import once
from t2g.config import CompareJob, ModelConfig, PolicyJob, with_overrides
from t2g.files import write_atomic
from t2g.interfaces import FeedbackSource, Sampling
from t2g.loop.sampling import sampling_of
from t2g.study import targeting
from t2g.study.arms import arm_job
from t2g.types import Prompt, Rollout, SpanFeedback

REFERENCE, TARGETING_FILE = "reference", "targeting.json"


def make_reference(job: CompareJob, data: PolicyData, fleets: Fleets) -> list[targeting.Reference]:
    """Responses of the base to held-out prompts, judged; from the run folder where they are there.

    fleets: engines that have not been sent other weights yet.
    """
    settings = reference_job(job)
    prompts = data.eval_prompts[: job.compare.reference_prompts]

    def make() -> dict[str, Any]:
        rollouts, feedback = fleets.for_policy(settings, data.task)
        judged = asyncio.run(sample_and_judge(prompts, rollouts, feedback, reference_sampling(job)))
        made = [targeting.Reference(prompt=p, rollout=r, feedback=f) for p, (r, f) in zip(prompts, judged, strict=True)]
        return {"samples": [targeting.reference_record(reference) for reference in made]}

    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    return [targeting.read_reference(record, by_id) for record in once(settings.run.folder, settings, make)["samples"]]


def reference_job(job: CompareJob) -> PolicyJob:
    """The settings that the reference is made with; kept beside it, so that others are refused."""
    arm = arm_job(job, "span", job.run.seed, job.learner.policy.lr)
    run = {"run.root": job.run.folder, "run.name": REFERENCE}
    return with_overrides(arm, run | {"eval.num_prompts": job.compare.reference_prompts})


def reference_sampling(job: CompareJob) -> Sampling:
    """The same seeds for the base and for every trained policy: a response changes only where the policy did."""
    return sampling_of(job, REFERENCE, 0, num_samples=1)


async def sample_and_judge(
    prompts: Sequence[Prompt], rollouts: RolloutFleet, feedback: FeedbackSource, sampling: Sampling
) -> list[tuple[Rollout, SpanFeedback]]:
    """One response to each prompt, with its feedback."""

    async def one(prompt: Prompt) -> tuple[Rollout, SpanFeedback]:
        (rollout,) = await rollouts.sample(prompt, sampling)
        return rollout, await feedback.judge(prompt, rollout.response_text)

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def measure_targeting(
    arm: PolicyJob,
    data: PolicyData,
    reference: Sequence[targeting.Reference],
    sampling: Sampling,
    rollouts: RolloutFleet,
    feedback: FeedbackSource,
    learner: LearnerGroup,
) -> None:
    """Writes what the run changed on the reference into the run's folder, while its learner lives."""
    stats = learner.forward([r.rollout for r in reference])
    changes = [s.old_logprobs - s.ref_logprobs for s in stats]
    again = asyncio.run(criticised_again(reference, sampling, rollouts, feedback))
    write_targeting(arm, data, reference, changes, again)


def measure_exported(
    arm: PolicyJob,
    data: PolicyData,
    reference: Sequence[targeting.Reference],
    sampling: Sampling,
    feedback: FeedbackSource,
) -> None:
    """The same of a run whose learner is gone, from the policy that it left.

    Log-probabilities of the base are the engine's, from when the reference was sampled.
    """
    model = ModelConfig(policy=str(arm.run.folder / "policy"))
    spec = LearnerSpec(
        model=model,
        learner=with_overrides(arm.learner, {"lora": None}),  # the policy was merged when it was exported
        objective=with_overrides(arm.objective, {"advantages": "group"}),  # no critic is asked
        temperature=arm.rollout.temperature,
        num_updates=1,
        seed=arm.run.seed,
    )
    with closing(LearnerGroup(spec, placement_timeout_s=arm.cluster.placement_timeout_s)) as learner:
        stats = learner.forward([r.rollout for r in reference])
    changes = [s.old_logprobs - r.rollout.rollout_logprobs for s, r in zip(stats, reference, strict=True)]
    with Fleets() as own:
        again = asyncio.run(criticised_again(reference, sampling, own.rollouts(model, arm.rollout, arm), feedback))
    write_targeting(arm, data, reference, changes, again)


async def criticised_again(
    reference: Sequence[targeting.Reference], sampling: Sampling, rollouts: RolloutFleet, feedback: FeedbackSource
) -> dict[str, Any]:
    """`targeting.returns`, by what this one source says of both responses: an ablation's reward model quotes in its
    own way.
    """
    before = await asyncio.gather(*(feedback.judge(r.prompt, r.rollout.response_text) for r in reference))
    after = await sample_and_judge([r.prompt for r in reference], rollouts, feedback, sampling)
    return targeting.returns(
        [targeting.criticisms(r.rollout.response_text, f) for r, f in zip(reference, before, strict=True)],
        [targeting.criticisms(rollout.response_text, f) for rollout, f in after],
    )


def write_targeting(
    arm: PolicyJob,
    data: PolicyData,
    reference: Sequence[targeting.Reference],
    changes: Sequence[np.ndarray],
    again: dict[str, Any],
) -> None:
    judged = [(r, c) for r, c in zip(reference, changes, strict=True) if r.feedback.usable]
    labels = [targeting.mentions(data.tokenizer, r.rollout, r.feedback) for r, _ in judged]
    measured = targeting.changes_by_mention(labels, [change for _, change in judged]) | again
    write_atomic(arm.run.folder / TARGETING_FILE, json.dumps(measured, indent=1).encode())
