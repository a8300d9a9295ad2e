"""One run that trains a policy: its data, its training by PPO on running fleets or by a baseline, its summary.

`jobs.train_policy` makes one run of PPO, `jobs.demo` and `jobs.compare` several on the same engines.

A baseline (`t2g.study.baselines`) has its own engines, and starts again if it is not finished. The reviser of ilf and
reflection is the policy itself, called through `Task.revise_messages`, or another model. The tiny world needs another
model, since its base policy never read a critique: `stages.make_corrector` trains it on the world's corrections
(`tasks.tiny.revision`). There, both baselines can follow a critique before they begin, which PPO cannot.
"""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from actors.cluster.telemetry import RayMetrics
from actors.engines.multi_turn import Conversations
from actors.engines.rollout import RolloutFleet
from actors.fleet.health import restarts_left
from actors.fleet.steering import Steering
from actors.learner.export import EXPORT_FILE
from actors.learner.learner import LearnerGroup
from actors.learner.lora import check_adapters
from actors.learner.trainers import LearnerSpec
from actors.weights.gpu_time_sharing import FleetGpuTimeSharing
from actors.weights.probe import PROBE_TOKENS
from actors.weights.sync import FleetWeightSync
from jobs.common import run_folder
from jobs.common.cli import StopFlag
from jobs.common.fleets import Fleets, loaded_learner, wait_for_engines
from jobs.train_sft.supervised import MODEL, supervise
from t2g.concurrency import run_with_background
from t2g.config import LearnerConfig, ModelConfig, PolicyJob, RolloutConfig, RunConfig, SFTJob, with_overrides
from t2g.data.batching import count_steps
from t2g.data.load import load_records
from t2g.data.prompts import make_prompts
from t2g.environments.converse import make_encoder
from t2g.environments.environment import Environment
from t2g.errors import LearnerLost, RunStopped, Stopped
from t2g.feedback.outcome_rewards import OutcomeRewards
from t2g.files import read_regular, write_json
from t2g.interfaces import FeedbackSource, RolloutSource
from t2g.loop.steps import check_truncation_penalty
from t2g.loop.trainer import Trainer, TrainerState
from t2g.metrics import EVAL_S, NEUTRAL_SHARE, SAMPLES, STEP, STEP_S, format_step, select_held_out
from t2g.report.model_card import write_model_card
from t2g.report.run_page import SUMMARY_FILE, report_run
from t2g.runs import identity
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.judgements import JournaledFeedback
from t2g.runs.log import METRICS_FILE, RunLog, read_records
from t2g.runs.progress import log_duration, show_progress
from t2g.runs.versions import collect_versions
from t2g.study import baselines
from t2g.study.baselines import METHODS, POLICY, Arm, Metrics, PreferencePair
from t2g.tasks.base import Task, get_task
from t2g.tasks.references import check_references
from t2g.text.policy_chat import load_policy_tokenizer
from t2g.types import Prompt, TrainSequence

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
OnFinished = Callable[[RolloutFleet, FeedbackSource, LearnerGroup], None]

IMITATION = "imitation"  # folder of ilf's training
TIMES = {"steps_s": STEP_S, "evaluations_s": EVAL_S}  # in the summary: sums of metrics


@dataclass(frozen=True, kw_only=True)
class PolicyData:
    """The inputs of a run, read before any process is started, so that bad input is refused within seconds."""

    task: Task
    tokenizer: Any
    prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    environment: Environment | None = None

    @property
    def trainer_inputs(self) -> dict[str, Any]:
        """Return the fields that a trainer takes."""
        return {name: value for name, value in vars(self).items() if name != "environment"}


def read_data(config: PolicyJob, arms: Sequence[PolicyJob] = ()) -> PolicyData:
    """Return the task, the tokenizer, the prompts and the held-out prompts.

    Args:
        arms: Runs that train on the same data with objectives of their own.

    Raises:
        UserError: The data, the tokenizer or the task cannot be used.
    """
    learner = config.learner
    if learner.lora is not None:
        uses_cpu_engines = learner.sync_adapters and not config.rollout.gpus
        check_adapters(learner.lora, config.model, cpu_engines=uses_cpu_engines)
    task = get_task(config.task)
    tokenizer = load_policy_tokenizer(config.model)
    room = config.rollout.max_prompt_tokens
    records = load_records(config.data)
    prompts = make_prompts(records, task, tokenizer, room, too_long=config.data.too_long)

    jobs = (config, *arms)
    for job in jobs:
        OutcomeRewards(job, task, prompts)  # checks them
    environment = Environment(config, task) if config.environment else None
    if environment is not None:
        make_encoder(tokenizer)  # checks the chat template

    penalty = max(job.objective.truncation_penalty for job in jobs)
    check_truncation_penalty(tokenizer, prompts, config.model, penalty)
    prompts_per_step = config.rollout.prompts_per_step
    if len(prompts) < prompts_per_step:
        logger.warning(
            "data.path has only %d prompts, and rollout.prompts_per_step=%d: they get more samples in each step",
            len(prompts), prompts_per_step,
        )  # fmt: skip

    eval_prompts: list[Prompt] = []
    if config.eval_data is not None:
        eval_records = load_records(config.eval_data, "eval_data")[: config.eval.num_prompts]
        too_long = config.eval_data.too_long
        eval_prompts = make_prompts(eval_records, task, tokenizer, room, too_long=too_long, key="eval_data")
    return PolicyData(
        task=task, tokenizer=tokenizer, prompts=prompts, eval_prompts=eval_prompts, environment=environment
    )


def run_references(config: PolicyJob, data: PolicyData) -> PolicyData:
    """Return the data with the mode of each record's tests, without records whose reference fails.

    Raises:
        UserError: No prompt is left.
    """
    checked = partial(check_references, task=data.task, sandbox=config.feedback.sandbox, folder=config.run.folder)
    prompts = checked(data.prompts)
    eval_prompts = checked(data.eval_prompts)
    return replace(data, prompts=prompts, eval_prompts=eval_prompts)


# ----------------------------------------------------------------------------------------------------------------- PPO
def train(
    config: PolicyJob,
    data: PolicyData,
    rollouts: RolloutFleet,
    feedback: FeedbackSource,
    stop: StopFlag,
    on_finished: OnFinished = lambda *_: None,
    **identity_extras: Any,
) -> dict[str, Any]:
    """Make one run on running fleets, with a learner group that ends with this call; return the written summary.

    Args:
        rollouts: Engines of the same model.
        on_finished: Called after the last step, while the learner lives and the engines have its weights. A run
            whose `on_finished` did not return is not finished.
        identity_extras: See `Identity.from_config`.

    Raises:
        Stopped: `stop` ended the run at a checkpoint; the same call resumes it.
    """
    steering = Steering(config, rollouts, feedback)  # one for all learners: its picture of the run stays
    attempt = partial(run_with_learner, config, data, rollouts, feedback, steering, stop, on_finished)
    with run_folder.sole_process(config.run.folder):
        run_folder.begin_folder(config, **identity_extras)
        state = with_restarts(attempt, config.learner, stop)
    if state.step < config.num_steps:
        raise Stopped
    return write_summary(config, seconds=state.wall_s)


def with_restarts(attempt: Callable[[float | None], Result], learner: LearnerConfig, stop: StopFlag) -> Result:
    """Return attempt(None), or after each LearnerLost attempt(time of the loss), while the restart budget allows it.

    Times are of time.monotonic.

    Raises:
        RunStopped: The budget is used up.
        Stopped: `stop` was set.
    """
    restart_times: list[float] = []
    while True:
        try:
            return attempt(restart_times[-1] if restart_times else None)
        except LearnerLost as lost:
            now = time.monotonic()
            left = restarts_left(restart_times, now=now, config=learner)
            if left == 0:
                within = f"learner.max_restarts={learner.max_restarts} in {learner.restart_window_s:g} s"
                raise RunStopped(f"{lost}; {within} (learner.restart_window_s) allows no other start") from lost
            restart_times.append(now)
            logger.warning("%s; it is started again from the last checkpoint (%d more at most)", lost, left - 1)
        if stop:
            raise Stopped


def run_with_learner(
    config: PolicyJob,
    data: PolicyData,
    rollouts: RolloutFleet,
    feedback: FeedbackSource,
    steering: Steering,
    stop: StopFlag,
    on_finished: OnFinished,
    lost_at: float | None,
) -> TrainerState:
    """Continue the run from its last checkpoint, with a new learner group. Raises LearnerLost."""
    folder = config.run.folder
    run_identity = identity.load_identity(folder)
    journaled = JournaledFeedback(feedback, folder, run_identity, keep=config.checkpoint.keep)

    if config.cluster.gpu_sharing != "none":  # vLLM measures the memory of a GPU that nothing else takes meanwhile
        wait_for_engines(feedback.fleet, rollouts)
    gpu_sharing = make_gpu_sharing(config, rollouts)
    spec = learner_spec(config)
    timeout_s = placement_timeout(config, is_replaced=lost_at is not None)
    loading = loaded_learner(spec, feedback.fleet, rollouts, placement_timeout_s=timeout_s)
    log = RunLog(folder, config.log, [RayMetrics(config.run.name)])
    with closing(log), closing(journaled), loading as learner, ExitStack() as engines:
        sync = make_weight_sync(config, data, learner, rollouts)
        rollouts.catch_up = sync.catch_up
        if gpu_sharing is not None:
            gpu_sharing.learner = learner
            gpu_sharing.sending = sync.sending
        engines.callback(setattr, rollouts, "catch_up", None)  # the ranks behind it end here

        rollout_source = make_rollout_source(config, data, rollouts)
        checkpoints = open_checkpoints(config)
        trainer = Trainer(
            config=config,
            **data.trainer_inputs,
            rollouts=rollout_source,
            feedback=journaled,
            learner=learner,
            sync=sync,
            log=log,
            checkpoints=checkpoints,
            identity=run_identity,
            stop=lambda: bool(stop),
            on_checkpoint=journaled.start_file,
            extra_metrics=steering.metrics,
            gpu_time_sharing=gpu_sharing,
            lost_at=lost_at,
        )
        done = trainer.resume().step
        journaled.start_file(done)
        state = run_trainer(trainer, config, steering, done=done)

        if state.step == config.num_steps:
            with log_duration("writing the policy"):
                learner.export(folder / "policy")
            on_finished(rollouts, journaled, learner)
        return state


def placement_timeout(config: PolicyJob, *, is_replaced: bool) -> float:
    """Return the seconds within which the learner gets its resources.

    Args:
        is_replaced: Whether a learner was lost; with its node, perhaps, and another takes minutes to come.
    """
    timeout_s = config.cluster.placement_timeout_s
    if is_replaced:
        return max(timeout_s, config.learner.step_timeout_s)
    return timeout_s


def make_weight_sync(
    config: PolicyJob, data: PolicyData, learner: LearnerGroup, rollouts: RolloutFleet
) -> FleetWeightSync:
    """Return the transfer of weights from the learner to the engines, which is probed on some prompts."""
    probe = [prompt.prompt_ids for prompt in data.prompts[:PROBE_TOKENS]]
    baseline_file = config.run.folder / "probe.json"
    return FleetWeightSync(learner, rollouts, config.learner, prompts=probe, baseline_file=baseline_file)


def make_gpu_sharing(config: PolicyJob, rollouts: RolloutFleet) -> FleetGpuTimeSharing | None:
    """Return the time sharing of the GPUs, which the learner has first; None for a run whose processes keep theirs."""
    if config.cluster.gpu_sharing != "alternate":
        return None
    gpu_sharing = FleetGpuTimeSharing(rollouts, timeout_s=config.learner.step_timeout_s)
    # The learner's models need the GPU memory; `supervise` starts and ends engines meanwhile.
    asyncio.run(run_with_background(gpu_sharing.switch_to("learner"), rollouts.supervise()))
    return gpu_sharing


def run_trainer(trainer: Trainer, config: PolicyJob, steering: Steering, *, done: int) -> TrainerState:
    """Run the steps after step `done`, with a progress bar and the steering of the fleets; return the last state."""
    with show_progress(f"PPO {config.run.name}", config.num_steps, done=done) as bar:

        def on_step(step: int, metrics: dict[str, float]) -> None:
            bar.print_line(format_step(step, metrics))
            if step > 0:  # step 0 is the evaluation before the first update
                bar.advance()
            steering.on_step(step, metrics)

        trainer.on_step = on_step
        trainer.on_phase = bar.set_phase
        background = steering.make_background_tasks()
        return asyncio.run(run_with_background(trainer.run(), *background))


def open_checkpoints(config: PolicyJob) -> CheckpointStore:
    """Return the checkpoints of a run."""
    folder = config.run.folder / "checkpoints"
    skip_unreadable = config.run.resume == "readable"
    return CheckpointStore(folder, config.checkpoint.keep, skip_unreadable=skip_unreadable)


def make_rollout_source(config: PolicyJob, data: PolicyData, rollouts: RolloutFleet) -> RolloutSource:
    """Return the engines, which converse with the environment if the config has one."""
    if data.environment is None:
        return rollouts
    return Conversations(rollouts, config.rollout, data.environment, data.tokenizer)


def learner_spec(config: PolicyJob) -> LearnerSpec:
    reserved_learner = config.reserved[1]
    num_updates = config.learner.schedule_steps or config.num_steps
    return LearnerSpec(
        model=config.model,
        learner=reserved_learner,
        objective=config.objective,
        temperature=config.rollout.temperature,
        num_updates=num_updates,
        seed=config.run.seed,
    )


# ---------------------------------------------------------------------------------------------------------- baselines
def run_baseline(
    job: PolicyJob,
    data: PolicyData,
    feedback: FeedbackSource,
    stop: StopFlag,
    *,
    procedure: str,
    reviser: str | None = None,
    **identity_extras: Any,
) -> dict[str, Any]:
    """Make a baseline run in `job.run.folder` from its beginning, and return its summary.

    The engines of the base, of the reviser and of the result run one after the other.

    Args:
        job: See `baselines.check`.
        reviser: A model folder or hub name; None for the policy itself.
        identity_extras: See `Identity.from_config`.

    Raises:
        UserError: The folder belongs to another run.
        Stopped: `stop` ended the run.
    """
    folder = job.run.folder
    started = time.monotonic()
    with run_folder.sole_process(folder), closing(RunLog(folder, job.log)) as log:
        run_folder.begin_folder(job, procedure=procedure, reviser=reviser, **identity_extras)
        log.truncate(0)
        for leftover in (POLICY, f"{POLICY}.part", IMITATION):
            shutil.rmtree(folder / leftover, ignore_errors=True)

        run_identity = identity.load_identity(folder)
        journaled = JournaledFeedback(feedback, folder, run_identity, keep=1)
        revising = job.model if reviser is None else ModelConfig(policy=reviser)
        reviser_tokenizer = load_policy_tokenizer(revising)
        train_on = train_pairs if procedure == "dpo" else train_examples
        arm = Arm(
            job=job,
            **data.trainer_inputs,
            feedback=journaled,
            reviser=revising,
            reviser_tokenizer=reviser_tokenizer,
            log=log,
            stop=lambda: bool(stop),
            serve=partial(with_engines, job),
            train=partial(train_on, job, stop),
        )
        with closing(journaled):
            metrics = METHODS[procedure](arm)
            log.write_step(job.num_steps, metrics)
    return write_summary(job, seconds=time.monotonic() - started)


def with_engines(
    job: PolicyJob,
    model: ModelConfig,
    rollout: RolloutConfig,
    use_engines: Callable[[RolloutSource], Coroutine[Any, Any, Any]],
) -> Any:
    """Start engines of `model`, return the result of `use_engines` on them, and end them."""
    with Fleets() as own:
        source = own.rollouts(model, rollout, job)
        return asyncio.run(use_engines(source))


def train_pairs(job: PolicyJob, stop: StopFlag, pairs: Sequence[PreferencePair]) -> Metrics:
    """Train the base by DPO into the run's `policy`."""
    from actors.learner.dpo import train_dpo

    part = job.run.folder / f"{POLICY}.part"
    size = baselines.batch_size(job, len(pairs))
    num_steps = count_steps(len(pairs), job.learner.num_epochs, size)
    with show_progress(f"{job.run.name}: DPO", num_steps) as bar:
        trained = train_dpo(
            job.model, job.learner, pairs,
            cluster=job.cluster, stop=lambda: bool(stop), on_progress=bar.advance_to,
            batch_size=size, seed=job.run.seed, out_folder=part,
        )  # fmt: skip
    if trained is None:
        raise Stopped
    part.rename(job.run.folder / POLICY)
    return trained


def train_examples(job: PolicyJob, stop: StopFlag, examples: Sequence[TrainSequence]) -> Metrics:
    """Fine-tune the base into the run's `policy`; `stop` does not interrupt it."""
    run = RunConfig(root=job.run.folder, name=IMITATION, seed=job.run.seed)
    sft = baselines.sft_options(job, len(examples))
    imitation = SFTJob(
        run=run, cluster=job.cluster, task=job.task, model=job.model, data=job.data, sft=sft, log=job.log
    )
    metrics = supervise(imitation, examples, title=f"{job.run.name}: imitation")
    (run.folder / MODEL).rename(job.run.folder / POLICY)
    if stop:
        raise Stopped
    return metrics


# ------------------------------------------------------------------------------------------------------------- results
def limit_smoke(config: PolicyJob) -> PolicyJob:
    """Return the config with the steps of a smoke run, if it is one."""
    if not config.run.smoke:
        return config
    num_steps = min(run_folder.SMOKE_STEPS, config.num_steps)
    return with_overrides(config, {"num_steps": num_steps})


def report_steps_done(*configs: PolicyJob) -> bool:
    """Return whether each run has a checkpoint beyond its num_steps, and print its step.

    Raises:
        UserError: A run was made with other inputs.
    """
    steps = find_steps_done(*configs)
    for config, step in steps:
        print(f"{config.run.folder} is already at step {step}: num_steps={config.num_steps} leaves nothing to do")
    return bool(steps)


def find_steps_done(*configs: PolicyJob, should_save: bool = True) -> list[tuple[PolicyJob, int]]:
    """Return each run and the step of its last checkpoint, if all of them have one beyond their num_steps; else [].

    Args:
        should_save: See `identity.check_identity`.

    Raises:
        UserError: A run was made with other inputs.
    """
    steps: list[tuple[PolicyJob, int]] = []
    for config in configs:
        if config.run.smoke or config.run.resume == "never":
            return []
        step = open_checkpoints(config).find_step_after(config.num_steps)
        if step is None:
            return []
        written = identity.load_identity(config.run.folder).config
        same_schedule = {identity.SCHEDULE: written.get(identity.SCHEDULE)}  # num_steps may be another
        run_folder.check_folder(with_overrides(config, same_schedule), should_save=should_save)
        steps.append((config, step))
    return steps


def finished(config: PolicyJob, **identity_extras: Any) -> dict[str, Any] | None:
    """Return the summary of a run that already has all its steps; None for others and for a smoke run.

    See `run_folder.check_folder` for `more` and errors.
    """
    run_folder.check_folder(config, SUMMARY_FILE, **identity_extras)
    if config.run.smoke:
        return None
    content = read_regular(config.run.folder / SUMMARY_FILE)
    if content is None:
        return None
    summary = json.loads(content)
    if summary["steps"] < config.num_steps:
        return None
    return summary


def write_summary(config: PolicyJob, *, seconds: float) -> dict[str, Any]:
    """Write summary.json and report.html of a finished run from its files; return the summary."""
    folder = config.run.folder
    lines = list(read_records(folder / METRICS_FILE))
    evaluated = [metrics for metrics in map(select_held_out, lines) if metrics]
    base = evaluated[0] if evaluated else {}
    policy = evaluated[-1] if evaluated else {}

    last = lines[-1]
    trained = [line for line in lines if line[STEP] > 0]
    timing = {"wall_s": seconds}
    for name, metric in TIMES.items():
        timing[name] = sum(line.get(metric, 0.0) for line in lines)
    summary = {
        "steps": last[STEP],
        "samples": int(last[SAMPLES]),
        "base": base,
        "policy": policy,
        "unlabelled": all(line.get(NEUTRAL_SHARE) == 1.0 for line in trained),
        "timing": timing,
        "versions": collect_versions(),
    }
    export = folder / POLICY / EXPORT_FILE
    if export.is_file():
        summary["export"] = json.loads(export.read_text())
    write_json(folder / SUMMARY_FILE, summary)

    if (folder / POLICY).is_dir():
        write_model_card(folder / POLICY, config, base, policy)
    report_run(folder)
    return summary
