"""The figures of a comparison, from the files of its runs; see `t2g.study.comparison`."""

import json
from typing import Any

from jobs.common.cli import print_outputs
from t2g.config import PolicyJob
from t2g.errors import Diverged, UserError
from t2g.files import write_atomic
from t2g.report.comparison_page import write_comparison
from t2g.runs.log import METRICS_FILE, read_records
from t2g.runs.versions import collect_versions
from t2g.study.comparison import RunCurve, base_run, read_run, summarize, summarize_noise, tables
from t2g.study.methods import NOISY, ComparisonPlan
from t2g.study.result_lines import ResultLines

TARGETING_FILE = "targeting.json"


def load_run(method_job: PolicyJob) -> RunCurve:
    """Load a finished run. Raises UserError or Diverged, with its folder, if an evaluation or its score is missing."""
    folder = method_job.run.folder
    path = folder / TARGETING_FILE
    targeting = json.loads(path.read_text()) if path.exists() else None
    records = list(read_records(folder / METRICS_FILE))
    try:
        return read_run(records, targeting, every=method_job.eval.every)
    except (UserError, Diverged) as error:
        raise type(error)(f"{folder}: {error}") from None


def load_all(plan: ComparisonPlan, chosen: dict[str, float]) -> tuple[dict[str, dict[int, RunCurve]], dict[str, Any]]:
    """Return method -> seed -> run in the order of compare.methods, and the same by noise."""
    config = plan.job.compare
    results = ResultLines(config)

    def load_one(name: str, seed: int, noise: str) -> RunCurve:
        method_job = plan.make_job(name, seed, chosen.get(name), noise)
        return results.find(method_job, **plan.identity_extras(name, method_job)) or load_run(method_job)

    def load(name: str, noise: str = "") -> dict[int, RunCurve]:
        if plan.methods[name].procedure == "base":
            trained = load(plan.trained_methods[0])
            return {seed: base_run(run) for seed, run in trained.items()}
        return {seed: load_one(name, seed, noise) for seed in config.seeds}

    runs = {name: load(name) for name in plan.methods} if config.seeds else {}
    runs_by_noise: dict[str, Any] = {}
    if not runs:
        return runs, runs_by_noise
    for noise in config.noise:
        runs_by_noise[noise] = {name: load(name, noise) for name in NOISY}
    return runs, runs_by_noise


def finish(plan: ComparisonPlan, search: dict[str, Any], rewards: dict[str, Any]) -> None:
    """Write compare.json, compare.md, curves.svg and report.html; without seeds of policies the first two."""
    runs, noise = load_all(plan, search["chosen"])
    summary = {
        "methods": summarize(runs),
        "noise": summarize_noise(noise),
        "rewards": rewards,
        "search": search,
        "config": plan.job.model_dump(mode="json"),
        "versions": collect_versions(),
    }
    folder = plan.job.run.folder
    numbers = json.dumps(summary, indent=1)
    numbers_file = folder / "compare.json"
    write_atomic(numbers_file, numbers.encode())
    text = tables(summary)
    table_file = folder / "compare.md"
    write_atomic(table_file, f"{text}\n".encode())
    print(text)
    if runs:
        write_comparison(folder, summary, runs)
    print_outputs(report=folder / "report.html", numbers=numbers_file)
