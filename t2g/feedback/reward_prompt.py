"""The reward model's prompt, the same for annotation, training, RL and evaluation.

In a prompt that is too long the input text is truncated, never the instructions, the chat header or the response.
"""

import hashlib
import json
from functools import partial
from typing import Any

import numpy as np

from t2g.config import StyleConfig
from t2g.errors import UserError
from t2g.tasks.base import SPARSE, Task
from t2g.text.tokenizer import fit_chat
from t2g.types import Prompt


def build_feedback_prompt(
    task: Task,
    prompt: Prompt,
    response_text: str,
    tokenizer: Any,
    max_prompt_tokens: int,
    *,
    style: StyleConfig = SPARSE,
    window_name: str = "max_model_len of the reward engine",
) -> np.ndarray:
    """Return the token ids of the request for feedback on one response, [P] int32, P <= `max_prompt_tokens`.

    `prompt.prompt_ids` is not read: the policy has another tokenizer.

    Args:
        window_name: What sets the window, for the message.

    Raises:
        UserError: The response does not fit even without input text, or the tokenizer has no chat template.
    """
    build = partial(task.feedback_messages, prompt, response_text, style=style)
    ids = fit_chat(build, tokenizer, max_prompt_tokens, input_chars=len(prompt.prompt_text))
    if ids is None:
        raise UserError(
            f"prompt {prompt.prompt_id}: the feedback instructions and a response of {len(response_text)} characters "
            f"do not fit into {max_prompt_tokens} tokens even without the input text; "
            f"raise {window_name}, or take shorter responses (rollout.max_new_tokens)"
        )
    return ids


def compute_prompt_version(task: Task, style: StyleConfig = SPARSE) -> str:
    """Return a hash of the task's feedback instructions in this style."""
    blank = Prompt(prompt_id="", prompt_text="{input}", task=task.name)
    messages = json.dumps(task.feedback_messages(blank, "{response}", style=style), ensure_ascii=False)
    return hashlib.blake2b(messages.encode(), digest_size=4).hexdigest()
