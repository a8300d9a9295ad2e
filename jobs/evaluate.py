"""Measure policies side by side, or a reward model, on held-out data: intervals and errors.

    python -m jobs.evaluate --what reward --config configs/own/evaluate.yaml \
        feedback.reward_model=runs/own-reward/model data.path=runs/own-annotated/heldout.jsonl
    python -m jobs.evaluate --what policy --config configs/own/evaluate_policy.yaml \
        policies.base.policy=my/model policies.span.policy=runs/own/policy data.path=my.jsonl

reward: serves the reward model as PPO does; spans are compared on the tokens of its own tokenizer. policy: samples all
policies on the same prompts and seeds, measures and compares them; the same command goes on after any crash. Both leave
evaluation.json and evaluation.html in the run folder. run.smoke=true does the same with three records. teacher: takes
the config of jobs.train_policy and measures whether a critique in the prompt helps the policy, for objective.teacher.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from jobs.common.cli import main, print_outputs, stop_flag
from jobs.common.run_folder import begin_folder, sole_process
from t2g.config import EvaluateJob, ModelConfig, PolicyEvaluationJob, PolicyJob

WHAT = {
    "choices": ["reward", "policy", "teacher"],
    "default": "reward",
    "help": "what is evaluated; `--what policy --help` lists the keys of that one",
}


def evaluate(argv: Sequence[str] | None = None) -> int:
    first = ArgumentParser(add_help=False, allow_abbrev=False)  # decides what keys there are
    first.add_argument("--what", default=WHAT["default"])
    shared = partial(main, argv=argv, options={"--what": WHAT})
    what = first.parse_known_args(argv)[0].what
    if what == "teacher":
        return shared(PolicyJob, run_teacher, read="jobs.common.policy_runs:read_data")
    if what == "policy":
        return shared(PolicyEvaluationJob, run_policy, read="jobs.common.policy_evaluation:read_questions")
    return shared(EvaluateJob, run_reward, read="jobs.common.reward_models:read_heldout")


def run_reward(config: EvaluateJob, records: Any, what: str) -> None:
    from jobs.common.reward_models import connected_model, evaluate_reward, with_trained_style
    from t2g.report.reward_page import HTML_FILE, JSON_FILE
    from t2g.text.tokenizer import load_tokenizer

    resolved = with_trained_style(config)
    tokenizer = load_tokenizer(str(resolved.feedback.reward_model), resolved.feedback.reward_revision)  # its own
    folder = begin_folder(config, JSON_FILE)
    with connected_model(resolved) as model:
        metrics = evaluate_reward(resolved, records, model, tokenizer, folder)
    print(" ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    print_outputs(report=folder / HTML_FILE, numbers=folder / JSON_FILE)


def run_teacher(config: PolicyJob, data: Any, what: str) -> None:
    from jobs.common.fleets import Fleets, on_cluster
    from jobs.common.policy_runs import read_data
    from jobs.common.stages import demo_of, make_stages, resolve_stages
    from jobs.common.teacher_evaluation import TEACHER_FILE, evaluate_teacher, format_result
    from t2g.files import write_json

    demo = demo_of(config)
    resolved = resolve_stages(config, demo)
    with sole_process(config.run.folder):
        folder = begin_folder(config)
        with on_cluster(resolved), Fleets() as fleets:
            if demo:
                make_stages(demo, fleets, reward="reward_model" in resolved.feedback.models)
            data = data or read_data(resolved)
            result = evaluate_teacher(resolved, data, *fleets.for_policy(resolved, data.task))
            write_json(folder / TEACHER_FILE, result)
    print(format_result(result))
    print_outputs(numbers=folder / TEACHER_FILE)


def run_policy(config: PolicyEvaluationJob, questions: Any, what: str) -> None:
    from jobs.common.fleets import Fleets, on_cluster
    from jobs.common.policy_evaluation import Evaluation

    @contextmanager
    def serve(model: ModelConfig) -> Iterator[Any]:
        with Fleets() as fleets:
            yield fleets.rollouts(model, config.rollout, config)

    with sole_process(config.run.folder):
        evaluation = Evaluation(config, questions)
        with on_cluster(config) if any(map(evaluation.is_incomplete, config.served)) else nullcontext():
            evaluation.run(serve, stop_flag())
    folder = config.run.folder
    print((folder / "evaluation.md").read_text())
    print_outputs(report=folder / "evaluation.html", numbers=folder / "evaluation.json")


if __name__ == "__main__":
    sys.exit(evaluate())
