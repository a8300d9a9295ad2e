"""Separate a model's thinking from its answer.

    prompt ends with      response                          answer
    anything              "<think>Hm.</think>\n\nYes."       "Yes."
    "<think>"             "Hm.</think>\n\nYes."              "Yes."
    "<think>"             "Hm."                             none: the response ended within its thinking
    "<think> </think>"    "Yes."                            "Yes."
    anything              "Yes, </think> is a tag."         the whole response: it does not think

The first closing tag after the start ends the thinking; every other tag is text of the answer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from t2g.text.offsets import token_offsets

Tags = tuple[str, str]  # opening and closing
KNOWN_TAGS: tuple[Tags, ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
NO_ANSWER = "the response ended within its thinking"  # why a response is not judged
TAIL_TOKENS = 32  # tokens of a prompt in which its last tag stands


def find_thinking_tags(tokenizer: Any, configured: Sequence[str] | None = None) -> Tags | None:
    """Return the tags around a model's thinking, None for a model without.

    Args:
        configured: `model.thinking_tags`; None finds a pair of KNOWN_TAGS among the tokenizer's added tokens.
    """
    if configured is not None:
        return (configured[0], configured[1]) if configured else None
    added = tokenizer.get_added_vocab()
    for opening, closing in KNOWN_TAGS:
        if opening in added and closing in added:
            return opening, closing
    return None


def find_last_tag(tokenizer: Any, prompt_ids: Sequence[int] | np.ndarray, tags: Tags) -> str | None:
    """Return the tag with which a prompt ends, blanks left out; None if it ends with other text."""
    tail = [int(token_id) for token_id in prompt_ids[-TAIL_TOKENS:]]
    text = tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    text = text.rstrip()
    for tag in tags:
        if text.endswith(tag):
            return tag
    return None


def find_answer_start(
    tokenizer: Any, prompt_ids: np.ndarray, response_ids: np.ndarray, text: str, tags: Tags | None
) -> int | None:
    """Return the first character of the answer in a response, after the line ends that follow the closing tag.

    Args:
        prompt_ids: [P], response_ids: [R].
        text: The response, `decode(tokenizer, response_ids)`.

    Returns:
        0 for a response that does not think; None for a response that ends within its thinking.
    """
    if tags is None:
        return 0
    opening, closing = tags
    if find_last_tag(tokenizer, prompt_ids, tags) != opening:
        opening_range = _find_tag(tokenizer, response_ids, text, opening)
        if opening_range is None:
            return 0
        before = text[: opening_range[0]]
        if before.strip():
            return 0
    closing_range = _find_tag(tokenizer, response_ids, text, closing)
    if closing_range is None:
        return None
    after = text[closing_range[1] :]
    return len(text) - len(after.lstrip("\r\n"))


def _find_tag(tokenizer: Any, ids: np.ndarray, text: str, tag: str) -> tuple[int, int] | None:
    """Return the characters of the first tag; a tag that is a token counts only as that token, and may have no text."""
    token_id = tokenizer.get_added_vocab().get(tag)
    if token_id is None:
        start = text.find(tag)
        if start < 0:
            return None
        return start, start + len(tag)
    (positions,) = np.nonzero(np.asarray(ids) == token_id)
    if not positions.size:
        return None
    offsets = token_offsets(tokenizer, ids)
    start, end = offsets[positions[0]].tolist()
    return start, end
