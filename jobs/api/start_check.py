"""Refuse a job whose folders were made with other inputs, before anything is started: for its start and its dry run.

Nothing is written. A folder that an earlier artifact of the job decides is checked once that artifact is finished.
"""

from jobs.common.run_folder import check_folder
from jobs.demo.demo_methods import method_job
from t2g.config import (
    AnnotateJob,
    AnyJob,
    BenchmarkJob,
    CompareJob,
    DemoJob,
    EvaluateJob,
    JobConfig,
    PolicyEvaluationJob,
    PolicyJob,
    RewardJob,
    SFTJob,
)
from t2g.runs import identity
from t2g.runs.identity import Identity


def check_start(config: AnyJob, what: str | None = None) -> None:
    """Check the folders that the job continues.

    Args:
        what: Kind of an evaluation, see `jobs.evaluate`; None for other jobs.

    Raises:
        UserError: A folder has other inputs, see `identity.check_identity`.
    """
    match config:
        case CompareJob():
            _check_comparison(config)
        case PolicyJob() if what is None:
            _check_policy(config)
        case PolicyJob():
            _check_own(config)
        case DemoJob():
            _check_demo(config)
        case SFTJob() | RewardJob():
            from jobs.train_sft.supervised import LEFTOVERS

            _check_own(config, *LEFTOVERS)
        case AnnotateJob():
            from jobs.annotate.annotation_runs import JOURNAL_FILE

            _check_own(config, JOURNAL_FILE)
        case EvaluateJob():
            from t2g.report.reward_page import JSON_FILE

            _check_own(config, JSON_FILE)
        case PolicyEvaluationJob():
            from jobs.evaluate.policy_evaluation import RESPONSES

            _check_own(config, RESPONSES)
        case BenchmarkJob():
            _check_benchmark(config)


def _check_own(config: JobConfig, *leftovers: str) -> None:
    """Check the run folder; for a new run no content is read."""
    if config.run.folder.is_dir():
        check_folder(config, *leftovers, should_save=False)


def _check_policy(job: PolicyJob) -> None:
    from jobs.artifacts.demo_artifacts import check_demo_artifacts, demo_of
    from jobs.train_policy.policy_results import find_steps_done, limit_smoke

    demo = demo_of(job)
    if demo and not check_demo_artifacts(demo, reward="reward_model" in job.feedback.models):
        return
    config = limit_smoke(job)
    if not find_steps_done(config, should_save=False):
        _check_own(config)


def _check_demo(demo: DemoJob) -> None:
    from jobs.artifacts.demo_artifacts import check_demo_artifacts
    from jobs.train_policy.policy_results import find_steps_done

    if demo.task != "tiny" or not check_demo_artifacts(demo):
        return
    methods = [method_job(demo, method) for method in demo.arms]
    if not find_steps_done(*methods, should_save=False):
        for method in methods:
            _check_own(method)


def _check_comparison(job: CompareJob) -> None:
    from jobs.artifacts.demo_artifacts import check_demo_artifacts, demo_of

    demo = demo_of(job)
    if demo is None or check_demo_artifacts(demo, reward=False):
        _check_own(job)


def _check_benchmark(config: BenchmarkJob) -> None:
    from jobs.benchmark_phases.results import FILE

    if config.run.resume == "never":
        return
    run_identity = Identity.from_config(config)
    identity.load_result(config.run.folder, run_identity, FILE, should_save=False)
