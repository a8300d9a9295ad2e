"""The loop: generate -> feedback -> token rewards -> advantages -> update -> sync.

Written against the four Protocols of `t2g.interfaces`: it does not know whether they are Ray actors or fakes.
A step is all or nothing: it is logged and checkpointed only when its weights are in every rollout worker, and which
prompts it has, with which seeds, is a function of (seed, step). With rollout.max_staleness s > 0 the responses of the
s steps behind the one being trained are made meanwhile; a checkpoint keeps those that are finished.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from t2g.algo.kl import adapt_kl_coef
from t2g.concurrency import gather_unless_stopped
from t2g.config import PolicyJob, with_overrides
from t2g.data.batching import make_train_batch
from t2g.data.buffer import Group, read_groups, write_groups
from t2g.data.prompts import encode_revision
from t2g.errors import LearnerLost, RunStopped, Stopped, UserError
from t2g.feedback import token_offsets, token_rewards
from t2g.feedback.rewards import compute_step_ids
from t2g.interfaces import FeedbackSource, Learner, RolloutSource, Turn, Turns, WeightSync
from t2g.loop.alarms import alarms
from t2g.loop.producer import Producer
from t2g.loop.sampling import (
    compute_held_out_metrics,
    make_dropped_records,
    measure,
    sample_held_out,
    select_usable,
    training_feedback,
)
from t2g.loop.steps import (
    check_finite,
    fault_recall,
    make_train_samples,
    step_kl,
    step_metrics,
    sync_metrics,
    teacher_contexts,
    teacher_metrics,
    token_columns,
    token_staleness,
)
from t2g.runs import identity
from t2g.runs.checkpoint import CheckpointStore, Entries
from t2g.runs.identity import Identity
from t2g.runs.log import RunLog
from t2g.tasks.base import Task
from t2g.types import Prompt, Rollout, ScoredRollout, SpanFeedback, TokenStats, TrainSample, UpdateResult

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What a checkpoint holds beside identity, learner and the groups that wait for later steps."""

    step: int = 0  # finished steps
    num_samples: int = 0  # responses sampled for training so far
    policy_version: int = 0
    kl_coef: float
    wall_s: float = 0.0  # seconds of all sessions that led here


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Owns nothing but the order of things. `run` returns the state it stopped in."""

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
    identity: Identity  # of the run; a checkpoint's step number points into the prompts, the reference is model.policy
    stop: Callable[[], bool]
    on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
    extra_metrics: Callable[[], Awaitable[dict[str, float]]]  # what others know of a step, asked at its end
    turns: Turns | None = None  # where engines and learner have the same GPUs
    lost_at: float | None = None  # on time.monotonic, when the learner was lost whose work this one takes up

    def __post_init__(self) -> None:
        self.train_feedback = training_feedback(self.config, self.feedback)
        self.state = TrainerState(kl_coef=self.config.objective.kl_coef)
        self.history: list[dict[str, float]] = []
        self._finished: dict[int, list[Group]] = {}  # by the checkpoint
        self._measuring = asyncio.Semaphore(self.config.feedback.sandbox.max_concurrent)
        self._since = time.monotonic()
        self._busy_s = 0.0  # of the learner, in this step
        self._sealing: asyncio.Future[Path] | None = None
        self._learner_is_at_state = True  # False while the weights move: a checkpoint would be of half a step

    def resume(self) -> TrainerState:
        """Load the last checkpoint, if there is one, and open the log after it. Comes before `run`.

        UserError for a checkpoint of another identity, see `identity.check_identity`.
        """
        found = self.checkpoints.latest()
        if found is None:
            self.log.truncate(0)
            return self.state
        folder, saved = found
        identity.check_identity(folder, self.identity)
        self.state = TrainerState(**saved)
        self._finished = read_groups(folder / "buffer", {prompt.prompt_id: prompt for prompt in self.prompts})
        self.learner.load(folder / "learner")
        self.history = self.log.truncate(self.state.step + 1)
        return self.state

    async def run(self) -> TrainerState:
        """Step until `num_steps` or until `stop()`, and leave a checkpoint of the last finished step.

        Raises RunStopped or UserError when the run must not go on. Then, and when it is cancelled, steps that were
        finished are kept, unless it is the learner that was lost; where somebody else has seen that first, which
        cancels this, it is asked in vain.
        """
        try:
            return await self._run()
        finally:
            await self._sealed()

    async def _run(self) -> TrainerState:
        await self._turn("engines")
        await self.sync.push(self.state.policy_version)
        recovered = {} if self.lost_at is None else {"recovery/learner_s": time.monotonic() - self.lost_at}
        if self.state.step == 0 and self.eval_prompts:
            self._log(0, await self._evaluate(step=0))
        async with Producer(self.config, self.prompts, self.rollouts, self.train_feedback, self._finished) as producer:
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
        await self._turn("engines")  # whoever comes after finds them serving
        return self.state

    async def _turn(self, turn: Turn) -> None:
        if self.turns is not None:
            await self.turns.take(turn)

    async def _step(self, producer: Producer, recovered: dict[str, float]) -> bool:
        """One round. False if `stop()` came before the weights moved: the step then never happened."""
        started, self._busy_s = time.monotonic(), 0.0
        step, max_staleness = self.state.step + 1, self.config.rollout.max_staleness
        await self._turn("engines")
        for admitted in range(step, min(step + max_staleness, self.config.num_steps) + 1):
            producer.admit(admitted)
        try:
            judged = await producer.take(step, self.stop)
            kept = select_usable(judged, self.config, step=step, source=self.feedback.name)
            scored = await gather_unless_stopped([self._scored(*triple) for triple in kept], self.stop)
        except Stopped:
            return False
        ages = token_staleness(
            [s.rollout for s in scored], policy_version=self.state.policy_version, max_staleness=max_staleness
        )

        self._learner_is_at_state = False
        learn_started = time.monotonic()
        await self._turn("learner")
        samples, stats, kl, result = await self._learn(step, scored, [prompt for prompt, _, _ in kept])
        learn_s = time.monotonic() - learn_started
        await self._turn("engines")
        synced = await self.sync.push(result.policy_version)

        kl_coef = self.state.kl_coef
        self._advance(step, result.policy_version, len(judged.pairs), kl)
        metrics = step_metrics(judged.pairs, scored, stats, self.config.objective, kl=kl, kl_coef=kl_coef)
        metrics |= fault_recall(self.task, judged.pairs) | result.metrics | sync_metrics(synced) | recovered
        metrics |= await self.extra_metrics()
        step_s = time.monotonic() - started
        metrics |= {
            "samples": float(self.state.num_samples),
            "staleness/mean": float(ages.mean()),
            "staleness/max": float(ages.max()),
            "buffer/samples": float(producer.num_waiting()),
            "dropped/samples": float(len(judged.pairs) - len(scored) + judged.num_unsampled),
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
        finally:  # the step is done, whatever becomes of its evaluation
            self.log.write_samples(step, "train", judged.pairs, scored, self.tokenizer, token_columns(samples, stats))
            self.log.write_dropped(step, make_dropped_records(judged))
            self._log(step, metrics)
            self._learner_is_at_state = True
        return True

    async def _learn(
        self, step: int, scored: Sequence[ScoredRollout], prompts: Sequence[Prompt]
    ) -> tuple[list[TrainSample], list[TokenStats], float, UpdateResult]:
        """The update of these samples, with the learner's view before it and the KL (nats a sequence) to the reference.

        Where the update alone looks at the policy, that is its view.
        """
        stats = await self._call(self.learner.forward, [s.rollout for s in scored])
        check_finite(step, scored, stats)
        objective, kl_coef, seed = self.config.objective, self.state.kl_coef, self.config.run.seed
        teacher = await self._score_teacher(scored, prompts) if objective.teacher else ()
        samples = make_train_samples(scored, stats, objective, kl_coef=kl_coef, seed=seed, teacher=teacher)
        batch = make_train_batch(
            samples,
            num_epochs=self.config.learner.num_epochs,
            minibatches_per_epoch=self.config.learner.minibatches_per_epoch,
            kl_coef=kl_coef if objective.kl_in_loss else 0.0,
            seed=seed + step,
        )
        result = await self._call(self.learner.update, batch)
        stats = list(result.stats) or stats
        result = replace(result, metrics=result.metrics | teacher_metrics(teacher, stats))
        return samples, stats, step_kl(stats), result

    async def _score_teacher(
        self, scored: Sequence[ScoredRollout], prompts: Sequence[Prompt]
    ) -> list[np.ndarray | None]:
        """Log-probabilities [R] of each response by the policy that reads its critique, None where none fits."""
        room = self.config.revision_window - self.config.rollout.max_new_tokens
        asked = []
        words = teacher_contexts(scored, sibling=self.config.objective.teacher.sibling)
        for one, told, prompt in zip(scored, words, prompts, strict=True):
            fits = partial(encode_revision, self.task, prompt, one.rollout.response_text)
            tried = (fits(said, self.tokenizer, room, whole=said is not told[-1]) for said in told)
            asked.append(next((ids for ids in tried if ids is not None), None))
        shown = [replace(s.rollout, prompt_ids=ids) for s, ids in zip(scored, asked, strict=True) if ids is not None]
        if not shown:
            raise RunStopped(f"no response has a critique for objective.teacher that fits into {room} tokens beside it")

        said = iter(await self._call(self.learner.forward, shown))
        return [None if ids is None else next(said).old_logprobs for ids in asked]

    async def _call(self, call: Callable[..., Result], *args: Any) -> Result:
        """A call of the learner in a thread: requests go on meanwhile. Cancelled, it waits for the call's end all the
        same: the ranks can make one at a time.
        """
        started = time.monotonic()
        thread = asyncio.ensure_future(asyncio.to_thread(call, *args))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            await asyncio.wait([thread])
            raise
        finally:
            self._busy_s += time.monotonic() - started

    async def _scored(self, prompt: Prompt, rollout: Rollout, feedback: SpanFeedback) -> ScoredRollout:
        outcome_reward = 0.0
        if self.config.objective.outcome_rewards:
            metrics = await measure(self.task, prompt, rollout, self.config.feedback.sandbox, self._measuring)
            outcome_reward = metrics[self.task.score_name]
        offsets = token_offsets(self.tokenizer, rollout.response_ids)
        rule = self.config.objective.rewards
        pay = partial(token_rewards, offsets, feedback.spans, text=rollout.response_text)
        return ScoredRollout(
            rollout=rollout,
            feedback=feedback,
            token_rewards=pay(rule=rule),
            by_token=pay(rule=with_overrides(rule, {"unit": "token"})),
            step_ids=compute_step_ids(offsets, rollout.response_text, self.task.step_pattern),
            outcome_reward=outcome_reward,
            truncation_penalty=self.config.objective.truncation_penalty if rollout.is_truncated else 0.0,
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
        """Held-out prompts, sampled as in training. A task without a measure of its own is scored by the feedback."""
        started = time.monotonic()
        pairs = await sample_held_out(self.config, self.eval_prompts, self.rollouts)
        metrics = await compute_held_out_metrics(self.config, self.task, pairs, self.feedback, self.log, step=step)
        await self._sealed()
        await self._call(self.checkpoints.keep_best, step, self.learner.export, metrics["eval/score"])
        return metrics | {"time/eval_s": time.monotonic() - started}

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.log.write_step(step, metrics)
        self.history.append(metrics)
        said = alarms(self.history, self.config.alarms)
        self.log.write_alarms(step, said)
        for sentence in said:
            logger.warning("step %d: %s", step, sentence)
        self.on_step(step, metrics)

    async def _checkpoint(self, producer: Producer) -> None:
        await self._turn("learner")
        now = time.monotonic()
        self.state, self._since = replace(self.state, wall_s=self.state.wall_s + now - self._since), now
        groups = producer.finished()

        def fill(folder: Path) -> Entries:
            identity.save_identity(folder, self.identity)
            (folder / "learner").mkdir()
            hashed = self.learner.save(folder / "learner")
            self.learner.export(folder / "policy")
            if groups:
                write_groups(folder / "buffer", groups)
            return {f"learner/{name}": known for name, known in hashed.items()}

        await self._sealed()
        seal = await self._call(self.checkpoints.begin, self.state.step, fill, asdict(self.state))
        self._sealing = asyncio.ensure_future(asyncio.to_thread(seal))

    async def _sealed(self) -> None:
        """The last checkpoint stands: it is hashed and brought to the disk while steps go on. UserError as `write`."""
        if (sealing := self._sealing) is not None:
            await asyncio.wait([sealing])  # who is cancelled here leaves it: the next checkpoint would remove its files
            self._sealing = None
            sealing.result()
