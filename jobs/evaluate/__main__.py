r"""Measure policies side by side, or a reward model, on held-out data: intervals and errors.

    t2g evaluate runs/my-run    # the policy of a run against its base; the reward model of t2g reward
    python -m jobs.evaluate --what reward --config configs/own/evaluate.yaml \
        feedback.reward_model=runs/own-reward/model data.path=runs/own-annotated/heldout.jsonl
    python -m jobs.evaluate --what policy --config configs/own/evaluate_policy.yaml \
        policies.base.policy=my/model policies.span.policy=runs/own/policy data.path=my.jsonl

RUN: a policy is measured on the run's held-out prompts and scored by the run's feedback source; results are in
RUN/evaluation. reward: serves the reward model as PPO does; spans are compared on the tokens of its own tokenizer.
policy: samples all policies on the same prompts and seeds, measures and compares them; the same command goes on after
any crash. Both leave evaluation.json and evaluation.html in the run folder. run.smoke=true does the same with three
records. teacher: takes the config of jobs.train_policy and measures whether a critique in the prompt helps the policy,
for objective.teacher.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from jobs.common.cli import find_run_folder, main, program_name
from jobs.evaluate.evaluations import EVALUATIONS
from t2g.config.run_values import evaluation_values, find_run_kind
from t2g.errors import UserError

WHAT = {
    "choices": [*EVALUATIONS],
    "default": "reward",
    "help": "what is evaluated, with RUN what it trained; `--what policy --help` lists the keys of that one",
}

KINDS = {"policy": "policy", "reward": "reward model"}  # kind of a run -> what it trained


def evaluate(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments in (["-h"], ["--help"]):
        print(format_overview())
        return 0
    what = find_what(arguments)
    kind = EVALUATIONS.get(what, EVALUATIONS["reward"])
    option = {"--what": {**WHAT, "default": what}}
    of_run = None if what == "teacher" else partial(read_run, what)

    def run(config: Any, data: Any, what: str) -> None:
        kind.run(config, data)

    return main(kind.schema, run, argv=arguments, options=option, read=kind.read, of_run=of_run)


def format_overview() -> str:
    """Return what can be evaluated, and how to list the keys of each."""
    program = program_name("jobs.evaluate")
    listings = [f"  {program} --what {what} --help" for what in EVALUATIONS]
    parser = ArgumentParser(
        prog=program,
        usage="%(prog)s (RUN | --what WHAT --config FILE) [--dry-run] [--show-config] [key=value ...]",
        description=__doc__,
        epilog="\n".join(["To list the keys and their defaults:", *listings]),
        formatter_class=RawDescriptionHelpFormatter,
        add_help=False,
    )
    return parser.format_help()


def read_run(what: str, folder: Path) -> dict[str, Any]:
    """Return the values of the evaluation of a run. Raises UserError for a run that trained something else."""
    kind = find_run_kind(folder)
    if kind != what:
        raise UserError(f"{folder}: --what is {what}, and the run trained a {KINDS[kind]}: leave out --what")
    return evaluation_values(folder)


def find_what(arguments: Sequence[str]) -> str:
    """Return what is evaluated, which decides the keys: --what, or what the run named by its folder has trained."""
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--what")
    first.add_argument("--config")
    known, others = first.parse_known_args(arguments)
    folder = find_run_folder(others)
    if known.what is None and folder is not None:
        with suppress(UserError):  # `evaluation_values` raises it again
            return find_run_kind(Path(folder))
    return known.what or WHAT["default"]


if __name__ == "__main__":
    sys.exit(evaluate())
