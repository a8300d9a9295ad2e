"""The training loop: generate -> feedback -> token rewards -> advantages -> update -> sync.

Written against the Protocols of `t2g.interfaces`: their implementations are Ray actors or fakes. A step is atomic: it
is logged and checkpointed only after its weights are in every rollout worker. Its prompts and seeds are a function of
(run.seed, step). With rollout.max_staleness s > 0, the responses of the next s steps are sampled during an update; a
checkpoint keeps the finished ones.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from t2g.algo.kl import adapt_kl_coef
from t2g.concurrency import finish_in_thread
from t2g.config import PolicyJob, with_overrides
from t2g.data.batching import make_train_batch
from t2g.data.buffer import Group, read_groups, write_groups
from t2g.data.prompts import encode_teacher_prompt
from t2g.errors import LearnerLost, RunStopped, Stopped, UserError
from t2g.feedback import token_rewards
from t2g.feedback.outcome_rewards import OutcomeRewards
from t2g.feedback.rewards import compute_step_ids
from t2g.interfaces import FeedbackSource, GpuTimeSharing, GpuUser, Learner, RolloutSource, WeightSync
from t2g.loop import sampling, steps
from t2g.loop.alarms import find_alarms
from t2g.loop.producer import Producer
from t2g.runs.checkpoint import CheckpointStore, FileHashes
from t2g.runs.identity import Identity, check_identity, save_identity
from t2g.runs.log import RunLog
from t2g.tasks.base import Task
from t2g.text.transcript import find_answer_tokens, rollout_offsets
from t2g.types import (
    Prompt,
    Rollout,
    ScoredRollout,
    SpanFeedback,
    TeacherQuery,
    TeacherStats,
    TokenStats,
    TrainSample,
    UpdateResult,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The trainer's part of a checkpoint, beside identity, learner and the finished groups of later steps."""

    step: int = 0  # finished steps
    num_samples: int = 0  # responses sampled for training so far
    policy_version: int = 0
    kl_coef: float
    wall_s: float = 0.0  # seconds of all sessions up to this state


@dataclass(kw_only=True, eq=False)
class Trainer:
    """The order of the operations of a run. `run` returns the final state."""

    config: PolicyJob
    task: Task
    tokenizer: Any
    prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    rollouts: RolloutSource
    feedback: FeedbackSource
    learner: Learner
    sync: WeightSync
    log: RunLog
    checkpoints: CheckpointStore
    identity: Identity  # of the run; a checkpoint is valid for the same prompts and the same reference policy only
    stop: Callable[[], bool]
    on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
    on_phase: Callable[[str], None] = lambda phase: None  # called with what the run does next: sampling, learning
    on_checkpoint: Callable[[int], None] = lambda step: None  # called with the step before its checkpoint is written
    extra_metrics: Callable[[], Awaitable[dict[str, float]]]  # further metrics of a step, read at its end
    gpu_time_sharing: GpuTimeSharing | None = None  # if engines and learner share GPUs
    lost_at: float | None = None  # time.monotonic() at which the learner failed that this one replaces

    def __post_init__(self) -> None:
        self.train_feedback = sampling.training_feedback(self.config, self.feedback)
        self.state = TrainerState(kl_coef=self.config.objective.kl_coef)
        self.history: list[dict[str, float]] = []
        self._finished: dict[int, list[Group]] = {}  # groups of later steps, from the checkpoint
        self._outcome_rewards = OutcomeRewards(self.config, self.task, self.prompts)
        self._since = time.monotonic()
        self._busy_s = 0.0  # of the learner in this step
        self._sealing: asyncio.Future[Path] | None = None
        self._learner_is_at_state = True  # False during an update: a checkpoint would hold half a step

    def resume(self) -> TrainerState:
        """Load the last checkpoint, if there is one, and open the log after it. Call it before `run`.

        Raises:
            UserError: The checkpoint has another identity, see `check_identity`.
        """
        checkpoint = self.checkpoints.latest()
        if checkpoint is None:
            self.log.truncate(0)
            return self.state
        folder, saved = checkpoint
        check_identity(folder, self.identity)
        self.state = TrainerState(**saved)
        self._finished = read_groups(folder / "buffer", {prompt.prompt_id: prompt for prompt in self.prompts})
        self.learner.load(folder / "learner")
        self.history = self.log.truncate(self.state.step + 1)
        return self.state

    async def run(self) -> TrainerState:
        """Run steps until `num_steps` or until `stop()`, and write a checkpoint of the last finished step.

        After an error or a cancellation a checkpoint keeps the finished steps too, except after LearnerLost. If
        another coroutine sees the loss first and cancels this one, the call of the lost learner fails at once.

        Raises:
            RunStopped, UserError: The run must not continue.
        """
        try:
            return await self._run()
        finally:
            await self._wait_for_checkpoint()

    async def _run(self) -> TrainerState:
        await self._give_gpus_to("engines")
        await self.sync.push(self.state.policy_version)
        recovered = {} if self.lost_at is None else {"recovery/learner_s": time.monotonic() - self.lost_at}
        if self.state.step == 0 and self.eval_prompts:
            self._log(0, await self._evaluate(step=0))
        inputs = self.prompts, self.rollouts, self.train_feedback, self._finished, self._outcome_rewards, self.on_phase
        async with Producer(self.config, *inputs) as producer:
            saved = self.state.step
            try:
                while self.state.step < self.config.num_steps and await self._step(producer, recovered):
                    recovered = {}
                    if self.state.step % self.config.checkpoint.every == 0:
                        await self._checkpoint(producer)
                        saved = self.state.step
            except (RunStopped, UserError, asyncio.CancelledError) as error:
                if self._learner_is_at_state and self.state.step > saved and not isinstance(error, LearnerLost):
                    await self._checkpoint(producer)
                raise
            if self.state.step > saved:
                await self._checkpoint(producer)
        await self._give_gpus_to("engines")  # the caller expects engines that serve
        return self.state

    async def _give_gpus_to(self, user: GpuUser) -> None:
        if self.gpu_time_sharing is not None:
            await self.gpu_time_sharing.switch_to(user)

    async def _step(self, producer: Producer, recovered: dict[str, float]) -> bool:
        """Run one step. Returns False if `stop()` was set before the update: the step then has no effect."""
        started, self._busy_s = time.monotonic(), 0.0
        step, max_staleness = self.state.step + 1, self.config.rollout.max_staleness
        await self._give_gpus_to("engines")
        for admitted in range(step, min(step + max_staleness, self.config.num_steps) + 1):
            producer.admit(admitted)
        try:
            judged = await producer.take(step, self.stop)
        except Stopped:
            return False
        try:
            usable = sampling.select_usable(judged, self.config, step=step)
        except RunStopped:  # a resume drops these lines
            self.log.write_samples(step, "train", judged.responses)
            self.log.write_dropped(step, sampling.make_dropped_records(judged))
            raise
        scored = [self._score(rollout, feedback) for _, rollout, feedback in usable]
        ages = steps.token_staleness(
            [s.rollout for s in scored], policy_version=self.state.policy_version, max_staleness=max_staleness
        )

        self._learner_is_at_state = False
        self.on_phase("learning")
        learn_started = time.monotonic()
        await self._give_gpus_to("learner")
        samples, stats, kl, result = await self._learn(step, scored, [prompt for prompt, _, _ in usable])
        learn_s = time.monotonic() - learn_started
        self.on_phase("weight sync")
        await self._give_gpus_to("engines")
        synced = await self.sync.push(result.policy_version)

        kl_coef = self.state.kl_coef
        self._advance(step, result.policy_version, len(judged.responses), kl)
        metrics = steps.step_metrics(judged.responses, scored, stats, self.config.objective, kl=kl, kl_coef=kl_coef)
        metrics |= (
            steps.fault_recall(self.task, judged.responses) | result.metrics | steps.sync_metrics(synced) | recovered
        )
        metrics |= await self.extra_metrics()
        step_s = time.monotonic() - started
        metrics |= {
            "samples": float(self.state.num_samples),
            "staleness/mean": float(ages.mean()),
            "staleness/max": float(ages.max()),
            "buffer/samples": float(producer.count_waiting()),
            "dropped/samples": float(len(judged.responses) - len(scored) + judged.num_unsampled),
            "dropped/prompts": float(len(judged.unsampled)),
            "idle/learner": max(0.0, 1 - (self._busy_s + synced.seconds) / step_s),
            "time/generate_s": judged.generate_s,
            "time/feedback_s": judged.feedback_s,
            "time/learn_s": learn_s,
            "time/step_s": step_s,
            "speed/tokens_per_s": len(ages) / step_s,
        }
        try:
            if self.eval_prompts and (step % self.config.eval.every == 0 or step == self.config.num_steps):
                metrics |= await self._evaluate(step=step)
        finally:  # the step is finished even if its evaluation fails
            self.log.write_samples(
                step, "train", judged.responses, scored, self.tokenizer, steps.make_token_columns(samples, stats)
            )
            self.log.write_dropped(step, sampling.make_dropped_records(judged))
            self._log(step, metrics)
            self._learner_is_at_state = True
        return True

    async def _learn(
        self, step: int, scored: Sequence[ScoredRollout], prompts: Sequence[Prompt]
    ) -> tuple[list[TrainSample], list[TokenStats], float, UpdateResult]:
        """Update the policy; return samples, statistics before the update, KL (nats per sequence) and result.

        The statistics are those of the update's own forward pass where `Learner.forward` leaves them out.
        """
        stats = await self._call(self.learner.forward, [s.rollout for s in scored])
        steps.check_finite(step, scored, stats)
        objective, kl_coef, seed = self.config.objective, self.state.kl_coef, self.config.run.seed
        teacher = await self._score_teacher(scored, stats, prompts) if objective.teacher else ()
        samples = steps.make_train_samples(scored, stats, objective, kl_coef=kl_coef, seed=seed, teacher=teacher)
        batch = make_train_batch(
            samples,
            num_epochs=self.config.learner.num_epochs,
            minibatches_per_epoch=self.config.learner.minibatches_per_epoch,
            kl_coef=kl_coef if objective.kl_in_loss else 0.0,
            seed=seed + step,
        )
        result = await self._call(self.learner.update, batch)
        stats = list(result.stats) or stats
        if teacher:
            result = replace(result, metrics=result.metrics | steps.teacher_metrics(scored, teacher, stats))
        return samples, stats, steps.step_kl(scored, stats), result

    async def _score_teacher(
        self, scored: Sequence[ScoredRollout], stats: Sequence[TokenStats], prompts: Sequence[Prompt]
    ) -> list[TeacherStats | None]:
        """Return the teacher's log-probabilities for each response; None if no critique fits into its prompt.

        Raises:
            RunStopped: The teacher has no critique at all, and the loss has no other part.
        """
        rule = self.config.objective.teacher
        assert rule is not None
        max_tokens = self.config.revision_window - self.config.rollout.max_new_tokens
        critiques = steps.teacher_critiques(
            [s.rollout.prompt_id for s in scored],
            [s.feedback.critique for s in scored],
            shuffled=rule.critique == "shuffled",
        )
        teacher_ids = [
            encode_teacher_prompt(self.task, prompt, critique, self.tokenizer, max_tokens) if critique else None
            for prompt, critique in zip(prompts, critiques, strict=True)
        ]
        queries = [
            TeacherQuery(prompt_ids=ids, response_ids=s.rollout.response_ids, top_ids=t.top_ids)
            for s, t, ids in zip(scored, stats, teacher_ids, strict=True)
            if ids is not None
        ]
        if not queries and rule.weight == 1:
            raise RunStopped(
                f"no response of the step has a critique for objective.teacher that fits into a prompt of {max_tokens} "
                "tokens, and objective.teacher.weight=1 trains on nothing else; set it below 1"
            )
        teacher_stats = iter(await self._call(self.learner.score_teacher, queries) if queries else ())
        return [None if ids is None else next(teacher_stats) for ids in teacher_ids]

    async def _call(self, call: Callable[..., Result], *args: Any) -> Result:
        """Call the learner in a thread, so that requests go on meanwhile.

        A cancelled call waits for the end of the thread: the ranks can run one call at a time.
        """
        started = time.monotonic()
        try:
            return await finish_in_thread(call, *args)
        finally:
            self._busy_s += time.monotonic() - started

    def _score(self, rollout: Rollout, feedback: SpanFeedback) -> ScoredRollout:
        offsets = rollout_offsets(self.tokenizer, rollout)
        objective, rule = self.config.objective, self.config.objective.rewards
        reward_by = partial(token_rewards, offsets, text=rollout.response_text, weights=self.config.feedback.weights)
        by_criterion = {name: [s for s in feedback.spans if s.criterion == name] for name in feedback.criteria}
        return ScoredRollout(
            rollout=rollout,
            feedback=feedback,
            token_rewards=reward_by(feedback.spans, rule=rule),
            by_token=reward_by(feedback.spans, rule=with_overrides(rule, {"unit": "token"})),
            step_ids=compute_step_ids(
                offsets, rollout.response_text, self.task.step_pattern, starts=[t.characters[0] for t in rollout.turns]
            ),
            outcome_reward=sum(e.weight * feedback.outcomes.get(e.source, 0.0) for e in objective.outcome_rewards),
            truncation_penalty=objective.truncation_penalty if rollout.is_unfinished else 0.0,
            answer_tokens=find_answer_tokens(offsets, rollout),
            criterion_rewards={name: float(reward_by(spans, rule=rule).sum()) for name, spans in by_criterion.items()},
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

    async def _evaluate(self, *, step: int) -> dict[str, float]:
        """Evaluate the held-out prompts, sampled as in training, and keep the policy if it is the best so far."""
        started = time.monotonic()
        self.on_phase("evaluation")
        pairs = await sampling.sample_held_out(self.config, self.eval_prompts, self.rollouts)
        metrics = await sampling.compute_held_out_metrics(
            self.config, self.task, pairs, self.feedback, self.log, step=step
        )
        await self._wait_for_checkpoint()
        await self._call(self.checkpoints.keep_best, step, self.learner.export, metrics["eval/score"])
        return metrics | {"time/eval_s": time.monotonic() - started}

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.log.write_step(step, metrics)
        self.history.append(metrics)
        penalty = self.config.objective.truncation_penalty
        alarms = find_alarms(self.history, self.config.alarms, truncation_penalty=penalty)
        self.log.write_alarms(step, alarms)
        for sentence in alarms:
            logger.warning("step %d: %s", step, sentence)
        self.on_step(step, metrics)

    async def _checkpoint(self, producer: Producer) -> None:
        self.on_phase("checkpoint")
        await self._give_gpus_to("learner")
        now = time.monotonic()
        self.state, self._since = replace(self.state, wall_s=self.state.wall_s + now - self._since), now
        groups = producer.collect_finished()
        self.on_checkpoint(self.state.step)

        def fill(folder: Path) -> FileHashes:
            save_identity(folder, self.identity)
            (folder / "learner").mkdir()
            hashed = self.learner.save(folder / "learner")
            if self.config.checkpoint.export:
                self.learner.export(folder / "policy")
            if groups:
                write_groups(folder / "buffer", groups)
            return {f"learner/{name}": entry for name, entry in hashed.items()}

        await self._wait_for_checkpoint()
        seal = await self._call(self.checkpoints.begin, self.state.step, fill, asdict(self.state))
        self._sealing = asyncio.ensure_future(asyncio.to_thread(seal))

    async def _wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is hashed and synced to the disk, which runs beside the next steps.

        Raises:
            UserError: The checkpoint cannot be written.
        """
        if (sealing := self._sealing) is not None:
            # A cancellation here keeps `_sealing`: the next checkpoint would remove the files of an unfinished one.
            await asyncio.wait([sealing])
            self._sealing = None
            sealing.result()
