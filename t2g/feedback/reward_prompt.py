"""The one builder of the reward model's prompt: annotation, training, RL and evaluation all call it.

A prompt too long loses input text, never the instructions, the chat header or the response (three different prompts and
a cut at the end, where the instructions stood, were faults of the published code).
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
) -> np.ndarray:
    """Token ids that ask for the feedback on one response, [P] int32, P <= `max_prompt_tokens`.

    `prompt.prompt_ids` is not read: the policy's tokenizer is another one.
    Raises UserError when even the response without any input text does not fit, or without a chat template.
    """
    build = partial(task.feedback_messages, prompt, response_text, style=style)
    ids = fit_chat(build, tokenizer, max_prompt_tokens, input_chars=len(prompt.prompt_text))
    if ids is None:
        raise UserError(
            f"prompt {prompt.prompt_id}: the feedback instructions and a response of {len(response_text)} characters "
            f"do not fit into {max_prompt_tokens} tokens even without the input text; "
            "raise the reward engine's max_model_len or lower rollout.max_new_tokens"
        )
    return ids


def compute_prompt_version(task: Task, style: StyleConfig = SPARSE) -> str:
    """Hash of the task's feedback instructions: other instructions, or another style, are another version."""
    blank = Prompt(prompt_id="", prompt_text="{input}", task=task.name)
    messages = json.dumps(task.feedback_messages(blank, "{response}", style=style), ensure_ascii=False)
    return hashlib.blake2b(messages.encode(), digest_size=4).hexdigest()
