"""The jobs behind `jobs.evaluate`: each measures what its config names on held-out data, and returns the numbers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from jobs.common.cli import install_stop_flag, print_outputs
from jobs.train_policy.policy_job import READ_DATA
from t2g.config import EvaluateJob, ModelConfig, PolicyEvaluationJob, PolicyJob


def measure_reward_model(config: EvaluateJob, records: Any) -> dict[str, Any]:
    """Compare the spans of a reward model with those of held-out records."""
    from jobs.common.run_folder import begin_folder
    from jobs.train_reward.reward_models import evaluate_reward, serve_reward_model, with_trained_style
    from t2g.config.jobs import EVALUATION_FILE
    from t2g.report.reward_page import HTML_FILE
    from t2g.text.tokenizer import load_tokenizer

    resolved = with_trained_style(config)
    feedback = resolved.feedback
    tokenizer = load_tokenizer(str(feedback.reward_model), feedback.reward_revision)  # its own
    folder = begin_folder(config)
    with serve_reward_model(resolved) as model:
        metrics = evaluate_reward(resolved, records, model, tokenizer, folder)
    figures = [f"{name} {value:.4g}" for name, value in metrics.items()]
    print(" ".join(figures))
    print_outputs(report=folder / HTML_FILE, numbers=folder / EVALUATION_FILE)
    return metrics


def measure_teacher(config: PolicyJob, data: Any) -> dict[str, Any]:
    """Measure whether a critique in the prompt helps the policy, for objective.teacher."""
    from jobs.common.fleets import Fleets
    from jobs.common.run_folder import begin_folder, sole_process
    from jobs.train_policy.prepared import prepare_job
    from jobs.train_policy.teacher_evaluation import TEACHER_FILE, evaluate_teacher, format_result
    from t2g.files import write_json

    with sole_process(config.run.folder):
        folder = begin_folder(config)
        stop = install_stop_flag()
        with prepare_job(config, data) as checked, Fleets() as fleets:
            rollouts, source = fleets.for_policy(config, checked.task)
            result = evaluate_teacher(config, checked, rollouts, source, lambda: bool(stop))
        write_json(folder / TEACHER_FILE, result)
    print(format_result(result))
    print_outputs(numbers=folder / TEACHER_FILE)
    return result


def measure_policies(config: PolicyEvaluationJob, questions: Any) -> dict[str, Any]:
    """Sample and compare policies on the same prompts. questions: of `read_questions`."""
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
            result = evaluation.run(serve, install_stop_flag(), serve_feedback)
    folder = config.run.folder
    print((folder / "evaluation.md").read_text())
    print_outputs(report=folder / "evaluation.html", numbers=folder / "evaluation.json")
    return result


class EvaluationKind(NamedTuple):
    """A value of `--what`."""

    schema: Any
    run: Callable[[Any, Any], dict[str, Any]]
    read: str  # function that reads the data, late


EVALUATIONS = {
    "reward": EvaluationKind(EvaluateJob, measure_reward_model, "jobs.train_reward.reward_models:read_heldout"),
    "policy": EvaluationKind(PolicyEvaluationJob, measure_policies, "jobs.evaluate.policy_evaluation:read_questions"),
    "teacher": EvaluationKind(PolicyJob, measure_teacher, READ_DATA),
}
