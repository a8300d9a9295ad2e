"""How likely a policy still makes texts that it was not trained on."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from t2g.config import DataConfig
from t2g.data.load import load_records
from t2g.errors import UserError
from t2g.tasks.base import describe_record, get_text
from t2g.text.tokenizer import encode_texts
from t2g.types import TokenIds, TokenStats


def read_texts(data: DataConfig | None, tokenizer: Any, max_tokens: int) -> list[TokenIds]:
    """Return the texts of `compare.retention` with at most `max_tokens` tokens, [] without any.

    Raises:
        UserError: A record has no text in `prompt` or `response`.
    """
    texts: list[str] = []
    for number, record in enumerate(load_records(data, "compare.retention") if data else (), start=1):
        try:
            texts += get_text(record, "prompt"), get_text(record, "response")
        except ValueError as error:
            raise UserError(f"{describe_record(record, number, 'compare.retention')}: {error}") from None
    ids = [np.asarray(row, np.int32) for row in (encode_texts(tokenizer, texts) if texts else ())]
    return [
        TokenIds(prompt_ids=prompt, response_ids=response)
        for prompt, response in zip(ids[::2], ids[1::2], strict=True)
        if len(prompt) + len(response) <= max_tokens
    ]


def measure_retention(stats: Sequence[TokenStats], *, has_reference: bool) -> dict[str, float]:
    """Return the figures of texts that a policy was not trained on.

    Returns:
        perplexity, exp of the mean of -log p over all tokens of the responses; and with a reference also retention, the
        mean change of log p against it, nats a token, below 0 for a policy that has forgotten.
    """
    policy, reference = (np.concatenate([getattr(s, name) for s in stats]) for name in ("old_logprobs", "ref_logprobs"))
    perplexity = {"perplexity": float(np.exp(-policy.mean()))}
    return perplexity | ({"retention": float((policy - reference).mean())} if has_reference else {})
