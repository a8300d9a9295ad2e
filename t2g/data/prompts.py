"""Records to prompts for the policy."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from t2g.errors import UserError
from t2g.tasks.base import Record, Task, stable_id
from t2g.text.tokenizer import Message, check_chat_template, encode_chat, fit_chat
from t2g.types import Prompt

logger = logging.getLogger(__name__)

MAX_PROBLEMS = 3  # wrong records that are told one by one


class PromptTooLongError(ValueError):
    """A prompt that does not fit, however it may be cut."""


def make_prompts(
    records: Sequence[Record],
    task: Task,
    tokenizer: Any,
    max_prompt_tokens: int,
    *,
    too_long: str = "error",
    key: str = "data",
) -> list[Prompt]:
    """One prompt for each record, in order, with the tokenizer's own chat template; without ids where it is None.

    A prompt of more than `max_prompt_tokens` tokens loses input text if the task cuts it; else too_long, see
    `DataConfig`, says what becomes of it.
    A record without an id gets a hash of its messages. The same messages under the same id again, as where a data set
    has several responses to a prompt, get a number after it: "7", "7-2", "7-3".
    Raises UserError: no chat template; or, with `key` and the number of the record (from 1), of each of the first
    MAX_PROBLEMS wrong records, a missing or wrong field, a prompt too long, an id that other messages have.
    """
    if tokenizer is not None:
        check_chat_template(tokenizer)
    prompts: dict[str, Prompt] = {}
    repeats: Counter[tuple[str, str]] = Counter()
    left_out: list[int] = []
    problems: list[str] = []
    for number, record in enumerate(records, start=1):
        try:
            messages = task.policy_messages(record)
            content = stable_id(json.dumps(messages, ensure_ascii=False))
            prompt_id = task.prompt_id(record) or content
            repeats[prompt_id, content] += 1
            if (repeat := repeats[prompt_id, content]) > 1:
                prompt_id = f"{prompt_id}-{repeat}"
            if prompt_id in prompts:
                raise ValueError(f"the id {prompt_id} was used before; ids must be unique in a data set")
            asked = {}
            if tokenizer is not None:
                cut = too_long == "truncate"
                asked = {"prompt_ids": encode_policy_prompt(record, task, tokenizer, max_prompt_tokens, cut=cut)}
            prompts[prompt_id] = Prompt(
                prompt_id=prompt_id,
                prompt_text=task.prompt_text(record),
                task=task.name,
                payload=task.payload(record),
                **asked,
            )
        except ValueError as error:
            if too_long == "skip" and isinstance(error, PromptTooLongError):
                left_out.append(number)
            else:
                problems.append(f"{key} record {number}: {error}")
    if problems:
        more = [f"{len(problems) - MAX_PROBLEMS} more records are wrong"] if len(problems) > MAX_PROBLEMS else []
        raise UserError("\n".join([*problems[:MAX_PROBLEMS], *more]))
    if left_out:
        said = f"{len(left_out)} of {len(records)} prompts have more than {max_prompt_tokens} tokens"
        if not prompts:
            raise UserError(f"{said}: nothing is left; raise rollout.max_model_len, or set data.too_long=truncate")
        logger.warning("%s and are left out, the first is record %d", said, left_out[0])
    return list(prompts.values())


def encode_policy_prompt(
    record: Record, task: Task, tokenizer: Any, max_prompt_tokens: int, *, cut: bool = False
) -> np.ndarray:
    """What the policy reads, in sampling and in supervised training. -> [P] int32, P <= max_prompt_tokens.

    cut: what is still too long loses the end of its longest message; else PromptTooLongError. Raises ValueError
    (UserError is one) with a sentence about the record when it cannot be made.
    """
    build = partial(task.policy_messages, record)
    ids = fit_chat(build, tokenizer, max_prompt_tokens, input_chars=len(task.prompt_text(record)))
    if ids is None and cut:
        messages = task.policy_messages(record)
        longest = max(messages, key=lambda message: len(message["content"]))
        shorter = partial(_shortened, messages, longest)
        ids = fit_chat(shorter, tokenizer, max_prompt_tokens, input_chars=len(longest["content"]))
    if ids is None:
        raise PromptTooLongError(
            f"the prompt, cut as far as may be, has {len(encode_chat(tokenizer, build(0)))} tokens and the window "
            f"holds {max_prompt_tokens} beside the response; shorten it, raise rollout.max_model_len, or set "
            "data.too_long to skip or truncate"
        )
    return ids


def _shortened(messages: Sequence[Message], longest: Message, limit: int | None) -> list[Message]:
    return [{**m, "content": m["content"][:limit]} if m is longest else m for m in messages]


def encode_revision(
    task: Task,
    prompt: Prompt,
    response_text: str,
    critique: str,
    tokenizer: Any,
    max_prompt_tokens: int,
    *,
    cut: bool = True,
) -> np.ndarray | None:
    """What a model reads that is to write a response again, with a critique of it in view. -> [P] int32.

    None for no room: a prompt too long loses input text, unless `whole`, and never the response or the critique.
    """
    build = partial(task.revise_messages, prompt, response_text, critique)
    return fit_chat(build, tokenizer, max_prompt_tokens, input_chars=len(prompt.prompt_text) if cut else 0)
