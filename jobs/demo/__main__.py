"""Run the whole pipeline on a tiny world: base policy, records, reward model, three methods of PPO.

    python -m jobs.demo    # with configs/tiny/demo.yaml

The methods share records, reward model, prompts, seeds and engines. They differ in where the rewards are paid, and
`span` alone has local credit. The feedback function annotates and the facts measure; every sample of PPO is judged by
the reward model.
"""

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from jobs.common.cli import install_stop_flag, main, print_outputs
from jobs.demo.demo_methods import METHODS_FOLDER, method_job
from t2g.config import DemoJob, Placement, PolicyJob
from t2g.errors import UserError
from t2g.study.tables import markdown

CONFIG = Path(__file__).parents[2] / "configs" / "tiny" / "demo.yaml"  # next to jobs in a checkout and in a wheel
FACTS = ("fact_f1", "fact_precision", "fact_recall")
SIDE_METRICS = ("repeated", "length_mean")  # printed with F1: values that a policy that games F1 would change
PURPOSES: dict[Placement, str] = {  # for the log
    "span": "PPO with a reward at the end of each span that a critique praises or criticises: the method",
    "step": "PPO with the same rewards, summed at the end of each sentence: rewards for steps",
    "scalar": "PPO with the same rewards, summed on the last token: what one number for each response achieves",
    "shuffled": "PPO with the same rewards on random tokens: a control that shows whether their places matter",
}


def summarize(
    demo: DemoJob, artifacts: dict[str, dict[str, Any]], methods: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return summary.json: held-out facts of the base and of each method at equal samples."""
    from t2g.runs.versions import collect_versions

    first = methods[demo.methods[0]]
    timing = {f"{name}_s": metrics["seconds"] for name, metrics in artifacts.items()}
    timing |= {f"{name}_s": method["timing"]["wall_s"] for name, method in methods.items()}
    timing["all_phases_s"] = sum(timing.values())
    policies = {name: select_facts(method["policy"]) for name, method in methods.items()}
    reward_model = dict(artifacts["reward"])
    reward_model.pop("seconds", None)
    return {
        "references": {"fact_f1": artifacts["world"]["references_fact_f1"]},
        "base": select_facts(first["base"]),
        "methods": policies,
        "reward_model": reward_model,
        "steps": first["steps"],
        "samples": first["samples"],
        "timing": timing,
        "versions": collect_versions(),
    }


def select_facts(measured: dict[str, float]) -> dict[str, float]:
    """Return the held-out metrics of the summary."""
    return {name: measured[name] for name in (*FACTS, *SIDE_METRICS)}


def table(summary: dict[str, Any]) -> str:
    """Return a table of the held-out facts, with one row for the base and each method."""
    rows: list[tuple[str, ...]] = []
    for name, metrics in {"base": summary["base"], **summary["methods"]}.items():
        shares = [f"{metrics[fact]:.3f}" for fact in (*FACTS, "repeated")]
        rows.append((name, *shares, f"{metrics['length_mean']:.1f}"))
    text = markdown(("held-out posts", "fact F1", "precision", "recall", "repeated facts", "tokens"), rows)
    return f"{text}\n\n{summary['samples']} sampled responses in each method, {summary['steps']} steps"


def check_start(demo: DemoJob) -> None:
    """Refuse, before anything is started, artifacts and methods that were made with other inputs. Nothing is written.

    The methods are checked once the artifacts are finished.

    Raises:
        UserError: A folder has other inputs, see `identity.check_identity`.
    """
    from jobs.artifacts.demo_artifacts import check_demo_artifacts
    from jobs.common.run_folder import check_methods_folder, check_own_folder
    from jobs.train_policy.policy_results import find_steps_done

    check_methods_folder(demo.run.folder)
    if demo.task != "tiny" or not check_demo_artifacts(demo):
        return
    methods = [method_job(demo, method) for method in demo.methods]
    if not find_steps_done(*methods, should_save=False):
        for method in methods:
            check_own_folder(method)


def run(demo: DemoJob) -> None:
    """Make the unfinished artifacts, then the runs of the methods."""
    from jobs.artifacts.demo_artifacts import make_demo_artifacts
    from jobs.common.fleets import Fleets, on_cluster
    from jobs.common.run_folder import sole_process
    from jobs.train_policy.policy_data import read_data
    from jobs.train_policy.policy_results import load_finished_summary, report_steps_done
    from jobs.train_policy.policy_training import PolicyTraining
    from t2g.runs.progress import format_duration, log_duration

    if demo.task != "tiny":
        raise UserError(f"task={demo.task} has no reward model to train with; jobs.compare compares methods on it")
    started = time.monotonic()
    jobs = {method: method_job(demo, method) for method in demo.methods}
    if report_steps_done(*jobs.values()):
        return
    with sole_process(demo.run.folder), on_cluster(demo), Fleets() as fleets:
        # Close engines that the methods cannot reuse: they hold GPUs and memory that the methods need.
        keeps_engines = all(map(has_artifact_engines, jobs.values()))
        with nullcontext(fleets) if keeps_engines else Fleets() as artifact_fleets:
            artifacts = make_demo_artifacts(demo, artifact_fleets)

        data = read_data(jobs[demo.methods[0]])  # the same for all
        stop = install_stop_flag()
        methods: dict[str, dict[str, Any]] = {}
        for method, job in jobs.items():
            with log_duration(f"phase {method}", PURPOSES[method]):
                summary = load_finished_summary(job)
                if not summary:
                    rollouts, feedback = fleets.for_policy(job, data.task)
                    training = PolicyTraining(config=job, data=data, rollouts=rollouts, feedback=feedback, stop=stop)
                    summary = training.run()
                methods[method] = summary
    finish(demo, summarize(demo, artifacts, methods))
    print(f"all phases: {format_duration(time.monotonic() - started)}")
    print_outputs(report=demo.run.folder / "report.html", numbers=demo.run.folder / "summary.json")


def has_artifact_engines(job: PolicyJob) -> bool:
    """Return whether the rollout engines of a method are those that made the artifacts; see `Fleets`."""
    learner = job.learner
    return learner.sync_transport == "store" and learner.lora is None


def finish(demo: DemoJob, summary: dict[str, Any]) -> None:
    """Write summary.json and report.html, and print the table."""
    from t2g.files import write_atomic
    from t2g.report.run_page import REPORT_FILE, SUMMARY_FILE, find_origin, load_examples, write_report
    from t2g.runs.log import METRICS_FILE, SAMPLES_FILE, read_records

    folder = demo.run.folder
    numbers = json.dumps(summary, indent=1)
    write_atomic(folder / SUMMARY_FILE, numbers.encode())

    records: dict[str, list[dict[str, Any]]] = {}
    for method in demo.methods:
        metrics_file = folder / METHODS_FOLDER / method / METRICS_FILE
        records[method] = list(read_records(metrics_file))
    first = folder / METHODS_FOLDER / demo.methods[0]
    write_report(
        folder / REPORT_FILE,
        title="Text2Grad on the tiny world",
        summary=summary,
        methods=records,
        examples=load_examples(first / SAMPLES_FILE),
        origin=find_origin(first),
    )
    print(table(summary))


if __name__ == "__main__":
    sys.exit(main(DemoJob, run, default_file=CONFIG, check=check_start))
