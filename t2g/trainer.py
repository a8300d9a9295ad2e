"""The loop: generate -> feedback -> token rewards -> advantages -> update -> sync. Staleness 0.

Written against the four Protocols of `t2g.interfaces`: it does not know whether they are Ray actors or fakes.
A step is all or nothing: it is logged and checkpointed only when its weights are in every rollout worker, and
everything random in it is a function of (seed, step), so that the step number is all that a resume must know.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from t2g.algo.kl import adapt_kl_coef
from t2g.checkpoint import CheckpointStore
from t2g.config import PolicyJob
from t2g.data.batching import make_train_batch
from t2g.decisions.alarms import alarms
from t2g.errors import RunStopped, UserError
from t2g.feedback import token_offsets, token_rewards
from t2g.feedback.rewards import step_ids
from t2g.interfaces import FeedbackSource, Learner, RolloutSource, WeightSync
from t2g.metrics import RunLog
from t2g.sampling import (
    Judged,
    held_out_metrics,
    measure,
    sample_held_out,
    sample_step,
    training_feedback,
    unless_stopped,
    usable,
)
from t2g.steps import advantage_samples, refuse_not_finite, step_metrics
from t2g.tasks.base import Task
from t2g.types import Prompt, Rollout, ScoredRollout, SpanFeedback

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What a checkpoint holds beside the learner's own files."""

    step: int = 0  # finished steps
    num_samples: int = 0  # responses sampled for training so far
    policy_version: int = 0
    kl_coef: float
    wall_s: float = 0.0  # seconds of all sessions that led here


class Trainer:
    """Owns nothing but the order of things. `run` returns the state it stopped in."""

    def __init__(
        self,
        *,
        config: PolicyJob,
        task: Task,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt],
        rollouts: RolloutSource,
        feedback: FeedbackSource,
        learner: Learner,
        sync: WeightSync,
        log: RunLog,
        checkpoints: CheckpointStore,
        stop: Callable[[], bool],
        on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
    ) -> None:
        self.config, self.task, self.tokenizer = config, task, tokenizer
        self.prompts, self.eval_prompts = prompts, eval_prompts
        self.rollouts, self.feedback, self.learner, self.sync = rollouts, feedback, learner, sync
        self.train_feedback = training_feedback(config, feedback)
        self.log, self.checkpoints, self.stop, self.on_step = log, checkpoints, stop, on_step
        self.state = TrainerState(kl_coef=config.objective.kl_coef)
        self.history: list[dict[str, float]] = []
        self._measuring = asyncio.Semaphore(config.feedback.concurrency)
        self._since = time.monotonic()
        self._learner_is_at_state = True  # False while the weights move: a checkpoint would be of half a step

    def resume(self) -> TrainerState:
        """Load the last checkpoint, if there is one, and open the log after it. Comes before `run`."""
        found = self.checkpoints.latest()
        if found is None:
            self.log.truncate(0)
            return self.state
        folder, state = found
        self.learner.load(folder / "learner")
        self.state = TrainerState(**state)
        self.history = self.log.truncate(self.state.step + 1)
        return self.state

    async def run(self) -> TrainerState:
        """Step until `num_steps` or until `stop()`, and leave a checkpoint of the last finished step.

        Raises RunStopped or UserError when the run must not go on; steps that were finished are kept.
        """
        self.sync.push(self.state.policy_version)
        if self.state.step == 0 and self.eval_prompts:
            self._log(0, await self._evaluate(step=0))
        saved = self.state.step
        try:
            while self.state.step < self.config.num_steps and await self._step(self.state.step + 1):
                if self.state.step % self.config.checkpoint.every == 0:
                    self._checkpoint()
                    saved = self.state.step
        except (RunStopped, UserError):
            if self._learner_is_at_state and self.state.step > saved:
                self._checkpoint()
            raise
        if self.state.step > saved:
            self._checkpoint()
        return self.state

    async def _step(self, step: int) -> bool:
        """One round. False if `stop()` came before the weights moved: the step then never happened."""
        started = time.monotonic()
        judged = await sample_step(
            self.config, self.prompts, self.rollouts, self.train_feedback, self.stop, step=step
        )
        if judged is None:
            return False
        scored = await self._score(step, judged)
        if scored is None or self.stop():
            return False

        self._learner_is_at_state = False
        learn_started = time.monotonic()
        stats = self.learner.forward([s.rollout for s in scored])
        refuse_not_finite(step, scored, stats)
        objective, kl_coef, seed = self.config.objective, self.state.kl_coef, self.config.run.seed
        samples, kl = advantage_samples(scored, stats, objective, kl_coef=kl_coef, seed=seed)
        batch = make_train_batch(
            samples,
            num_epochs=self.config.learner.num_epochs,
            minibatches_per_epoch=self.config.learner.minibatches_per_epoch,
            loss_mean=objective.loss_mean,
            kl_coef=kl_coef if objective.kl_in_loss else 0.0,
            seed=seed + step,
        )
        result = self.learner.update(batch)
        learn_s = time.monotonic() - learn_started
        synced = self.sync.push(result.policy_version)

        metrics = step_metrics(judged.pairs, scored, stats, objective, kl=kl, kl_coef=kl_coef)
        metrics |= result.metrics
        metrics |= {
            "time/generate_s": judged.generate_s,
            "time/feedback_s": judged.feedback_s,
            "time/learn_s": learn_s,
            "time/sync_s": synced.seconds,
            "time/step_s": time.monotonic() - started,
            "sync/bytes": float(synced.bytes),
            "sync/probe_gap": synced.probe_gap,
        }
        metrics["speed/tokens_per_s"] = sum(len(s.rollout.response_ids) for s in scored) / metrics["time/step_s"]
        self._advance(step, result.policy_version, len(judged.pairs), kl)
        metrics["samples"] = float(self.state.num_samples)
        try:
            if self.eval_prompts and (step % self.config.eval.every == 0 or step == self.config.num_steps):
                metrics |= await self._evaluate(step=step)
        finally:  # the step is done, whatever becomes of its evaluation
            self.log.samples(step, judged.pairs, scored, self.tokenizer)
            self._log(step, metrics)
            self._learner_is_at_state = True
        return True

    async def _score(self, step: int, judged: Judged) -> list[ScoredRollout] | None:
        """Rewards of the samples whose feedback can be used; the others are dropped and counted. None: `stop()` came.

        Raises RunStopped when more than `feedback.max_failed_share` of the step has no usable feedback.
        """
        kept = usable(judged.pairs, self.config, step=step, source=self.feedback.name)
        end_rewards: list[float] | None = [0.0] * len(kept)
        if self.config.objective.w_end:
            end_rewards = await unless_stopped([self._end_reward(p, r) for p, r, _ in kept], self.stop)
        if end_rewards is None:
            return None
        return [self._scored(r, f, end_reward) for (_, r, f), end_reward in zip(kept, end_rewards, strict=True)]

    async def _end_reward(self, prompt: Prompt, rollout: Rollout) -> float:
        measured = await measure(self.task, prompt, rollout, self.config.feedback.sandbox, self._measuring)
        if measured is None:
            raise UserError(
                f"objective.w_end pays {self.task.score_name}, and prompt {prompt.prompt_id} holds nothing to measure "
                "its response against; take the record out of data.path, or set w_end to 0"
            )
        return measured[self.task.score_name]

    def _scored(self, rollout: Rollout, feedback: SpanFeedback, end_reward: float) -> ScoredRollout:
        versions = {version for _, _, version in rollout.policy_versions}
        if versions != {self.state.policy_version}:
            raise RunStopped(
                f"prompt {rollout.prompt_id}, sample {rollout.sample_index} was sampled with weights of version "
                f"{sorted(versions)}, and the learner is at {self.state.policy_version}: staleness 0 forbids it"
            )
        offsets = token_offsets(self.tokenizer, rollout.response_ids)
        deltas = token_rewards(offsets, feedback.spans, text=rollout.response_text, rule=self.config.objective.rewards)
        return ScoredRollout(
            rollout=rollout,
            feedback=feedback,
            token_rewards=deltas,
            step_ids=step_ids(offsets, rollout.response_text, self.task.step_pattern),
            end_reward=end_reward,
        )

    def _advance(self, step: int, policy_version: int, num_samples: int, kl: float) -> None:
        objective = self.config.objective
        kl_coef = self.state.kl_coef
        if objective.kl_target is not None:
            kl_coef = adapt_kl_coef(
                kl_coef, kl=kl, target=objective.kl_target, num_samples=num_samples, horizon=objective.kl_horizon
            )
        self.state = replace(
            self.state,
            step=step,
            num_samples=self.state.num_samples + num_samples,
            policy_version=policy_version,
            kl_coef=kl_coef,
        )

    def _mark_time(self) -> None:
        now = time.monotonic()
        self.state = replace(self.state, wall_s=self.state.wall_s + now - self._since)
        self._since = now

    async def _evaluate(self, *, step: int) -> dict[str, float]:
        """Held-out prompts, sampled as in training. A task without a measure of its own is scored by the feedback."""
        started = time.monotonic()
        pairs = await sample_held_out(self.config, self.eval_prompts, self.rollouts)
        metrics = await held_out_metrics(self.config, self.task, pairs, self.feedback, self.log, step=step)
        self.checkpoints.keep_best(step, self.learner.export, metrics["eval/score"])
        return metrics | {"time/eval_s": time.monotonic() - started}

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.log.step(step, metrics)
        self.history.append(metrics)
        for sentence in alarms(self.history, self.config.alarms):
            logger.warning("step %d: %s", step, sentence)
        self.on_step(step, metrics)

    def _checkpoint(self) -> None:
        self._mark_time()

        def fill(folder: Path) -> None:
            (folder / "learner").mkdir()
            self.learner.save(folder / "learner")
            self.learner.export(folder / "policy")

        self.checkpoints.write(self.state.step, fill, asdict(self.state))
