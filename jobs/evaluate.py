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
from collections.abc import Sequence

from jobs.api.calls import EVALUATIONS
from jobs.common.cli import main

WHAT = {
    "choices": [*EVALUATIONS],
    "default": "reward",
    "help": "what is evaluated; `--what policy --help` lists the keys of that one",
}


def evaluate(argv: Sequence[str] | None = None) -> int:
    first = ArgumentParser(add_help=False, allow_abbrev=False)  # decides what keys there are
    first.add_argument("--what", default=WHAT["default"])
    schema, run, read = EVALUATIONS.get(first.parse_known_args(argv)[0].what, EVALUATIONS["reward"])
    return main(schema, run, argv=argv, options={"--what": WHAT}, read=read)


if __name__ == "__main__":
    sys.exit(evaluate())
