"""The driver's side of supervised training under Ray Train: start the ranks, follow their reports, keep the model.

The policy's fine-tuning and the span reward model's training use this function; a rank is `sft_rank`.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.cluster.fanout import collect, first_line, is_short_of_memory
from actors.cluster.placement import bundle, check_placement, process_environment
from actors.learner.export import EXPORT_FILE
from actors.learner.ranks import rank_environment
from actors.learner.sft_rank import CHECKPOINTS, LABEL, MODEL, REPORT_EVERY, RankJob, Report, SFTProgress, train_loop
from actors.learner.spec import LearnerSpec
from t2g.config import ClusterConfig, LearnerConfig, LoRAConfig, ModelConfig, SFTOptions
from t2g.data.batching import count_steps
from t2g.errors import RunStopped, Stopped, Unreadable, UserError
from t2g.files import sync_folder, sync_path, write_atomic
from t2g.resources.host_memory import advise
from t2g.runs import identity
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.identity import Identity
from t2g.types import TrainSequence

DRIVER_GRACE_S = 30.0  # the collectives of the ranks time out first: their errors name the step
POLL_S = 0.2  # between two looks at the ranks' reports
DONE_FILE = "sft.json"  # the metrics, written last: a folder without it is not finished
RAY_TRAIN = "ray_train"  # folder of Ray Train in an unfinished training
logger = logging.getLogger(__name__)


def run_sft(
    *,
    model: ModelConfig,
    examples: Sequence[TrainSequence],
    options: SFTOptions,
    cluster: ClusterConfig,
    out_folder: Path,
    seed: int,
    run_identity: Identity,
    skip_unreadable: bool = False,
    on_start: Callable[[int], None],
    on_report: Callable[[int, SFTProgress | None], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Train `model` on `examples` and write it to `out_folder` (safetensors, tokenizer, identity.json, sft.json).

    Ray must be connected. A finished `out_folder` of the same identity is kept, and its metrics are returned at once.
    An unfinished training in `.part` beside it resumes after its last checkpoint.

    Args:
        run_identity: identity of the training: model, examples, options and seed decide its result.
        skip_unreadable: whether a checkpoint that cannot be read is skipped, see `CheckpointStore`.
        on_start: called before the ranks start with the number of steps that are done; not for a model that is kept.
        on_report: called soon after each step with the number of steps that are done, and with the progress every
            REPORT_EVERY of them.
        should_stop: called every POLL_S; once it holds, the training ends after its step with a checkpoint, from which
            the next call resumes it.

    Returns:
        The last `SFTProgress` as a dict, `wall_s` with start-up and export, and `export_gap`, the largest difference
        of the probe between the trained and the written model, nats. Seconds are of this start.

    Raises:
        UserError: There are no examples, `out_folder` has another model, the checkpoint cannot be read, the ranks do
            not fit, or the disk is full.
        RunStopped: A rank is lost or a deadline is missed; Diverged if a loss or gradient is not finite.
        Stopped: `should_stop` holds.
    """
    if not examples:
        raise UserError(f"{LABEL} got no examples")
    earlier_result = identity.load_result(out_folder, run_identity, DONE_FILE)
    if earlier_result is not None:
        logger.info("%s is already trained with these settings: kept", out_folder)
        return earlier_result
    if out_folder.exists():
        raise UserError(f"{out_folder} exists and was not written by {LABEL}: remove it or rename the run")
    part = out_folder.with_name(out_folder.name + ".part")
    checkpoint, state = _find_checkpoint(part, run_identity, skip_unreadable=skip_unreadable)
    done = state["step"]
    leftovers = (part / MODEL, part / RAY_TRAIN) if checkpoint else (part,)
    for leftover in leftovers:
        shutil.rmtree(leftover, ignore_errors=True)
    identity.save_identity(part, run_identity)
    on_start(done)

    started = time.monotonic()
    check_placement({"sft": options}, timeout_s=cluster.placement_timeout_s)
    num_steps = count_steps(len(examples), options.num_epochs, options.batch_size)
    longest_row = max(map(len, examples))
    job = RankJob(
        spec=_learner_spec(model, options, num_steps, seed, longest_row=longest_row),
        options=options,
        examples=ray.put(list(examples)),
        folder=part,
        checkpoint=checkpoint,
        done=done,
        unreported_metrics=state.get("unreported_metrics", ()),
    )
    metrics = _fit(job, cluster, on_report, should_stop)
    metrics["wall_s"] = time.monotonic() - started
    _publish(part, out_folder, metrics, run_identity)
    return metrics


def _publish(part: Path, out_folder: Path, metrics: dict[str, float], run_identity: Identity) -> None:
    """Add `export_gap` to the metrics, move the model with them to `out_folder`, and remove the rest."""
    written = part / MODEL
    exported = json.loads((written / EXPORT_FILE).read_text())
    metrics["export_gap"] = exported["probe_gap"]["largest"]
    identity.save_identity(written, run_identity)
    sync_folder(written)
    write_atomic(written / DONE_FILE, json.dumps(metrics, indent=1).encode())
    os.replace(written, out_folder)
    sync_path(out_folder.parent)
    shutil.rmtree(part)


def _learner_spec(
    model: ModelConfig, options: SFTOptions, num_steps: int, seed: int, *, longest_row: int
) -> LearnerSpec:
    shared = {"workers", "gpus", "dtype", "tokens_per_microbatch", "gradient_checkpointing", "offload"}
    lora = options.lora
    learner = LearnerConfig(
        **options.model_dump(include=shared),
        policy=options.optim,
        lora=LoRAConfig(r=lora.r, alpha=lora.alpha) if lora else None,
        step_timeout_s=options.timeout_s,
    )
    return LearnerSpec(
        model=model,
        learner=learner,
        loss="supervised",
        num_updates=num_steps,
        seed=seed,
        dropout=lora.dropout if lora else 0.0,
        longest_row=longest_row,
    )


def _find_checkpoint(
    part: Path, run_identity: Identity, *, skip_unreadable: bool
) -> tuple[Path | None, dict[str, Any]]:
    """Return the folder and the state of this training's last intact checkpoint; without one, None and step 0.

    Raises:
        UserError: See `CheckpointStore.latest`.
    """
    if not part.exists():
        return None, {"step": 0}
    try:
        identity.check_identity(part, run_identity)
    except Unreadable:
        raise
    except UserError as error:
        logger.warning("the training starts from the base model: %s", error)
        return None, {"step": 0}
    store = CheckpointStore(part / CHECKPOINTS, keep=1, skip_unreadable=skip_unreadable)
    checkpoint = store.latest()
    if checkpoint is None:
        logger.warning("the training starts from the base model: %s has no checkpoint", part)
        return None, {"step": 0}
    return checkpoint


def _fit(
    job: RankJob,
    cluster: ClusterConfig,
    on_report: Callable[[int, SFTProgress | None], None],
    should_stop: Callable[[], bool],
) -> dict[str, float]:
    """Run the ranks and follow their reports. All processes of the training end when this function ends."""
    node_id = ray.get_runtime_context().get_node_id()
    own_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    settings = {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # the default poll of 2 s delays start and end
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(cluster.placement_timeout_s),
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one process less; a lost rank ends the training anyway
        "RAY_TRAIN_METRICS_ENABLED": "0",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths then mean the same as for the driver
    }
    actor = ray.remote(Launcher).options(
        num_cpus=0, max_concurrency=2, scheduling_strategy=own_node, runtime_env={"env_vars": settings}
    )
    launcher = actor.remote()
    running = launcher.fit.remote(job)
    timeout_s = (REPORT_EVERY + 1) * job.options.timeout_s + DRIVER_GRACE_S
    wait = partial(collect, actor_name=LABEL, call="training", timeout_s=timeout_s)

    def read_reports() -> tuple[list[Report], bool]:
        ended, _ = ray.wait([running], timeout=POLL_S)
        (reports,) = wait([launcher.take_reports.remote()])
        return reports, bool(ended)

    def request_stop() -> None:
        wait([launcher.request_stop.remote()])

    try:
        last = _follow(read_reports, timeout_s, on_report, should_stop, request_stop)
        wait([running])  # raises what the training raised
        if last is None or last.step < last.num_steps:
            assert should_stop(), "only a stop ends the ranks before their last step"
            raise Stopped
        return asdict(last)
    finally:
        ray.kill(launcher)  # it owns the controller, which owns the ranks


class Launcher:
    """Ray Train's driver, in a process that can be killed, and the unread reports of rank 0.

    `fit` takes one of the actor's two threads, so that reports keep their order.
    """

    def __init__(self) -> None:
        self._reports: list[Report] = []
        self._should_stop = False

    def report(self, report: Report) -> bool:
        """Store a report of rank 0; return whether the ranks must stop."""
        self._reports.append(report)
        return self._should_stop

    def request_stop(self) -> None:
        """Tell the ranks to write a checkpoint after the current step, and to end."""
        self._should_stop = True

    def take_reports(self) -> list[Report]:
        reports = self._reports
        self._reports = []
        return reports

    def fit(self, job: RankJob) -> None:
        """Train until every rank has ended and the model is written."""
        options = job.options
        torch_config = ray.train.torch.TorchConfig(
            backend="nccl" if options.gpus else "gloo",
            timeout_s=max(1, round(options.timeout_s)),
        )
        scaling_config = ray.train.ScalingConfig(
            num_workers=options.workers,
            use_gpu=options.gpus > 0,
            resources_per_worker=bundle(options),
            label_selector=options.labels or None,  # pyrefly: ignore[unexpected-keyword] (Ray Train's version 2)
        )
        env = process_environment(options) | rank_environment(options) | {"TOKENIZERS_PARALLELISM": "false"}
        # Retries once a process that did not start, as on a node that is short of memory for a moment.
        # pyrefly: ignore[unexpected-keyword]
        failure_config = ray.train.FailureConfig(max_failures=0, controller_failure_limit=1)
        run_config = ray.train.RunConfig(
            name="sft",
            storage_path=str(job.folder / RAY_TRAIN),  # no Ray Train checkpoints: nothing but a marker is written
            worker_runtime_env={"env_vars": env},  # pyrefly: ignore[unexpected-keyword]
            failure_config=failure_config,
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),  # pyrefly: ignore[unexpected-keyword]
        )
        trainer = ray.train.torch.TorchTrainer(
            train_loop,
            train_loop_config={"job": job, "launcher": ray.get_runtime_context().current_actor},
            torch_config=torch_config,
            scaling_config=scaling_config,
            run_config=run_config,
        )
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            raise _explain(error, options) from error


def _follow(
    read_reports: Callable[[], tuple[list[Report], bool]],
    timeout_s: float,
    on_report: Callable[[int, SFTProgress | None], None],
    should_stop: Callable[[], bool] = lambda: False,
    request_stop: Callable[[], None] = lambda: None,
) -> SFTProgress | None:
    """Pass on each report until the training has ended, and return the last progress.

    Args:
        read_reports: Returns the reports since its last call, and whether the training has ended.
        request_stop: Called once when `should_stop` holds: the ranks then end after their step with a checkpoint.

    Raises:
        RunStopped: The next progress took over `timeout_s`.
        Stopped: `should_stop` holds before the first step of this start.
    """
    deadline = time.monotonic() + timeout_s
    last: SFTProgress | None = None
    has_steps = False
    is_stopping = False
    while True:
        reports, has_ended = read_reports()
        has_steps = has_steps or bool(reports)
        for step, progress in reports:
            on_report(step, progress)
            if progress:
                last = progress
                deadline = time.monotonic() + timeout_s
        if has_ended:
            return last
        if should_stop() and not is_stopping:
            if not has_steps:
                raise Stopped
            is_stopping = True
            request_stop()
        if time.monotonic() > deadline:
            where = f"the ranks stood at step {last.step} of {last.num_steps}" if last else "no rank has reported yet"
            raise RunStopped(
                f"{LABEL} timed out: its ranks reported nothing for {timeout_s:g} s, which is sft.timeout_s for "
                f"each of {REPORT_EVERY} steps and for what comes before or after them; {where}"
            )


def _explain(error: ray.train.TrainingFailedError, options: SFTOptions) -> Exception:
    """Return one error for Ray Train's: of several failures, an error of t2g comes first."""
    advice = f"; if it was short of memory, {advise('sft', options)}"
    if isinstance(error, ray.train.ControllerError):
        failure = error.controller_failure
        text = f"Ray Train could not run {LABEL}: {first_line(failure)}"
        lines = str(failure).strip().splitlines()
        if len(lines) > 1:
            text += f" {lines[-1]}"
        if is_short_of_memory(failure):
            text += advice
        return RunStopped(text)

    failures = sorted(getattr(error, "worker_failures", {}).items())
    causes = {rank: getattr(failure, "_base_exc", failure) for rank, failure in failures}
    for cause in causes.values():
        if isinstance(cause, (RunStopped, UserError)):
            return cause

    by_rank = "; ".join(f"rank {rank}: {first_line(cause)}" for rank, cause in causes.items())
    text = f"{LABEL} failed on {by_rank or first_line(error)}"
    if any(map(is_short_of_memory, [error, *causes.values()])):
        text += advice
    return RunStopped(text)
