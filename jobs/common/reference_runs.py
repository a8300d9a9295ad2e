"""The reference of a comparison, and what each run changed on it; what is measured is said in `t2g.study.targeting`."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from actors.engines.rollout import RolloutFleet
from actors.learner.learner import LearnerGroup
from jobs.common.fleets import Fleets
from jobs.common.policy_runs import PolicyData, learner_spec
from jobs.common.stages import once
from t2g.config import ModelConfig, PolicyJob, with_overrides
from t2g.data.buffer import Group, read_groups, write_groups
from t2g.files import write_atomic
from t2g.interfaces import FeedbackSource
from t2g.loop.sampling import JudgedResponse, sampling_of
from t2g.study import targeting
from t2g.study.baselines import POLICY
from t2g.study.methods import Arms

TARGETING_FILE = "targeting.json"


class Target:
    """Responses of the base to held-out prompts, judged: sampled now, or in an earlier start.

    fleets: engines that have not been sent other weights yet.
    """

    def __init__(self, arms: Arms, data: PolicyData, fleets: Fleets) -> None:
        job = arms.reference
        prompts, samples = data.eval_prompts[: job.eval.num_prompts], job.run.folder / "samples"
        self._tokenizer, self._sampling = data.tokenizer, sampling_of(job, "reference", 0, num_samples=1)

        def make() -> dict[str, Any]:
            rollouts, feedback = fleets.for_policy(job, data.task)
            judged = asyncio.run(targeting.sample_and_judge(prompts, rollouts, feedback, self._sampling))
            shutil.rmtree(samples, ignore_errors=True)  # of a start that was cut short
            job.run.folder.mkdir(parents=True, exist_ok=True)
            write_groups(samples, {0: [Group(prompt=p, samples=((r, f),)) for p, r, f in judged]})
            return {}

        once(job.run.folder, job, make)
        groups = read_groups(samples, {prompt.prompt_id: prompt for prompt in prompts})[0]
        self.responses: list[JudgedResponse] = [(group.prompt, *group.samples[0]) for group in groups]

    def measure(self, arm: PolicyJob, rollouts: RolloutFleet, feedback: FeedbackSource, learner: LearnerGroup) -> None:
        """Writes what a run changed into its folder. Engines and learner have the weights that it trained."""
        self._write(arm, self._logprobs(learner), rollouts, feedback)

    def measure_exported(self, arm: PolicyJob, feedback: FeedbackSource) -> None:
        """The same of a run that had no learner of ours, from the policy that it left."""
        # Merged when it was exported; no critic is asked.
        changes = {"model": ModelConfig(policy=str(arm.run.folder / POLICY)), "learner.lora": None}
        exported = with_overrides(arm, changes | {"objective.advantages": "group"})
        placement_timeout_s = arm.cluster.placement_timeout_s
        with closing(LearnerGroup(learner_spec(exported), placement_timeout_s=placement_timeout_s)) as learner:
            logprobs = self._logprobs(learner)
        with Fleets() as own:
            self._write(arm, logprobs, own.rollouts(exported.model, exported.rollout, exported), feedback)

    def _logprobs(self, learner: LearnerGroup) -> list[Any]:
        return [stats.old_logprobs for stats in learner.forward([rollout for _, rollout, _ in self.responses])]

    def _write(self, arm: PolicyJob, logprobs: Sequence[Any], rollouts: RolloutFleet, feedback: FeedbackSource) -> None:
        measured = targeting.measure(self.responses, logprobs, rollouts, feedback, self._sampling, self._tokenizer)
        write_atomic(arm.run.folder / TARGETING_FILE, json.dumps(asyncio.run(measured), indent=1).encode())
