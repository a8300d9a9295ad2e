"""The job `jobs.train_policy`: one run of PPO from its config to its report."""

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from jobs.common.cli import install_stop_flag, print_outputs
from t2g.config import PolicyJob
from t2g.errors import RunStopped

READ_DATA = "jobs.train_policy.policy_data:read_data"  # late: it imports torch
NUM_SHOWN = 3  # responses below the curves in a notebook


@dataclass(frozen=True, kw_only=True)
class PolicyRun:
    """A run by its folder; its files are read at each access, while it goes on as well."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the numbers of each step, lines of metrics.jsonl."""
        return self._read("metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Return the logged responses with their feedback, lines of samples.jsonl."""
        return self._read("samples.jsonl")

    @property
    def policy(self) -> Path:
        """Return the folder of the trained model, which transformers and vLLM load."""
        return self.folder / "policy"

    @property
    def report(self) -> Path:
        """Return the HTML report."""
        return self.folder / "report.html"

    def show_samples(self, count: int = 5) -> Any:
        """Return the latest responses, which a notebook shows with colored spans."""
        from t2g.report.notebook_view import view_samples

        return view_samples(self._read_samples(), count)

    def _repr_html_(self) -> str:
        """Return the curves of the run and its latest responses, for a notebook."""
        from t2g.report.notebook_view import view_run

        return view_run(self.metrics, self._read_samples(), NUM_SHOWN)._repr_html_()

    def _read_samples(self) -> list[Any]:
        from t2g.report.run_page import read_samples

        return read_samples(self.folder / "samples.jsonl")

    def _read(self, name: str) -> list[dict[str, Any]]:
        from t2g.runs.log import read_records

        return [*read_records(self.folder / name)]


def run_training(job: PolicyJob, data: Any) -> PolicyRun:
    """Connect, start the fleets, train. data: PolicyData, None if artifacts are made first."""
    from jobs.common.fleets import Fleets
    from jobs.common.run_folder import sole_process
    from jobs.train_policy.policy_results import limit_smoke, load_finished_summary, report_steps_done
    from jobs.train_policy.policy_training import PolicyTraining
    from jobs.train_policy.prepared import prepare_job
    from t2g.runs.control import publish_phases

    config = limit_smoke(job)
    folder = config.run.folder
    policy_run = PolicyRun(folder=folder)
    if report_steps_done(config):
        return policy_run
    summary = load_finished_summary(config)
    teacher: list[str] = []
    if summary is None:
        with (
            sole_process(folder),
            publish_phases(folder, config.num_steps) as publish_phase,
            prepare_job(config, data) as checked,
        ):
            publish_phase("loading")
            stop = install_stop_flag()  # before the engines start: a signal during their start ends the run as well
            with Fleets() as fleets:
                rollouts, feedback = fleets.for_policy(config, checked.task)
                teacher = try_teacher(config, checked, rollouts, feedback, lambda: bool(stop))
                training = PolicyTraining(
                    config=config,
                    data=checked,
                    rollouts=rollouts,
                    feedback=feedback,
                    stop=stop,
                    publish_phase=publish_phase,
                )
                summary = training.run()
    if job.run.smoke:
        print(format_smoke_summary(job, summary), *teacher, sep="\n")
        show_last_response(folder)
    else:
        held_out = [f"{name} {value:.4g}" for name, value in summary["policy"].items() if value is not None]
        reason = "eval_data is not given" if job.eval_data is None else "the last evaluation failed"
        print(f"held out: {', '.join(held_out) or f'not measured, {reason}'}")
    print_outputs(policy=policy_run.policy, report=policy_run.report, numbers=folder / "summary.json")
    return policy_run


def check_start(job: PolicyJob) -> None:
    """Refuse, before anything is started, folders that were made with other inputs. Nothing is written.

    The folder of a run on artifacts that are not made yet is checked once they are.

    Raises:
        UserError: A folder has other inputs, see `identity.check_identity`.
    """
    from jobs.artifacts.demo_artifacts import check_demo_artifacts, demo_of
    from jobs.common.run_folder import check_own_folder
    from jobs.train_policy.policy_results import find_steps_done, limit_smoke

    demo = demo_of(job)
    if demo and not check_demo_artifacts(demo, reward="reward_model" in job.feedback.models):
        return
    config = limit_smoke(job)
    if not find_steps_done(config, should_save=False):
        check_own_folder(config)


def format_smoke_summary(config: PolicyJob, summary: dict[str, Any]) -> str:
    """Describe the full run from three steps: its speed, its duration, and whether feedback gives rewards."""
    from t2g.runs.progress import format_duration

    timing = summary["timing"]
    num_steps = config.num_steps
    steps_made = summary["steps"]
    step_s = timing["steps_s"] / steps_made
    evaluations_made = 1 + ceil(steps_made / config.eval.every)
    evaluations_planned = 1 + ceil(num_steps / config.eval.every)
    evaluations_s = timing["evaluations_s"] / evaluations_made * evaluations_planned

    pace = summary["samples"] / timing["steps_s"]
    duration = format_duration(step_s * num_steps + evaluations_s)
    text = f"smoke run done: {pace:.1f} samples/s, {step_s:.1f} s a step; {num_steps} steps will take about {duration}"
    if summary["all_neutral"]:
        text += (
            f"\nevery token of these responses is neutral: feedback.source={config.feedback.describe()} gave no span "
            "with a reward; samples.jsonl has its critiques"
        )
    return text


def try_teacher(config: PolicyJob, *inputs: Any) -> list[str]:
    """Return lines about the teacher of a smoke run, before anything is trained; [] without a teacher.

    Args:
        inputs: Further arguments of `evaluate_teacher`.
    """
    from jobs.train_policy.teacher_evaluation import evaluate_teacher, format_result

    if not config.run.smoke or config.objective.teacher is None:
        return []
    try:
        result = evaluate_teacher(config, *inputs)
        return [format_result(result)]
    except RunStopped as error:
        return [f"the teacher was not measured: {error}"]


def show_last_response(folder: Path) -> None:
    """Print the latest response that has spans, colored; if none has any, the latest response."""
    from rich.console import Console

    from t2g.report.run_page import load_examples
    from t2g.report.terminal import show_feedback
    from t2g.runs.log import SAMPLES_FILE

    last_samples = [samples[-1] for samples in load_examples(folder / SAMPLES_FILE)]
    judged = [sample for sample in last_samples if sample.feedback is not None]
    if not judged:
        return
    last = max(judged, key=lambda sample: (bool(sample.feedback.spans), sample.step))
    print(f"\ncritique and text of one response, of step {last.step}:")
    show_feedback(Console(), last.response, last.feedback, last.turns)
