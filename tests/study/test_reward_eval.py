"""Token and span scores of a reward model, by hand and by slow second counts."""

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2g.feedback.parse import make_failed_feedback, make_feedback, parse_answer
from t2g.feedback.records import AnnotatedRecord, read_record
from t2g.study.reward_eval import (
    ERROR_KINDS,
    JudgedRecord,
    bootstrap_intervals,
    count_overlapping,
    find_errors,
    judge_records,
    judged_record,
    parse_warning,
    reward_metrics,
    token_confusion,
)
from t2g.tasks.tiny.assets import build_tokenizer
from t2g.types import Prompt, Span, SpanFeedback

NOTHING = SpanFeedback(critique="", spans=(), status="empty", source="test", version="1")


def says(
    good: Sequence[tuple[int, int]] = (), poor: Sequence[tuple[int, int]] = (), *, agreement: float | None = None
) -> SpanFeedback:
    spans = [Span(start=a, end=b, label=1) for a, b in good] + [Span(start=a, end=b, label=-1) for a, b in poor]
    return SpanFeedback(
        critique="c", spans=tuple(spans), status="ok", source="test", version="1",
        num_quotes=len(spans), num_located=len(spans), agreement=agreement,
    )  # fmt: skip


def judged(
    gold_labels: Sequence[float] = (), labels: Sequence[float] = (), *, response: str = "x" * 20,
    gold: SpanFeedback = NOTHING, feedback: SpanFeedback = NOTHING, parsed: bool = True,
) -> JudgedRecord:  # fmt: skip
    return JudgedRecord(
        response=response, gold=gold, feedback=feedback, parsed=parsed,
        gold_labels=np.array(gold_labels, np.float32), labels=np.array(labels, np.float32),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------- tokens and rates
def test_numbers_by_hand() -> None:
    failed = make_failed_feedback("unparsable", source="test", version="1")
    first = SpanFeedback(critique="", spans=(), status="ok", source="t", version="1", num_quotes=3, num_located=3)
    second = SpanFeedback(critique="", spans=(), status="ok", source="t", version="1", num_quotes=2, num_located=1)
    first_record = judged([1, 1, 1, 0, -1, -1], [1, 1, 0, 1, -1, 0], feedback=first, gold=says(agreement=0.5))
    second_record = judged([-1, 0, 1], [-1, -1, -1], feedback=second, parsed=False)
    failed_record = judged([1, 0], [0, 0], feedback=failed, parsed=False, gold=says(agreement=1.0))
    records = [first_record, second_record, failed_record]
    metrics = reward_metrics(records)
    # good: found 2, called good wrongly 1, missed 1 + 1 + 1; poor: found 2, wrongly 2, missed 1
    # kappa: 11 tokens, 5 agree; gold 5 good 3 poor 3 none, predicted 3 good 4 poor 4 none: chance (15 + 12 + 12) / 121
    kappa = (5 / 11 - 39 / 121) / (1 - 39 / 121)
    good = {"good_precision": 2 / 3, "good_recall": 2 / 5, "good_f1": 4 / 8, "good_tokens": 5, "good_spans": 0}
    poor = {"poor_precision": 2 / 4, "poor_recall": 2 / 3, "poor_f1": 4 / 7, "poor_tokens": 3, "poor_spans": 0}
    good |= {"good_span_exact_f1": 0, "good_span_overlap_f1": 0}
    poor |= {"poor_span_exact_f1": 0, "poor_span_overlap_f1": 0}
    rates = {"located_rate": 4 / 5, "parse_rate": 1 / 3, "usable_rate": 2 / 3, "agreement": 0.75}
    expected = {**good, **poor, **rates, "kappa": kappa, "num_records": 3}
    assert metrics.keys() == expected.keys()
    assert metrics == pytest.approx(expected)
    assert token_confusion(records) == {
        "good": {"good": 2, "poor": 1, "neutral": 2},
        "poor": {"good": 0, "poor": 2, "neutral": 1},
        "neutral": {"good": 1, "poor": 1, "neutral": 1},
    }


def test_a_model_that_parses_nothing_is_named_in_a_sentence() -> None:
    failed = make_failed_feedback("unparsable", source="test", version="1")
    nothing = judged(feedback=failed, parsed=False)
    unguided = judged(parsed=False)
    assert "None of the reward model's 2 answers could be used" in str(parse_warning(reward_metrics([nothing] * 2)))
    assert "without guided decoding" in str(parse_warning(reward_metrics([nothing, unguided])))
    assert parse_warning(reward_metrics([nothing, unguided, judged()])) is None


def test_the_size_of_a_reward_does_not_matter_its_sign_does() -> None:
    assert reward_metrics([judged([2.0, -0.5], [1.0, -3.0])])["kappa"] == 1.0


def test_nothing_over_nothing_is_zero_and_no_annotators_have_no_agreement() -> None:
    metrics = reward_metrics([judged([0, 0], [0, 0])])
    assert {metrics[k] for k in ("good_precision", "poor_recall", "good_f1", "kappa", "located_rate")} == {0.0}
    assert "agreement" not in metrics
    with pytest.raises(ValueError, match="no record"):
        reward_metrics([])


def test_records_are_pooled_not_averaged() -> None:
    long = judged([1] * 9, [1] * 9)
    short = judged([1], [0])
    assert reward_metrics([long, short])["good_recall"] == pytest.approx(0.9)  # the mean of 1 and 0 would be 0.5


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([-1, 0, 1]), st.sampled_from([-1, 0, 1])), max_size=40))
def test_tokens_against_a_slow_count(tokens: list[tuple[int, int]]) -> None:
    gold = [g for g, _ in tokens]
    predicted = [p for _, p in tokens]
    metrics = reward_metrics([judged(gold[:5], predicted[:5]), judged(gold[5:], predicted[5:])])
    for name, label in (("good", 1), ("poor", -1)):
        hits = sum(g == label and p == label for g, p in tokens)
        called = predicted.count(label)
        true = gold.count(label)
        precision = hits / called if called else 0.0
        recall = hits / true if true else 0.0
        harmonic = 2 * precision * recall / (precision + recall) if hits else 0.0
        assert math.isclose(metrics[f"{name}_precision"], precision)
        assert math.isclose(metrics[f"{name}_recall"], recall)
        assert math.isclose(metrics[f"{name}_f1"], harmonic)
        assert metrics[f"{name}_tokens"] == true


# --------------------------------------------------------------------------------------------------------------- spans
def test_spans_by_hand() -> None:
    first = judged(gold=says(good=[(0, 5), (6, 9)]), feedback=says(good=[(0, 5), (5, 20)]))
    second = judged(gold=says(good=[(0, 2)], poor=[(3, 4)]), feedback=says(good=[(3, 4)], poor=[(3, 4), (6, 8)]))
    metrics = reward_metrics([first, second])
    # good: 3 gold and 3 predicted, one equal, a second one touches; another label's place is no hit
    assert metrics["good_span_exact_f1"] == pytest.approx(2 * 1 / 6)
    assert metrics["good_span_overlap_f1"] == pytest.approx(2 * 2 / 6)
    assert metrics["poor_span_exact_f1"] == metrics["poor_span_overlap_f1"] == pytest.approx(2 / 3)
    assert (metrics["good_spans"], metrics["poor_spans"]) == (3, 1)


def test_one_long_span_is_one_pair_and_a_shared_blank_is_none() -> None:
    text = "so good so bad"
    assert count_overlapping([(3, 7), (11, 14)], [(0, 14)], text) == 1
    assert count_overlapping([(3, 7), (11, 14)], [(0, 7), (8, 14)], text) == 2
    assert count_overlapping([(0, 3)], [(2, 7)], text) == 0  # character 2 is the blank
    assert count_overlapping([], [(0, 3)], text) == 0


def cut(ends: set[int], keep: list[bool]) -> list[tuple[int, int]]:
    """Ranges that do not overlap: some of the pieces between `ends`."""
    points = sorted(ends)
    return [piece for piece, is_used in zip(pairwise(points), keep, strict=False) if is_used]


ranges = st.builds(cut, st.sets(st.integers(0, 12), max_size=6), st.lists(st.booleans(), min_size=5, max_size=5))


@settings(deadline=None)
@given(ranges, ranges)
def test_no_matching_has_more_pairs(gold: list[tuple[int, int]], predicted: list[tuple[int, int]]) -> None:
    few, many = sorted((gold, predicted), key=len)

    def count_overlaps(order: tuple[tuple[int, int], ...]) -> int:
        pairs = zip(few, order, strict=False)
        return sum(max(a[0], b[0]) < min(a[1], b[1]) for a, b in pairs)

    best = max(map(count_overlaps, permutations(many, len(few))))
    assert count_overlapping(gold, predicted, "x" * 12) == count_overlapping(predicted, gold, "x" * 12) == best


# ----------------------------------------------------------------------------------------------------------- intervals
def noisy(rng: np.random.Generator, count: int) -> list[JudgedRecord]:
    return [judged(rng.integers(-1, 2, 12).tolist(), rng.integers(-1, 2, 12).tolist()) for _ in range(count)]


def intervals_of(records: list[JudgedRecord], seed: int) -> dict[str, tuple[float, float]]:
    """Return the intervals where each record has its own prompt."""
    return bootstrap_intervals(records, [str(number) for number in range(len(records))], seed=seed)


def test_records_of_one_prompt_are_resampled_together() -> None:
    """Four equal records of each prompt say no more than one."""
    once = noisy(np.random.default_rng(7), 30)
    names = [str(number) for number in range(30)]
    single = bootstrap_intervals(once, names, seed=1)
    repeated = bootstrap_intervals(once * 4, names * 4, seed=1)
    assert all(repeated[name] == pytest.approx(single[name]) for name in single)
    assert intervals_of(once * 4, seed=1)["poor_f1"][0] > repeated["poor_f1"][0] + 0.01


def test_intervals_against_a_slow_bootstrap() -> None:
    rng = np.random.default_rng(7)
    records = noisy(rng, 30)
    fast = intervals_of(records, seed=1)
    slow = []
    for _ in range(600):
        drawn = [records[i] for i in rng.integers(0, 30, 30)]
        slow.append(reward_metrics(drawn)["poor_f1"])
    assert fast["poor_f1"] == pytest.approx(tuple(np.percentile(slow, [2.5, 97.5])), abs=0.03)
    low, high = fast["poor_f1"]
    assert low < reward_metrics(records)["poor_f1"] < high


def test_the_seed_decides_the_intervals() -> None:
    records = noisy(np.random.default_rng(7), 10)
    assert intervals_of(records, seed=3) == intervals_of(records, seed=3)
    assert intervals_of(records, seed=3) != intervals_of(records, seed=4)


def test_records_that_are_all_alike_leave_no_doubt_about_any_ratio() -> None:
    alike = [judged([1, 1, -1], [1, 0, -1])] * 5
    metrics = reward_metrics(alike)
    intervals = intervals_of(alike, seed=3)
    sizes = {"good_tokens", "poor_tokens", "good_spans", "poor_spans", "num_records"}
    assert intervals.keys() == metrics.keys() - sizes
    assert all(intervals[name] == pytest.approx((metrics[name], metrics[name])) for name in intervals)


def test_agreement_is_of_the_resamples_that_have_any() -> None:
    records = [judged(gold=says(agreement=0.8)), judged(), judged()]
    assert intervals_of(records, seed=1)["agreement"] == pytest.approx((0.8, 0.8))
    assert "agreement" not in intervals_of([judged()], seed=1)


# -------------------------------------------------------------------------------------------------------------- errors
def test_every_kind_of_error_once() -> None:
    text = "aa bb cc dd ee"
    gold = says(good=[(0, 2), (3, 5)], poor=[(6, 8)])
    model = says(good=[(0, 2), (6, 8), (9, 11)], poor=[(12, 14)])
    lossy = SpanFeedback(
        critique="", spans=gold.spans, status="ok", source="test", version="1", num_quotes=5, num_located=3
    )
    broken = SpanFeedback(critique="", spans=(), status="failed", source="test", version="1", reason="it was late")
    missing = says(good=[(0, 2), (3, 5)])
    record_of = partial(judged, response=text, gold=gold)
    records = [
        record_of(feedback=model),
        record_of(feedback=lossy, parsed=False),
        record_of(feedback=broken, parsed=False),
        record_of(feedback=missing),
        record_of(feedback=gold),
    ]
    errors = find_errors(records)
    assert list(errors) == list(ERROR_KINDS)
    examples_by_kind = {kind: (e.count, e.examples) for kind, e in errors.items()}
    expected = {
        "missed_good": (1, [(0, ["bb"])]),
        "missed_poor": (1, [(3, ["cc"])]),
        "invented_good": (1, [(0, ["dd"])]),
        "invented_poor": (1, [(0, ["ee"])]),
        "wrong_label": (1, [(0, ["cc"])]),
        "not_located": (2, [(1, ["2 of 5 quotes are not in the response"])]),
        "unparsable": (
            2,
            [
                (1, ["without guided decoding there is no answer, or it is not JSON of the requested schema"]),
                (2, ["failed: it was late"]),  # and nothing of it counts as missed
            ],
        ),
    }
    assert examples_by_kind == expected


def test_examples_are_few_and_from_everywhere() -> None:
    records = [judged(gold=says(poor=[(0, 1), (2, 3)])) for _ in range(10)]
    errors = find_errors(records)["missed_poor"]
    assert (errors.count, errors.num_records) == (20, 10)
    assert [index for index, _ in errors.examples] == [0, 1, 3, 5, 6, 8]
    assert find_errors(records)["missed_good"].examples == []


# ------------------------------------------------------------------------------------------------------------- judging
def test_feedback_becomes_labels_of_the_tokenizers_tokens(tmp_path: Path) -> None:
    """Bytes only, so that "Zoë, 3" is Z | o | C3 | AB | , | blank | 3: the split character is two tokens."""
    tokenizer = build_tokenizer(tmp_path, ["x"], vocab_size=261)

    def quotes(good: list[str], poor: list[str]) -> SpanFeedback:
        return make_feedback("...", good, poor, "Zoë, 3", source="test", version="1")

    failed = make_failed_feedback("unparsable", source="test", version="1")
    record = judged_record("Zoë, 3", quotes(["Zoë"], ["3"]), quotes(["oë", "Ann"], [", 3"]), failed, tokenizer)
    assert record.gold_labels.tolist() == [1, 1, 1, 1, 0, 0, -1]
    assert record.labels.tolist() == [0, 1, 1, 1, -1, 0, -1]
    assert (record.feedback.num_quotes, record.feedback.num_located, record.parsed) == (3, 2, False)

    lost = judged_record("Zoë, 3", quotes(["Zoë"], []), failed, quotes([], []), tokenizer)
    assert lost.labels.tolist() == [0] * 7
    assert lost.parsed
    assert len(judged_record("", quotes([], []), failed, failed, tokenizer).gold_labels) == 0


GUIDED = {
    "ab cd": '{"critique": "x", "good": ["ab"], "poor": ["zz"]}',  # finds the good one, misses the poor one
    "ef gh": '{"critique": "x", "good": [], "poor": ["ef", "gh"]}',
}
UNGUIDED = {"ab cd": '{"critique": "x", "good": [], "poor": []}', "ef gh": "I think that"}


class TableModel:
    """Answers from two tables."""

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        return parse_answer(GUIDED[response_text], response_text, source="fake", version="1")

    async def judge_unguided(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        return parse_answer(UNGUIDED[response_text], response_text, source="fake", version="1")


def annotated(response: str, good: list[str], poor: list[str]) -> AnnotatedRecord:
    return read_record({"prompt": "p", "response": response, "critique": "c", "good": good, "poor": poor})


def test_spans_come_from_the_guided_answer_and_the_parse_rate_from_the_other(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path, ["x"], vocab_size=261)  # a token a byte
    records = [annotated("ab cd", ["ab"], ["cd"]), annotated("ef gh", [], ["ef"])]
    ticks: list[int] = []
    metrics = reward_metrics(asyncio.run(judge_records(TableModel(), records, tokenizer, lambda: ticks.append(1))))
    expected = {
        "good_precision": 1.0, "good_recall": 1.0, "good_f1": 1.0, "good_tokens": 2,
        "poor_precision": 2 / 4, "poor_recall": 2 / 4, "poor_f1": 4 / 8, "poor_tokens": 4,
        "poor_span_exact_f1": 2 / 4, "located_rate": 3 / 4, "parse_rate": 1 / 2, "usable_rate": 1, "num_records": 2,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert len(ticks) == 2
