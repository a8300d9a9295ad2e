"""Make the policy's prompts from records."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from t2g.errors import UserError
from t2g.tasks.base import Record, Task, describe_record, stable_id
from t2g.text.tokenizer import Message, chat_renderer, encode_chat, encode_texts, fit_chat
from t2g.types import Prompt

logger = logging.getLogger(__name__)

MAX_PROBLEMS = 3  # invalid records that an error message describes
ENCODED_AT_ONCE = 1000  # prompts


class PromptTooLongError(UserError):
    """A prompt that does not fit into the window, even truncated, or not together with the target of an example."""


class PromptDraft(NamedTuple):
    """A prompt before its ids."""

    number: int  # number of the record, from 1
    record: Record
    messages: Sequence[Message]


@dataclass(kw_only=True)
class _PromptDrafts:
    """The drafts of a data set by prompt_id, and the problems of the other records by number."""

    task: Task
    render: Callable[[Sequence[Message]], str]
    by_id: dict[str, PromptDraft] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)
    _repeats: Counter[tuple[str, str]] = field(default_factory=Counter)  # repeats of an id with a content

    def add_all(self, records: Sequence[Record]) -> Iterator[str]:
        """Yield the text of each draft."""
        for number, record in enumerate(records, start=1):
            try:
                messages = self.task.policy_messages(record)
                prompt_id = self._make_id(record, messages)
                text = self.render(messages)
            except ValueError as error:
                self.problems[number] = str(error)
                continue
            self.by_id[prompt_id] = PromptDraft(number, record, messages)
            yield text

    def _make_id(self, record: Record, messages: Sequence[Message]) -> str:
        content = stable_id(json.dumps(messages, ensure_ascii=False))
        prompt_id = self.task.prompt_id(record) or content
        self._repeats[prompt_id, content] += 1
        repeat = self._repeats[prompt_id, content]
        if repeat > 1:
            prompt_id = f"{prompt_id}-{repeat}"
        if prompt_id in self.by_id:
            raise ValueError(f"the id {prompt_id} was used before; ids must be unique in a data set")
        return prompt_id


def make_prompts(
    records: Sequence[Record],
    task: Task,
    tokenizer: Any,
    max_prompt_tokens: int,
    *,
    too_long: str = "error",
    key: str = "data",
) -> list[Prompt]:
    """Return a prompt for each record, in order, encoded with the tokenizer's own chat template.

    A record without an id gets a hash of its messages. Repeated messages under one id, as in a data set with several
    responses to a prompt, get a number: "7", "7-2", "7-3".

    Args:
        tokenizer: None makes prompts without ids.
        max_prompt_tokens: A longer prompt loses input text, if the task can truncate it.
        too_long: The policy for prompts that are still too long, see `DataConfig`.
        key: The config's section, for error messages.

    Raises:
        UserError: The tokenizer has no chat template. Or a field is missing or invalid, a prompt is too long, or an id
            belongs to other messages too; the message describes the first MAX_PROBLEMS of these records.
    """
    render = chat_renderer(tokenizer) if tokenizer is not None else lambda _: ""
    drafts = _PromptDrafts(task=task, render=render)
    encoded = _encode(drafts.add_all(records), tokenizer)
    problems = drafts.problems
    prompts: list[Prompt] = []
    skipped: list[int] = []
    for (prompt_id, draft), ids in zip(drafts.by_id.items(), encoded, strict=True):
        try:
            if len(ids) > max_prompt_tokens:
                truncate = too_long == "truncate"
                ids = encode_policy_prompt(draft.record, task, tokenizer, max_prompt_tokens, truncate=truncate, key=key)
            prompts.append(_make_prompt(prompt_id, draft, ids, task))
        except ValueError as error:
            if too_long == "skip" and isinstance(error, PromptTooLongError):
                skipped.append(draft.number)
            else:
                problems[draft.number] = str(error)

    if problems:
        raise UserError(_describe_problems(problems, records, key))
    if skipped:
        summary = f"{len(skipped)} of {len(records)} prompts have more than {max_prompt_tokens} tokens"
        if not prompts:
            raise UserError(f"{summary}: nothing is left; raise rollout.max_model_len, or set {key}.too_long=truncate")
        logger.warning("%s: %s and are left out, the first is record %d", key, summary, skipped[0])
    return prompts


def _make_prompt(prompt_id: str, draft: PromptDraft, ids: np.ndarray, task: Task) -> Prompt:
    record = draft.record
    return Prompt(
        prompt_id=prompt_id,
        prompt_text=task.prompt_text(record),
        task=task.name,
        payload=task.payload(record),
        messages=tuple(draft.messages),
        is_chat=task.is_chat(record),
        data_file=getattr(record, "file", ""),
        prompt_ids=ids,
    )


def _describe_problems(problems: Mapping[int, str], records: Sequence[Record], key: str) -> str:
    """Return a line for each of the first problems by number, and one with the number of the others."""
    lines: list[str] = []
    for number, problem in sorted(problems.items())[:MAX_PROBLEMS]:
        where = describe_record(records[number - 1], number, key)
        lines.append(f"{where}: {problem}")
    num_more = len(problems) - MAX_PROBLEMS
    if num_more > 0:
        lines.append(f"{num_more} more records are wrong")
    return "\n".join(lines)


def _encode(texts: Iterator[str], tokenizer: Any) -> list[np.ndarray]:
    """Return the token ids of each text, [P] int32; a thread encodes a batch while the next one is rendered."""

    def encode(batch: list[str]) -> list[np.ndarray]:
        ids = encode_texts(tokenizer, batch) if tokenizer is not None else [()] * len(batch)
        return [np.asarray(row, np.int32) for row in ids]

    pending: list[Future[list[np.ndarray]]] = []
    with ThreadPoolExecutor(1) as pool:
        while batch := list(islice(texts, ENCODED_AT_ONCE)):
            pending.append(pool.submit(encode, batch))
    results = [future.result() for future in pending]
    return list(chain.from_iterable(results))


def encode_policy_prompt(
    record: Record,
    task: Task,
    tokenizer: Any,
    max_prompt_tokens: int,
    *,
    truncate: bool = False,
    window_name: str = "rollout.max_model_len",
    key: str = "data",
) -> np.ndarray:
    """Return the policy's prompt for sampling and supervised training, [P] int32, P <= max_prompt_tokens.

    Args:
        truncate: Whether a prompt that the task cannot shorten enough loses the end of its longest message.
        window_name: What sets the window, for the message.
        key: The config's section of the record, for the message.

    Raises:
        PromptTooLongError: The prompt does not fit.
        ValueError: The record has no valid prompt.
    """
    build = partial(task.policy_messages, record)
    ids = fit_chat(build, tokenizer, max_prompt_tokens, input_chars=len(task.prompt_text(record)))
    if ids is None and truncate:
        messages = task.policy_messages(record)
        longest = max(messages, key=lambda message: len(message["content"]))
        shorter = partial(_shorten, messages, longest)
        ids = fit_chat(shorter, tokenizer, max_prompt_tokens, input_chars=len(longest["content"]))
    if ids is None:
        shortest = encode_chat(tokenizer, build(0))
        other_policies = "skip" if truncate else "skip or truncate"
        raise PromptTooLongError(
            f"the shortest form of the prompt has {len(shortest)} tokens and the window "
            f"holds {max_prompt_tokens} before the response; shorten it, raise {window_name}, or set "
            f"{key}.too_long to {other_policies}"
        )
    return ids


def _shorten(messages: Sequence[Message], longest: Message, limit: int | None) -> list[Message]:
    """Return the messages with the longest one truncated to its first `limit` characters."""
    shorter: list[Message] = []
    for message in messages:
        if message is longest:
            message = {**message, "content": message["content"][:limit]}
        shorter.append(message)
    return shorter


def encode_revision(
    task: Task, prompt: Prompt, response_text: str, critique: str, tokenizer: Any, max_prompt_tokens: int
) -> np.ndarray | None:
    """Return the prompt of a model that revises a response by its critique, [P] int32, or None if it does not fit.

    A prompt that is too long loses input text; response and critique are never truncated.
    """
    build = partial(task.revise_messages, prompt, response_text, critique)
    return fit_chat(build, tokenizer, max_prompt_tokens, input_chars=len(prompt.prompt_text))


def encode_teacher_prompt(
    task: Task, prompt: Prompt, critique: str, tokenizer: Any, max_prompt_tokens: int
) -> np.ndarray | None:
    """Return the prompt of `objective.teacher`, [P] int32, or None if it does not fit.

    Nothing is truncated: a teacher that does not see what the policy sees would teach the policy to ignore it.
    """
    messages = task.teacher_messages(prompt, critique)
    ids = np.asarray(encode_chat(tokenizer, messages), np.int32)
    return ids if len(ids) <= max_prompt_tokens else None
