"""Methods side by side: the same model, data, seeds, feedback and number of samples; tables, curves, compare.json.

    python -m jobs.compare --config configs/tiny/compare.yaml
    python -m jobs.compare --config configs/tiny/compare.yaml compare.methods=[scalar,span] compare.seeds=[1]

Each method first chooses its learning rate from one grid on seeds of its own, then runs on the seeds that are compared.
Engines stay warm between runs. The same command again goes on where it was, run by run; methods, seeds and noise may be
added later. What the figures are is said in `t2g.study.comparison`.
"""

import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from jobs.common.cli import StopFlag, main, stop_flag, stopped
from jobs.common.run_folder import begin_folder, sole_process
from t2g.config import NOISY, UNTRAINED, CompareJob, DemoJob, FeedbackConfig, Method, PolicyJob, StudyJob
from t2g.config.describe import describe_compare
from t2g.errors import RunStopped, Stopped, UserError
from t2g.study import arms

if TYPE_CHECKING:  # numpy, torch and Ray are imported by the functions that need them: --help must answer at once
    from actors.engines.rollout import RolloutFleet
    from actors.learner.learner import LearnerGroup
    from jobs.common.fleets import Fleets
    from jobs.common.policy_runs import PolicyData
    from t2g.interfaces import FeedbackSource
    from t2g.study.comparison import Run
    from t2g.study.targeting import Reference

    Hook = Callable[[RolloutFleet, FeedbackSource, LearnerGroup], None]

logger = logging.getLogger(__name__)

STUDY = "${study}"
STUDY_MODEL = re.compile(r"\$\{study\}/([a-z_]+)-(\d+)/model")


@dataclass(frozen=True, kw_only=True)
class Session:
    """What all runs of one start share."""

    job: CompareJob
    data: "PolicyData"
    stop: StopFlag

    def run(self, arm: PolicyJob, fleets: "Fleets", *, method: Method, after: "Hook | None" = None) -> dict[str, Any]:
        """The summary of a run, made now where it is not finished. Raises Stopped."""
        from jobs.common.policy_runs import finished, train

        # What made a baseline is not told by its config alone: `run_baseline` knows the rest.
        summary = None if method in arms.BASELINES else finished(arm)
        if summary is not None:
            return summary
        if self.stop:
            raise Stopped
        fleets.forget_answers()
        if method in arms.BASELINES:
            from jobs.common.baseline_stages import run_baseline

            summary = run_baseline(method, arm, self.data, fleets, self.stop, reviser=self.job.compare.reviser)
        else:
            rollouts, feedback = fleets.for_policy(arm, self.data.task)
            hook = partial(after, rollouts, feedback) if after else lambda learner: None
            summary = train(arm, self.data, rollouts, feedback, self.stop, hook)
        if summary is None:
            raise Stopped
        shutil.rmtree(arm.run.folder / "checkpoints", ignore_errors=True)  # tens of runs; the numbers stay
        return summary


# ---------------------------------------------------------------------------------------------------------------- runs
def engine_groups(job: CompareJob) -> list[tuple[FeedbackConfig, list[Method]]]:
    """Methods by the feedback that they need, the job's own first: only the engines of one group run at a time."""
    groups: list[tuple[FeedbackConfig, list[Method]]] = [(job.feedback, [])]
    for method in (m for m in job.compare.methods if m != "sft"):
        own = arms.arm_feedback(job, method)
        found = next((methods for feedback, methods in groups if feedback == own), None)
        if found is None:
            groups.append((own, [method]))
        else:
            found.append(method)
    return groups


def run_all(job: CompareJob, data: "PolicyData", stop: StopFlag) -> dict[str, Any]:
    """Every run that is not there yet; what the search found. Raises Stopped."""
    from jobs.common.fleets import Fleets
    from jobs.common.reference_runs import make_reference

    session = Session(job=job, data=data, stop=stop)
    config = job.compare
    search: dict[str, Any] = {"grid": config.lr_grid, "seeds": config.search_seeds, "scores": {}, "chosen": {}}
    reference: list[Reference] | None = None
    for _, methods in engine_groups(job):
        with Fleets() as fleets:
            reference = reference or make_reference(job, data, fleets)
            for method in methods:
                scores, lr = find_lr(session, method, fleets)
                search["scores"] |= {method: scores} if scores else {}
                search["chosen"] |= {} if method in UNTRAINED else {method: lr}
            run_arms(session, methods, search["chosen"], fleets, reference)
            if set(NOISY) <= set(methods):
                run_noise(session, search["chosen"], fleets)
    return search


def find_lr(session: Session, method: Method, fleets: "Fleets") -> tuple[arms.Scores, float]:
    """The scores of the search, and the learning rate that they choose."""

    def score_of(arm: PolicyJob) -> float | None:
        try:
            session.run(arm, fleets, method=method)
        except RunStopped as error:  # a rate that is too high must not end the comparison
            logger.warning("%s ended by itself: %s", arm.run.folder, error)
            return None
        shutil.rmtree(arm.run.folder / "policy", ignore_errors=True)
        return load_run(arm, method).score

    scores = arms.search_scores(session.job, method, score_of)
    if scores:
        return scores, arms.choose_lr(scores)
    return scores, session.job.learner.policy.lr if method in UNTRAINED else session.job.compare.lr_grid[0]


def run_arms(
    session: Session,
    methods: Sequence[Method],
    chosen: dict[Method, float],
    fleets: "Fleets",
    reference: "Sequence[Reference]",
) -> None:
    """Seed by seed, so that a machine that is slower for a while is slower for all methods."""
    from jobs.common.reference_runs import TARGETING_FILE, measure_exported, measure_targeting, reference_sampling

    job, data, sampling = session.job, session.data, reference_sampling(session.job)
    for seed in job.compare.seeds:
        for method in methods:
            arm = the_arm(job, method, seed, chosen)
            session.run(arm, fleets, method=method, after=partial(measure_targeting, arm, data, reference, sampling))
            if method not in UNTRAINED and not (arm.run.folder / TARGETING_FILE).exists():
                feedback = fleets.feedback(arm.feedback, data.task, arm)
                measure_exported(arm, data, reference, sampling, feedback)


def run_noise(session: Session, chosen: dict[Method, float], fleets: "Fleets") -> None:
    job = session.job
    for name in job.compare.noise:
        for seed in job.compare.seeds:
            for method in NOISY:
                session.run(arms.noise_job(job, name, method, seed, chosen[method]), fleets, method=method)


def the_arm(job: CompareJob, method: Method, seed: int, chosen: dict[Method, float]) -> PolicyJob:
    return arms.arm_job(job, method, seed, chosen.get(method, job.learner.policy.lr))


def load_run(arm: PolicyJob, method: Method) -> "Run":
    """What a finished run wrote. UserError for one that was evaluated at other steps than this comparison's."""
    from jobs.common.reference_runs import TARGETING_FILE
    from t2g.runs.metrics import METRICS_FILE, read_records
    from t2g.study.comparison import read_run, refuse_other_grid

    path = arm.run.folder / TARGETING_FILE
    targeting = json.loads(path.read_text()) if path.exists() else None
    run = read_run((record for _, record in read_records(arm.run.folder / METRICS_FILE)), targeting)
    if method not in UNTRAINED:
        expected = arms.evaluated_at(arm)
        refuse_other_grid(arm.run.name, run, [0, expected[-1]] if method in arms.BASELINES else expected)
    return run


def load_all(job: CompareJob, chosen: dict[Method, float]) -> "tuple[dict[str, dict[int, Run]], dict[str, Any]]":
    """Method -> seed -> run in the order of compare.methods; and the same by noise."""
    from t2g.study.comparison import base_run

    config = job.compare
    measures_base = arms.trained(job)[0]
    runs: dict[str, dict[int, Run]] = {}
    for method in config.methods:
        if method == "sft":
            measured = {s: load_run(the_arm(job, measures_base, s, chosen), measures_base) for s in config.seeds}
            runs[method] = {s: base_run(run) for s, run in measured.items()}
        else:
            runs[method] = {s: load_run(the_arm(job, method, s, chosen), method) for s in config.seeds}
    noise = {
        name: {m: {s: load_run(arms.noise_job(job, name, m, s, chosen[m]), m) for s in config.seeds} for m in NOISY}
        for name in config.noise
    }
    return runs, noise


# ------------------------------------------------------------------------------------------------------------ the job
def study_of(job: CompareJob) -> StudyJob | None:
    """The study whose reward models the job uses, under the job's own root and on its cluster."""
    from jobs.common.stages import load_beside

    return None if job.compare.study is None else load_beside(StudyJob, job.compare.study, job)


def study_models(job: CompareJob) -> list[tuple[str, int]]:
    """(variant, seed) of each reward model of the study that the job names and its methods use."""
    wanted: list[tuple[str, int]] = []
    for feedback, _ in engine_groups(job):
        model = feedback.reward_model or ""
        if not model.startswith(STUDY):
            continue
        found = STUDY_MODEL.fullmatch(model)
        if found is None:
            raise UserError(f"reward_model={model} needs the form {STUDY}/<variant>-<seed>/model")
        wanted.append((found[1], int(found[2])))
    return wanted


def needs_reviser(job: CompareJob, demo: DemoJob) -> bool:
    """Whether a method asks the reviser of the stages."""
    from jobs.common.stages import reviser_job

    return job.compare.reviser == str(reviser_job(demo).run.folder / "model") and bool(
        set(arms.REVISED) & set(job.compare.methods)
    )


def check_methods(job: CompareJob, score_name: str) -> None:
    """UserError for a method with which this job makes no sense, and where feedback that is changed would give the
    marks as well.
    """
    from t2g.study import baselines

    for method in job.compare.methods:
        try:
            arm = arms.arm_job(job, method, job.run.seed, job.learner.policy.lr)
        except ValidationError as error:
            raise UserError(f"compare.methods has {method}: {error.errors()[0]['msg']}") from None
        if method in arms.BASELINES:
            baselines.check(method, arm)
    changed = [method for method in job.compare.methods if arms.arm_feedback(job, method) != job.feedback]
    if changed and not score_name:
        raise UserError(
            f"{', '.join(changed)} cannot be compared: task {job.task} has no measure of its own, so the feedback that "
            "they change would judge them; leave them out"
        )


def run(asked: CompareJob) -> int:
    """All runs, then the figures. 0 when done, 128 + its number when a signal ended it."""
    from jobs.common.fleets import Fleets, feedback_roles, on_cluster
    from jobs.common.policy_runs import read_data
    from jobs.common.stages import demo_of, load_beside, make_reviser, make_stages, resolve_folder, resolve_stages
    from jobs.reward_study import make_variants
    from jobs.train_policy import policy_roles
    from t2g.tasks.base import get_task

    check_methods(asked, get_task(asked.task).score_name)
    demo, study = demo_of(asked), study_of(asked)
    wanted = study_models(asked) if study else []
    job = resolve_stages(asked, demo)
    job = resolve_folder(job, STUDY, study.run.folder) if study else job
    data = None if demo else read_data(job)
    with sole_process(job.run.folder):
        begin_folder(job)
        with on_cluster(job.cluster, policy_roles(job) | feedback_roles(job.feedback)):
            if demo:
                with Fleets() as fleets:
                    make_stages(demo, fleets)
                if needs_reviser(job, demo):
                    make_reviser(demo)
            if study and wanted:
                make_variants(study, load_beside(DemoJob, study.stages, study), wanted)
            stop = stop_flag()
            try:
                search = run_all(job, data or read_data(job), stop)
            except Stopped:
                return stopped(stop)
        finish(job, search)
    return 0


def finish(job: CompareJob, search: dict[str, Any]) -> None:
    """compare.json, compare.md, curves.svg and report.html."""
    from t2g.files import write_atomic
    from t2g.report.comparison_page import write_comparison
    from t2g.runs.versions import versions
    from t2g.study.comparison import summarise, summarise_noise, table

    runs, noise = load_all(job, search["chosen"])
    summary = {
        "methods": summarise(runs),
        "noise": summarise_noise(noise),
        "search": search,
        "config": job.model_dump(mode="json"),
        "versions": versions(),
    }
    folder = job.run.folder
    write_atomic(folder / "compare.json", json.dumps(summary, indent=1).encode())
    words = table(summary)
    write_atomic(folder / "compare.md", f"{words}\n".encode())
    write_comparison(folder, summary, runs)
    print(words)
    print(f"numbers: {folder / 'compare.json'}\nreport: {folder / 'report.html'}")


if __name__ == "__main__":
    sys.exit(main(CompareJob, run, describe_compare))
