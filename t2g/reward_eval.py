"""How good is a span reward model? Token-level precision, recall and F1 per label, and how much of it can be used.

Gold and predicted spans are projected on the same tokens, counts are summed over all records (micro average), and a
ratio whose denominator is 0 is 0: a model that marks nothing earns nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from t2g.feedback.rewards import token_rewards
from t2g.types import SpanFeedback

LABELS = {"good": 1, "poor": -1}


@dataclass(frozen=True, kw_only=True)
class JudgedRecord:
    """One held-out record and what the reward model made of it."""

    gold: np.ndarray  # [R], token labels of the record's own spans: +1 good, -1 poor, 0 unlabelled
    predicted: np.ndarray  # [R], token labels of the model's spans; all 0 when its answer could not be used
    num_quotes: int  # quotes in the model's answer
    num_located: int  # of these, found in the response
    parsed: bool  # whether the answer given *without* guided decoding parses


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """Token counts of one label."""

    true_positive: int
    false_positive: int
    false_negative: int

    @property
    def precision(self) -> float:
        return ratio(self.true_positive, self.true_positive + self.false_positive)

    @property
    def recall(self) -> float:
        return ratio(self.true_positive, self.true_positive + self.false_negative)

    @property
    def f1(self) -> float:
        return ratio(2 * self.true_positive, 2 * self.true_positive + self.false_positive + self.false_negative)


def judged_record(
    response_text: str, gold: SpanFeedback, guided: SpanFeedback, unguided: SpanFeedback, tokenizer: Any
) -> JudgedRecord:
    """Gold and predicted spans of one response as labels of `tokenizer`'s tokens of its text.

    guided: the model's answer as it is served, with guided decoding; unguided: without, which only says whether it
    parses. Characters come from the fast tokenizer's offset mapping, which holds for tokenizers that normalise, too.
    """
    encoded = tokenizer(response_text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.asarray(encoded["offset_mapping"], np.int32).reshape(-1, 2)
    return JudgedRecord(
        gold=token_rewards(offsets, gold.spans, text=response_text),
        predicted=token_rewards(offsets, guided.spans, text=response_text),
        num_quotes=guided.num_quotes,
        num_located=guided.num_located,
        parsed=unguided.status in ("ok", "empty"),
    )


def ratio(part: int, whole: int) -> float:
    """part / whole, 0.0 when whole is 0."""
    return part / whole if whole else 0.0


def confusion(records: Sequence[JudgedRecord], label: int) -> Confusion:
    """Token counts of `label` (+1 or -1) over all records.

    >>> record = JudgedRecord(gold=np.array([1, 1, 0, -1]), predicted=np.array([1, 0, 1, -1]),
    ...                       num_quotes=3, num_located=3, parsed=True)
    >>> confusion([record], 1)  # token 0 is found, token 2 is wrongly called good, token 1 is missed
    Confusion(true_positive=1, false_positive=1, false_negative=1)
    """
    hit = wrong = missed = 0
    for record in records:
        if len(record.gold) != len(record.predicted):
            raise ValueError(f"{len(record.gold)} gold and {len(record.predicted)} predicted labels for one response")
        gold, predicted = np.sign(record.gold) == label, np.sign(record.predicted) == label
        hit += int((gold & predicted).sum())
        wrong += int((predicted & ~gold).sum())
        missed += int((gold & ~predicted).sum())
    return Confusion(true_positive=hit, false_positive=wrong, false_negative=missed)


def reward_metrics(records: Sequence[JudgedRecord]) -> dict[str, float]:
    """The content of reward.json: {good,poor}_{precision,recall,f1,tokens}, located_rate, parse_rate, num_records.

    `*_tokens` counts gold tokens of the label: a ratio over few of them means little. Counts are floats.
    """
    metrics: dict[str, float] = {}
    for name, label in LABELS.items():
        counts = confusion(records, label)
        metrics |= {
            f"{name}_precision": counts.precision,
            f"{name}_recall": counts.recall,
            f"{name}_f1": counts.f1,
            f"{name}_tokens": float(counts.true_positive + counts.false_negative),
        }
    metrics["located_rate"] = ratio(sum(r.num_located for r in records), sum(r.num_quotes for r in records))
    metrics["parse_rate"] = ratio(sum(r.parsed for r in records), len(records))
    metrics["num_records"] = float(len(records))
    return metrics
