"""How likely a policy still makes texts that it was not trained on."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from t2g.config import DataConfig
from t2g.data.load import load_records
from t2g.errors import UserError
from t2g.tasks.base import describe_record, get_text
from t2g.text.tokenizer import encode_texts
from t2g.types import TokenIds, TokenStats

logger = logging.getLogger(__name__)


def read_texts(data: DataConfig | None, tokenizer: Any, max_tokens: int) -> list[TokenIds]:
    """Return the texts of `compare.retention` with at most `max_tokens` tokens, [] without any.

    Raises:
        UserError: A record has no text in `prompt` or `response`, or every text is longer.
    """
    if data is None:
        return []
    prompts: list[str] = []
    responses: list[str] = []
    for number, record in enumerate(load_records(data, "compare.retention"), start=1):
        try:
            prompts.append(get_text(record, "prompt"))
            responses.append(get_text(record, "response"))
        except ValueError as error:
            raise UserError(f"{describe_record(record, number, 'compare.retention')}: {error}") from None
    if not prompts:
        return []
    texts: list[TokenIds] = []
    lengths: list[int] = []
    encoded = zip(encode_texts(tokenizer, prompts), encode_texts(tokenizer, responses), strict=True)
    for prompt, response in encoded:
        lengths.append(len(prompt) + len(response))
        if lengths[-1] <= max_tokens:
            ids = TokenIds(prompt_ids=np.asarray(prompt, np.int32), response_ids=np.asarray(response, np.int32))
            texts.append(ids)
    if not texts:
        raise UserError(
            f"rollout.max_model_len={max_tokens} is shorter than every text of compare.retention: the shortest has "
            f"{min(lengths)} tokens"
        )
    num_left_out = len(lengths) - len(texts)
    if num_left_out:
        logger.warning(
            "compare.retention: %d of %d texts are longer than rollout.max_model_len=%d, and are left out",
            num_left_out, len(lengths), max_tokens,
        )  # fmt: skip
    return texts


def measure_retention(stats: Sequence[TokenStats], *, has_reference: bool) -> dict[str, float]:
    """Return the figures of texts that a policy was not trained on.

    Returns:
        perplexity, exp of the mean of -log p over all tokens of the responses; and with a reference also retention, the
        mean change of log p against it, nats a token, below 0 for a policy that has forgotten.
    """
    logprobs = np.concatenate([text.old_logprobs for text in stats])
    figures = {"perplexity": float(np.exp(-logprobs.mean()))}
    if has_reference:
        ref_logprobs = np.concatenate([text.ref_logprobs for text in stats])
        figures["retention"] = float((logprobs - ref_logprobs).mean())
    return figures
