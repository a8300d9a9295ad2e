"""The span reward model as stage 2 makes it: what it learns from, its training, and how it is measured."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from jobs.annotate import DONE_FILE
from jobs.common.fleets import Fleets
from jobs.common.reward_serving import judge_all, usable_records
from jobs.common.supervised import MODEL, supervise
from t2g.config import FeedbackConfig, RewardJob, StyleConfig
from t2g.errors import UserError
from t2g.feedback.card import make_card, style_words, write_card
from t2g.feedback.examples import reward_examples
from t2g.feedback.records import AnnotatedRecord, load_annotated
from t2g.files import write_atomic
from t2g.study.reward_eval import JudgedRecord, reward_metrics
from t2g.tasks.base import get_task
from t2g.text.tokenizer import load_tokenizer
from t2g.types import TrainSequence

REPORT_FILE = "reward.json"


@dataclass(frozen=True, kw_only=True)
class RewardData:
    """What the job reads before any process is started, so that bad input is refused in a second."""

    tokenizer: Any
    examples: list[TrainSequence]
    heldout: list[AnnotatedRecord]


def read_data(config: RewardJob) -> RewardData:
    """Examples and held-out records. UserError for what cannot be used."""
    for name, path in (("data.path", config.data.path), ("eval_data.path", config.eval_data.path)):
        check_style(name, path, config.style)
    task, tokenizer = get_task(config.task), load_tokenizer(config.model.policy, config.model.revision)
    heldout = usable_records("eval_data.path", config.eval_data, config.task)
    records = load_annotated(config.data, task)
    if config.style.critique and not any(record.critique.strip() for record in records if record.usable):
        raise UserError(
            f"data.path={config.data.path}: style.critique is on, and no record that could be used has a critique; "
            "set style.critique=false, or take records that were annotated with one"
        )
    examples = reward_examples(
        records, task, tokenizer,
        max_length=config.sft.max_length, span_weight=config.sft.span_weight, style=config.style,
    )  # fmt: skip
    return RewardData(tokenizer=tokenizer, examples=examples, heldout=heldout[: config.eval_records])


class _Summary(BaseModel):
    """What is read of an annotated.json."""

    style: StyleConfig


def check_style(name: str, path: str, style: StyleConfig) -> None:
    """UserError when the annotated.json beside `path` names a style whose records cannot teach `style`.

    Records with a critique teach a model that writes none, too. Without such a file nobody can tell.
    """
    try:
        made = _Summary.model_validate_json((Path(path).parent / DONE_FILE).read_bytes()).style
    except (OSError, ValidationError):  # a file of that name may be anybody's
        return
    if made.labels != style.labels or (style.critique and not made.critique):
        raise UserError(
            f"{name}={path} holds feedback {style_words(made)} (says {DONE_FILE} beside it), not "
            f"{style_words(style)}; set style to what was annotated, or annotate again with that annotate.style"
        )


def train_reward(config: RewardJob, data: RewardData, fleets: Fleets, *, tokenizer: Any) -> dict[str, float]:
    """Train and measure on the Ray that is connected; returns what stands in reward.json.

    tokenizer: on whose tokens spans are compared.
    """
    metrics = reward_metrics(train_and_judge(config, data, fleets, tokenizer=tokenizer))
    write_atomic(config.run.folder / REPORT_FILE, json.dumps(metrics, indent=1).encode())
    return metrics


def train_and_judge(config: RewardJob, data: RewardData, fleets: Fleets, *, tokenizer: Any) -> list[JudgedRecord]:
    """Train, then serve the model with vLLM as PPO will, and let it judge the held-out records."""
    supervise(config, data.examples, title="span reward model")
    task, model = get_task(config.task), config.run.folder / MODEL
    write_card(model, make_card(task, config.style))
    served = FeedbackConfig(reward_model=str(model), style=config.style, engine=config.engine)
    fleet = fleets.rewards(served, task, config)
    return judge_all(fleet, data.heldout, tokenizer)
