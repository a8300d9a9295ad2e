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
from t2g.interfaces import FeedbackSource, Learner, RolloutSource, Sampling, WeightSync
from t2g.metrics import RunLog
from t2g.steps import (
    advantage_samples,
    eval_metrics,
    prompt_indices,
    refuse_not_finite,
    sampling_seed,
    step_metrics,
)
from t2g.tasks.base import Task
from t2g.types import Prompt, Rollout, ScoredRollout, SpanFeedback

logger = logging.getLogger(__name__)

STOP_POLL_S = 0.2  # a SIGTERM during generation is noticed within this time


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What a checkpoint holds beside the learner's own files."""

    step: int = 0  # finished steps
    num_samples: int = 0  # responses sampled for training so far
    policy_version: int = 0
    kl_coef: float
    wall_s: float = 0.0  # seconds of all sessions that led here


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One step's samples before the learner has seen them."""

    pairs: tuple[tuple[Prompt, Rollout, SpanFeedback], ...]
    generate_s: float  # until the last response was there
    feedback_s: float  # from then until the last critique was there: scoring overlaps with sampling


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
        self.log, self.checkpoints, self.stop, self.on_step = log, checkpoints, stop, on_step
        self.state = TrainerState(kl_coef=config.objective.kl_coef)
        self.history: list[dict[str, float]] = []
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
        judged = await self._judged(step)
        if judged is None:
            return False
        scored = self._score(step, judged)
        if self.stop():
            return False

        self._learner_is_at_state = False
        learn_started = time.monotonic()
        stats = self.learner.forward([s.rollout for s in scored])
        refuse_not_finite(step, scored, stats)
        samples, kl = advantage_samples(
            scored, stats, self.config.objective, kl_coef=self.state.kl_coef, seed=self.config.run.seed
        )
        config = self.config.learner
        batch = make_train_batch(
            samples,
            num_ranks=config.workers,
            token_budget=config.tokens_per_microbatch,
            num_epochs=config.num_epochs,
            minibatches_per_epoch=config.minibatches_per_epoch,
            seed=self.config.run.seed + step,
        )
        result = self.learner.update(batch)
        learn_s = time.monotonic() - learn_started
        synced = self.sync.push(result.policy_version)

        metrics = step_metrics(judged.pairs, scored, stats, kl=kl, kl_coef=self.state.kl_coef)
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

    async def _judged(self, step: int) -> Judged | None:
        """Sample this step's prompts and judge each response as soon as it is there. None if `stop()` came first."""
        rollout = self.config.rollout
        chosen = prompt_indices(
            num_prompts=len(self.prompts), per_step=rollout.prompts_per_step, step=step, seed=self.config.run.seed
        )
        sampling = Sampling(
            num_samples=rollout.samples_per_prompt,
            temperature=rollout.temperature,
            max_new_tokens=rollout.max_new_tokens,
            seed=sampling_seed(self.config.run.seed, "train", step),
        )
        started = time.monotonic()
        sampled_at = [started]

        async def one(prompt: Prompt) -> list[tuple[Prompt, Rollout, SpanFeedback]]:
            rollouts = await self.rollouts.sample(prompt, sampling)
            sampled_at.append(time.monotonic())
            feedback = await asyncio.gather(*(self.feedback.judge(prompt, r.response_text) for r in rollouts))
            return [(prompt, r, f) for r, f in zip(rollouts, feedback, strict=True)]

        tasks = [asyncio.ensure_future(one(self.prompts[i])) for i in chosen]
        try:
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, timeout=STOP_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
                if self.stop():
                    return None
                for task in done:
                    task.result()  # raises here what was raised there, instead of waiting for the others
        finally:
            for task in tasks:
                task.cancel()
        pairs = tuple(pair for task in tasks for pair in task.result())
        generate_s = max(sampled_at) - started
        return Judged(pairs=pairs, generate_s=generate_s, feedback_s=time.monotonic() - started - generate_s)

    def _score(self, step: int, judged: Judged) -> list[ScoredRollout]:
        """Token rewards of the samples whose feedback can be used; the others are dropped and counted.

        Raises RunStopped when more than `feedback.max_failed_share` of the step has no usable feedback.
        """
        usable = [(p, r, f) for p, r, f in judged.pairs if f.status in ("ok", "empty")]
        failed_share = 1 - len(usable) / len(judged.pairs)
        if failed_share > self.config.feedback.max_failed_share or not usable:
            counts = {s: sum(f.status == s for _, _, f in judged.pairs) for s in ("failed", "unparsable")}
            raise RunStopped(
                f"step {step}: {failed_share:.0%} of {len(judged.pairs)} samples have no usable feedback "
                f"({counts['failed']} failed, {counts['unparsable']} unparsable) from {self.feedback.name}; "
                f"feedback.max_failed_share allows {self.config.feedback.max_failed_share:.0%}"
            )
        return [self._scored(rollout, feedback) for _, rollout, feedback in usable]

    def _scored(self, rollout: Rollout, feedback: SpanFeedback) -> ScoredRollout:
        versions = {version for _, _, version in rollout.policy_versions}
        if versions != {self.state.policy_version}:
            raise RunStopped(
                f"prompt {rollout.prompt_id}, sample {rollout.sample_index} was sampled with weights of version "
                f"{sorted(versions)}, and the learner is at {self.state.policy_version}: staleness 0 forbids it"
            )
        offsets = token_offsets(self.tokenizer, rollout.response_ids)
        deltas = token_rewards(
            offsets, feedback.spans, text=rollout.response_text, rule=self.config.objective.rewards
        )
        return ScoredRollout(rollout=rollout, feedback=feedback, token_rewards=deltas)

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
        rollout, config = self.config.rollout, self.config.eval
        sampling = Sampling(
            num_samples=config.samples_per_prompt,
            temperature=rollout.temperature,
            max_new_tokens=rollout.max_new_tokens,
            seed=sampling_seed(self.config.run.seed, "eval", 0),  # the same at every evaluation and in every arm
        )
        groups = await asyncio.gather(*(self.rollouts.sample(p, sampling) for p in self.eval_prompts))
        pairs = [(p, r) for p, group in zip(self.eval_prompts, groups, strict=True) for r in group]
        measured = await self._measured(pairs)
        judged = pairs if None in measured else pairs[: self.config.log.num_samples]  # the latter for the report only
        feedback = await asyncio.gather(*(self.feedback.judge(p, r.response_text) for p, r in judged))
        metrics = eval_metrics(pairs, measured, feedback, self.task, self.config.objective.rewards)
        self.log.eval_samples(step, pairs, feedback)
        self.checkpoints.keep_best(step, self.learner.export, metrics["eval/score"])
        return metrics | {"time/eval_s": time.monotonic() - started}

    async def _measured(self, pairs: Sequence[tuple[Prompt, Rollout]]) -> list[dict[str, float] | None]:
        """What the task itself says of each response. In threads: a task may run programs, for seconds each."""
        turn = asyncio.Semaphore(self.config.feedback.concurrency)

        async def one(prompt: Prompt, rollout: Rollout) -> dict[str, float] | None:
            async with turn:
                return await asyncio.to_thread(self.task.measure, prompt, rollout.response_text)

        return list(await asyncio.gather(*(one(*pair) for pair in pairs)))

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
