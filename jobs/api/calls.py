"""The calls, and the jobs behind them, which the commands of the same names run."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from jobs.api.job_start import GivenConfig, Records, start
from jobs.common.cli import print_outputs, stop_flag
from jobs.train_policy.policy_job import READ_DATA, PolicyRun, run_training
from t2g.config import AnnotateJob, EvaluateJob, ModelConfig, PolicyEvaluationJob, PolicyJob
from t2g.errors import UserError

READ_SAMPLES = "jobs.annotate.annotation_runs:read_samples"


# ------------------------------------------------------------------------------------------------------------ training
def train(
    config: GivenConfig, *, prompts: Records | None = None, eval_prompts: Records | None = None, feedback: Any = None
) -> PolicyRun:
    """Train a policy by span-level PPO, or resume the run in the folder `run.root`/`run.name`.

    Args:
        config: A PolicyJob, a dict of its keys or the path of a YAML file. A function may stand where a key takes an
            import path, `pkg.mod:function`.
        prompts: Dicts or a `datasets.Dataset`, in place of `data.path`; the run folder keeps them.
        eval_prompts: The same for `eval_data.path`.
        feedback: Feedback function, async or not, or its import path; in place of `feedback.source`.

    Raises:
        UserError, RunStopped, Stopped, KeyboardInterrupt: See `start`.
    """
    inputs = {"data.path": prompts, "eval_data.path": eval_prompts, "feedback.source": feedback}
    return start(PolicyJob, run_training, READ_DATA, config, inputs)


# ---------------------------------------------------------------------------------------------------------- annotation
def annotate(config: GivenConfig, *, prompts: Records | None = None, feedback: Any = None) -> list[dict[str, Any]]:
    """Judge responses, or resume the run in the folder `run.root`/`run.name`; return the records of annotated.jsonl.

    Args:
        config: An AnnotateJob, a dict of its keys or the path of a YAML file; see `train`.
        prompts: Dicts with prompts and, unless `annotate.responses=policy`, responses; in place of `data.path`.
        feedback: Feedback function, or its import path; in place of `annotate.source`.

    Raises:
        UserError, RunStopped, Stopped, KeyboardInterrupt: See `start`.
    """
    inputs = {"data.path": prompts, "annotate.source": feedback}
    file = start(AnnotateJob, run_annotation, READ_SAMPLES, config, inputs)
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def run_annotation(config: AnnotateJob, samples: Any) -> Path:
    """Request the missing judgements and write the files. samples: of `read_samples`."""
    from jobs.annotate import annotation_runs as runs

    with ExitStack() as opened:
        fleets = None
        if config.roles() and _has_requests(config, samples):
            from jobs.common.fleets import Fleets, on_cluster

            opened.enter_context(on_cluster(config))
            fleets = opened.enter_context(Fleets())
        runs.annotate_samples(config, samples, fleets, stop_flag())
    folder = config.run.folder
    records = folder / runs.ANNOTATED_FILE
    print_outputs(records=records, training=folder / runs.TRAIN_FILE, held_out=folder / runs.HELDOUT_FILE)
    return records


def _has_requests(config: AnnotateJob, samples: Any) -> bool:
    """Return whether the journal lacks judgements; a smoke run makes all of its own."""
    from jobs.annotate import annotation_runs as runs

    if config.run.smoke:
        return True
    records = runs.known_records(config, samples)
    return bool(runs.missing_samples(samples, records))


# ---------------------------------------------------------------------------------------------------------- evaluation
def evaluate(config: GivenConfig, *, what: str = "reward", prompts: Records | None = None) -> dict[str, Any]:
    """Measure a reward model, policies or a teacher on held-out data; return the numbers.

    Args:
        config: A config of the job that `what` names, a dict of its keys or the path of a YAML file; see `train`.
        what: reward, policy or teacher, as of `t2g evaluate --what`.
        prompts: Dicts or a `datasets.Dataset`, in place of `data.path`.

    Raises:
        UserError, RunStopped, Stopped, KeyboardInterrupt: See `start`.
    """
    if what not in EVALUATIONS:
        raise UserError(f"what={what!r} is none of {', '.join(EVALUATIONS)}")
    return start(*EVALUATIONS[what], config, {"data.path": prompts}, what=what)


def run_reward(config: EvaluateJob, records: Any, what: str) -> dict[str, Any]:
    from jobs.common.run_folder import begin_folder
    from jobs.train_reward.reward_models import connected_model, evaluate_reward, with_trained_style
    from t2g.report.reward_page import HTML_FILE, JSON_FILE
    from t2g.text.tokenizer import load_tokenizer

    resolved = with_trained_style(config)
    feedback = resolved.feedback
    tokenizer = load_tokenizer(str(feedback.reward_model), feedback.reward_revision)  # its own
    folder = begin_folder(config, JSON_FILE)
    with connected_model(resolved) as model:
        metrics = evaluate_reward(resolved, records, model, tokenizer, folder)
    figures = [f"{name} {value:.4g}" for name, value in metrics.items()]
    print(" ".join(figures))
    print_outputs(report=folder / HTML_FILE, numbers=folder / JSON_FILE)
    return metrics


def run_teacher(config: PolicyJob, data: Any, what: str) -> dict[str, Any]:
    from jobs.common.fleets import Fleets
    from jobs.common.run_folder import begin_folder, sole_process
    from jobs.train_policy.prepared import prepared_job
    from jobs.train_policy.teacher_evaluation import TEACHER_FILE, evaluate_teacher, format_result
    from t2g.files import write_json

    with sole_process(config.run.folder):
        folder = begin_folder(config)
        with prepared_job(config, data) as checked, Fleets() as fleets:
            rollouts, source = fleets.for_policy(config, checked.task)
            result = evaluate_teacher(config, checked, rollouts, source)
        write_json(folder / TEACHER_FILE, result)
    print(format_result(result))
    print_outputs(numbers=folder / TEACHER_FILE)
    return result


def run_policy(config: PolicyEvaluationJob, questions: Any, what: str) -> dict[str, Any]:
    from jobs.common.fleets import Fleets, on_cluster
    from jobs.common.run_folder import sole_process
    from jobs.evaluate.policy_evaluation import Evaluation

    @contextmanager
    def serve(model: ModelConfig) -> Iterator[Any]:
        with Fleets() as fleets:
            yield fleets.rollouts(model, config.rollout, config)

    @contextmanager
    def serve_feedback() -> Iterator[Any]:
        assert config.feedback is not None, "the evaluation asks for it only then"
        with Fleets() as fleets:
            yield fleets.feedback(config.feedback, evaluation.task, config)

    with sole_process(config.run.folder):
        evaluation = Evaluation(config, questions)
        has_judge = config.feedback is not None and config.feedback.engine_source is not None
        lacks_responses = any(map(evaluation.is_incomplete, config.policies))
        needs_engines = lacks_responses or (has_judge and evaluation.lacks_feedback())
        with on_cluster(config) if needs_engines else nullcontext():
            result = evaluation.run(serve, stop_flag(), serve_feedback)
    folder = config.run.folder
    print((folder / "evaluation.md").read_text())
    print_outputs(report=folder / "evaluation.html", numbers=folder / "evaluation.json")
    return result


EVALUATIONS: dict[str, tuple[Any, Callable[..., Any], str]] = {  # by `what`: schema, job, reader of the data
    "reward": (EvaluateJob, run_reward, "jobs.train_reward.reward_models:read_heldout"),
    "policy": (PolicyEvaluationJob, run_policy, "jobs.evaluate.policy_evaluation:read_questions"),
    "teacher": (PolicyJob, run_teacher, READ_DATA),
}
