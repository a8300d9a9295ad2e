"""Supervised examples: a prompt, a target, a loss weight per target token, and the plan of who trains on what, when.

Examples of like length share a microbatch and become right-padded rows (see `t2g.data.batching`: one packed row of
4,096 tokens costs a model of 1 M parameters five times the time, 2,100 tokens/s against 10,500); on a GPU `sft.packing`
puts them one after the other instead.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from t2g.config import StyleConfig
from t2g.data.batching import EMPTY_TOKENS, Plan, plan_microbatches
from t2g.data.prompts import policy_prompt_ids
from t2g.errors import UserError
from t2g.feedback.records import AnnotatedRecord, first_few
from t2g.feedback.reward_prompt import build_feedback_prompt
from t2g.tasks.base import SPARSE, Record, Task
from t2g.text.offsets import token_offsets

Ranges = Sequence[tuple[int, int]]  # half-open character ranges
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SFTExample:
    """What the model reads and what it must write."""

    prompt_ids: np.ndarray  # [P] int32, P >= 1
    target_ids: np.ndarray  # [R] int32, EOS last
    target_weights: np.ndarray  # [R] float32, loss weight of each target token, aligned with target_ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.target_ids)


@dataclass(frozen=True, kw_only=True)
class SFTMicrobatch:
    """One forward and backward: B right-padded rows of T tokens, or one row in which examples follow one another.

    Without examples it is one row of weight 0. Entry c of `labels` and `weights` is about the token that follows
    `input_ids[:, columns[c]]`; logits of other columns need not be computed.
    """

    input_ids: np.ndarray  # [B, T] int64, 0 on padding
    position_ids: np.ndarray  # [B, T] int64, restart at each example: transformers takes its attention mask from them
    columns: np.ndarray  # [C] int64, ascending
    labels: np.ndarray  # [B, C] int64, 0 where the weight is 0
    weights: np.ndarray  # [B, C] float32, 0 on prompts and padding


def target_ids(text: str, tokenizer: Any) -> np.ndarray:
    """`text` and the end-of-sequence token, [R] int32. UserError when the tokenizer has none.

    Text that spells a special token stays text: a critique that quotes "<|end|>" must not teach to stop there.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token; a model trained without one never stops: set it in its folder")
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return np.asarray([*ids, tokenizer.eos_token_id], np.int32)


def policy_examples(records: Sequence[Record], task: Task, tokenizer: Any, *, max_length: int) -> list[SFTExample]:
    """Each record's prompt with its reference as the target. UserError with the record's number (from 1)."""
    examples = []
    for number, record in enumerate(records, start=1):
        try:
            reference = task.reference(record)
            if reference is None:
                raise ValueError(f"task {task.name} finds no reference to learn from in it")
            build = partial(policy_prompt_ids, record, task, tokenizer)
            examples.append(sft_example(build, reference, tokenizer, max_length=max_length))
        except ValueError as error:
            raise UserError(f"data record {number}: {error}") from error
    return examples


def reward_examples(
    records: Sequence[AnnotatedRecord],
    task: Task,
    tokenizer: Any,
    *,
    max_length: int,
    span_weight: float,
    style: StyleConfig = SPARSE,
) -> list[SFTExample]:
    """Each judged response with [critique; span map] as the target; `task.decisive_ranges` weighs `span_weight`.

    In a style without a critique the target is the span map alone, which then weighs as a whole. `style.labels` chooses
    the instructions only: whether the spans are sparse or dense was decided when the records were made.

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
        ranges = task.decisive_ranges(target)
        try:
            examples.append(
                sft_example(build, target, tokenizer, max_length=max_length, ranges=ranges, span_weight=span_weight)
            )
        except UserError as error:
            left_out.append(f"record {number} (prompt {record.prompt_id}): {error}")
    if not examples:
        why = left_out[0] if left_out else "none has feedback"
        raise UserError(f"none of the {len(records)} annotated records can be used; {why}")
    if left_out:
        logger.warning("%d annotated records are left out; %s", len(left_out), "; ".join(first_few(left_out)))
    return examples


def decisive_weights(offsets: np.ndarray, ranges: Ranges, span_weight: float) -> np.ndarray:
    """`span_weight` on tokens that share a character with a range, 1 elsewhere, [R] float32.

    >>> decisive_weights(np.array([[0, 4], [4, 10], [10, 10]]), [(3, 4)], 8.0).tolist()
    [8.0, 1.0, 1.0]
    """
    weights = np.ones(len(offsets), np.float32)
    for start, end in ranges:
        weights[np.minimum(offsets[:, 1], end) > np.maximum(offsets[:, 0], start)] = span_weight
    return weights


def sft_example(
    build_prompt: Callable[[int], np.ndarray],
    target: str,
    tokenizer: Any,
    *,
    max_length: int,
    ranges: Ranges = (),
    span_weight: float = 1.0,
) -> SFTExample:
    """One example of at most `max_length` tokens; a prompt that is too long loses input text, the target nothing.

    Args:
        build_prompt: from the number of tokens left for the prompt to its ids [P]; it cuts input text only and raises
            UserError when even the instructions do not fit.
        ranges: half-open characters of `target` whose tokens weigh `span_weight` in the loss.

    Raises:
        UserError: the target alone leaves no room for a prompt.
    """
    ids = target_ids(target, tokenizer)
    room = max_length - len(ids)
    if room < 1:
        raise UserError(f"a target of {len(ids)} tokens leaves no room for its prompt in sft.max_length={max_length}")
    prompt_ids = np.asarray(build_prompt(room), np.int32)
    assert 1 <= len(prompt_ids) <= room, f"build_prompt returned {len(prompt_ids)} tokens for a room of {room}"
    weights = decisive_weights(token_offsets(tokenizer, ids), ranges, span_weight)
    return SFTExample(prompt_ids=prompt_ids, target_ids=ids, target_weights=weights)


def plan_epochs(
    lengths: Sequence[int],
    *,
    num_epochs: float,
    batch_size: int,
    num_ranks: int,
    token_budget: int,
    seed: int,
    packed: bool = False,
) -> list[Plan]:
    """Which examples each rank trains on in each optimizer step, and in which microbatches: [step][rank][microbatch].

    Every epoch is a permutation of its own; `num_epochs` passes over N examples are round(num_epochs * N) examples
    (at least one), cut into steps of `batch_size` that run across epoch borders; the last step may be smaller. A
    function of its arguments alone, and the examples of a step do not depend on `num_ranks`.

    >>> plan_epochs([5, 9], num_epochs=1, batch_size=2, num_ranks=2, token_budget=16, seed=0)
    [[[[1]], [[0]]]]
    """
    num_draws = _count_draws(len(lengths), num_epochs)
    orders = (np.random.default_rng([seed, epoch]).permutation(len(lengths)) for epoch in range(num_draws))
    draws: list[int] = []
    while len(draws) < num_draws:
        draws.extend(next(orders).tolist())
    draws = draws[:num_draws]
    steps = []
    for first in range(0, num_draws, batch_size):
        chosen = draws[first : first + batch_size]
        sizes = [lengths[index] for index in chosen]
        plan = plan_microbatches(sizes, num_ranks, token_budget, packed=packed)
        steps.append([[[chosen[place] for place in rows] for rows in hand] for hand in plan])
    return steps


def count_steps(num_examples: int, num_epochs: float, batch_size: int) -> int:
    """Optimizer steps that `plan_epochs` makes."""
    return ceil(_count_draws(num_examples, num_epochs) / batch_size)


def _count_draws(num_examples: int, num_epochs: float) -> int:
    return max(1, round(num_epochs * num_examples))


def make_microbatch(examples: Sequence[SFTExample], *, packed: bool = False) -> SFTMicrobatch:
    """Rows of one forward and backward, each label shifted to the column that predicts it.

    packed: one row of all examples, else a row for each. No examples give one row of padding, for a rank that has none
    must still run forward and backward.
    """
    rows = [list(examples)] if packed or not examples else [[example] for example in examples]
    width = max(sum(len(example) for example in row) for row in rows) or EMPTY_TOKENS
    input_ids = np.zeros((len(rows), width), np.int64)
    labels = np.zeros_like(input_ids)
    position_ids = np.broadcast_to(np.arange(width), input_ids.shape).copy()  # padding counts on: it is no new example
    weights = np.zeros(input_ids.shape, np.float32)
    for row, members in enumerate(rows):
        end = 0
        for example in members:
            start, target, end = end, end + len(example.prompt_ids), end + len(example)
            input_ids[row, start:target] = example.prompt_ids
            input_ids[row, target:end] = example.target_ids
            position_ids[row, start:end] = np.arange(end - start)
            labels[row, target - 1 : end - 1] = example.target_ids
            weights[row, target - 1 : end - 1] = example.target_weights
    needed = weights.any(axis=0)
    if needed.sum() < EMPTY_TOKENS:
        needed[:EMPTY_TOKENS] = True  # for the reason of EMPTY_TOKENS
    columns = np.flatnonzero(needed)
    return SFTMicrobatch(
        input_ids=input_ids,
        position_ids=position_ids,
        columns=columns,
        labels=labels[:, columns],
        weights=weights[:, columns],
    )
