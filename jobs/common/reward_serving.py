"""A span reward model that is served and measured: one that is given, and one that was trained just now."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from jobs.common.fleets import Fleets, on_cluster
from t2g.config import DataConfig, EvaluateJob, ScoreJob, with_overrides
from t2g.errors import UserError
from t2g.feedback.card import read_card, style_words
from t2g.feedback.records import AnnotatedRecord, load_annotated
from t2g.report.reward_page import HTML_FILE, JSON_FILE, write_evaluation
from t2g.runs.progress import stage
from t2g.runs.versions import versions
from t2g.study.reward_eval import JudgedRecord, ServedModel, judge_records
from t2g.tasks.base import get_task
from t2g.text.tokenizer import lacks_folder

Served = TypeVar("Served", bound=ScoreJob)

SMOKE_RECORDS = 3


def usable_records(name: str, data: DataConfig, task: str) -> list[AnnotatedRecord]:
    """The records with feedback that could be used. UserError, with the key `name`, where there is none."""
    usable = [record for record in load_annotated(data, get_task(task)) if record.usable]
    if not usable:
        raise UserError(f"{name}={data.path} has no record with feedback that could be used")
    return usable


def judge_all(model: ServedModel, records: Sequence[AnnotatedRecord], tokenizer: Any) -> list[JudgedRecord]:
    """tokenizer: on whose tokens spans are compared."""
    with stage("asking the reward model", len(records)) as bar:
        return asyncio.run(judge_records(model, records, tokenizer, bar.advance))


def evaluate_reward(
    config: EvaluateJob, records: Sequence[AnnotatedRecord], model: ServedModel, tokenizer: Any, folder: Path
) -> dict[str, float]:
    """Let `model` judge the records, a smoke run's first ones, write the report into `folder`, return its metrics."""
    records = records[:SMOKE_RECORDS] if config.run.smoke else records
    judged = judge_all(model, records, tokenizer)
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
def connected_model(config: ScoreJob) -> Iterator[ServedModel]:
    """The reward model of `config`, serving, on the cluster of `config`; both end with the block."""
    task = get_task(config.task)
    with on_cluster(config), Fleets() as fleets:
        yield fleets.rewards(config.feedback, task, config)
