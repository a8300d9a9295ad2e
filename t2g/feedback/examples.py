"""Supervised examples: a prompt and a target whose tokens all have weight 1."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from t2g.config import StyleConfig
from t2g.data.prompts import PromptTooLongError, encode_policy_prompt
from t2g.errors import UserError
from t2g.feedback.records import AnnotatedRecord, shorten_list
from t2g.feedback.reward_prompt import build_feedback_prompt
from t2g.tasks.base import SPARSE, Record, Task, describe_record
from t2g.text.ends import find_target_end
from t2g.text.thinking import Tags, find_last_tag
from t2g.types import TrainSequence

logger = logging.getLogger(__name__)

WINDOW_KEY = "sft.max_length"  # bounds a prompt with its target


def encode_target(text: str, tokenizer: Any) -> np.ndarray:
    """Return the ids of `text` and the token that ends a turn, see `find_target_end`, [R] int32.

    Special tokens in the text are encoded as text: a critique that quotes "<|end|>" must not train the model to stop.

    Raises:
        UserError: No token ends a turn.
    """
    end = find_target_end(tokenizer)
    encoding = tokenizer(text, add_special_tokens=False, split_special_tokens=True)
    ids = [*encoding["input_ids"], end]
    return np.asarray(ids, np.int32)


def end_thinking(example: TrainSequence, tokenizer: Any, tags: Tags | None) -> TrainSequence:
    """Return the example with a closing tag before its target if the prompt leaves the thinking open.

    A target that has the tag, after thinking of its own, stays.
    """
    if tags is None:
        return example
    opening, closing = tags
    if find_last_tag(tokenizer, example.prompt_ids, tags) != opening:
        return example
    target = tokenizer.decode(example.response_ids, skip_special_tokens=False)
    if closing in target:
        return example

    ids = np.append(encode_closing(tokenizer, tags), example.response_ids)
    weights = np.ones(len(ids), np.float32)
    return replace(example, response_ids=ids, weights=weights)


def encode_closing(tokenizer: Any, tags: Tags | None) -> np.ndarray:
    """Return the ids that end a thinking without text, [N] int32; none for a model that does not think."""
    if tags is None:
        return np.asarray([], np.int32)
    _, closing = tags
    encoding = tokenizer(f"\n{closing}\n\n", add_special_tokens=False)
    return np.asarray(encoding["input_ids"], np.int32)


def make_policy_examples(
    records: Sequence[Record],
    task: Task,
    tokenizer: Any,
    *,
    max_length: int,
    too_long: str = "error",
    tags: Tags | None = None,
) -> list[TrainSequence]:
    """Return an example for each record, with its prompt and its reference as the target.

    Args:
        too_long: error, skip or truncate, see `DataConfig`.
        tags: Tags of a model that thinks, see `end_thinking`.

    Raises:
        UserError: A record cannot be used; with its number (from 1). Or no record is left.
    """
    closing_ids = encode_closing(tokenizer, tags)
    max_example_length = max_length - len(closing_ids)
    examples: list[TrainSequence] = []
    for number, record in enumerate(records, start=1):
        try:
            reference = task.reference(record)
            if reference is None:
                raise ValueError(
                    f"task {task.name} finds no reference to learn from in it, only {', '.join(record)}; data.columns "
                    "renames a field, as in {reference: completion}"
                )
            truncate = too_long == "truncate"
            build = partial(encode_policy_prompt, record, task, tokenizer, truncate=truncate, window_name=WINDOW_KEY)
            example = make_sft_example(build, reference, tokenizer, max_length=max_example_length)
            examples.append(end_thinking(example, tokenizer, tags))
        except ValueError as error:
            is_skipped = too_long == "skip" and isinstance(error, PromptTooLongError)
            if not is_skipped:
                raise UserError(f"{describe_record(record, number)}: {error}") from error
    num_skipped = len(records) - len(examples)
    if records and not examples:
        raise UserError(f"all {len(records)} records are too long for {WINDOW_KEY}={max_length}: raise it")
    if num_skipped:
        logger.warning("%d of %d prompts or references are too long and are left out", num_skipped, len(records))
    return examples


def make_reward_examples(
    records: Sequence[AnnotatedRecord], task: Task, tokenizer: Any, *, max_length: int, style: StyleConfig = SPARSE
) -> list[TrainSequence]:
    """Return an example for each judged response, with [critique; span map] as the target.

    In a style without a critique the target is the span map alone. `style.labels` selects the instructions only; the
    records already have sparse or dense spans.

    Records with failed or unparsable feedback are left out; records with a critique and no span are used. Records that
    do not fit into `max_length` are left out with a warning that gives their numbers (from 1).

    Raises:
        UserError: No record is left.
    """
    examples: list[TrainSequence] = []
    left_out: list[str] = []
    for number, record in enumerate(records, start=1):
        if not record.usable:
            continue
        target = record.target(style)
        prompt = record.to_prompt()
        options = {"style": style, "window_name": WINDOW_KEY}
        build = partial(build_feedback_prompt, task, prompt, record.response, tokenizer, **options)
        try:
            example = make_sft_example(build, target, tokenizer, max_length=max_length)
            examples.append(example)
        except UserError as error:
            left_out.append(f"record {number} (prompt {record.prompt_id}): {error}")
    if not examples:
        reason = left_out[0] if left_out else "none has feedback"
        raise UserError(f"none of the {len(records)} annotated records can be used; {reason}")
    if left_out:
        reasons = "; ".join(shorten_list(left_out))
        logger.warning("%d annotated records are left out; %s", len(left_out), reasons)
    return examples


def make_sft_example(
    build_prompt: Callable[[int], np.ndarray], target: str, tokenizer: Any, *, max_length: int
) -> TrainSequence:
    """Return one example of at most `max_length` tokens. Input text is truncated if needed, the target never.

    Args:
        build_prompt: Returns the prompt's ids [P] for a number of tokens left. It truncates input text only and raises
            UserError if the instructions do not fit.

    Raises:
        PromptTooLongError: The target leaves no room for a prompt.
    """
    ids = encode_target(target, tokenizer)
    max_prompt_tokens = max_length - len(ids)
    if max_prompt_tokens < 1:
        reason = f"a target of {len(ids)} tokens leaves no room for its prompt in {WINDOW_KEY}={max_length}"
        raise PromptTooLongError(reason)
    prompt_ids = np.asarray(build_prompt(max_prompt_tokens), np.int32)
    assert 1 <= len(prompt_ids) <= max_prompt_tokens, f"{len(prompt_ids)} prompt tokens, limit {max_prompt_tokens}"
    weights = np.ones(len(ids), np.float32)
    return TrainSequence(prompt_ids=prompt_ids, response_ids=ids, weights=weights)
