"""Stage 2: the span reward model learns [critique; span map] from annotated records, then is measured on held-out ones.

    python -m jobs.train_reward --config configs/own/reward.yaml model.policy=my/model \
        data.path=runs/own-annotated/train.jsonl eval_data.path=runs/own-annotated/heldout.jsonl

Leaves `<run folder>/model` with span_reward.json in it, metrics.jsonl and reward.json (see
`t2g.study.reward_eval.reward_metrics`). run.smoke=true does the same with three steps in the folder `smoke`.
"""

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from jobs.annotate import DONE_FILE
from jobs.common.cli import main
from jobs.train_sft import LEFTOVERS, MODEL, check_folder, supervise, work_folder
from t2g.config import FeedbackConfig, RewardJob, StyleConfig
from t2g.config.describe import describe_reward
from t2g.errors import UserError
from t2g.files import write_atomic

if TYPE_CHECKING:
    from jobs.common.fleets import Fleets
    from t2g.feedback.examples import SFTExample
    from t2g.feedback.records import AnnotatedRecord
    from t2g.study.reward_eval import JudgedRecord

REPORT_FILE = "reward.json"


@dataclass(frozen=True, kw_only=True)
class RewardData:
    """What the job reads before any process is started, so that bad input is refused in a second."""

    tokenizer: Any
    examples: "list[SFTExample]"
    heldout: "list[AnnotatedRecord]"


def read_data(config: RewardJob) -> RewardData:
    """Examples and held-out records. UserError for what cannot be used."""
    from t2g.feedback.examples import reward_examples
    from t2g.feedback.records import load_annotated
    from t2g.tasks.base import get_task
    from t2g.text.tokenizer import load_tokenizer

    for name, path in (("data.path", config.data.path), ("eval_data.path", config.eval_data.path)):
        check_style(name, path, config.style)
    task, tokenizer = get_task(config.task), load_tokenizer(config.model.policy, config.model.revision)
    heldout = [record for record in load_annotated(config.eval_data, task) if record.usable]
    if not heldout:
        raise UserError(f"eval_data.path={config.eval_data.path} has no record with feedback that could be used")
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
    from t2g.feedback.card import style_words

    try:
        made = _Summary.model_validate_json((Path(path).parent / DONE_FILE).read_bytes()).style
    except (OSError, ValidationError):  # a file of that name may be anybody's
        return
    if made.labels != style.labels or (style.critique and not made.critique):
        raise UserError(
            f"{name}={path} holds feedback {style_words(made)} (says {DONE_FILE} beside it), not "
            f"{style_words(style)}; set style to what was annotated, or annotate again with that annotate.style"
        )


def train_reward(config: RewardJob, data: RewardData, fleets: "Fleets", *, tokenizer: Any) -> dict[str, float]:
    """Train and measure on the Ray that is connected; returns what stands in reward.json.

    tokenizer: on whose tokens spans are compared.
    """
    from t2g.study.reward_eval import reward_metrics

    metrics = reward_metrics(train_and_judge(config, data, fleets, tokenizer=tokenizer))
    write_atomic(work_folder(config.run) / REPORT_FILE, json.dumps(metrics, indent=1).encode())
    return metrics


def train_and_judge(config: RewardJob, data: RewardData, fleets: "Fleets", *, tokenizer: Any) -> "list[JudgedRecord]":
    """Train, then serve the model with vLLM as PPO will, and let it judge the held-out records."""
    from t2g.feedback.card import make_card, write_card
    from t2g.runs.progress import stage
    from t2g.study.reward_eval import judge_records
    from t2g.tasks.base import get_task

    supervise(config, data.examples, title="span reward model")
    task, model = get_task(config.task), work_folder(config.run) / MODEL
    write_card(model, make_card(task, config.style))
    served = FeedbackConfig(reward_model=str(model), style=config.style, engine=config.engine)
    fleet = fleets.rewards(served, task, config)
    with stage("measuring the reward model", len(data.heldout)) as bar:
        return asyncio.run(judge_records(fleet, data.heldout, tokenizer, bar.advance))


def run(config: RewardJob) -> None:
    from actors.cluster.placement import connect
    from jobs.common.fleets import Fleets

    check_folder(config, *LEFTOVERS)
    data = read_data(config)
    connect(config.cluster, {"sft": config.sft})  # the engine starts when the ranks have gone
    with Fleets() as fleets:
        metrics = train_reward(config, data, fleets, tokenizer=data.tokenizer)
    print(" ".join(f"{name} {value:.3f}" for name, value in metrics.items()))


if __name__ == "__main__":
    sys.exit(main(RewardJob, run, describe_reward))
