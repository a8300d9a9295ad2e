"""Supervised training under Ray Train, as its driver sees it: start the ranks, follow them, keep what they wrote.

The policy's fine-tuning and the span reward model's training are this one function; a rank is `sft_rank`.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.train.v2._internal.execution.controller import TrainController
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.cluster.fanout import first_line
from actors.cluster.placement import GIB
from actors.learner.sft_rank import CHECKPOINTS, LABEL, REPORT_EVERY, RankJob, SFTProgress, train_loop
from t2g.config import ClusterConfig, ModelConfig, SFTOptions
from t2g.errors import RunStopped, UserError
from t2g.feedback.examples import SFTExample
from t2g.files import write_atomic
from t2g.runs.checkpoint import CheckpointStore

DRIVER_GRACE_S = 30.0  # the deadline of the ranks' collectives comes first: they know where they stand
POLL_S = 0.2  # between two looks at the ranks' reports
DONE_FILE = "sft.json"  # written last: a folder without it is not finished
# Fields of SFTOptions that decide the weights; the others move the order of sums, and which units dropout meets.
MOVES_WEIGHTS = {"optim", "dtype", "num_epochs", "batch_size", "max_length", "span_weight", "lora"}
UNUSED_CALLBACKS = (
    "DatasetsCallback",
    "PlacementGroupCleanerCallback",
    "WorkingDirectorySetupCallback",  # relative paths stay what they are for the driver
    "ControllerMetricsCallback",
    "WorkerMetricsCallback",
)
NO_PLACE = ("WorkerGroupStartupTimeoutError", "InsufficientClusterResourcesError")  # Ray Train keeps them private
logger = logging.getLogger(__name__)


class _Trainer(ray.train.torch.TorchTrainer):
    """Ray Train's, but for the processes beside the ranks.

    The controller is ended by force. Left alone it begins to exit when its handle is gone, and takes seconds: a Ray
    that ends meanwhile leaves it behind, since nobody watches a worker any more that has said goodbye. The helpers that
    would each start a process of 200 MB are left out: we pass no Ray data sets, and a placement group ends with the
    controller that made it.
    """

    def __init__(
        self, *, follow: Callable[["ray.ObjectRef[Any]"], None], placement_timeout_s: float, **ours: Any
    ) -> None:
        """follow: waits for the end of a training and may give it up by raising."""
        super().__init__(train_loop, **ours)
        self._follow = follow
        self._settings = {
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # its poll; the default of 2 s delays start, reports and end
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(placement_timeout_s),
            "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process; a lost rank ends the training here anyway
            "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",  # the controller does so by design
        }

    def _create_default_callbacks(self) -> list[Any]:
        return [call for call in super()._create_default_callbacks() if type(call).__name__ not in UNUSED_CALLBACKS]

    def _initialize_and_run_controller(self, **parts: Any) -> ray.train.Result:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        controller = (
            ray.remote(TrainController)
            .options(num_cpus=0, scheduling_strategy=here, runtime_env={"env_vars": self._settings})
            .remote(**parts)
        )
        try:
            running = controller.run.remote()
            self._follow(running)
            ray.get(running)
            return ray.get(controller.get_result.remote())
        finally:
            ray.kill(controller)  # with it go the ranks that still run: it owns them


class _ReportsFile(ray.train.UserCallback):
    """Appends rank 0's reports to a file. Runs in Ray Train's controller, which Ray Train puts on the driver's node."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(metrics[0]) + "\n")


def run_sft(
    *,
    model: ModelConfig,
    examples: Sequence[SFTExample],
    options: SFTOptions,
    cluster: ClusterConfig,
    out_folder: Path,
    seed: int,
    on_start: Callable[[int], None],
    on_progress: Callable[[SFTProgress], None],
) -> dict[str, float]:
    """Train `model` on `examples` and write it to `out_folder` (safetensors, tokenizer, sft.json).

    Ray must be connected. A finished `out_folder` of the same model, examples, options and seed is kept and its metrics
    are returned at once; an unfinished one, beside it under the name `.part`, goes on after its last checkpoint.

    Args:
        on_start: called before the ranks start with the number of steps that are done; not for a model that is kept.
        on_progress: called with every report.

    Returns the last `SFTProgress` as a dict, and `wall_s`, start-up and export included; seconds are of this start.

    Raises:
        UserError: no examples, `out_folder` holds another training's model, no place for the ranks, or a full disk.
        RunStopped: a loss or gradient that is not finite, a lost rank, a missed deadline (who and where it stood).
    """
    if not examples:
        raise UserError(f"{LABEL} got no examples")
    key = _fingerprint(model, examples, options, seed)
    kept = _finished(out_folder, key)
    if kept is not None:
        logger.info("%s is already trained with these settings: kept", out_folder)
        return kept
    part = out_folder.with_name(out_folder.name + ".part")
    identity = {"fingerprint": key, "num_ranks": options.workers}  # a ZeRO-3 checkpoint has one part for each rank
    checkpoint, done = _resume_point(part, identity)
    _clear(part, keep=CHECKPOINTS if checkpoint else None)
    on_start(done)

    started = time.monotonic()
    job = RankJob(
        model=model, examples=ray.put(list(examples)), options=options, out_folder=str(part), seed=seed,
        identity=identity, checkpoint=checkpoint, done=done,
    )  # fmt: skip
    metrics = _fit(job, cluster, on_progress) | {"wall_s": time.monotonic() - started}
    write_atomic(part / DONE_FILE, json.dumps({"fingerprint": key, "metrics": metrics}, indent=1).encode())
    os.replace(part, out_folder)
    shutil.rmtree(out_folder / CHECKPOINTS, ignore_errors=True)  # there is none where every step came before the first
    return metrics


def _resume_point(part: Path, identity: Mapping[str, Any]) -> tuple[str | None, int]:
    """Folder of the last intact checkpoint of this training and the number of steps behind it; (None, 0) without one.

    identity: fingerprint and number of ranks, which the checkpoint must share.
    """
    if not part.exists():
        return None, 0
    found = CheckpointStore(part / CHECKPOINTS, keep=1).latest()
    if found is not None and identity.items() <= found[1].items():
        return str(found[0]), found[1]["step"]
    why = "no whole checkpoint" if found is None else "a checkpoint of other data, options or number of ranks"
    logger.warning("%s has %s: the training starts from the base model", part, why)
    return None, 0


def _clear(part: Path, *, keep: str | None) -> None:
    """An empty folder, but for `keep`."""
    part.mkdir(parents=True, exist_ok=True)
    for path in part.iterdir():
        if path.name == keep:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _fingerprint(model: ModelConfig, examples: Sequence[SFTExample], options: SFTOptions, seed: int) -> str:
    """Names a training: what it starts from, what it learns from, and the options that move its weights."""
    found = {file.name: file.stat() for file in sorted(Path(model.policy).glob("*")) if file.is_file()}
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found.items()]
    chosen = options.model_dump(mode="json", include=MOVES_WEIGHTS)
    digest = hashlib.blake2b(json.dumps([model.model_dump(), files, chosen, seed]).encode(), digest_size=16)
    for example in examples:
        for array in (example.prompt_ids, example.target_ids, example.target_weights):
            digest.update(len(array).to_bytes(8) + array.tobytes())
    return digest.hexdigest()


def _finished(out_folder: Path, key: str) -> dict[str, float] | None:
    """The metrics of a finished training with this fingerprint, None where there is no folder yet."""
    if not out_folder.exists():
        return None
    done = out_folder / DONE_FILE
    if not done.exists():
        raise UserError(f"{out_folder} exists and was not written by {LABEL}: remove it or rename the run")
    record = json.loads(done.read_text())
    if record["fingerprint"] != key:
        raise UserError(f"{out_folder} was trained with another model, data or options: remove it or rename the run")
    return record["metrics"]


def _fit(job: RankJob, cluster: ClusterConfig, on_progress: Callable[[SFTProgress], None]) -> dict[str, float]:
    """Run the ranks and follow their reports. However this ends, ranks and controller end with it."""
    patience_s = (REPORT_EVERY + 1) * job.options.timeout_s + DRIVER_GRACE_S
    with tempfile.TemporaryDirectory() as scratch:
        reports = Path(scratch, "reports.jsonl")

        def follow(running: "ray.ObjectRef[Any]") -> None:
            _follow(lambda: bool(ray.wait([running], timeout=POLL_S)[0]), reports, patience_s, on_progress)

        trainer = _trainer(job, cluster, reports, scratch, follow)
        try:
            return trainer.fit().return_value
        except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
            raise _explain(error, job.options, cluster) from error


def _trainer(
    job: RankJob, cluster: ClusterConfig, reports: Path, scratch: str, follow: Callable[["ray.ObjectRef[Any]"], None]
) -> _Trainer:
    options = job.options
    resources = {"CPU": options.cpus, "memory": int(options.memory_gib * GIB)}
    if options.gpus:
        resources["GPU"] = options.gpus
    env = {"OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
    if not options.gpus:
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return _Trainer(
        follow=follow,
        placement_timeout_s=cluster.placement_timeout_s,
        train_loop_config={"job": job},
        torch_config=ray.train.torch.TorchConfig(
            backend="nccl" if options.gpus else "gloo", timeout_s=max(1, round(options.timeout_s))
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=options.workers,
            use_gpu=options.gpus > 0,
            resources_per_worker=resources,
            label_selector=options.labels or None,
        ),
        run_config=ray.train.RunConfig(
            name="sft",
            storage_path=scratch,  # no Ray Train checkpoints: nothing but a marker is written there
            callbacks=[_ReportsFile(reports)],
            worker_runtime_env={"env_vars": env},
            failure_config=ray.train.FailureConfig(max_failures=0, controller_failure_limit=0),
            logging_config=ray.train.LoggingConfig(log_level="ERROR"),
        ),
    )


def _follow(
    has_ended: Callable[[], bool], reports: Path, patience_s: float, on_progress: Callable[[SFTProgress], None]
) -> None:
    """Hand on each report until the end; RunStopped when the next one, or the end, takes over `patience_s`.

    has_ended: may take a moment to answer.
    """
    deadline = time.monotonic() + patience_s
    num_read, last = 0, None
    while True:
        ended = has_ended()
        lines = reports.read_text().split("\n")[:-1] if reports.exists() else []  # the last may be half written
        for line in lines[num_read:]:
            last = SFTProgress(**json.loads(line))
            on_progress(last)
            deadline = time.monotonic() + patience_s
        num_read = len(lines)
        if ended:
            return
        if time.monotonic() > deadline:
            where = f"the ranks stood at step {last.step} of {last.num_steps}" if last else "no rank has reported yet"
            raise RunStopped(
                f"{LABEL} is late: nothing was heard of its ranks for {patience_s:g} s, which is sft.timeout_s for "
                f"each of {REPORT_EVERY} steps and for what comes before or after them; {where}"
            )


def _explain(error: Exception, options: SFTOptions, cluster: ClusterConfig) -> Exception:
    """Ray Train's error as one sentence: of several ranks' failures, one of ours comes first."""
    if isinstance(error, ray.train.ControllerError):
        if type(error.controller_failure).__name__ in NO_PLACE:
            free = ray.available_resources()
            return UserError(
                f"no place for the {options.workers} ranks of {LABEL} within {cluster.placement_timeout_s:g} s: "
                f"each needs {options.cpus:g} CPUs, {options.gpus:g} GPUs and {options.memory_gib:g} GiB; "
                f"free in the cluster: {free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs, "
                f"{free.get('memory', 0) / GIB:.1f} GiB"
            )
        return RunStopped(f"Ray Train could not run {LABEL}: {first_line(error.controller_failure)}")
    failures = sorted(getattr(error, "worker_failures", {}).items())
    causes = {rank: getattr(failure, "_base_exc", failure) for rank, failure in failures}
    for cause in causes.values():
        if isinstance(cause, (RunStopped, UserError)):
            return cause
    text = "; ".join(f"rank {rank}: {first_line(cause)}" for rank, cause in causes.items())
    return RunStopped(f"{LABEL} failed on {text or first_line(error)}")
