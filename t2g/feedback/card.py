"""What a span reward model was trained to answer, in `span_reward.json` beside its weights.

    {"task": "tiny", "style": {"critique": true, "labels": "sparse"}, "prompt_version": "5f0c2a91"}

A model asked in another style, or with other instructions, still answers something: nobody would notice.
"""

import logging
from pathlib import Path

from pydantic import ValidationError

from t2g.config import Section, StyleConfig
from t2g.config.validation_errors import format_first_error
from t2g.errors import UserError
from t2g.feedback.reward_prompt import compute_prompt_version
from t2g.files import write_atomic
from t2g.tasks.base import Task

CARD_FILE = "span_reward.json"
logger = logging.getLogger(__name__)


class RewardCard(Section):
    """A task, a style, and the version of the instructions that the two make."""

    task: str
    style: StyleConfig
    prompt_version: str


def make_card(task: Task, style: StyleConfig) -> RewardCard:
    return RewardCard(task=task.name, style=style, prompt_version=compute_prompt_version(task, style=style))


def write_card(folder: Path, card: RewardCard) -> None:
    write_atomic(folder / CARD_FILE, (card.model_dump_json() + "\n").encode())


def read_card(folder: Path) -> RewardCard | None:
    """The card of a model folder, if it has one. UserError for a file that is none."""
    path = folder / CARD_FILE
    if not path.is_file():
        return None
    try:
        return RewardCard.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(f"{path}: {format_first_error(error)}; it needs task, style and prompt_version") from error


def check_card(folder: Path, asked: RewardCard) -> None:
    """UserError when the model in `folder` was trained to answer something else than it is asked; a warning when
    nobody can know (a folder without a card, the name of a model on the hub).
    """
    card = read_card(folder)
    if card is None:
        logger.warning(
            "reward model %s has no %s: nobody can tell whether it answers %s", folder, CARD_FILE, _words(asked)
        )
    elif (card.task, card.style) != (asked.task, asked.style):
        raise UserError(
            f"reward model {folder} was trained for {_words(card)}, and is asked for {_words(asked)}; "
            "set task and style to what it was trained for, or train another"
        )
    elif card.prompt_version != asked.prompt_version:
        raise UserError(
            f"reward model {folder} was trained with version {card.prompt_version} of the instructions of task "
            f"{card.task}, and would be asked with version {asked.prompt_version}; train it again"
        )


def _words(card: RewardCard) -> str:
    return f"task {card.task}, {format_style(card.style)}"


def format_style(style: StyleConfig) -> str:
    return f"{'with' if style.critique else 'without'} a critique, {style.labels} labels"
