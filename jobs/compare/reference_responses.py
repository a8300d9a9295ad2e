"""Responses of the base to held-out prompts: what each run of a comparison changes is measured on them."""

import asyncio
import json
import shutil
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from actors.engines.rollout import RolloutFleet
from actors.learner.learner import LearnerGroup
from jobs.artifacts.demo_artifacts import load_or_run
from jobs.common.fleets import Fleets, start_learner, wait_for_engines
from jobs.compare.comparison_report import TARGETING_FILE
from jobs.train_policy.policy_data import PolicyData
from jobs.train_policy.policy_training import make_learner_spec, make_rollout_source
from t2g.config import PolicyJob, with_overrides
from t2g.config.run_values import POLICY
from t2g.data.buffer import Group, read_groups, write_groups
from t2g.files import write_atomic
from t2g.interfaces import FeedbackSource
from t2g.loop.sampling import make_sampling
from t2g.study import targeting
from t2g.study.choices import choice_accuracy, read_questions
from t2g.study.methods import ComparisonPlan
from t2g.study.retention import measure_retention, read_texts
from t2g.types import JudgedResponse


class PolicyMeasures(NamedTuple):
    """What a learner with trained weights measures."""

    logprobs: list[np.ndarray]  # each reference response's tokens, [R] float32
    retained: dict[str, float]  # figures of compare.retention and compare.choices


class ReferenceResponses:
    """Judged responses of the base to held-out prompts, sampled now or in an earlier start.

    `fleets` has engines with the weights of the base.
    """

    def __init__(self, plan: ComparisonPlan, data: PolicyData, fleets: Fleets) -> None:
        job = plan.reference
        num_prompts = job.eval.num_prompts
        prompts = data.eval_prompts[:num_prompts]
        folder = job.run.folder
        samples = folder / "samples"
        self._tokenizer = data.tokenizer
        self._sampling = make_sampling(job, "reference", 0, num_samples=1)
        self._source = partial(make_rollout_source, job, data)

        def make() -> dict[str, Any]:
            rollouts, feedback = fleets.for_policy(job, data.task)
            wait_for_engines(feedback.fleet, rollouts)
            source = self._source(rollouts)
            sampling = targeting.sample_and_judge(prompts, source, feedback, self._sampling)
            judged = asyncio.run(sampling)

            shutil.rmtree(samples, ignore_errors=True)  # left by a start that was cut short
            folder.mkdir(parents=True, exist_ok=True)
            groups: list[Group] = []
            for response in judged:
                sample = (response.rollout, response.feedback)
                group = Group(prompt=response.prompt, samples=(sample,))
                groups.append(group)
            write_groups(samples, {0: groups})
            return {}

        load_or_run(folder, job, make)
        prompts_by_id = {prompt.prompt_id: prompt for prompt in prompts}
        groups = read_groups(samples, prompts_by_id)[0]
        self.responses = [JudgedResponse(group.prompt, *group.samples[0]) for group in groups]
        self._retained = read_texts(plan.job.compare.retention, data.tokenizer, job.rollout.max_model_len)
        self._questions = read_questions(plan.job.compare.choices, data.tokenizer, job.rollout.max_model_len)

    def measure(
        self, method_job: PolicyJob, rollouts: RolloutFleet, feedback: FeedbackSource, learner: LearnerGroup
    ) -> None:
        """Measure what a run changed, into its folder. Engines and learner have the trained weights."""
        measured = self._compute_logprobs(learner, has_reference=True)
        self._write(method_job, measured, rollouts, feedback)

    def measure_exported(self, method_job: PolicyJob, feedback: FeedbackSource) -> None:
        """Measure a run without a learner of ours, from its exported policy."""
        changes = {
            "model.policy": str(method_job.run.folder / POLICY),
            "model.revision": None,
            "learner.lora": None,  # merged when it was exported
            "objective.advantages": "group",  # no critic takes part
        }
        exported = with_overrides(method_job, changes)
        placement_timeout_s = method_job.cluster.placement_timeout_s
        spec = replace(make_learner_spec(exported), loss="none")  # neither a reference nor an optimizer
        with start_learner(spec, placement_timeout_s=placement_timeout_s) as learner:
            measured = self._compute_logprobs(learner, has_reference=False)
        with Fleets() as fleets:
            rollouts = fleets.rollouts(exported.model, exported.rollout, exported)
            self._write(method_job, measured, rollouts, feedback)

    def _compute_logprobs(self, learner: LearnerGroup, *, has_reference: bool) -> PolicyMeasures:
        """Return the log-probabilities of the reference responses, and what the policy retains."""
        responses = [response.rollout for response in self.responses]
        logprobs = [stats.old_logprobs for stats in learner.forward(responses, ["old_logprobs"])]
        figures: dict[str, float] = {}
        fields = ["old_logprobs"]
        if has_reference:
            fields.append("ref_logprobs")
        if self._retained:
            retained = learner.forward(self._retained, fields)
            figures |= measure_retention(retained, has_reference=has_reference)
        if self._questions:
            choices = chain.from_iterable(question.choices for question in self._questions)
            scored = learner.forward([*choices], fields)
            figures["choices"] = choice_accuracy(self._questions, [stats.old_logprobs for stats in scored])
            if has_reference:
                reference_accuracy = choice_accuracy(self._questions, [stats.ref_logprobs for stats in scored])
                figures["choices_change"] = figures["choices"] - reference_accuracy
        return PolicyMeasures(logprobs, figures)

    def _write(
        self, method_job: PolicyJob, measured: PolicyMeasures, rollouts: RolloutFleet, feedback: FeedbackSource
    ) -> None:
        source = self._source(rollouts)
        measuring = targeting.measure(
            self.responses, measured.logprobs, source, feedback, self._sampling, self._tokenizer
        )
        content = asyncio.run(measuring) | measured.retained
        text = json.dumps(content, indent=1)
        file = method_job.run.folder / TARGETING_FILE
        write_atomic(file, text.encode())
