"""One PPO run on running fleets. It resumes from its last checkpoint, also after a lost learner.

`jobs.train_policy` makes one run, `jobs.demo` and `jobs.compare` several on the same engines.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from actors.cluster.kept_placements import KeptPlacements
from actors.cluster.telemetry import RayMetrics
from actors.engines.multi_turn import Conversations
from actors.engines.rollout import RolloutFleet
from actors.fleet.health import restarts_left
from actors.fleet.steering import Steering
from actors.learner.learner import LearnerGroup
from actors.learner.spec import LearnerSpec
from actors.weights.gpu_time_sharing import FleetGpuTimeSharing
from actors.weights.probe import PROBE_TOKENS
from actors.weights.sync import FleetWeightSync
from jobs.common.cli import StopFlag
from jobs.common.fleets import start_learner, wait_for_engines
from jobs.common.run_folder import begin_folder, make_trackers, sole_process
from jobs.train_policy.policy_data import PolicyData
from jobs.train_policy.policy_results import open_checkpoints, write_summary
from t2g.concurrency import run_with_background
from t2g.config import LearnerConfig, PolicyJob
from t2g.errors import LearnerLost, RunStopped, Stopped
from t2g.interfaces import FeedbackSource, RolloutSource
from t2g.loop.trainer import Trainer, TrainerState
from t2g.metrics import format_step
from t2g.report.run_page import REPORT_FILE
from t2g.runs import identity
from t2g.runs.control import Phase
from t2g.runs.judgements import JournaledFeedback
from t2g.runs.log import RunLog
from t2g.runs.progress import ProgressBar, log_duration, show_progress
from t2g.runs.trackers.tracker_threads import Trackers

logger = logging.getLogger(__name__)

OnFinished = Callable[[RolloutFleet, FeedbackSource, LearnerGroup], None]


@dataclass(frozen=True, kw_only=True)
class PolicyTraining:
    """A run of PPO. Its learner group ends with `run`, its engines stay."""

    config: PolicyJob
    data: PolicyData
    rollouts: RolloutFleet  # engines of the same model
    feedback: FeedbackSource
    stop: StopFlag
    # Called after the last step, while the learner lives and the engines have its weights; ends a run.
    on_finished: OnFinished = lambda rollouts, feedback, learner: None
    publish_phase: Callable[[Phase], None] = lambda phase: None  # for status.json

    def run(self, **identity_extras: Any) -> dict[str, Any]:
        """Make the steps that the run lacks; return the written summary.

        Args:
            identity_extras: See `Identity.from_config`.

        Raises:
            Stopped: `stop` ended the run at a checkpoint; the same call resumes it.
            RunStopped: The learner was lost too often.
        """
        config = self.config
        steering = Steering(config, self.rollouts, self.feedback)  # kept across restarts of the learner
        restarts = RestartBudget(config.learner, self.stop)
        state: TrainerState | None = None
        with (
            sole_process(config.run.folder),
            closing(KeptPlacements()) as placements,
            closing(make_trackers(config)) as trackers,
        ):
            begin_folder(config, **identity_extras)
            while state is None:
                try:
                    state = self._train(steering, placements, trackers, lost_at=restarts.lost_at)
                except LearnerLost as lost:
                    restarts.spend(lost)
            if state.step < config.num_steps:
                raise Stopped
            summary = write_summary(config, seconds=state.wall_s)
            trackers.log_report(config.run.folder / REPORT_FILE)
        return summary

    def _train(
        self, steering: Steering, placements: KeptPlacements, trackers: Trackers, *, lost_at: float | None
    ) -> TrainerState:
        """Continue the run from its last checkpoint, with a new learner group; return the last state.

        Args:
            placements: Placements of the learner that failed and of the new one.
            lost_at: time.monotonic() at which the learner failed that the new one replaces.

        Raises:
            LearnerLost: A rank died or timed out.
        """
        self.publish_phase("loading")
        config = self.config
        rollouts = self.rollouts
        folder = config.run.folder
        run_identity = identity.load_identity(folder)
        journaled = JournaledFeedback(self.feedback, folder, run_identity, keep=config.checkpoint.keep)

        gpu_sharing = self._share_gpus()
        loading = self._load_learner(placements, is_replaced=lost_at is not None)
        log = RunLog(folder, config.log, [RayMetrics(config.run.name), trackers])
        with closing(journaled), loading as learner, ExitStack() as opened:
            sync = make_weight_sync(config, self.data, learner, rollouts)
            opened.enter_context(sync_joining_engines(rollouts, sync))
            if gpu_sharing is not None:
                gpu_sharing.attach_learner(learner, sync.sending)
            progress = StepProgress(config, steering)
            callbacks: dict[str, Any] = {
                "stop": self._should_stop,
                "on_step": progress.on_step,
                "on_phase": progress.on_phase,
                "on_checkpoint": journaled.start_file,
                "extra_metrics": steering.metrics,
            }
            rollout_source = make_rollout_source(config, self.data, rollouts)
            checkpoints = open_checkpoints(config)
            trainer = Trainer(
                config=config,
                **self.data.trainer_inputs,
                **callbacks,
                rollouts=rollout_source,
                feedback=journaled,
                learner=learner,
                sync=sync,
                log=log,
                checkpoints=checkpoints,
                identity=run_identity,
                gpu_time_sharing=gpu_sharing,
                lost_at=lost_at,
            )
            resumed = trainer.resume()
            journaled.start_file(resumed.step)
            with progress.show_bar(resumed):
                background = steering.make_background_tasks()
                state = asyncio.run(run_with_background(trainer.run(), *background))

            if state.step == config.num_steps:
                self._finish(learner, journaled)
            return state

    def _share_gpus(self) -> FleetGpuTimeSharing | None:
        if self.config.cluster.gpu_sharing != "none":
            # An engine that measures its GPU must not see memory that a rank takes meanwhile.
            wait_for_engines(self.feedback.fleet, self.rollouts, should_stop=self._should_stop)
        return make_gpu_sharing(self.config, self.rollouts)

    def _finish(self, learner: LearnerGroup, feedback: FeedbackSource) -> None:
        self.publish_phase("exporting")
        with log_duration("writing the policy"):
            learner.export(self.config.run.folder / "policy")
        self.on_finished(self.rollouts, feedback, learner)

    def _load_learner(self, placements: KeptPlacements, *, is_replaced: bool) -> AbstractContextManager[LearnerGroup]:
        spec = make_learner_spec(self.config)
        timeout_s = choose_placement_timeout(self.config, is_replaced=is_replaced)
        fleets = (self.feedback.fleet, self.rollouts)
        return start_learner(
            spec, *fleets, placement_timeout_s=timeout_s, placements=placements, should_stop=self._should_stop
        )

    def _should_stop(self) -> bool:
        return bool(self.stop)


class RestartBudget:
    """The restarts that a run has for lost learners."""

    lost_at: float | None = None  # time.monotonic() of the last loss

    def __init__(self, config: LearnerConfig, stop: StopFlag) -> None:
        self._config = config
        self._stop = stop
        self._restart_times: list[float] = []

    def spend(self, lost: LearnerLost) -> None:
        """Count the restart after a loss.

        Raises:
            RunStopped: The budget is used up.
            Stopped: `stop` was set.
        """
        if self._stop:
            logger.warning("%s; the run stops, and the learner is not restarted", lost)
            raise Stopped
        config = self._config
        now = time.monotonic()
        left = restarts_left(self._restart_times, now=now, config=config)
        if left == 0:
            limit = f"learner.max_restarts={config.max_restarts} in {config.restart_window_s:g} s"
            raise RunStopped(f"{lost}; {limit} (learner.restart_window_s) allows no other start") from lost
        self._restart_times.append(now)
        self.lost_at = now
        logger.warning("%s; the learner restarts from the last checkpoint (restarts left: %d)", lost, left - 1)


class StepProgress:
    """The progress bar of a run, and the steering of its fleets after each step."""

    _bar: ProgressBar | None = None

    def __init__(self, config: PolicyJob, steering: Steering) -> None:
        self._config = config
        self._steering = steering

    @contextmanager
    def show_bar(self, resumed: TrainerState) -> Iterator[None]:
        """Show the bar while the block runs, which continues the state `resumed`."""
        config = self._config
        self._steering.set_progress(resumed.step, resumed.num_samples)
        with show_progress(f"PPO {config.run.name}", config.num_steps, done=resumed.step) as self._bar:
            yield

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        assert self._bar is not None, "steps are made while it is shown"
        self._bar.print_line(format_step(step, metrics))
        if step > 0:  # step 0 is the evaluation before the first update
            self._bar.advance()
        self._steering.on_step(step, metrics)

    def on_phase(self, phase: str) -> None:
        assert self._bar is not None, "steps are made while it is shown"
        self._bar.set_phase(phase)


@contextmanager
def sync_joining_engines(rollouts: RolloutFleet, sync: FleetWeightSync) -> Iterator[None]:
    """Give engines that start within the block the weights of the learner, whose ranks end with it."""
    rollouts.catch_up = sync.catch_up
    try:
        yield
    finally:
        rollouts.catch_up = None


def choose_placement_timeout(config: PolicyJob, *, is_replaced: bool) -> float:
    """Return the seconds within which the learner gets its resources.

    Args:
        is_replaced: Whether this learner replaces a lost one: its node may be lost, too, and a new node takes minutes.
    """
    timeout_s = config.cluster.placement_timeout_s
    if is_replaced:
        return max(timeout_s, config.learner.step_timeout_s)
    return timeout_s


def make_weight_sync(
    config: PolicyJob, data: PolicyData, learner: LearnerGroup, rollouts: RolloutFleet
) -> FleetWeightSync:
    """Return the weight sync from the learner to the engines, with a probe of the first prompts."""
    probe = [prompt.prompt_ids for prompt in data.prompts[:PROBE_TOKENS]]
    baseline_file = config.run.folder / "probe.json"
    return FleetWeightSync(learner, rollouts, config.learner, prompts=probe, baseline_file=baseline_file)


def make_gpu_sharing(config: PolicyJob, rollouts: RolloutFleet) -> FleetGpuTimeSharing | None:
    """Return the GPU time sharing, with the GPUs given to the learner; None without cluster.gpu_sharing=alternate."""
    if config.cluster.gpu_sharing != "alternate":
        return None
    gpu_sharing = FleetGpuTimeSharing(rollouts, timeout_s=config.learner.step_timeout_s)
    # The learner's models need the GPU memory; `supervise` starts and ends engines meanwhile.
    asyncio.run(run_with_background(gpu_sharing.switch_to("learner"), rollouts.supervise()))
    return gpu_sharing


def make_rollout_source(config: PolicyJob, data: PolicyData, rollouts: RolloutFleet) -> RolloutSource:
    """Return the engines, which converse with the environment if the config has one."""
    if data.environment is None:
        return rollouts
    return Conversations(rollouts, config.rollout, data.environment, data.tokenizer, data.read_calls)


def make_learner_spec(config: PolicyJob) -> LearnerSpec:
    num_updates = config.learner.schedule_steps or config.num_steps
    return LearnerSpec(
        model=config.model,
        learner=config.reserved.learner,
        objective=config.objective,
        temperature=config.rollout.temperature,
        num_updates=num_updates,
        seed=config.run.seed,
    )
