"""Records to prompts for the policy."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from t2g.errors import UserError
from t2g.tasks.base import Record, Task, stable_id
from t2g.text.tokenizer import check_chat_template, encode_chat, fit_chat
from t2g.types import Prompt


def make_prompts(records: Sequence[Record], task: Task, tokenizer: Any, max_prompt_tokens: int) -> list[Prompt]:
    """One prompt for each record, in order, with the tokenizer's own chat template; without ids where it is None.

    A prompt of more than `max_prompt_tokens` tokens loses input text if the task cuts it, else it is refused.
    A record without an id gets a hash of its messages. The same messages under the same id again, as where a data set
    has several responses to a prompt, get a number after it: "7", "7-2", "7-3".
    Raises UserError: no chat template; or, with the number of the record (from 1), a missing or wrong field, a prompt
    too long, an id that other messages have.
    """
    if tokenizer is not None:
        check_chat_template(tokenizer)
    prompts: dict[str, Prompt] = {}
    repeats: Counter[tuple[str, str]] = Counter()
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
                asked = {"prompt_ids": policy_prompt_ids(record, task, tokenizer, max_prompt_tokens)}
            prompts[prompt_id] = Prompt(
                prompt_id=prompt_id,
                prompt_text=task.prompt_text(record),
                task=task.name,
                payload=task.payload(record),
                **asked,
            )
        except ValueError as error:
            raise UserError(f"data record {number}: {error}") from error
    return list(prompts.values())


def policy_prompt_ids(record: Record, task: Task, tokenizer: Any, max_prompt_tokens: int) -> np.ndarray:
    """What the policy reads, in sampling and in supervised training. -> [P] int32, P <= max_prompt_tokens.

    Raises ValueError (UserError is one) with a sentence about the record when it cannot be made or does not fit.
    """
    build = partial(task.policy_messages, record)
    ids = fit_chat(build, tokenizer, max_prompt_tokens, input_chars=len(task.prompt_text(record)))
    if ids is None:
        raise ValueError(
            f"the prompt, cut as far as may be, has {len(encode_chat(tokenizer, build(0)))} tokens and the window "
            f"holds {max_prompt_tokens} beside the response; shorten it, or raise rollout.max_model_len"
        )
    return ids


def revision_ids(
    task: Task, prompt: Prompt, response_text: str, critique: str, tokenizer: Any, max_prompt_tokens: int
) -> np.ndarray | None:
    """What a model reads that is to write a response again, with a critique of it in view. -> [P] int32.

    None for no room: a prompt too long loses input text, never the response or the critique.
    """
    build = partial(task.revise_messages, prompt, response_text, critique)
    return fit_chat(build, tokenizer, max_prompt_tokens, input_chars=len(prompt.prompt_text))
