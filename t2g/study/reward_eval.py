"""Evaluate a span reward model on held-out records: metrics with intervals, and examples of errors.

Gold and predicted spans are projected on the same tokens, and counts are summed over all records (micro average). A
ratio whose denominator is 0 is 0, so that a model without spans scores 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np

from t2g.concurrency import gather_all
from t2g.feedback.records import AnnotatedRecord
from t2g.feedback.rewards import token_rewards
from t2g.feedback.sources.votes import kappa_of_counts
from t2g.study.paired import Draws, bootstrap_interval
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
    "unparsable": "answers that are unusable, or are missing or do not parse without guided decoding",
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
    feedback: SpanFeedback  # feedback of the model, with guided decoding
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
        prompt = record.to_prompt()
        response = record.response
        works = [model.judge(prompt, response), model.judge_unguided(prompt, response)]
        guided, unguided = await gather_all(works)
        on_record()
        return judged_record(response, record.to_feedback(), guided, unguided, tokenizer)

    return await gather_all(map(judge, records))


def judged_record(
    response_text: str, gold: SpanFeedback, guided: SpanFeedback, unguided: SpanFeedback, tokenizer: Any
) -> JudgedRecord:
    """Project the gold and predicted spans of a response on `tokenizer`'s tokens of its text.

    Character ranges are the fast tokenizer's offset mapping, which is right for tokenizers that normalize, too.
    """
    encoded = tokenizer(response_text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.asarray(encoded["offset_mapping"], np.int32).reshape(-1, 2)
    return JudgedRecord(
        response=response_text,
        gold=gold,
        feedback=guided,
        parsed=unguided.usable or unguided.num_quotes > 0,  # quotes may be lost
        gold_labels=token_rewards(offsets, gold.spans, text=response_text),
        labels=token_rewards(offsets, guided.spans, text=response_text),
    )


# ------------------------------------------------------------------------------------------------------------- metrics
def reward_metrics(records: Sequence[JudgedRecord]) -> dict[str, float]:
    """Return the content of reward.json: the ratios of `_ratios`, {good,poor}_{tokens,spans} and num_records.

    {good,poor}_{tokens,spans} count gold tokens and gold spans: a ratio over few of them is unreliable. Counts are
    floats.
    """
    totals = {name: column.sum() for name, column in _columns(records).items()}
    metrics: dict[str, float] = {}
    for name, value in _ratios(totals).items():
        if not np.isnan(value):
            metrics[name] = float(value)
    for label in LABELS:
        num_tokens = sum(totals[label, predicted] for predicted in CLASSES)
        metrics[f"{label}_tokens"] = float(num_tokens)
        metrics[f"{label}_spans"] = float(totals[label, "gold spans"])
    metrics["num_records"] = float(len(records))
    return metrics


def parse_warning(metrics: Mapping[str, float]) -> str | None:
    """Return a warning if no answer of the reward model is usable or parses, given its `reward_metrics`."""
    rates = {"usable_rate": "could be used", "parse_rate": "parses without guided decoding"}
    failures = [text for rate, text in rates.items() if metrics[rate] == 0]
    if not failures:
        return None
    num_answers = f"{metrics['num_records']:g}"
    return f"None of the reward model's {num_answers} answers {failures[0]}: check task and style."


def measure_method(judged: Sequence[JudgedRecord], sparse: Sequence[SpanFeedback], tokenizer: Any) -> dict[str, float]:
    """Return `reward_metrics` of the judged records, labelled_share and decisive_* metrics.

    labelled_share is the share of the held-out tokens with a gold label. decisive_* are token metrics on the tokens
    that `sparse` labels good or poor: models of all feedback styles can be compared on them.

    Args:
        sparse: Gold feedback of the sparse style on the same responses.
    """
    decisive: list[JudgedRecord] = []
    for record, gold in zip(judged, sparse, strict=True):
        relabelled = judged_record(record.response, gold, record.feedback, record.feedback, tokenizer)
        is_decisive = relabelled.gold_labels != 0
        on_decisive_tokens = replace(
            relabelled,
            gold_labels=relabelled.gold_labels[is_decisive],
            labels=relabelled.labels[is_decisive],
        )
        decisive.append(on_decisive_tokens)
    decisive_metrics = reward_metrics(decisive)
    is_labelled = np.concatenate([record.gold_labels for record in judged]) != 0

    metrics = reward_metrics(judged)
    metrics["labelled_share"] = float(is_labelled.mean())
    for label in LABELS:
        for ratio in ("precision", "recall", "f1"):
            name = f"{label}_{ratio}"
            metrics[f"decisive_{name}"] = decisive_metrics[name]
    return metrics


def bootstrap_intervals(
    records: Sequence[JudgedRecord], prompt_ids: Sequence[str], *, seed: int
) -> dict[str, tuple[float, float]]:
    """Return the 95 % interval of every ratio in `reward_metrics`: percentiles over bootstrap resamples of the prompts.

    Ratios that a resample does not define are left out, and so are all of a single prompt.

    Args:
        prompt_ids: The prompt of each record. Records of one prompt are alike, so that they are resampled together.
    """
    unique_ids, prompt_index = np.unique(prompt_ids, return_inverse=True)
    num_prompts = len(unique_ids)
    if num_prompts < 2:
        return {}
    draws = Draws(num_prompts, seed=seed, num_draws=NUM_RESAMPLES)
    totals: dict[tuple[str, str], np.ndarray] = {}
    for name, column in _columns(records).items():
        sums = np.bincount(prompt_index, weights=column)
        totals[name] = draws.sum_resamples(sums)
    intervals: dict[str, tuple[float, float]] = {}
    for name, values in _ratios(totals).items():
        defined = values[~np.isnan(values)]
        if len(defined):
            low, high = bootstrap_interval(defined, num_prompts)
            intervals[name] = (float(low), float(high))
    return intervals


def token_confusion(records: Sequence[JudgedRecord]) -> dict[str, dict[str, int]]:
    """Return the numbers of tokens by gold class (outer) and predicted class (inner)."""
    columns = _columns(records)
    confusion: dict[str, dict[str, int]] = {}
    for gold in CLASSES:
        confusion[gold] = {predicted: int(columns[gold, predicted].sum()) for predicted in CLASSES}
    return confusion


Columns = Mapping[tuple[str, str], Any]  # name of a count -> its total, its values by record [N] or by resample [B]


def _columns(records: Sequence[JudgedRecord]) -> dict[tuple[str, str], np.ndarray]:
    """Return every count that a ratio needs, by record, [N] float64."""
    if not records:
        raise ValueError("there is no record to measure a reward model on")
    rows = [_counts(record) for record in records]
    columns: dict[tuple[str, str], np.ndarray] = {}
    for name in rows[0]:
        columns[name] = np.array([row[name] for row in rows], np.float64)
    return columns


def _counts(record: JudgedRecord) -> dict[tuple[str, str], float]:
    """Count one record: (gold class, predicted class) -> tokens, (label, ...) -> spans, ("all", ...) -> the rest."""
    counts: dict[tuple[str, str], float] = {}
    gold = np.sign(record.gold_labels)
    predicted = np.sign(record.labels)
    for (gold_class, gold_sign), (predicted_class, predicted_sign) in product(CLASSES.items(), CLASSES.items()):
        is_pair = (gold == gold_sign) & (predicted == predicted_sign)
        counts[gold_class, predicted_class] = float(is_pair.sum())
    for name, label in LABELS.items():
        gold_ranges = _ranges(record.gold, label)
        ranges = _ranges(record.feedback, label)
        counts[name, "gold spans"] = len(gold_ranges)
        counts[name, "spans"] = len(ranges)
        counts[name, "exact"] = len(set(gold_ranges) & set(ranges))
        counts[name, "overlapping"] = count_overlapping(gold_ranges, ranges, record.response)
    counts["all", "quotes"] = record.feedback.num_quotes
    counts["all", "located"] = record.feedback.num_located
    counts["all", "parse"] = record.parsed
    counts["all", "usable"] = record.feedback.usable
    counts["all", "records"] = 1
    agreement = record.gold.agreement
    counts["all", "voted"] = agreement is not None
    counts["all", "agreement"] = agreement or 0.0
    return counts


def _ratios(counts: Columns) -> dict[str, np.ndarray]:
    """Return {precision, recall, f1} over tokens and {span_exact_f1, span_overlap_f1} of each label, kappa and rates.

    span_*_f1 = 2 pairs / (gold spans + predicted spans); pairs of equal ranges, or pairs of `count_overlapping`.
    kappa (Cohen 1960) = (p - e) / (1 - e) over the token classes good, poor and neutral; p: share of tokens on which
    gold and model agree, e: share expected by chance.
    located_rate: share of the quotes; parse_rate: share of the answers without guided decoding; usable_rate: share of
    the answers with it; agreement: mean agreement of the gold annotators, NaN if no record has several.

        gold + + 0 -, predicted + 0 + -: good precision, recall and f1 1/2; p 1/2, e (2*2 + 1*1 + 1*1) / 16, kappa 0.2
        gold spans [0, 5) [6, 9), predicted [0, 5) [5, 20): exact 2 * 1 / 4, overlap 2 * 2 / 4
    """
    gold: dict[str, Any] = {}
    predicted: dict[str, Any] = {}
    for name in CLASSES:
        gold[name] = sum(counts[name, other] for other in CLASSES)
        predicted[name] = sum(counts[other, name] for other in CLASSES)
    ratios: dict[str, np.ndarray] = {}
    for name in LABELS:
        hits = counts[name, name]
        ratios[f"{name}_precision"] = _ratio(hits, predicted[name])
        ratios[f"{name}_recall"] = _ratio(hits, gold[name])
        ratios[f"{name}_f1"] = _ratio(2 * hits, gold[name] + predicted[name])
        ratios |= _span_ratios(counts, name)
    num_same = sum(counts[name, name] for name in CLASSES)
    kappa = kappa_of_counts(num_same, [(gold[name], predicted[name]) for name in CLASSES])
    ratios["kappa"] = np.nan_to_num(kappa, nan=0.0)
    ratios["located_rate"] = _ratio(counts["all", "located"], counts["all", "quotes"])
    ratios["parse_rate"] = _ratio(counts["all", "parse"], counts["all", "records"])
    ratios["usable_rate"] = _ratio(counts["all", "usable"], counts["all", "records"])
    ratios["agreement"] = _ratio(counts["all", "agreement"], counts["all", "voted"], empty=np.nan)
    return ratios


def _span_ratios(counts: Columns, label: str) -> dict[str, np.ndarray]:
    """Return the span_*_f1 of a label."""
    spans = counts[label, "gold spans"] + counts[label, "spans"]
    exact = _ratio(2 * counts[label, "exact"], spans)
    overlapping = _ratio(2 * counts[label, "overlapping"], spans)
    return {f"{label}_span_exact_f1": exact, f"{label}_span_overlap_f1": overlapping}


def _ratio(part: Any, total: Any, *, empty: float = 0.0) -> np.ndarray:
    """Return part / total, or `empty` where total is 0."""
    quotients = np.full(np.shape(total), empty)
    return np.divide(part, total, out=quotients, where=np.asarray(total) != 0)


def _ranges(feedback: SpanFeedback, label: int) -> list[tuple[int, int]]:
    """Return the ranges of the spans of one label, each once, in the order of their ends."""
    ranges = {(span.start, span.end) for span in feedback.spans if span.label == label}
    return sorted(ranges, key=lambda ends: (ends[1], ends[0]))


def count_overlapping(gold: Sequence[tuple[int, int]], predicted: Sequence[tuple[int, int]], text: str) -> int:
    """Count pairs of a gold and a predicted range that share a non-blank character of `text`, no range in two pairs.

    Greedy matching in the order of the ends: the first two ranges that overlap are a pair, else the range that ends
    first is skipped. The number is maximal if the ranges of each side do not overlap each other.

        "so good so bad": gold (3, 7) (11, 14), predicted (0, 14): 1; predicted (0, 7) (8, 14): 2
    """
    num_pairs = 0
    gold_index = 0
    index = 0
    while gold_index < len(gold) and index < len(predicted):
        if _overlap(gold[gold_index], predicted[index], text):
            num_pairs += 1
            gold_index += 1
            index += 1
        elif gold[gold_index][1] <= predicted[index][1]:
            gold_index += 1
        else:
            index += 1
    return num_pairs


def _overlap(first: tuple[int, int], second: tuple[int, int], text: str) -> bool:
    start = max(first[0], second[0])
    end = min(first[1], second[1])
    return bool(text[start:end].strip())


# -------------------------------------------------------------------------------------------------------------- errors
@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of one kind: their number, the records with such an error, and examples spread evenly over these."""

    count: int
    num_records: int
    examples: list[tuple[int, list[str]]]  # index of the judged record; texts of the spans, or a sentence


def find_errors(records: Sequence[JudgedRecord]) -> dict[str, Errors]:
    """Return the errors by kind, for all ERROR_KINDS in that order, each with at most EXAMPLES_PER_KIND examples."""
    by_record = [_errors_of(record) for record in records]
    errors: dict[str, Errors] = {}
    for kind in ERROR_KINDS:
        count = 0
        indices: list[int] = []  # indices of the records with such an error
        for index, errors_of_record in enumerate(by_record):
            if kind in errors_of_record:
                indices.append(index)
                count += errors_of_record[kind].count
        num_examples = min(EXAMPLES_PER_KIND, len(indices))
        examples: list[tuple[int, list[str]]] = []
        for number in range(num_examples):
            index = indices[number * len(indices) // num_examples]
            examples.append((index, by_record[index][kind].texts))
        errors[kind] = Errors(count=count, num_records=len(indices), examples=examples)
    return errors


class RecordErrors(NamedTuple):
    """The errors of one kind in one record."""

    count: int
    texts: list[str]  # texts of the spans, or a sentence


def _errors_of(record: JudgedRecord) -> dict[str, RecordErrors]:
    """Return the errors by kind. An unusable answer is one error: its gold spans do not count as missed."""
    feedback = record.feedback
    text = record.response
    if not feedback.usable:
        reason = feedback.reason or "no reason is known"
        return {"unparsable": RecordErrors(1, [f"{feedback.status}: {reason}"])}
    wrong: dict[str, list[str]] = {}
    for span in record.gold.spans:
        if not _overlapping_labels(span, feedback, text):
            kind = f"missed_{_name(span)}"
            quote = text[span.start : span.end]
            wrong.setdefault(kind, []).append(quote)
    for span in feedback.spans:
        labels = _overlapping_labels(span, record.gold, text)
        if span.label not in labels:
            kind = "wrong_label" if labels else f"invented_{_name(span)}"
            quote = text[span.start : span.end]
            wrong.setdefault(kind, []).append(quote)
    errors = {kind: RecordErrors(len(quotes), quotes) for kind, quotes in wrong.items()}
    missing = feedback.num_quotes - feedback.num_located
    if missing:
        sentence = f"{missing} of {feedback.num_quotes} quotes are not in the response"
        errors["not_located"] = RecordErrors(missing, [sentence])
    if not record.parsed:
        sentence = "without guided decoding there is no answer, or it is not JSON of the requested schema"
        errors["unparsable"] = RecordErrors(1, [sentence])
    return errors


def _overlapping_labels(span: Span, feedback: SpanFeedback, text: str) -> set[int]:
    labels: set[int] = set()
    for other in feedback.spans:
        if _overlap((span.start, span.end), (other.start, other.end), text):
            labels.add(other.label)
    return labels


def _name(span: Span) -> str:
    return "good" if span.label == 1 else "poor"
