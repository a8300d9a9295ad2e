"""Evaluate a span reward model on held-out records: metrics with intervals, and examples of errors.

Gold and predicted spans are projected on the same tokens, and counts are summed over all records (micro average). A
ratio whose denominator is 0 is 0, so that a model without spans scores 0.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol

import numpy as np

from t2g.feedback.records import AnnotatedRecord
from t2g.feedback.rewards import token_rewards
from t2g.types import LABELS, Prompt, Span, SpanFeedback

CLASSES = LABELS | {"neutral": 0}
NUM_RESAMPLES = 1000
EXAMPLES_PER_KIND = 6
ERROR_KINDS = {
    "missed_good": "gold good spans without a span of the model",
    "missed_poor": "gold poor spans without a span of the model",
    "invented_good": "good spans of the model without a gold span",
    "invented_poor": "poor spans of the model without a gold span",
    "wrong_label": "spans of the model that overlap only gold spans of the other label",
    "not_located": "quotes of the model that are not in the response",
    "unparsable": "answers that are unusable, or do not parse without guided decoding",
}


class ServedModel(Protocol):
    """A reward model that answers with guided decoding, as in policy training, and without."""

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback: ...

    async def judge_unguided(self, prompt: Prompt, response_text: str) -> SpanFeedback: ...


@dataclass(frozen=True, kw_only=True)
class JudgedRecord:
    """A held-out record and the reward model's feedback on it."""

    response: str
    gold: SpanFeedback
    feedback: SpanFeedback  # of the model, with guided decoding
    parsed: bool  # whether the answer *without* guided decoding parses
    gold_labels: np.ndarray  # [R], labels of the tokens of `response`: +1 good, -1 poor, 0 neutral
    labels: np.ndarray  # [R], of the model; all 0 if its feedback is unusable


async def judge_records(
    model: ServedModel, records: Sequence[AnnotatedRecord], tokenizer: Any, on_record: Callable[[], None]
) -> list[JudgedRecord]:
    """Judge all records, in order.

    Each record is judged twice: with guided decoding for the spans, and without it for the parse rate, which guided
    decoding would make 1.

    Args:
        tokenizer: Spans are compared on its tokens.
        on_record: Called after each record.
    """

    async def judge(record: AnnotatedRecord) -> JudgedRecord:
        prompt, response = record.to_prompt(), record.response
        guided, unguided = await asyncio.gather(model.judge(prompt, response), model.judge_unguided(prompt, response))
        on_record()
        return judged_record(response, record.to_feedback(), guided, unguided, tokenizer)

    return list(await asyncio.gather(*(judge(record) for record in records)))


def judged_record(
    response_text: str, gold: SpanFeedback, guided: SpanFeedback, unguided: SpanFeedback, tokenizer: Any
) -> JudgedRecord:
    """Project the gold and predicted spans of a response on `tokenizer`'s tokens of its text.

    Character ranges are the fast tokenizer's offset mapping, which is right for tokenizers that normalise, too.
    """
    encoded = tokenizer(response_text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.asarray(encoded["offset_mapping"], np.int32).reshape(-1, 2)
    return JudgedRecord(
        response=response_text,
        gold=gold,
        feedback=guided,
        parsed=unguided.usable,
        gold_labels=token_rewards(offsets, gold.spans, text=response_text),
        labels=token_rewards(offsets, guided.spans, text=response_text),
    )


# ------------------------------------------------------------------------------------------------------------- metrics
def reward_metrics(records: Sequence[JudgedRecord]) -> dict[str, float]:
    """Return the content of reward.json: the ratios of `_ratios`, {good,poor}_{tokens,spans} and num_records.

    {good,poor}_{tokens,spans} count gold tokens and gold spans: a ratio over few of them is unreliable. Counts are
    floats.
    """
    columns = _columns(records)
    totals = {name: column.sum() for name, column in columns.items()}
    metrics = {name: float(value) for name, value in _ratios(totals).items() if not np.isnan(value)}
    for name in LABELS:
        metrics[f"{name}_tokens"] = float(sum(totals[name, predicted] for predicted in CLASSES))
        metrics[f"{name}_spans"] = float(totals[name, "gold spans"])
    return metrics | {"num_records": float(len(records))}


def parse_warning(metrics: Mapping[str, float]) -> str | None:
    """Return a warning if no answer of the reward model is usable or parses, given its `reward_metrics`."""
    rates = {"usable_rate": "could be used", "parse_rate": "parses without guided decoding"}
    failure = next((text for rate, text in rates.items() if metrics[rate] == 0), None)
    return failure and f"None of the reward model's {metrics['num_records']:g} answers {failure}: check task and style."


def arm_metrics(judged: Sequence[JudgedRecord], sparse: Sequence[SpanFeedback], tokenizer: Any) -> dict[str, float]:
    """Return `reward_metrics` of the judged records, labelled_share and decisive_* metrics.

    labelled_share is the share of the held-out tokens with a gold label. decisive_* are token metrics on the tokens
    that `sparse` labels good or poor: models of all feedback styles can be compared on them.

    Args:
        sparse: Gold feedback of the sparse style on the same responses.
    """
    decisive = []
    for record, gold in zip(judged, sparse, strict=True):
        relabelled = judged_record(record.response, gold, record.feedback, record.feedback, tokenizer)
        is_decisive = relabelled.gold_labels != 0
        labels, gold_labels = relabelled.labels[is_decisive], relabelled.gold_labels[is_decisive]
        decisive.append(replace(relabelled, gold_labels=gold_labels, labels=labels))
    on_decisive = reward_metrics(decisive)
    labelled = np.concatenate([record.gold_labels for record in judged]) != 0
    ratios = [f"{label}_{ratio}" for label in LABELS for ratio in ("precision", "recall", "f1")]
    return (
        reward_metrics(judged)
        | {"labelled_share": float(labelled.mean())}
        | {f"decisive_{name}": on_decisive[name] for name in ratios}
    )


def bootstrap_intervals(records: Sequence[JudgedRecord], *, seed: int) -> dict[str, tuple[float, float]]:
    """Return the 95 % interval of every ratio in `reward_metrics`: percentiles over bootstrap resamples of the records.

    A resample is represented by how often each record was drawn, so that its totals are one matrix product with the
    counts by record (Efron, "Bootstrap methods", Annals of Statistics 1979, section 2).
    """
    columns = _columns(records)
    draws = np.random.default_rng(seed).multinomial(len(records), [1 / len(records)] * len(records), NUM_RESAMPLES)
    ratios = _ratios({name: draws @ column for name, column in columns.items()})
    defined = {name: values[~np.isnan(values)] for name, values in ratios.items()}
    bounds = {name: np.percentile(values, [2.5, 97.5]) for name, values in defined.items() if len(values)}
    return {name: (float(low), float(high)) for name, (low, high) in bounds.items()}


def token_confusion(records: Sequence[JudgedRecord]) -> dict[str, dict[str, int]]:
    """Return the numbers of tokens by gold class (outer) and predicted class (inner)."""
    columns = _columns(records)
    return {gold: {predicted: int(columns[gold, predicted].sum()) for predicted in CLASSES} for gold in CLASSES}


Columns = Mapping[tuple[str, str], Any]  # name of a count -> its total, its values by record [N] or by resample [B]


def _columns(records: Sequence[JudgedRecord]) -> dict[tuple[str, str], np.ndarray]:
    """Return every count that a ratio needs, by record, [N] float64."""
    if not records:
        raise ValueError("there is no record to measure a reward model on")
    rows = [_counts(record) for record in records]
    return {name: np.array([row[name] for row in rows], np.float64) for name in rows[0]}


def _counts(record: JudgedRecord) -> dict[tuple[str, str], float]:
    """Count one record: (gold class, predicted class) -> tokens, (label, ...) -> spans, ("all", ...) -> the rest."""
    gold, predicted = np.sign(record.gold_labels), np.sign(record.labels)
    counts: dict[tuple[str, str], float] = {
        (a, b): float(((gold == CLASSES[a]) & (predicted == CLASSES[b])).sum()) for a, b in product(CLASSES, CLASSES)
    }
    for name, label in LABELS.items():
        gold_ranges, ranges = _ranges(record.gold, label), _ranges(record.feedback, label)
        counts[name, "gold spans"], counts[name, "spans"] = len(gold_ranges), len(ranges)
        counts[name, "exact"] = len(set(gold_ranges) & set(ranges))
        counts[name, "overlapping"] = num_overlapping(gold_ranges, ranges, record.response)
    counts["all", "quotes"], counts["all", "located"] = record.feedback.num_quotes, record.feedback.num_located
    counts["all", "parse"], counts["all", "usable"] = record.parsed, record.feedback.usable
    counts["all", "records"] = 1
    agreement = record.gold.agreement
    counts["all", "voted"], counts["all", "agreement"] = agreement is not None, agreement or 0.0
    return counts


def _ratios(counts: Columns) -> dict[str, np.ndarray]:
    """Return {precision, recall, f1} over tokens and {span_exact_f1, span_overlap_f1} of each label, kappa and rates.

    span_*_f1 = 2 pairs / (gold spans + predicted spans); pairs of equal ranges, or pairs of `num_overlapping`.
    kappa (Cohen 1960) = (p - e) / (1 - e) over the token classes good, poor and neutral; p: share of tokens on which
    gold and model agree, e: share expected by chance.
    located_rate: share of the quotes; parse_rate: share of the answers without guided decoding; usable_rate: share of
    the answers with it; agreement: mean agreement of the gold annotators, NaN if no record has several.

        gold + + 0 -, predicted + 0 + -: good precision, recall and f1 1/2; p 1/2, e (2*2 + 1*1 + 1*1) / 16, kappa 0.2
        gold spans [0, 5) [6, 9), predicted [0, 5) [5, 20): exact 2 * 1 / 4, overlap 2 * 2 / 4
    """
    gold = {name: sum(counts[name, predicted] for predicted in CLASSES) for name in CLASSES}
    predicted = {name: sum(counts[gold_name, name] for gold_name in CLASSES) for name in CLASSES}
    ratios = {}
    for name in LABELS:
        hits, spans = counts[name, name], counts[name, "gold spans"] + counts[name, "spans"]
        ratios[f"{name}_precision"] = _ratio(hits, predicted[name])
        ratios[f"{name}_recall"] = _ratio(hits, gold[name])
        ratios[f"{name}_f1"] = _ratio(2 * hits, gold[name] + predicted[name])
        ratios[f"{name}_span_exact_f1"] = _ratio(2 * counts[name, "exact"], spans)
        ratios[f"{name}_span_overlap_f1"] = _ratio(2 * counts[name, "overlapping"], spans)
    tokens = sum(gold.values())
    # p, e and 1, each times the squared number of tokens: integers, without rounding
    agreement = tokens * sum(counts[name, name] for name in CLASSES)
    by_chance = sum(gold[name] * predicted[name] for name in CLASSES)
    ratios["kappa"] = _ratio(agreement - by_chance, tokens * tokens - by_chance)
    ratios["located_rate"] = _ratio(counts["all", "located"], counts["all", "quotes"])
    ratios |= {f"{part}_rate": _ratio(counts["all", part], counts["all", "records"]) for part in ("parse", "usable")}
    ratios["agreement"] = _ratio(counts["all", "agreement"], counts["all", "voted"], empty=np.nan)
    return ratios


def _ratio(part: Any, total: Any, *, empty: float = 0.0) -> np.ndarray:
    """Return part / total, or `empty` where total is 0."""
    return np.divide(part, total, out=np.full(np.shape(total), empty), where=np.asarray(total) != 0)


def _ranges(feedback: SpanFeedback, label: int) -> list[tuple[int, int]]:
    """Return the ranges of the spans of one label, each once, in the order of their ends."""
    ranges = {(span.start, span.end) for span in feedback.spans if span.label == label}
    return sorted(ranges, key=lambda r: (r[1], r[0]))


def num_overlapping(gold: Sequence[tuple[int, int]], predicted: Sequence[tuple[int, int]], text: str) -> int:
    """Count pairs of a gold and a predicted range that share a non-blank character of `text`, no range in two pairs.

    Greedy matching in the order of the ends: the first two ranges that overlap are a pair, else the range that ends
    first is skipped. The number is maximal if the ranges of each side do not overlap each other.

        "so good so bad": gold (3, 7) (11, 14), predicted (0, 14): 1; predicted (0, 7) (8, 14): 2
    """
    pairs = i = j = 0
    while i < len(gold) and j < len(predicted):
        if _overlap(gold[i], predicted[j], text):
            pairs, i, j = pairs + 1, i + 1, j + 1
        elif gold[i][1] <= predicted[j][1]:
            i += 1
        else:
            j += 1
    return pairs


def _overlap(a: tuple[int, int], b: tuple[int, int], text: str) -> bool:
    return bool(text[max(a[0], b[0]) : min(a[1], b[1])].strip())


# -------------------------------------------------------------------------------------------------------------- errors
@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of one kind: their number, the records with such an error, and examples spread evenly over these."""

    count: int
    num_records: int
    examples: list[tuple[int, list[str]]]  # index of the judged record; texts of the spans, or a sentence


def find_errors(records: Sequence[JudgedRecord], *, examples_per_kind: int = EXAMPLES_PER_KIND) -> dict[str, Errors]:
    """Return the errors by kind, for all ERROR_KINDS in that order."""
    by_record = [_errors_of(record) for record in records]
    errors = {}
    for kind in ERROR_KINDS:
        found = [(index, *kinds[kind]) for index, kinds in enumerate(by_record) if kind in kinds]
        num = min(examples_per_kind, len(found))
        examples = [(index, texts) for index, _, texts in (found[i * len(found) // num] for i in range(num))]
        errors[kind] = Errors(count=sum(n for _, n, _ in found), num_records=len(found), examples=examples)
    return errors


def _errors_of(record: JudgedRecord) -> dict[str, tuple[int, list[str]]]:
    """Return kind -> (number, texts). An unusable answer is one error: its gold spans do not count as missed."""
    feedback, text = record.feedback, record.response
    if not feedback.usable:
        return {"unparsable": (1, [f"{feedback.status}: {feedback.reason or 'no reason is known'}"])}
    wrong: dict[str, list[str]] = {}
    for span in record.gold.spans:
        if not _overlapping_labels(span, feedback, text):
            wrong.setdefault(f"missed_{_name(span)}", []).append(text[span.start : span.end])
    for span in feedback.spans:
        labels = _overlapping_labels(span, record.gold, text)
        if span.label not in labels:
            kind = "wrong_label" if labels else f"invented_{_name(span)}"
            wrong.setdefault(kind, []).append(text[span.start : span.end])
    errors = {kind: (len(quotes), quotes) for kind, quotes in wrong.items()}
    missing = feedback.num_quotes - feedback.num_located
    if missing:
        errors["not_located"] = (missing, [f"{missing} of {feedback.num_quotes} quotes are not in the response"])
    if not record.parsed:
        errors["unparsable"] = (1, ["without guided decoding the answer is not JSON of the requested schema"])
    return errors


def _overlapping_labels(span: Span, feedback: SpanFeedback, text: str) -> set[int]:
    return {s.label for s in feedback.spans if _overlap((span.start, span.end), (s.start, s.end), text)}


def _name(span: Span) -> str:
    return "good" if span.label == 1 else "poor"
