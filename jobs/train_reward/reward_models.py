"""The span reward model: its data, training, serving and measurement."""

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from actors.learner.lora import check_adapters
from jobs.annotate.annotation_runs import DONE_FILE
from jobs.common.cli import StopFlag
from jobs.common.fleets import Fleets, on_cluster
from jobs.common.run_folder import SMOKE_PROMPTS
from jobs.train_sft.supervised import MODEL, train_supervised
from t2g.config import (
    DataConfig,
    EvaluateJob,
    FeedbackConfig,
    RewardEngineConfig,
    RewardJob,
    ScoreJob,
    StyleConfig,
    with_overrides,
)
from t2g.errors import UserError
from t2g.feedback.card import format_style, make_card, read_card, write_card
from t2g.feedback.examples import make_reward_examples
from t2g.feedback.records import AnnotatedRecord, keep_likely_spans, load_annotated, select_criterion
from t2g.files import write_json
from t2g.report.reward_page import write_evaluation
from t2g.runs.progress import show_progress
from t2g.study.reward_eval import JudgedRecord, ServedModel, judge_records, parse_warning, reward_metrics
from t2g.tasks.base import get_task
from t2g.text.policy_chat import load_policy_tokenizer
from t2g.types import TrainSequence

Served = TypeVar("Served", bound=ScoreJob)

REWARD_FILE = "reward.json"

logger = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------------------- training
@dataclass(frozen=True, kw_only=True)
class RewardData:
    """The inputs of the job, read before any process is started, so that bad input is refused at once."""

    tokenizer: Any
    examples: list[TrainSequence]
    heldout: list[AnnotatedRecord]


def read_data(config: RewardJob) -> RewardData:
    """Return examples and held-out records. Raises UserError if they cannot be used."""
    if config.sft.lora is not None:
        check_adapters(config.sft.lora, config.model)
    for name, data in (("data.path", config.data), ("eval_data.path", config.eval_data)):
        for path in data.paths:
            check_style(name, path, config.style, config.criterion)
    task = get_task(config.task)
    tokenizer = load_policy_tokenizer(config.model)
    heldout = usable_records("eval_data.path", config.eval_data, config.task, config.criterion)
    records = load_learned("data.path", config.data, config.task, config.criterion)
    has_critique = any(record.critique.strip() for record in records if record.usable)
    if config.style.critique and not has_critique:
        raise UserError(
            f"data.path={config.data.name}: style.critique is on, and no record that could be used has a critique; "
            "set style.critique=false, or take records that were annotated with one"
        )
    warn_of_long_targets(records, config.engine)
    examples = make_reward_examples(records, task, tokenizer, max_length=config.sft.max_length, style=config.style)
    return RewardData(tokenizer=tokenizer, examples=examples, heldout=heldout[: config.eval_records])


def warn_of_long_targets(records: Sequence[AnnotatedRecord], engine: RewardEngineConfig) -> None:
    """Warn of records whose target the served model, with guided decoding, could not write."""

    def is_too_long(record: AnnotatedRecord) -> bool:
        longest_quote = max((len(piece.quote) for piece in (*record.good, *record.poor)), default=0)
        num_quotes = max(len(record.good), len(record.poor))
        has_long_parts = longest_quote > engine.max_quote_chars or len(record.critique) > engine.max_critique_chars
        return has_long_parts or num_quotes > engine.max_spans

    num_too_long = sum(map(is_too_long, records))
    if num_too_long:
        logger.warning(
            "data.path: the target of %d of %d records has a longer critique, or longer or more quotes, than the "
            "served model can write; raise engine.max_critique_chars, engine.max_quote_chars or engine.max_spans",
            num_too_long, len(records),
        )  # fmt: skip


def check_style(name: str, path: str, style: StyleConfig, criterion: str | None) -> None:
    """Raise UserError if the annotated.json beside `path` has a style whose records cannot train `style`.

    Records with a critique can also train a model without critiques. Without this file the style is unknown.
    """
    try:
        content = (Path(path).parent / DONE_FILE).read_bytes()
        written = json.loads(content)["style"]
        annotated_style = StyleConfig.model_validate(written[criterion] if criterion else written)
    except (OSError, ValueError, KeyError, TypeError):  # a file of that name may be anybody's
        return
    lacks_critique = style.critique and not annotated_style.critique
    if annotated_style.labels != style.labels or lacks_critique:
        raise UserError(
            f"{name}={path} holds feedback {format_style(annotated_style)} (says {DONE_FILE} beside it), not "
            f"{format_style(style)}; set style to what was annotated, or annotate again with that annotate.style"
        )


def train_reward(
    config: RewardJob, data: RewardData, fleets: Fleets, *, tokenizer: Any, stop: StopFlag | None = None
) -> dict[str, float]:
    """Train and measure on the connected Ray; return the content of reward.json. Spans are compared on `tokenizer`."""
    judged = train_and_judge(config, data, fleets, tokenizer=tokenizer, stop=stop)
    metrics = reward_metrics(judged)
    write_json(config.run.folder / REWARD_FILE, metrics)
    return metrics


def train_and_judge(
    config: RewardJob, data: RewardData, fleets: Fleets, *, tokenizer: Any, stop: StopFlag | None = None
) -> list[JudgedRecord]:
    """Train, then serve the model with vLLM as PPO will, and let it judge the held-out records."""
    train_supervised(config, data.examples, title="span reward model", stop=stop)
    task = get_task(config.task)
    model = config.run.folder / MODEL
    write_card(model, make_card(task, config.style))
    served = FeedbackConfig(reward_model=str(model), style=config.style, engine=config.engine)
    fleet = fleets.feedback(served, task, config)
    return judge_all(fleet, data.heldout, tokenizer)


# ------------------------------------------------------------------------------------------------ serving and measuring
def load_learned(name: str, data: DataConfig, task: str, criterion: str | None) -> list[AnnotatedRecord]:
    """Return the records as a reward model of the criterion learns them: without unlikely spans."""
    records = select_criterion(load_annotated(data, get_task(task)), criterion, f"{name}={data.name}")
    return [keep_likely_spans(record) for record in records]


def usable_records(name: str, data: DataConfig, task: str, criterion: str | None = None) -> list[AnnotatedRecord]:
    """Return the records with usable feedback. Raises UserError, with the key `name`, if there are none."""
    records = load_learned(name, data, task, criterion)
    usable = [record for record in records if record.usable]
    if not usable:
        raise UserError(f"{name}={data.name} has no record with feedback that could be used")
    return usable


def judge_all(model: ServedModel, records: Sequence[AnnotatedRecord], tokenizer: Any) -> list[JudgedRecord]:
    """Let the reward model judge the records, and print a warning if no answer parses. Spans are in tokens."""
    with show_progress("asking the reward model", len(records)) as bar:
        judged = asyncio.run(judge_records(model, records, tokenizer, bar.advance))
    if warning := parse_warning(reward_metrics(judged)):
        print(warning)
    return judged


def evaluate_reward(
    config: EvaluateJob, records: Sequence[AnnotatedRecord], model: ServedModel, tokenizer: Any, folder: Path
) -> dict[str, float]:
    """Let `model` judge the records, a smoke run's first ones, write the report into `folder`, return its metrics."""
    records = records[:SMOKE_PROMPTS] if config.run.smoke else records
    judged = judge_all(model, records, tokenizer)
    about = {
        "reward_model": config.feedback.reward_model,
        "data": config.data.name,
        "task": config.task,
        "style": format_style(config.feedback.style),
    }
    result = write_evaluation(folder, about=about, records=records, judged=judged, seed=config.run.seed)
    return result["metrics"]


def with_trained_style(config: Served) -> Served:
    """Return `config` with the task and the style of the reward model's training, unless it has its own."""
    card = read_card(Path(str(config.feedback.reward_model)))
    if card is None:
        return config
    changes: dict[str, Any] = {}
    if "style" not in config.feedback.model_fields_set:
        changes["feedback.style"] = card.style
    if "task" not in config.model_fields_set:
        changes["task"] = card.task
    return with_overrides(config, changes)


def read_heldout(config: EvaluateJob) -> list[AnnotatedRecord]:
    """Return the records that the reward model judges, of the task that it was trained for."""
    task = with_trained_style(config).task
    return usable_records("data.path", config.data, task, config.criterion)


@contextmanager
def serve_reward_model(config: ScoreJob) -> Iterator[ServedModel]:
    """Serve the reward model of `config` on its cluster; both end with the block."""
    task = get_task(config.task)
    with on_cluster(config), Fleets() as fleets:
        yield fleets.feedback(config.feedback, task, config)
