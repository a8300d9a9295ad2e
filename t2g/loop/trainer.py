"""The training loop: generate -> feedback -> token rewards -> advantages -> update -> sync.

Written against the Protocols of `t2g.interfaces`: their implementations are Ray actors or fakes. A step is atomic: it
is logged and checkpointed only after at least one rollout worker has verified its weights; the others get no requests
until they have them. Its prompts and seeds are a function of (run.seed, step). With rollout.max_staleness s > 0, the
responses of the next s steps are sampled during an update; a checkpoint keeps the finished ones.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from t2g import metrics as m
from t2g.concurrency import finish_in_thread
from t2g.config import PolicyJob
from t2g.data.batching import make_train_batch
from t2g.data.buffer import Group, read_groups, write_groups
from t2g.data.prompts import encode_teacher_prompt
from t2g.errors import Diverged, LearnerLost, RankFailed, RunStopped, Stopped, UserError
from t2g.feedback.outcome_rewards import OutcomeRewards
from t2g.interfaces import FeedbackSource, GpuTimeSharing, GpuUser, Learner, RolloutSource, WeightSync
from t2g.loop import sampling, steps
from t2g.loop.alarms import find_alarms
from t2g.loop.consistency import consistency_metrics
from t2g.loop.producer import Producer
from t2g.loop.resampling import RewardVariance, find_reward_variance
from t2g.loop.scoring import score_response
from t2g.loop.step_metrics import compute_fault_recall, group_metrics, sample_metrics, step_metrics, sync_metrics
from t2g.loop.teacher import teacher_critiques, teacher_metrics
from t2g.runs.checkpoint import CheckpointStore, FileHashes
from t2g.runs.identity import Identity, check_identity, save_identity
from t2g.runs.log import RunLog
from t2g.tasks.base import Task
from t2g.types import (
    JudgedResponse,
    Prompt,
    Rollout,
    ScoredRollout,
    TeacherQuery,
    TeacherStats,
    TokenStats,
    TrainSample,
    UpdateResult,
    WeightSyncResult,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The trainer's part of a checkpoint; identity, learner and finished groups have files of their own."""

    step: int = 0  # finished steps
    num_samples: int = 0  # responses sampled for training so far
    policy_version: int = 0
    kl_coef: float
    wall_s: float = 0.0  # seconds of all sessions up to this state


class _StepUpdate(NamedTuple):
    """The result of a step's update."""

    samples: list[TrainSample]
    stats: list[TokenStats]  # before the update
    kl: float  # to the reference, nats per sequence
    kl_coef: float  # in the update; `_advance` adapts it for the next one
    result: UpdateResult
    seconds: float


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Run the training steps of a run. `run` returns the final state."""

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
    identity: Identity  # the run's; a checkpoint is valid for the same prompts and the same reference policy only
    stop: Callable[[], bool]
    on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
    on_phase: Callable[[str], None] = lambda phase: None  # called with the phase that begins, such as sampling
    on_checkpoint: Callable[[int], None] = lambda step: None  # called with a step, before its checkpoint is written
    extra_metrics: Callable[[], Awaitable[dict[str, float]]]  # further metrics of a step, read at its end
    gpu_time_sharing: GpuTimeSharing | None = None  # if engines and learner share GPUs
    lost_at: float | None = None  # time.monotonic() of the failure of the earlier learner

    def __post_init__(self) -> None:
        self.train_feedback = sampling.make_training_feedback(self.config, self.feedback)
        self.state = TrainerState(kl_coef=self.config.objective.kl_coef)
        self.history: list[dict[str, float]] = []
        self._finished: dict[int, list[Group]] = {}  # groups of later steps, from the checkpoint
        self._outcome_rewards = OutcomeRewards(self.config, self.task, self.prompts)
        self._score = partial(score_response, config=self.config, task=self.task, tokenizer=self.tokenizer)
        self._since = time.monotonic()
        self._busy_s = 0.0  # seconds of the learner in this step
        self._sealing: asyncio.Future[Path] | None = None
        self._learner_is_at_state = True  # False during an update: a checkpoint would hold half a step

    def resume(self) -> TrainerState:
        """Load the last checkpoint, if any, and truncate the logs to its step. Call it before `run`.

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
        prompts_by_id = {prompt.prompt_id: prompt for prompt in self.prompts}
        self._finished = read_groups(folder / "buffer", prompts_by_id)
        self.learner.load(folder / "learner")
        self.history = self.log.truncate(self.state.step + 1)
        return self.state

    async def run(self) -> TrainerState:
        """Run steps until `num_steps` or until `stop()`, and write a checkpoint of the last finished step.

        After RunStopped, UserError or a cancellation a checkpoint keeps the finished steps, too. There is none after
        LearnerLost, RankFailed or Diverged, nor between the beginning of an update and the end of its step, when the
        learner is at no finished step. If another coroutine sees the loss first and cancels this one, the call of the
        lost learner fails at once.

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
        recovered: dict[str, float] = {}
        if self.lost_at is not None:
            recovered[m.LEARNER_RECOVERY] = time.monotonic() - self.lost_at
        if self.state.step == 0 and self.eval_prompts:
            start_metrics: dict[str, float] = {}
            await self._evaluate(0, start_metrics)
            self._log(0, start_metrics)
        producer = Producer(
            self.config,
            self.prompts,
            self.rollouts,
            self.train_feedback,
            finished=self._finished,
            outcome_rewards=self._outcome_rewards,
            find_reward_variance=self._find_reward_variance if self.config.rollout.resample_zero_groups else None,
            on_phase=self.on_phase,
        )
        async with producer:
            saved = self.state.step
            try:
                while self.state.step < self.config.num_steps and await self._step(producer, recovered):
                    recovered = {}
                    if self.state.step % self.config.checkpoint.every == 0:
                        await self._checkpoint(producer)
                        saved = self.state.step
            except (RunStopped, UserError, asyncio.CancelledError) as error:
                # Weights with which the model computes NaN must not replace the last checkpoint.
                cannot_save = isinstance(error, LearnerLost | RankFailed | Diverged)
                can_save = self._learner_is_at_state and not cannot_save
                if can_save and self.state.step > saved:
                    await producer.cancel()
                    await self._checkpoint(producer)
                raise
            if self.state.step > saved:
                await producer.cancel()  # an engine that time-shares its GPU would finish all responses first
                await self._checkpoint(producer)
        await self._give_gpus_to("engines")  # the caller expects engines that serve
        return self.state

    async def _give_gpus_to(self, user: GpuUser) -> None:
        if self.gpu_time_sharing is not None:
            await self.gpu_time_sharing.switch_to(user)

    async def _step(self, producer: Producer, recovered: dict[str, float]) -> bool:
        """Run one step. Returns False if `stop()` was set before the update: the step then has no effect."""
        started = time.monotonic()
        self._busy_s = 0.0
        step = self.state.step + 1
        await self._give_gpus_to("engines")
        try:
            judged = await self._wait_for_judged(step, producer)
        except Stopped:
            return False
        usable = self._select_usable(step, judged)
        prompts = [response.prompt for response in usable]
        scored = [self._score(response.rollout, response.feedback) for response in usable]
        staleness = self._compute_staleness([response.rollout for response in usable])

        learned = await self._learn(step, scored, prompts)
        synced = await self._push_weights(learned.result.policy_version)

        self._advance(step, learned, scored, judged)
        metrics = self._collect_metrics(judged.responses, scored, learned, synced, staleness)
        metrics |= recovered
        metrics |= await self.extra_metrics()
        metrics |= sample_metrics(judged, staleness, self.config.rollout)
        step_s = time.monotonic() - started
        busy_share = (self._busy_s + synced.seconds) / step_s
        metrics |= {
            m.SAMPLES: float(self.state.num_samples),
            m.BUFFERED: float(producer.count_waiting()),
            m.IDLE_LEARNER: max(0.0, 1 - busy_share),
        }
        metrics |= {
            m.LEARN_S: learned.seconds,
            m.STEP_S: step_s,
            m.SPEED: judged.num_sampled_tokens / step_s,
        }
        try:
            if self._is_evaluated(step):
                await self._evaluate(step, metrics)
        finally:  # the step is finished even if its evaluation fails
            self._write_step(step, metrics, judged, scored, learned)
        return True

    def _compute_staleness(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        version = self.state.policy_version
        max_staleness = self.config.rollout.max_staleness
        return steps.compute_token_staleness(rollouts, policy_version=version, max_staleness=max_staleness)

    async def _push_weights(self, policy_version: int) -> WeightSyncResult:
        self.on_phase("weight sync")
        await self._give_gpus_to("engines")
        return await self.sync.push(policy_version)

    def _write_step(
        self,
        step: int,
        metrics: dict[str, float],
        judged: sampling.JudgedStep,
        scored: Sequence[ScoredRollout],
        learned: _StepUpdate,
    ) -> None:
        """Write the logs of a finished step."""
        columns = steps.make_token_columns(learned.samples, learned.stats)
        self.log.write_samples(step, "train", judged.responses, scored, self.tokenizer, columns)
        self.log.write_dropped(step, sampling.make_dropped_records(judged))
        self._log(step, metrics)
        self._learner_is_at_state = True

    async def _wait_for_judged(self, step: int, producer: Producer) -> sampling.JudgedStep:
        """Return the responses of the step once all are judged.

        The producer may sample this step and up to `rollout.max_staleness` next ones meanwhile.

        Raises:
            Stopped: `stop()` was set.
        """
        last = min(step + self.config.rollout.max_staleness, self.config.num_steps)
        for admitted in range(step, last + 1):
            producer.admit(admitted)
        return await producer.take(step, self.stop)

    def _select_usable(self, step: int, judged: sampling.JudgedStep) -> list[JudgedResponse]:
        """Return the responses to train on. If there are too few, the step is logged before the run stops.

        Raises:
            RunStopped: See `sampling.select_usable`.
        """
        try:
            return sampling.select_usable(judged, self.config, step=step)
        except RunStopped:  # a resume drops these lines
            self.log.write_samples(step, "train", judged.responses)
            self.log.write_dropped(step, sampling.make_dropped_records(judged))
            raise

    def _collect_metrics(
        self,
        responses: Sequence[JudgedResponse],
        scored: Sequence[ScoredRollout],
        learned: _StepUpdate,
        synced: WeightSyncResult,
        staleness: np.ndarray,
    ) -> dict[str, float]:
        """Return the metrics of the step's data, update and weight sync."""
        objective = self.config.objective
        metrics = step_metrics(responses, scored, learned.stats, objective, kl=learned.kl, kl_coef=learned.kl_coef)
        metrics |= group_metrics(scored, objective, seed=self.config.run.seed)
        metrics |= consistency_metrics(
            scored, learned.samples, learned.stats, staleness, objective, tokenizer=self.tokenizer
        )
        metrics |= compute_fault_recall(self.task, responses)
        metrics |= learned.result.metrics
        metrics |= sync_metrics(synced)
        return metrics

    def _is_evaluated(self, step: int) -> bool:
        if not self.eval_prompts:
            return False
        return step % self.config.eval.every == 0 or step == self.config.num_steps

    async def _learn(self, step: int, scored: Sequence[ScoredRollout], prompts: Sequence[Prompt]) -> _StepUpdate:
        """Update the policy.

        The returned statistics are those of the update's own forward pass where `Learner.forward` leaves them out.
        """
        self.on_phase("learning")
        started = time.monotonic()
        await self._give_gpus_to("learner")
        objective = self.config.objective
        kl_coef = self.state.kl_coef
        seed = self.config.run.seed
        stats = await self._call(self.learner.forward, [response.rollout for response in scored])
        steps.check_finite(step, scored, stats)
        teacher = await self._score_teacher(scored, stats, prompts) if objective.teacher else ()

        samples = steps.make_train_samples(scored, stats, objective, kl_coef=kl_coef, seed=seed, teacher=teacher)
        batch = make_train_batch(
            samples,
            num_epochs=self.config.learner.num_epochs,
            minibatches_per_epoch=self.config.learner.minibatches_per_epoch,
            kl_coef=kl_coef if objective.kl_in_loss else 0.0,
            seed=seed + step,
        )
        self._learner_is_at_state = False
        result = await self._call(self.learner.update, batch)
        stats = list(result.stats) or stats
        if objective.teacher is not None:
            measured = teacher_metrics(scored, teacher, stats, objective)
            result = replace(result, metrics=result.metrics | measured)
        kl = steps.compute_step_kl(scored, stats)
        seconds = time.monotonic() - started
        return _StepUpdate(samples=samples, stats=stats, kl=kl, kl_coef=kl_coef, result=result, seconds=seconds)

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
        prompt_ids = [response.rollout.prompt_id for response in scored]
        own_critiques = [response.feedback.critique for response in scored]
        critiques = teacher_critiques(prompt_ids, own_critiques, shuffled=rule.critique == "shuffled")

        queries: list[TeacherQuery] = []
        has_query: list[bool] = []
        for response, token_stats, prompt, critique in zip(scored, stats, prompts, critiques, strict=True):
            teacher_ids = None
            if critique:
                teacher_ids = encode_teacher_prompt(self.task, prompt, critique, self.tokenizer, max_tokens)
            has_query.append(teacher_ids is not None)
            if teacher_ids is not None:
                response_ids = response.rollout.response_ids
                query = TeacherQuery(prompt_ids=teacher_ids, response_ids=response_ids, top_ids=token_stats.top_ids)
                queries.append(query)

        if not queries and rule.replaces_rewards:
            raise RunStopped(
                f"no response of the step has a critique for objective.teacher that fits into a prompt of {max_tokens} "
                "tokens, and objective.teacher.weight=1 trains on nothing else; set it below 1"
            )
        scores = await self._call(self.learner.score_teacher, queries) if queries else []
        remaining = iter(scores)
        return [next(remaining) if has else None for has in has_query]

    async def _call(self, call: Callable[..., Result], *args: Any) -> Result:
        """Call the learner in a thread, so that requests go on meanwhile.

        A cancelled call waits for the end of the thread: the ranks can run one call at a time.
        """
        started = time.monotonic()
        try:
            return await finish_in_thread(call, *args)
        finally:
            self._busy_s += time.monotonic() - started

    def _find_reward_variance(self, group: Group) -> RewardVariance:
        usable = [(rollout, feedback) for rollout, feedback in group.samples if feedback.usable]
        scored = [self._score(rollout, feedback) for rollout, feedback in usable]
        return find_reward_variance(scored, self.config.objective, seed=self.config.run.seed)

    def _advance(
        self, step: int, learned: _StepUpdate, scored: Sequence[ScoredRollout], judged: sampling.JudgedStep
    ) -> None:
        objective = self.config.objective
        kl_coef = steps.next_kl_coef(
            objective, self.state.kl_coef, kl=learned.kl, scored=scored, num_samples=len(judged.responses)
        )
        self.state = replace(
            self.state,
            step=step,
            num_samples=self.state.num_samples + len(judged.all_responses),
            policy_version=learned.result.policy_version,
            kl_coef=kl_coef,
        )

    async def _evaluate(self, step: int, metrics: dict[str, float]) -> None:
        """Add the metrics of held-out prompts, sampled as in training, and keep the policy if it is the best so far.

        They are added before the policy is exported: a resumed run does not evaluate a finished step again.
        """
        started = time.monotonic()
        self.on_phase("evaluation")
        pairs = await sampling.sample_held_out(self.config, self.eval_prompts, self.rollouts)
        metrics |= await sampling.compute_held_out_metrics(
            self.config, self.task, pairs, self.feedback, self.log, step=step
        )
        await self._wait_for_checkpoint()
        await self._call(self.checkpoints.keep_best, step, self.learner.export, metrics[m.HELD_OUT_SCORE])
        metrics[m.EVAL_S] = time.monotonic() - started

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.log.write_step(step, metrics)
        self.history.append(metrics)
        config = self.config
        penalty = config.objective.truncation_penalty
        tolerance = config.learner.resolve_probe_tolerance(config.rollout)
        alarms = find_alarms(self.history, config.alarms, truncation_penalty=penalty, probe_tolerance=tolerance)
        self.log.write_alarms(step, alarms)
        for sentence in alarms:
            logger.warning("step %d: %s", step, sentence)
        self.on_step(step, metrics)

    async def _checkpoint(self, producer: Producer) -> None:
        self.on_phase("checkpoint")
        await self._give_gpus_to("learner")
        now = time.monotonic()
        self.state = replace(self.state, wall_s=self.state.wall_s + now - self._since)
        self._since = now
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
        """Wait until the last checkpoint is hashed and synced to the disk, which overlaps with the next steps.

        Raises:
            UserError: The checkpoint cannot be written.
        """
        sealing = self._sealing
        if sealing is None:
            return
        # A cancellation here keeps `_sealing`: the next checkpoint would remove the files of an unfinished one.
        await asyncio.wait([sealing])
        self._sealing = None
        sealing.result()
