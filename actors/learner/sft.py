"""Supervised training under Ray Train, as its driver sees it: start the ranks, follow them, keep what they wrote.

The policy's fine-tuning and the span reward model's training are this one function; a rank is `sft_rank`.
"""

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.cluster.fanout import collect, first_line
from actors.cluster.placement import bundle, check_places, process_environment
from actors.learner.parts import LearnerSpec
from actors.learner.ranks import rank_environment
from actors.learner.sft_rank import CHECKPOINTS, LABEL, MODEL, REPORT_EVERY, STEP_FILE, RankJob, SFTProgress, train_loop
from t2g.config import ClusterConfig, LearnerConfig, LoRAConfig, ModelConfig, SFTOptions
from t2g.data.batching import count_steps
from t2g.errors import RunStopped, UserError
from t2g.files import write_atomic
from t2g.runs import identity
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.identity import Identity
from t2g.types import TrainSequence

DRIVER_GRACE_S = 30.0  # the deadline of the ranks' collectives comes first: they know where they stand
POLL_S = 0.2  # between two looks at the ranks' reports
DONE_FILE = "sft.json"  # the metrics, written last: a folder without it is not finished
REPORTS_FILE, HANDLE_FILE = "reports.jsonl", "controller.pickle"  # of Ray Train's controller
logger = logging.getLogger(__name__)


def run_sft(
    *,
    model: ModelConfig,
    examples: Sequence[TrainSequence],
    options: SFTOptions,
    cluster: ClusterConfig,
    out_folder: Path,
    seed: int,
    made_of: Identity,
    on_start: Callable[[int], None],
    on_progress: Callable[[SFTProgress], None],
    on_step: Callable[[int], None] = lambda done: None,
) -> dict[str, float]:
    """Train `model` on `examples` and write it to `out_folder` (safetensors, tokenizer, identity.json, sft.json).

    Ray must be connected. A finished `out_folder` of the same identity is kept and its metrics are returned at once; an
    unfinished one, beside it under the name `.part`, goes on after its last checkpoint.

    Args:
        made_of: identity of the training: model, examples, options and seed decide its result.
        on_start: called before the ranks start with the number of steps that are done; not for a model that is kept.
        on_progress: called with every report, of REPORT_EVERY steps.
        on_step: called with the number of steps done soon after each, without metrics.

    Returns the last `SFTProgress` as a dict, and `wall_s`, start-up and export included; seconds are of this start.

    Raises:
        UserError: no examples, `out_folder` holds another training's model, no place for the ranks, or a full disk.
        RunStopped: a loss or gradient that is not finite, a lost rank, a missed deadline (who and where it stood).
    """
    if not examples:
        raise UserError(f"{LABEL} got no examples")
    kept = identity.finished(out_folder, made_of, DONE_FILE)
    if kept is not None:
        logger.info("%s is already trained with these settings: kept", out_folder)
        return kept
    if out_folder.exists():
        raise UserError(f"{out_folder} exists and was not written by {LABEL}: remove it or rename the run")
    part = out_folder.with_name(out_folder.name + ".part")
    checkpoint, done = _resume_point(part, made_of)
    shutil.rmtree(part / MODEL if checkpoint else part, ignore_errors=True)
    (part / STEP_FILE).unlink(missing_ok=True)  # it counts steps behind the checkpoint, which are lost
    identity.keep(part, made_of)
    on_start(done)

    started = time.monotonic()
    check_places({"sft": options}, timeout_s=cluster.placement_timeout_s)
    num_steps = count_steps(len(examples), options.num_epochs, options.batch_size)
    job = RankJob(
        spec=_learner_spec(model, options, num_steps, seed), options=options, examples=ray.put(list(examples)),
        folder=part, checkpoint=checkpoint, done=done,
    )  # fmt: skip
    metrics = _fit(job, cluster, on_progress, on_step) | {"wall_s": time.monotonic() - started}
    identity.keep(part / MODEL, made_of)
    write_atomic(part / MODEL / DONE_FILE, json.dumps(metrics, indent=1).encode())
    os.replace(part / MODEL, out_folder)
    shutil.rmtree(part)
    return metrics


def _learner_spec(model: ModelConfig, options: SFTOptions, num_steps: int, seed: int) -> LearnerSpec:
    shared = {"workers", "dtype", "tokens_per_microbatch", "gradient_checkpointing", "offload"}
    lora = options.lora
    learner = LearnerConfig(
        **options.model_dump(include=shared),
        policy=options.optim,
        lora=LoRAConfig(r=lora.r, alpha=lora.alpha) if lora else None,
        step_timeout_s=options.timeout_s,
    )
    return LearnerSpec(
        model=model, learner=learner, loss="supervised", num_updates=num_steps, seed=seed,
        dropout=lora.dropout if lora else 0.0,
    )  # fmt: skip


def _resume_point(part: Path, made_of: Identity) -> tuple[Path | None, int]:
    """Folder of the last whole checkpoint of this training, and the steps behind it; (None, 0) without one."""
    if not part.exists():
        return None, 0
    try:
        identity.check(part, made_of)
        if found := CheckpointStore(part / CHECKPOINTS, keep=1).latest():
            return found[0], found[1]["step"]
        reason = f"{part} has no whole checkpoint"
    except UserError as error:
        reason = str(error)
    logger.warning("the training starts from the base model: %s", reason)
    return None, 0


def _fit(
    job: RankJob,
    cluster: ClusterConfig,
    on_progress: Callable[[SFTProgress], None],
    on_step: Callable[[int], None],
) -> dict[str, float]:
    """Run the ranks and follow their reports. However this ends, all processes of the training end with it."""
    patience_s = (REPORT_EVERY + 1) * job.options.timeout_s + DRIVER_GRACE_S
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)  # to share `scratch`
    settings = {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # its poll; the default of 2 s delays start, reports and end
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(cluster.placement_timeout_s),
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process; a lost rank ends the training here anyway
        "RAY_TRAIN_METRICS_ENABLED": "0",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths stay what they are for the driver
    }
    scratch = tempfile.mkdtemp()
    running = ray.remote(_launch).options(
        num_cpus=0, max_retries=0, scheduling_strategy=here, runtime_env={"env_vars": settings}
    ).remote(job, Path(scratch))  # fmt: skip
    try:
        has_ended = partial(_ended, running, partial(_report_step, job.folder / STEP_FILE, on_step))
        metrics = _follow(has_ended, Path(scratch, REPORTS_FILE), patience_s, on_progress)
        if metrics is None:
            collect([running], who=LABEL, call="training", timeout_s=POLL_S)
            raise RunStopped(f"{LABEL} ended before its model was written")
        return metrics
    except BaseException:
        ray.cancel(running, force=True)  # with it go controller and ranks, each owned by the one before
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _ended(running: "ray.ObjectRef[None]", report_step: Callable[[], None]) -> bool:
    report_step()
    return bool(ray.wait([running], timeout=POLL_S)[0])


def _report_step(path: Path, on_step: Callable[[int], None]) -> None:
    """Call on_step with what rank 0 wrote; a file that is missing or half written is read at the next look."""
    with suppress(FileNotFoundError, ValueError):
        on_step(int(path.read_text()))


def _launch(job: RankJob, scratch: Path) -> None:
    """Ray Train's driver, in a process of its own that can be ended from outside, and may take its time to leave."""
    options = job.options
    env = process_environment(options) | rank_environment(options) | {"TOKENIZERS_PARALLELISM": "false"}
    trainer = ray.train.torch.TorchTrainer(
        train_loop,
        train_loop_config={"job": job},
        torch_config=ray.train.torch.TorchConfig(
            backend="nccl" if options.gpus else "gloo", timeout_s=max(1, round(options.timeout_s))
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=options.workers,
            use_gpu=options.gpus > 0,
            resources_per_worker=bundle(options),
            label_selector=options.labels or None,
        ),
        run_config=ray.train.RunConfig(
            name="sft",
            storage_path=str(scratch),  # no Ray Train checkpoints: nothing but a marker is written there
            callbacks=[_Reports(scratch)],
            worker_runtime_env={"env_vars": env},
            # A process that did not come up, on a node that was short of memory for a moment, is started once more.
            failure_config=ray.train.FailureConfig(max_failures=0, controller_failure_limit=1),
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        ),
    )
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        raise _explain(error) from error
    finally:
        # The controller takes seconds to leave; a Ray that ends meanwhile would leave it behind. Of a process that dies
        # by a signal Ray prints a paragraph, hence ray.kill.
        if (handle := scratch / HANDLE_FILE).exists():
            ray.kill(ray.cloudpickle.loads(handle.read_bytes()))
        shutil.rmtree(scratch, ignore_errors=True)


class _Reports(ray.train.UserCallback):
    """Appends rank 0's reports to a file. Runs in Ray Train's controller, which is on the launcher's node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        self._keep_handle()
        with (self.folder / REPORTS_FILE).open("a") as file:
            file.write(json.dumps(metrics[0]) + "\n")

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self._keep_handle()

    def _keep_handle(self) -> None:
        actor = ray.get_runtime_context().current_actor
        (self.folder / HANDLE_FILE).write_bytes(ray.cloudpickle.dumps(actor))


def _follow(
    has_ended: Callable[[], bool], reports: Path, patience_s: float, on_progress: Callable[[SFTProgress], None]
) -> dict[str, float] | None:
    """Hand on each report until the empty one; RunStopped when the next takes over `patience_s`.

    Returns the last but that, None when the ranks have ended without it.

    has_ended: may take a moment to answer.
    """
    deadline = time.monotonic() + patience_s
    num_read, last = 0, {}
    while True:
        ended = has_ended()
        lines = reports.read_text().split("\n")[:-1] if reports.exists() else []  # the last may be half written
        for report in map(json.loads, lines[num_read:]):
            if not report:
                return last
            last = report
            on_progress(SFTProgress(**report))
            deadline = time.monotonic() + patience_s
        num_read = len(lines)
        if ended:
            return None
        if time.monotonic() > deadline:
            stood = "the ranks stood at step {step} of {num_steps}"
            where = stood.format(**last) if last else "no rank has reported yet"
            raise RunStopped(
                f"{LABEL} is late: nothing was heard of its ranks for {patience_s:g} s, which is sft.timeout_s for "
                f"each of {REPORT_EVERY} steps and for what comes before or after them; {where}"
            )


def _explain(error: ray.train.TrainingFailedError) -> Exception:
    """Ray Train's error as one sentence: of several ranks' failures, one of ours comes first."""
    if isinstance(error, ray.train.ControllerError):
        failure = error.controller_failure
        _, *more = str(failure).strip().splitlines() or [""]
        return RunStopped(" ".join([f"Ray Train could not run {LABEL}: {first_line(failure)}", *more[-1:]]))
    failures = sorted(getattr(error, "worker_failures", {}).items())
    causes = {rank: getattr(failure, "_base_exc", failure) for rank, failure in failures}
    for cause in causes.values():
        if isinstance(cause, (RunStopped, UserError)):
            return cause
    text = "; ".join(f"rank {rank}: {first_line(cause)}" for rank, cause in causes.items())
    return RunStopped(f"{LABEL} failed on {text or first_line(error)}")
