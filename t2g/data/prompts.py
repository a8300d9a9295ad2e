"""Make the policy's prompts from records."""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from t2g.errors import UserError
from t2g.tasks.base import Record, Task, describe_record, stable_id
from t2g.text.tokenizer import Message, chat_renderer, encode_chat, encode_texts, fit_chat
from t2g.types import Prompt

logger = logging.getLogger(__name__)

MAX_PROBLEMS = 3  # invalid records that an error message describes
ENCODED_AT_ONCE = 1000  # prompts

Draft = tuple[int, Record, Sequence[Message]]  # the record's number, the record, its messages


class PromptTooLongError(ValueError):
    """A prompt that does not fit into the window, even cut."""


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
        max_prompt_tokens: A longer prompt loses input text, if the task can cut it.
        too_long: The policy for prompts that are still too long, see `DataConfig`.
        key: The config's section, for error messages.

    Raises:
        UserError: The tokenizer has no chat template. Or a field is missing or invalid, a prompt is too long, or an id
            belongs to other messages too; the message describes the first MAX_PROBLEMS of these records.
    """
    render = chat_renderer(tokenizer) if tokenizer is not None else lambda _: ""
    drafts: dict[str, Draft] = {}
    repeats: Counter[tuple[str, str]] = Counter()
    skipped: list[int] = []
    problems: dict[int, str] = {}

    def render_drafts() -> Iterator[str]:
        for number, record in enumerate(records, start=1):
            try:
                messages = task.policy_messages(record)
                content = stable_id(json.dumps(messages, ensure_ascii=False))
                prompt_id = task.prompt_id(record) or content
                repeats[prompt_id, content] += 1
                if (repeat := repeats[prompt_id, content]) > 1:
                    prompt_id = f"{prompt_id}-{repeat}"
                if prompt_id in drafts:
                    raise ValueError(f"the id {prompt_id} was used before; ids must be unique in a data set")
                text = render(messages)
            except ValueError as error:
                problems[number] = str(error)
            else:
                drafts[prompt_id] = number, record, messages
                yield text

    prompts: list[Prompt] = []
    encoded = _encode(render_drafts(), tokenizer)
    for (prompt_id, (number, record, messages)), ids in zip(drafts.items(), encoded, strict=True):
        try:
            if len(ids) > max_prompt_tokens:
                ids = encode_policy_prompt(record, task, tokenizer, max_prompt_tokens, cut=too_long == "truncate")
            chat = record.get("messages") if record.get("prompt") is None else record["prompt"]
            prompts.append(
                Prompt(
                    prompt_id=prompt_id,
                    prompt_text=task.prompt_text(record),
                    task=task.name,
                    payload=task.payload(record),
                    messages=tuple(messages),
                    is_chat=isinstance(chat, list),
                    data_file=getattr(record, "file", ""),
                    prompt_ids=ids,
                )
            )
        except ValueError as error:
            if too_long == "skip" and isinstance(error, PromptTooLongError):
                skipped.append(number)
            else:
                problems[number] = str(error)
    if problems:
        chosen = sorted(problems.items())[:MAX_PROBLEMS]
        first = [f"{describe_record(records[number - 1], number, key)}: {problem}" for number, problem in chosen]
        more = [f"{len(problems) - MAX_PROBLEMS} more records are wrong"] if len(problems) > MAX_PROBLEMS else []
        raise UserError("\n".join([*first, *more]))
    if skipped:
        summary = f"{len(skipped)} of {len(records)} prompts have more than {max_prompt_tokens} tokens"
        if not prompts:
            raise UserError(f"{summary}: nothing is left; raise rollout.max_model_len, or set data.too_long=truncate")
        logger.warning("%s and are left out, the first is record %d", summary, skipped[0])
    return prompts


def _encode(texts: Iterator[str], tokenizer: Any) -> list[np.ndarray]:
    """Return the token ids of each text, [P] int32; a thread encodes a batch while the next one is rendered."""

    def encode(batch: list[str]) -> list[np.ndarray]:
        ids = encode_texts(tokenizer, batch) if tokenizer is not None else [()] * len(batch)
        return [np.asarray(row, np.int32) for row in ids]

    with ThreadPoolExecutor(1) as pool:
        batches = [pool.submit(encode, batch) for batch in iter(lambda: [*islice(texts, ENCODED_AT_ONCE)], [])]
    return [ids for batch in batches for ids in batch.result()]


def encode_policy_prompt(
    record: Record, task: Task, tokenizer: Any, max_prompt_tokens: int, *, cut: bool = False
) -> np.ndarray:
    """Return the policy's prompt for sampling and supervised training, [P] int32, P <= max_prompt_tokens.

    Args:
        cut: Whether a prompt that the task cannot shorten enough loses the end of its longest message.

    Raises:
        PromptTooLongError: The prompt does not fit.
        ValueError: The record has no valid prompt.
    """
    build = partial(task.policy_messages, record)
    ids = fit_chat(build, tokenizer, max_prompt_tokens, input_chars=len(task.prompt_text(record)))
    if ids is None and cut:
        messages = task.policy_messages(record)
        longest = max(messages, key=lambda message: len(message["content"]))
        shorter = partial(_shorten, messages, longest)
        ids = fit_chat(shorter, tokenizer, max_prompt_tokens, input_chars=len(longest["content"]))
    if ids is None:
        raise PromptTooLongError(
            f"the shortest form of the prompt has {len(encode_chat(tokenizer, build(0)))} tokens and the window "
            f"holds {max_prompt_tokens} beside the response; shorten it, raise rollout.max_model_len, or set "
            "data.too_long to skip or truncate"
        )
    return ids


def _shorten(messages: Sequence[Message], longest: Message, limit: int | None) -> list[Message]:
    return [{**m, "content": m["content"][:limit]} if m is longest else m for m in messages]


def encode_revision(
    task: Task, prompt: Prompt, response_text: str, critique: str, tokenizer: Any, max_prompt_tokens: int
) -> np.ndarray | None:
    """Return the prompt of a model that revises a response by its critique, [P] int32, or None if it does not fit.

    A prompt that is too long loses input text; response and critique are never cut.
    """
    build = partial(task.revise_messages, prompt, response_text, critique)
    return fit_chat(build, tokenizer, max_prompt_tokens, input_chars=len(prompt.prompt_text))


def encode_teacher_prompt(
    task: Task, prompt: Prompt, critique: str, tokenizer: Any, max_prompt_tokens: int
) -> np.ndarray | None:
    """Return the prompt of `objective.teacher`, [P] int32, or None if it does not fit.

    Nothing is cut: a teacher that does not see what the policy sees would teach the policy to ignore it.
    """
    ids = np.asarray(encode_chat(tokenizer, task.teacher_messages(prompt, critique)), np.int32)
    return ids if len(ids) <= max_prompt_tokens else None
