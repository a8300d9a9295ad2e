"""Supervised examples: a prompt and a target, every token of which weighs 1."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from t2g.config import StyleConfig
from t2g.data.prompts import PromptTooLongError, encode_policy_prompt
from t2g.errors import UserError
from t2g.feedback.records import AnnotatedRecord, shorten_list
from t2g.feedback.reward_prompt import build_feedback_prompt
from t2g.tasks.base import SPARSE, Record, Task
from t2g.types import TrainSequence

logger = logging.getLogger(__name__)


def encode_target(text: str, tokenizer: Any) -> np.ndarray:
    """`text` and the end-of-sequence token, [R] int32. UserError when the tokenizer has none.

    Text that spells a special token stays text: a critique that quotes "<|end|>" must not teach to stop there.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token; a model trained without one never stops: set it in its folder")
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return np.asarray([*ids, tokenizer.eos_token_id], np.int32)


def make_policy_examples(
    records: Sequence[Record], task: Task, tokenizer: Any, *, max_length: int, too_long: str = "error"
) -> list[TrainSequence]:
    """Each record's prompt with its reference as the target. UserError with the record's number (from 1).

    too_long: what becomes of a prompt without room, see `DataConfig`.
    """
    examples = []
    for number, record in enumerate(records, start=1):
        try:
            reference = task.reference(record)
            if reference is None:
                raise ValueError(f"task {task.name} finds no reference to learn from in it")
            build = partial(encode_policy_prompt, record, task, tokenizer, cut=too_long == "truncate")
            examples.append(make_sft_example(build, reference, tokenizer, max_length=max_length))
        except ValueError as error:
            if too_long != "skip" or not isinstance(error, PromptTooLongError):
                raise UserError(f"data record {number}: {error}") from error
    if len(examples) < len(records):
        logger.warning("%d of %d prompts are too long and are left out", len(records) - len(examples), len(records))
    return examples


def make_reward_examples(
    records: Sequence[AnnotatedRecord],
    task: Task,
    tokenizer: Any,
    *,
    max_length: int,
    style: StyleConfig = SPARSE,
) -> list[TrainSequence]:
    """Each judged response with [critique; span map] as the target.

    In a style without a critique the target is the span map alone. `style.labels` chooses the instructions only:
    whether the spans are sparse or dense was decided when the records were made.

    Records whose feedback failed or could not be parsed teach nothing and are left out; one with a critique and no span
    stays. Records that do not fit into `max_length` are left out, too, counted and named by their number in `records`
    (from 1) in a warning. UserError when no record is left.
    """
    examples = []
    left_out: list[str] = []
    for number, record in enumerate(records, start=1):
        if not record.usable:
            continue
        target = record.target(style)
        build = partial(build_feedback_prompt, task, record.to_prompt(), record.response, tokenizer, style=style)
        try:
            examples.append(make_sft_example(build, target, tokenizer, max_length=max_length))
        except UserError as error:
            left_out.append(f"record {number} (prompt {record.prompt_id}): {error}")
    if not examples:
        why = left_out[0] if left_out else "none has feedback"
        raise UserError(f"none of the {len(records)} annotated records can be used; {why}")
    if left_out:
        logger.warning("%d annotated records are left out; %s", len(left_out), "; ".join(shorten_list(left_out)))
    return examples


def make_sft_example(
    build_prompt: Callable[[int], np.ndarray],
    target: str,
    tokenizer: Any,
    *,
    max_length: int,
) -> TrainSequence:
    """One example of at most `max_length` tokens; a prompt that is too long loses input text, the target nothing.

    Args:
        build_prompt: from the number of tokens left for the prompt to its ids [P]; it cuts input text only and raises
            UserError when even the instructions do not fit.

    Raises:
        UserError: the target alone leaves no room for a prompt.
    """
    ids = encode_target(target, tokenizer)
    room = max_length - len(ids)
    if room < 1:
        raise UserError(f"a target of {len(ids)} tokens leaves no room for its prompt in sft.max_length={max_length}")
    prompt_ids = np.asarray(build_prompt(room), np.int32)
    assert 1 <= len(prompt_ids) <= room, f"build_prompt returned {len(prompt_ids)} tokens for a room of {room}"
    return TrainSequence(prompt_ids=prompt_ids, response_ids=ids, weights=np.ones(len(ids), np.float32))
