"""The card of a span reward model, `span_reward.json` in its folder: the task and style of its training.

    {"task": "tiny", "style": {"critique": true, "labels": "sparse"}, "prompt_version": "5f0c2a91"}

Without the card a wrong style or other instructions would go unnoticed, since the model still answers.
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
    """Task, style, and the version of their instructions."""

    task: str
    style: StyleConfig
    prompt_version: str


def make_card(task: Task, style: StyleConfig) -> RewardCard:
    style = style.model_copy(update={"spans": True})  # false is for the annotator whose critiques the model aligns
    prompt_version = compute_prompt_version(task, style=style)
    return RewardCard(task=task.name, style=style, prompt_version=prompt_version)


def write_card(folder: Path, card: RewardCard) -> None:
    line = card.model_dump_json() + "\n"
    write_atomic(folder / CARD_FILE, line.encode())


def read_card(folder: Path) -> RewardCard | None:
    """Return the card of a model folder, if it has one. UserError if the file is invalid."""
    path = folder / CARD_FILE
    if not path.is_file():
        return None
    try:
        return RewardCard.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(f"{path}: {format_first_error(error)}; it needs task, style and prompt_version") from error


def check_card(folder: Path, expected: RewardCard) -> None:
    """Check that the model in `folder` was trained for the expected task, style and instructions.

    Without a card (an older folder, the name of a model on a hub) a warning is logged.

    Raises:
        UserError: The card differs.
    """
    card = read_card(folder)
    if card is None:
        logger.warning("reward model %s has no %s: not checked for %s", folder, CARD_FILE, _format_card(expected))
    elif (card.task, card.style) != (expected.task, expected.style):
        raise UserError(
            f"reward model {folder} was trained for {_format_card(card)}, but the config needs "
            f"{_format_card(expected)}; set task and style to those of its training, or train another model"
        )
    elif card.prompt_version != expected.prompt_version:
        raise UserError(
            f"reward model {folder} was trained with version {card.prompt_version} of the instructions of task "
            f"{card.task}; the current version is {expected.prompt_version}; train it again"
        )


def _format_card(card: RewardCard) -> str:
    return f"task {card.task}, {format_style(card.style)}"


def format_style(style: StyleConfig) -> str:
    critique = "with a critique" if style.critique else "without a critique"
    return f"{critique}, {style.labels} labels"
