"""Measure policies side by side, or a reward model, on held-out data: intervals and errors.

    python -m jobs.evaluate --what reward --config configs/own/evaluate.yaml \
        feedback.reward_model=runs/own-reward/model data.path=runs/own-annotated/heldout.jsonl
    python -m jobs.evaluate --what policy --config configs/own/evaluate_policy.yaml \
        policies.base.policy=my/model policies.span.policy=runs/own/policy data.path=my.jsonl

reward: serves the reward model as PPO does; spans are compared on the tokens of its own tokenizer. policy: samples all
policies on the same prompts and seeds, measures and compares them; the same command goes on after any crash. Both leave
evaluation.json and evaluation.html in the run folder. run.smoke=true does the same with three records.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from jobs.common.cli import main, print_outputs, stop_flag
from jobs.common.run_folder import begin_folder
from t2g.config import EvaluateJob, ModelConfig, PolicyEvaluationJob

WHAT = {"choices": ["reward", "policy"], "default": "reward", "help": "what is evaluated"}


def evaluate(argv: Sequence[str] | None = None) -> int:
    first = ArgumentParser(add_help=False, allow_abbrev=False)  # decides what keys there are
    first.add_argument("--what", default=WHAT["default"])
    shared = partial(main, argv=argv, options={"--what": WHAT})
    if first.parse_known_args(argv)[0].what == "policy":
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


def run_policy(config: PolicyEvaluationJob, questions: Any, what: str) -> None:
    from jobs.common.fleets import Fleets, on_cluster
    from jobs.common.policy_evaluation import Evaluation
    from jobs.common.run_folder import sole_process

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
