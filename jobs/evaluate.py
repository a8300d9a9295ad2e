"""How good is what was trained, on held-out data? A report that one can believe: figures with intervals, and errors.

    python -m jobs.evaluate --what reward --config configs/own/evaluate.yaml \
        feedback.reward_model=runs/own-reward/model data.path=runs/own-annotated/heldout.jsonl

Serves the reward model as PPO does and leaves evaluation.json and evaluation.html in the run folder. Spans are compared
on the tokens of the reward model's own tokenizer. run.smoke=true does the same with three records.
"""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jobs.common.cli import execute, job_parser
from jobs.common.run_folder import begin_folder
from t2g.config import EvaluateJob, ScoreJob, with_overrides
from t2g.config.roles import roles
from t2g.errors import UserError

if TYPE_CHECKING:
    from t2g.feedback.records import AnnotatedRecord
    from t2g.study.reward_eval import ServedModel

Served = TypeVar("Served", bound=ScoreJob)

SMOKE_RECORDS = 3


def evaluate(argv: Sequence[str] | None = None) -> int:
    parser = job_parser(EvaluateJob)
    parser.add_argument("--what", choices=["reward"], default="reward", help="what is evaluated")
    return execute(parser, parser.parse_intermixed_args(argv), EvaluateJob, run)


def run(config: EvaluateJob) -> None:
    from t2g.report.reward_page import JSON_FILE
    from t2g.text.tokenizer import load_tokenizer

    asked = as_trained(config)
    records = read_records(asked)
    tokenizer = load_tokenizer(str(asked.feedback.reward_model), asked.feedback.reward_revision)  # its own
    folder = begin_folder(config, JSON_FILE)
    with connected_model(asked) as model:
        metrics = evaluate_reward(asked, records, model, tokenizer, folder)
    print(" ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


def read_records(config: EvaluateJob) -> "list[AnnotatedRecord]":
    """The records with feedback that could be used. UserError where there is none."""
    from t2g.feedback.records import load_annotated
    from t2g.tasks.base import get_task

    records = load_annotated(config.data, get_task(config.task))
    usable = [record for record in records if record.usable]
    if not usable:
        raise UserError(f"data.path={config.data.path} has no record with feedback that could be used")
    return usable[:SMOKE_RECORDS] if config.run.smoke else usable


def evaluate_reward(
    config: EvaluateJob, records: "Sequence[AnnotatedRecord]", model: "ServedModel", tokenizer: Any, folder: Path
) -> dict[str, float]:
    """Let `model` judge the records, write the report into `folder`, and return its metrics.

    tokenizer: on whose tokens spans are compared.
    """
    from t2g.feedback.card import style_words
    from t2g.report.reward_page import HTML_FILE, JSON_FILE, write_evaluation
    from t2g.runs.progress import stage
    from t2g.runs.versions import versions
    from t2g.study.reward_eval import judge_records

    with stage("asking the reward model", len(records)) as bar:
        judged = asyncio.run(judge_records(model, records, tokenizer, bar.advance))
    about = {
        "reward_model": config.feedback.reward_model,
        "data": config.data.path,
        "task": config.task,
        "style": style_words(config.feedback.style),
    }
    result = write_evaluation(
        folder, about=about, versions=versions(), records=records, judged=judged, seed=config.run.seed
    )
    print(f"report: {folder / HTML_FILE}\nnumbers: {folder / JSON_FILE}")
    return result["metrics"]


def as_trained(config: Served) -> Served:
    """`config` with the task and the style that the reward model was trained for, where it does not give its own.

    UserError for a model that is no folder here and cannot be a name on the hub.
    """
    from t2g.feedback.card import read_card
    from t2g.text.tokenizer import lacks_folder

    model = str(config.feedback.reward_model)
    if lacks_folder(model):
        raise UserError(
            f"feedback.reward_model={model}: there is no such folder; it needs `model` in the run folder of a "
            "jobs.train_reward (`make demo` leaves a tiny one in runs/demo/reward/model)"
        )
    card = read_card(Path(model))
    if card is None:
        return config
    trained = {} if "style" in config.feedback.model_fields_set else {"feedback.style": card.style}
    return with_overrides(config, trained if "task" in config.model_fields_set else trained | {"task": card.task})


@contextmanager
def connected_model(config: ScoreJob) -> "Iterator[ServedModel]":
    """The reward model of `config`, serving, on the cluster of `config`; both end with the block."""
    from jobs.common.fleets import Fleets, on_cluster
    from t2g.tasks.base import get_task

    task = get_task(config.task)
    with on_cluster(config.cluster, roles(config)), Fleets() as fleets:
        yield fleets.rewards(config.feedback, task, config)


if __name__ == "__main__":
    sys.exit(evaluate())
