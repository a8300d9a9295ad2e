"""The transcript of a conversation, and its tokens: what was sampled, what is thinking, what the environment inserted.

A response of a single turn is its own transcript, see `t2g.types.Rollout`.

    def f(n):
        return n

    [user]
    f(2) needs to be 4.

    [assistant]
    def f(n):
        return n + 2
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from t2g.text.offsets import token_offsets
from t2g.text.tokenizer import Message
from t2g.types import Rollout, ToolResult

UNKNOWN_TOOL = "unknown"
AFTER_REPLY = "\n\n[assistant]\n"


def list_reply(reply: str, results: Sequence[ToolResult]) -> list[Message]:
    """Return the messages between two turns: of the user, or of each tool that was called."""
    if not results:
        return [{"role": "user", "content": reply}]
    messages = []
    for number, result in enumerate(results):
        name = result.tool or UNKNOWN_TOOL
        call_id = f"call{number:05d}"  # Mistral's templates take nine letters and digits
        messages.append({"role": "tool", "name": name, "tool_call_id": call_id, "content": result.text})
    return messages


def format_reply(messages: Iterable[Message]) -> str:
    """Return the messages between two turns under headings, as the transcript has them."""
    parts = []
    for message in messages:
        heading = f"tool {message['name']}" if message["role"] == "tool" else message["role"]
        parts.append(f"\n\n[{heading}]\n{message['content']}")
    return "".join(parts) + AFTER_REPLY


def rollout_offsets(tokenizer: Any, rollout: Rollout) -> np.ndarray:
    """Return the half-open range of characters of each token in `response_text`, [R, 2] int32.

    Inserted tokens have an empty range at the end of the turn before them: no span covers them.
    """
    offsets = np.zeros((len(rollout.response_ids), 2), np.int32)
    for turn in rollout.turns:
        start, end = turn.tokens
        first_character, end_character = turn.characters
        turn_offsets = token_offsets(tokenizer, rollout.response_ids[start:end])
        offsets[start:end] = turn_offsets + first_character
        offsets[end:] = end_character
    return offsets


def compute_answer_mask(offsets: np.ndarray, rollout: Rollout) -> np.ndarray:
    """Return whether a token belongs to an answer, [R] bool; tokens of thinking and inserted ones do not.

    A token without characters where the answer starts belongs to it: it may be a call's tag, and a closing tag that is
    a special token looks the same.

    Args:
        offsets: See `rollout_offsets`.
    """
    mask = np.zeros(len(offsets), bool)
    for turn in rollout.turns:
        if turn.answer_start is None:
            continue
        tokens = slice(*turn.tokens)
        starts, ends = offsets[tokens].T
        mask[tokens] = (starts >= turn.answer_start) | (ends > turn.answer_start)
    return mask


def judged_characters(rollout: Rollout) -> np.ndarray:
    """Return the positions in `response_text` of the characters that are judged: all but the thinking, [C] int64."""
    is_judged = np.ones(len(rollout.response_text), bool)
    for turn in rollout.turns:
        start, _ = turn.characters
        is_judged[start : turn.answer_start] = False
    return np.flatnonzero(is_judged)
