"""What a run that trains a policy has done so far, and the summary of a finished one."""

import json
import logging
from typing import Any

from actors.learner.export import EXPORT_FILE
from jobs.common import run_folder
from t2g.config import PolicyJob, with_overrides
from t2g.config.run_values import POLICY
from t2g.files import read_regular, sync_folder, write_json
from t2g.metrics import EVAL_S, NEUTRAL_SHARE, SAMPLES, STEP, STEP_S, select_held_out
from t2g.report.model_card import write_model_card
from t2g.report.run_page import SUMMARY_FILE, report_run
from t2g.runs import identity
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.log import METRICS_FILE, read_records
from t2g.runs.versions import collect_versions

logger = logging.getLogger(__name__)
TIMES = {"steps_s": STEP_S, "evaluations_s": EVAL_S}  # in the summary: sums of metrics


def open_checkpoints(config: PolicyJob) -> CheckpointStore:
    """Return the checkpoints of a run."""
    folder = config.run.folder / "checkpoints"
    skip_unreadable = config.run.resume == "readable"
    return CheckpointStore(folder, config.checkpoint.keep, skip_unreadable=skip_unreadable)


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


def load_finished_summary(config: PolicyJob, **identity_extras: Any) -> dict[str, Any] | None:
    """Return the summary of a run that already has all its steps; None for others and for a smoke run.

    See `run_folder.check_folder` for `identity_extras` and errors.
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
    last = lines[-1]
    policy = select_held_out(last)
    if evaluated and not policy:
        logger.warning(
            "step %d has no evaluation, because the run was stopped in it: `t2g evaluate %s` measures the policy",
            last[STEP], folder
        )  # fmt: skip
    trained = [line for line in lines if line[STEP] > 0]
    timing = {"wall_s": seconds}
    for name, metric in TIMES.items():
        timing[name] = sum(line.get(metric, 0.0) for line in lines)
    summary = {
        "steps": last[STEP],
        "samples": int(last[SAMPLES]),
        "base": base,
        "policy": policy,
        "all_neutral": all(line.get(NEUTRAL_SHARE) == 1.0 for line in trained),
        "timing": timing,
        "versions": collect_versions(),
    }
    export = folder / POLICY / EXPORT_FILE
    if export.is_file():
        summary["export"] = json.loads(export.read_text())
    has_policy = (folder / POLICY).is_dir()
    if has_policy:
        sync_folder(folder / POLICY)
    write_json(folder / SUMMARY_FILE, summary)

    if has_policy:
        write_model_card(folder / POLICY, config, base, policy)
    report_run(folder)
    return summary
