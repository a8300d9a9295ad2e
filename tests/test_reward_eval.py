"""Token-level precision, recall and F1 of a reward model, by hand and by a slow second count."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.feedback.parse import make_feedback, no_feedback
from t2g.reward_eval import Confusion, JudgedRecord, confusion, judged_record, reward_metrics
from t2g.tasks.tiny_assets import build_tokenizer
from t2g.types import SpanFeedback


def judged(
    gold: list[float], predicted: list[float], *, quotes: int = 0, located: int = 0, parsed: bool = True
) -> JudgedRecord:
    return JudgedRecord(
        gold=np.array(gold), predicted=np.array(predicted), num_quotes=quotes, num_located=located, parsed=parsed
    )


def test_numbers_by_hand() -> None:
    metrics = reward_metrics(
        [
            judged([1, 1, 1, 0, -1, -1], [1, 1, 0, 1, -1, 0], quotes=3, located=3),
            judged([-1, 0, 1], [-1, -1, -1], quotes=2, located=1, parsed=False),
            judged([1, 0], [0, 0], quotes=0, located=0, parsed=False),  # an answer that could not be used
        ]
    )
    # good: found 2, called good wrongly 1, missed 1 + 1 + 1; poor: found 2, wrongly 2, missed 1
    expected = {
        "good_precision": 2 / 3, "good_recall": 2 / 5, "good_f1": 4 / 8, "good_tokens": 5,
        "poor_precision": 2 / 4, "poor_recall": 2 / 3, "poor_f1": 4 / 7, "poor_tokens": 3,
        "located_rate": 4 / 5, "parse_rate": 1 / 3, "num_records": 3,
    }  # fmt: skip
    assert metrics.keys() == expected.keys()
    assert metrics == pytest.approx(expected)


def test_the_size_of_a_reward_does_not_matter_its_sign_does() -> None:
    assert confusion([judged([2.0, -0.5], [1.0, -3.0])], 1) == Confusion(
        true_positive=1, false_positive=0, false_negative=0
    )


def test_nothing_over_nothing_is_zero() -> None:
    metrics = reward_metrics([judged([0, 0], [0, 0])])
    assert metrics["good_precision"] == metrics["poor_recall"] == metrics["good_f1"] == metrics["located_rate"] == 0.0
    assert reward_metrics([])["parse_rate"] == 0.0


def test_records_are_pooled_not_averaged() -> None:
    long, short = judged([1] * 9, [1] * 9), judged([1], [0])
    assert reward_metrics([long, short])["good_recall"] == pytest.approx(0.9)  # the mean of 1 and 0 would be 0.5


def test_labels_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="3 gold and 2 predicted"):
        confusion([judged([1, 0, 0], [1, 0])], 1)


@given(st.lists(st.tuples(st.sampled_from([-1, 0, 1]), st.sampled_from([-1, 0, 1])), max_size=40))
def test_against_a_slow_count(tokens: list[tuple[int, int]]) -> None:
    gold, predicted = [g for g, _ in tokens], [p for _, p in tokens]
    metrics = reward_metrics([judged(gold[:5], predicted[:5]), judged(gold[5:], predicted[5:])])
    for name, label in (("good", 1), ("poor", -1)):
        hits = sum(g == label and p == label for g, p in tokens)
        called, true = predicted.count(label), gold.count(label)
        precision = hits / called if called else 0.0
        recall = hits / true if true else 0.0
        harmonic = 2 * precision * recall / (precision + recall) if hits else 0.0
        assert math.isclose(metrics[f"{name}_precision"], precision)
        assert math.isclose(metrics[f"{name}_recall"], recall)
        assert math.isclose(metrics[f"{name}_f1"], harmonic)
        assert metrics[f"{name}_tokens"] == true


def test_feedback_becomes_labels_of_the_tokenizers_tokens(tmp_path: Path) -> None:
    """Bytes only, so that "Zoë, 3" is Z | o | C3 | AB | , | blank | 3: the split character is two tokens."""
    tokenizer = build_tokenizer(tmp_path, ["x"], vocab_size=261)

    def says(good: list[str], poor: list[str]) -> SpanFeedback:
        return make_feedback("...", good, poor, "Zoë, 3", source="test", version="1")

    failed = no_feedback("unparsable", source="test", version="1")
    record = judged_record("Zoë, 3", says(["Zoë"], ["3"]), says(["oë", "Ann"], [", 3"]), failed, tokenizer)
    assert record.gold.tolist() == [1, 1, 1, 1, 0, 0, -1]
    assert record.predicted.tolist() == [0, 1, 1, 1, -1, 0, -1]
    assert (record.num_quotes, record.num_located, record.parsed) == (3, 2, False)

    lost = judged_record("Zoë, 3", says(["Zoë"], []), failed, says([], []), tokenizer)
    assert lost.predicted.tolist() == [0] * 7
    assert (lost.num_quotes, lost.num_located, lost.parsed) == (0, 0, True)
    assert len(judged_record("", says([], []), failed, failed, tokenizer).gold) == 0
