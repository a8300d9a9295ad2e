"""How good is a span reward model? Its labels against those of held-out records, with intervals and examples of errors.

Gold and predicted spans are projected on the same tokens, counts are summed over all records (micro average), and a
ratio whose denominator is 0 is 0: a model that marks nothing earns nothing.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from t2g.feedback.records import AnnotatedRecord
from t2g.feedback.rewards import token_rewards
from t2g.types import LABELS, Prompt, Span, SpanFeedback

CLASSES = LABELS | {"neutral": 0}
NUM_RESAMPLES = 1000
EXAMPLES_PER_KIND = 6
ERROR_KINDS = {
    "missed_good": "gold good spans where the model marks nothing",
    "missed_poor": "gold poor spans where the model marks nothing",
    "invented_good": "good spans of the model where nothing is marked",
    "invented_poor": "poor spans of the model where nothing is marked",
    "wrong_label": "spans of the model that only touch gold spans of the other label",
    "not_located": "quotes of the model that do not stand in the response",
    "unparsable": "answers that could not be used, or not without guided decoding",
}


class ServedModel(Protocol):
    """A reward model that answers with guided decoding, as in training of the policy, and without."""

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback: ...

    async def judge_unguided(self, prompt: Prompt, response_text: str) -> SpanFeedback: ...


@dataclass(frozen=True, kw_only=True)
class JudgedRecord:
    """One held-out record and what the reward model made of it."""

    response: str
    gold: SpanFeedback
    feedback: SpanFeedback  # the model's, as it is served: with guided decoding
    parsed: bool  # whether the answer given *without* guided decoding parses
    gold_labels: np.ndarray  # [R], labels of the tokens of `response`: +1 good, -1 poor, 0 neutral
    labels: np.ndarray  # [R], the model's; all 0 when its answer could not be used


async def judge_records(
    model: ServedModel, records: Sequence[AnnotatedRecord], tokenizer: Any, on_record: Callable[[], None]
) -> list[JudgedRecord]:
    """Every record judged, in order; `on_record` is called after each. Spans are compared on `tokenizer`'s tokens.

    Each is asked twice: guided for the spans, and free for the parse rate, which guiding would make 1.
    """

    async def one(record: AnnotatedRecord) -> JudgedRecord:
        prompt, response = record.to_prompt(), record.response
        guided, free = await asyncio.gather(model.judge(prompt, response), model.judge_unguided(prompt, response))
        on_record()
        return judged_record(response, record.to_feedback(), guided, free, tokenizer)

    return list(await asyncio.gather(*(one(record) for record in records)))


def judged_record(
    response_text: str, gold: SpanFeedback, guided: SpanFeedback, unguided: SpanFeedback, tokenizer: Any
) -> JudgedRecord:
    """Gold and predicted spans of one response as labels of `tokenizer`'s tokens of its text.

    Characters come from the fast tokenizer's offset mapping, which holds for tokenizers that normalise, too.
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
    """The content of reward.json: the ratios of `_ratios`, the sizes {good,poor}_{tokens,spans} and num_records.

    Sizes count gold tokens and gold spans of the label: a ratio over few of them means little. Counts are floats.
    """
    columns = _columns(records)
    totals = {name: column.sum() for name, column in columns.items()}
    metrics = {name: float(value) for name, value in _ratios(totals).items() if not np.isnan(value)}
    for name in LABELS:
        metrics[f"{name}_tokens"] = float(sum(totals[name, other] for other in CLASSES))
        metrics[f"{name}_spans"] = float(totals[name, "gold spans"])
    return metrics | {"num_records": float(len(records))}


def parse_warning(metrics: Mapping[str, float]) -> str | None:
    """Return a sentence if no answer of the reward model parses. metrics: see `reward_metrics`."""
    rates = {"usable_rate": "could be used", "parse_rate": "parses without guided decoding"}
    failed = next((what for rate, what in rates.items() if metrics[rate] == 0), None)
    return failed and f"None of the reward model's {metrics['num_records']:g} answers {failed}: check task and style."


def arm_metrics(judged: Sequence[JudgedRecord], sparse: Sequence[SpanFeedback], tokenizer: Any) -> dict[str, float]:
    """`reward_metrics` of the judged records, their labelled_share (of the held-out tokens, those with a gold label),
    and ratios of tokens as decisive_*: counted on the tokens that `sparse`, gold feedback to the same responses, calls
    good or poor, where models of all styles can be compared.
    """
    decisive = []
    for record, gold in zip(judged, sparse, strict=True):
        both = judged_record(record.response, gold, record.feedback, record.feedback, tokenizer)
        decides = both.gold_labels != 0
        decisive.append(replace(both, gold_labels=both.gold_labels[decides], labels=both.labels[decides]))
    on_decisive = reward_metrics(decisive)
    labelled = np.concatenate([record.gold_labels for record in judged]) != 0
    ratios = [f"{label}_{ratio}" for label in LABELS for ratio in ("precision", "recall", "f1")]
    return (
        reward_metrics(judged)
        | {"labelled_share": float(labelled.mean())}
        | {f"decisive_{name}": on_decisive[name] for name in ratios}
    )


def bootstrap_intervals(records: Sequence[JudgedRecord], *, seed: int) -> dict[str, tuple[float, float]]:
    """95 % interval of every ratio in `reward_metrics`: percentiles over resamples of the records, with replacement.

    A resample of N records is how often each of them was drawn, so that its totals are one product with the counts by
    record (Efron, "Bootstrap methods", Annals of Statistics 1979, section 2).
    """
    columns = _columns(records)
    draws = np.random.default_rng(seed).multinomial(len(records), [1 / len(records)] * len(records), NUM_RESAMPLES)
    ratios = _ratios({name: draws @ column for name, column in columns.items()})
    known = {name: values[~np.isnan(values)] for name, values in ratios.items()}
    bounds = {name: np.percentile(values, [2.5, 97.5]) for name, values in known.items() if len(values)}
    return {name: (float(low), float(high)) for name, (low, high) in bounds.items()}


def token_confusion(records: Sequence[JudgedRecord]) -> dict[str, dict[str, int]]:
    """Tokens by class in the gold labels (outer) and in the model's (inner)."""
    columns = _columns(records)
    return {gold: {other: int(columns[gold, other].sum()) for other in CLASSES} for gold in CLASSES}


Columns = Mapping[tuple[str, str], Any]  # a count -> its value for one record, for each ([N]) or over resamples ([B])


def _columns(records: Sequence[JudgedRecord]) -> dict[tuple[str, str], np.ndarray]:
    """Every count that a ratio needs, one entry for each record. -> [N] float64"""
    if not records:
        raise ValueError("there is no record to measure a reward model on")
    rows = [_counts(record) for record in records]
    return {name: np.array([row[name] for row in rows], np.float64) for name in rows[0]}


def _counts(record: JudgedRecord) -> dict[tuple[str, str], float]:
    """(gold class, predicted class) -> tokens; (label, ...) -> spans; ("all", ...) -> the rest."""
    gold, predicted = np.sign(record.gold_labels), np.sign(record.labels)
    counts: dict[tuple[str, str], float] = {
        (ours, theirs): float(((gold == CLASSES[ours]) & (predicted == CLASSES[theirs])).sum())
        for ours in CLASSES
        for theirs in CLASSES
    }
    for name, label in LABELS.items():
        ours, theirs = _places(record.gold, label), _places(record.feedback, label)
        counts[name, "gold spans"], counts[name, "spans"] = len(ours), len(theirs)
        counts[name, "exact"] = len(set(ours) & set(theirs))
        counts[name, "overlapping"] = num_overlapping(ours, theirs, record.response)
    counts["all", "quotes"], counts["all", "located"] = record.feedback.num_quotes, record.feedback.num_located
    counts["all", "parse"], counts["all", "usable"] = record.parsed, record.feedback.usable
    counts["all", "records"] = 1
    agreement = record.gold.agreement
    counts["all", "voted"], counts["all", "agreement"] = agreement is not None, agreement or 0.0
    return counts


def _ratios(counts: Columns) -> dict[str, np.ndarray]:
    """Of each label {precision, recall, f1} over tokens and {span_exact_f1, span_overlap_f1}; then kappa and rates.

    span_*_f1 = 2 pairs / (gold spans + predicted spans) with pairs as in `num_overlapping`, or of equal ranges.
    kappa (Cohen 1960) = (p - e) / (1 - e) over the three classes of tokens, good, poor and neutral: p the share of
    tokens on which gold and model agree, e the share on which they would by chance.
    located_rate: of the quotes; parse_rate: of the answers without guided decoding; usable_rate: of those with it;
    agreement: of the gold records' annotators, NaN where no record has several.

        gold + + 0 -, predicted + 0 + -: good precision, recall and f1 1/2; p 1/2, e (2*2 + 1*1 + 1*1) / 16, kappa 0.2
        gold spans [0, 5) [6, 9), predicted [0, 5) [5, 20): exact 2 * 1 / 4, overlap 2 * 2 / 4
    """
    gold = {name: sum(counts[name, other] for other in CLASSES) for name in CLASSES}
    predicted = {name: sum(counts[other, name] for other in CLASSES) for name in CLASSES}
    ratios = {}
    for name in LABELS:
        hits, spans = counts[name, name], counts[name, "gold spans"] + counts[name, "spans"]
        ratios[f"{name}_precision"] = _ratio(hits, predicted[name])
        ratios[f"{name}_recall"] = _ratio(hits, gold[name])
        ratios[f"{name}_f1"] = _ratio(2 * hits, gold[name] + predicted[name])
        ratios[f"{name}_span_exact_f1"] = _ratio(2 * counts[name, "exact"], spans)
        ratios[f"{name}_span_overlap_f1"] = _ratio(2 * counts[name, "overlapping"], spans)
    tokens = sum(gold.values())
    agreed = tokens * sum(counts[name, name] for name in CLASSES)  # times the tokens, as the two below
    by_chance = sum(gold[name] * predicted[name] for name in CLASSES)
    ratios["kappa"] = _ratio(agreed - by_chance, tokens * tokens - by_chance)
    ratios["located_rate"] = _ratio(counts["all", "located"], counts["all", "quotes"])
    ratios |= {f"{part}_rate": _ratio(counts["all", part], counts["all", "records"]) for part in ("parse", "usable")}
    ratios["agreement"] = _ratio(counts["all", "agreement"], counts["all", "voted"], empty=np.nan)
    return ratios


def _ratio(part: Any, whole: Any, *, empty: float = 0.0) -> np.ndarray:
    """part / whole, `empty` where whole is 0."""
    return np.divide(part, whole, out=np.full(np.shape(whole), empty), where=np.asarray(whole) != 0)


def _places(feedback: SpanFeedback, label: int) -> list[tuple[int, int]]:
    """Ranges of the spans of one label, each once, in the order of their ends."""
    places = {(span.start, span.end) for span in feedback.spans if span.label == label}
    return sorted(places, key=lambda place: (place[1], place[0]))


def num_overlapping(gold: Sequence[tuple[int, int]], predicted: Sequence[tuple[int, int]], text: str) -> int:
    """Pairs of a gold and a predicted range that share a non-blank character of `text`, no range in two pairs.

    Both are walked in the order of their ends: the first two that touch are a pair, else the one that ends first is
    left behind. Where the ranges of a side do not overlap each other there is no larger number of such pairs.

        "so good so bad": gold (3, 7) (11, 14), predicted (0, 14): 1; predicted (0, 7) (8, 14): 2
    """
    pairs = i = j = 0
    while i < len(gold) and j < len(predicted):
        if _touch(gold[i], predicted[j], text):
            pairs, i, j = pairs + 1, i + 1, j + 1
        elif gold[i][1] <= predicted[j][1]:
            i += 1
        else:
            j += 1
    return pairs


def _touch(one: tuple[int, int], other: tuple[int, int], text: str) -> bool:
    return bool(text[max(one[0], other[0]) : min(one[1], other[1])].strip())


# -------------------------------------------------------------------------------------------------------------- errors
@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of one kind: how many, in how many records, and some of these records, spread evenly over all."""

    count: int
    num_records: int
    # place among the judged records, and the spans' texts, or a sentence
    examples: list[tuple[int, list[str]]]


def find_errors(records: Sequence[JudgedRecord], *, examples_per_kind: int = EXAMPLES_PER_KIND) -> dict[str, Errors]:
    """The errors by kind, all of ERROR_KINDS in that order."""
    by_record = [_errors_of(record) for record in records]
    errors = {}
    for kind in ERROR_KINDS:
        found = [(index, *of[kind]) for index, of in enumerate(by_record) if kind in of]
        num = min(examples_per_kind, len(found))
        examples = [(index, what) for index, _, what in (found[i * len(found) // num] for i in range(num))]
        errors[kind] = Errors(count=sum(n for _, n, _ in found), num_records=len(found), examples=examples)
    return errors


def _errors_of(record: JudgedRecord) -> dict[str, tuple[int, list[str]]]:
    """Kind -> (number, what). An answer that could not be used misses nothing: it is one error, not many."""
    feedback, text = record.feedback, record.response
    if not feedback.usable:
        return {"unparsable": (1, [f"{feedback.status}: {feedback.reason or 'no reason is known'}"])}
    wrong: dict[str, list[str]] = {}
    for span in record.gold.spans:
        if not _labels_touching(span, feedback, text):
            wrong.setdefault(f"missed_{_name(span)}", []).append(text[span.start : span.end])
    for span in feedback.spans:
        labels = _labels_touching(span, record.gold, text)
        if span.label not in labels:
            kind = "wrong_label" if labels else f"invented_{_name(span)}"
            wrong.setdefault(kind, []).append(text[span.start : span.end])
    errors = {kind: (len(quotes), quotes) for kind, quotes in wrong.items()}
    lost = feedback.num_quotes - feedback.num_located
    if lost:
        errors["not_located"] = (lost, [f"{lost} of {feedback.num_quotes} quotes do not stand in the response"])
    if not record.parsed:
        errors["unparsable"] = (1, ["without guided decoding the answer is not the JSON that was asked for"])
    return errors


def _labels_touching(span: Span, feedback: SpanFeedback, text: str) -> set[int]:
    place = (span.start, span.end)
    return {other.label for other in feedback.spans if _touch(place, (other.start, other.end), text)}


def _name(span: Span) -> str:
    return "good" if span.label == 1 else "poor"
