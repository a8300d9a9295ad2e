"""Train a policy by span-level PPO.

    python -m jobs.train_policy --config configs/own/policy.yaml model.policy=my/model data.path=my.jsonl \
        feedback.source=my_pkg.feedback:judge
"""

import sys
from pathlib import Path
from typing import Any

from jobs.common.cli import main, print_outputs, stop_flag
from t2g.config import PolicyJob, with_overrides
from t2g.errors import RunStopped


def format_smoke_summary(config: PolicyJob, summary: dict[str, Any]) -> str:
    """Describe the full run from three steps: its speed, its duration, and whether feedback gives rewards."""
    from t2g.runs.progress import format_duration

    timing, num_steps = summary["timing"], config.num_steps
    step_s = timing["steps_s"] / summary["steps"]
    # A smoke run has the first evaluation and the last.
    evaluations_s = timing["evaluations_s"] / 2 * (1 + num_steps / config.eval.every)
    text = (
        f"smoke run done: {summary['samples'] / timing['steps_s']:.1f} samples/s, {step_s:.1f} s a step; "
        f"{num_steps} steps will take about {format_duration(step_s * num_steps + evaluations_s)}"
    )
    if summary["unlabelled"]:
        text += (
            f"\nno token of these responses was labelled: feedback.source={config.feedback.describe()} quoted nothing "
            "of them, so no span was paid; samples.jsonl has its critiques"
        )
    return text


def try_teacher(config: PolicyJob, *inputs: Any) -> list[str]:
    """Return lines about the teacher of a smoke run, before anything is trained; [] without one. See `inputs` there."""
    from jobs.common.teacher_evaluation import evaluate_teacher, format_result

    if not config.run.smoke or config.objective.teacher is None:
        return []
    try:
        return [format_result(evaluate_teacher(config, *inputs))]
    except RunStopped as error:
        return [f"the teacher was not measured: {error}"]


def show_one(folder: Path) -> None:
    """Return a response of the last step with coloured spans, with feedback if there is any."""
    from rich.console import Console

    from t2g.report.run_page import examples
    from t2g.report.terminal import show_feedback
    from t2g.runs.log import SAMPLES_FILE

    judged = [of[-1] for of in examples(folder / SAMPLES_FILE) if of[-1].feedback is not None]
    if judged:
        one = max(judged, key=lambda sample: (bool(sample.feedback.spans), sample.step))
        print(f"\none response, of step {one.step}:")
        show_feedback(Console(), one.response, one.feedback)


def run(unresolved: PolicyJob, data: Any) -> None:
    """Connect, start the fleets, train. data: PolicyData, None if stages are made first."""
    from jobs.common.fleets import Fleets, on_cluster
    from jobs.common.policy_runs import finished, read_data, report_steps_done, run_references, train
    from jobs.common.run_folder import SMOKE_STEPS, sole_process
    from jobs.common.stages import demo_of, make_stages, resolve_stages
    from t2g.runs.control import publish_phases

    demo = demo_of(unresolved)
    steps = {"num_steps": min(SMOKE_STEPS, unresolved.num_steps)} if unresolved.run.smoke else {}
    config = resolve_stages(with_overrides(unresolved, steps), demo)
    if report_steps_done(config):
        return
    summary = finished(config)
    if summary is None:
        folder = config.run.folder
        with sole_process(folder), publish_phases(folder, config.num_steps) as say, on_cluster(config):
            if demo:
                with Fleets() as fleets:
                    make_stages(demo, fleets, reward="reward_model" in config.feedback.models)
            data = run_references(config, data or read_data(config))
            say("loading")
            stop = stop_flag()  # before the engines start: a signal during their start ends the run as well
            with Fleets() as fleets:
                rollouts, feedback = fleets.for_policy(config, data.task)
                teacher = try_teacher(config, data, rollouts, feedback)
                summary = train(config, data, rollouts, feedback, stop)
    folder = config.run.folder
    if unresolved.run.smoke:
        print(format_smoke_summary(unresolved, summary), *teacher, sep="\n")
        show_one(folder)
    else:
        held_out = ", ".join(f"{name} {value:.4g}" for name, value in summary["policy"].items() if value is not None)
        print(f"held out: {held_out or 'not measured, eval_data is not given'}")
    print_outputs(policy=folder / "policy", report=folder / "report.html", numbers=folder / "summary.json")


if __name__ == "__main__":
    sys.exit(main(PolicyJob, run, read="jobs.common.policy_runs:read_data"))
