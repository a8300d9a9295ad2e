"""Spans to token rewards, by hand and against a loop over characters."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.config import Placement, PolicyJob, RewardRuleConfig
from t2g.feedback import token_rewards
from t2g.feedback.rewards import apply_placement, compute_label_shares, compute_sentence_ids, span_value_rule
from t2g.tasks.base import get_task
from t2g.types import Span

TEXT = "so good, so bad\n"
OFFSETS = np.array([[0, 2], [2, 7], [7, 8], [8, 11], [11, 15], [15, 16], [16, 16]], np.int32)  # the last is EOS


def span(start: int, end: int, label: int, severity: int = 1, confidence: float = 1.0) -> Span:
    return Span(start=start, end=end, label=1 if label > 0 else -1, severity=severity, confidence=confidence)


VALUES = (-0.25, -0.5, -2.0)  # by severity


def strength(span: Span) -> tuple[float, int]:
    """Return the order of spans of one label."""
    return abs(worth(span, VALUES)), span.severity


def rewards(*spans: Span, **rule: object) -> list[float]:
    return token_rewards(OFFSETS, spans, text=TEXT, rule=RewardRuleConfig(**{"unit": "token"} | rule)).tolist()  # type: ignore[arg-type]


def test_by_hand() -> None:
    assert rewards(span(3, 7, 1), span(12, 15, -1)) == [0, 1, 0, 0, -1, 0, 0]
    assert rewards() == [0] * 7
    assert token_rewards(OFFSETS, [span(0, 2, 1)], text=TEXT).dtype == np.float32


def test_a_blank_shared_character_covers_nothing() -> None:
    assert rewards(span(2, 3, 1)) == [0] * 7  # the space of " good"
    assert rewards(span(0, 3, 1)) == [1, 0, 0, 0, 0, 0, 0]
    assert rewards(span(0, 16, 1)) == [1, 1, 1, 1, 1, 0, 0]  # neither the line end nor EOS


def test_tokens_of_one_character_are_all_covered() -> None:
    offsets = np.array([[0, 1], [0, 1], [1, 2]], np.int32)
    assert token_rewards(offsets, [span(0, 1, -1)], text="éa").tolist() == [-1, -1, 0]


def test_overlap() -> None:
    both = span(3, 7, 1), span(5, 15, -1)  # they share the token " good"
    assert rewards(*both) == [0, -1, -1, -1, -1, 0, 0]
    assert rewards(*both, overlap="good") == [0, 1, -1, -1, -1, 0, 0]
    assert rewards(*both, overlap="sum") == [0, 0, -1, -1, -1, 0, 0]


def test_values_and_repeats() -> None:
    spans = span(3, 7, 1), span(3, 7, 1), span(12, 15, -1)
    assert rewards(*spans, good=2, poor=(-0.5, -1, -1)) == [0, 2, 0, 0, -0.5, 0, 0]


def test_poor_is_paid_by_severity_and_the_most_severe_span_counts() -> None:
    values = (0, -0.5, -2)
    assert rewards(span(0, 2, -1, 1), span(3, 7, -1, 2), span(12, 15, -1, 3), poor=values) == [0, -0.5, 0, 0, -2, 0, 0]
    assert (
        rewards(span(0, 15, -1, 2), span(3, 7, -1, 3), span(12, 15, -1, 1), poor=values)[:5] == [-0.5, -2] + [-0.5] * 3
    )
    both = span(3, 7, 1), span(3, 7, -1, 1)
    assert rewards(*both, poor=values)[1] == 0  # poor wins with a value of 0, too
    assert rewards(*both, poor=values, overlap="sum")[1] == 1
    assert rewards(*both, poor=values, overlap="good")[1] == 1


def test_the_task_code_pays_nothing_for_what_works() -> None:
    feedback = {"source": "reward_model", "reward_model": "m"}
    job = {"model": {"policy": "p"}, "data": {"path": "d"}, "feedback": feedback}
    rule = PolicyJob(**job, task="code").objective.rewards
    assert rule.poor == (0, -1, -1)
    assert span_value_rule(rule).poor == (0, -1, -1) and span_value_rule(rule).unit == "token"
    assert PolicyJob(**job).objective.rewards.poor == (-1, -1, -1)
    uniform = {"rewards": {"poor": (-1, -1, -1)}}
    assert PolicyJob(**job, task="code", objective=uniform).objective.rewards.poor == (-1, -1, -1)
    halved = PolicyJob(**job, task="code", objective={"rewards": {"good": 0.5}}).objective.rewards
    assert (halved.good, halved.poor) == (0.5, (0, -1, -1))


def test_a_span_beyond_the_text_is_cut() -> None:
    assert rewards(span(12, 99, -1)) == [0, 0, 0, 0, -1, 0, 0]


def test_no_tokens() -> None:
    assert token_rewards(np.zeros((0, 2), np.int32), [span(0, 1, 1)], text="").shape == (0,)


QUARTERS = st.integers(0, 4).map(lambda quarters: quarters / 4)
SPANS = st.tuples(st.integers(0, 19), st.integers(1, 20), st.sampled_from([1, -1]), st.integers(1, 3), QUARTERS)
# Texts, where they are cut into tokens, and spans of them under every rule.
marked_texts = given(
    text=st.text("ab \n", min_size=1, max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=6),
    spans=st.lists(SPANS, max_size=6),
    overlap=st.sampled_from(["poor", "good", "sum"]),
)


def worth(span: Span, values: tuple[float, float, float]) -> float:
    return span.confidence * (1 if span.label == 1 else values[span.severity - 1])


@marked_texts
def test_agrees_with_a_loop_over_characters(
    text: str, cuts: list[int], spans: list[tuple[int, int, int, int, float]], overlap: str
) -> None:
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    offsets = np.array([*itertools.pairwise(bounds), (len(text), len(text))], np.int32)
    nonempty = [span(*fields) for fields in spans if fields[0] < fields[1]]
    expected = []
    for start, end in offsets.tolist():
        ink = [i for i in range(start, end) if not text[i].isspace()]
        labels: dict[int, Span] = {}  # label -> the strongest span
        for s in nonempty:
            shared = [i for i in ink if s.start <= i < s.end]
            if shared and s.confidence > 0:
                labels[s.label] = max(labels.get(s.label, s), s, key=strength)
        if len(labels) == 2 and overlap != "sum":
            del labels[{"poor": 1, "good": -1}[overlap]]
        expected.append(sum(worth(strongest, VALUES) for strongest in labels.values()))
    rule = RewardRuleConfig(unit="token", overlap=overlap, poor=VALUES)  # type: ignore[arg-type]
    assert token_rewards(offsets, nonempty, text=text, rule=rule).tolist() == expected


# -- unit span


def test_a_span_is_paid_once_at_the_last_token_that_it_covers() -> None:
    assert rewards(span(0, 7, 1), span(8, 15, -1), unit="span") == [0, 1, 0, 0, -1, 0, 0]
    assert rewards(span(0, 16, 1), unit="span") == [0, 0, 0, 0, 1, 0, 0]  # neither the line end nor EOS
    assert rewards(span(2, 3, 1), unit="span") == [0] * 7  # a blank covers no token
    assert rewards(span(0, 2, -1, 2), span(8, 15, -1, 3), unit="span", poor=(0, -0.5, -2)) == [-0.5, 0, 0, 0, -2, 0, 0]


@given(
    starts_and_lengths=st.lists(st.tuples(st.integers(0, len(TEXT) - 1), st.integers(1, 9)), min_size=1, max_size=6),
    unit=st.sampled_from(["span", "token"]),
    weight=st.floats(0.01, 10),
)
def test_criteria_add_up_and_opposite_labels_of_one_weight_cancel(
    starts_and_lengths: list[tuple[int, int]], unit: str, weight: float
) -> None:
    rule = RewardRuleConfig(unit=unit)  # type: ignore[arg-type]

    def spans(label: int, criterion: str | None) -> list[Span]:
        ends = [min(len(TEXT), start + length) for start, length in starts_and_lengths]
        plain = [span(start, end, label) for (start, _), end in zip(starts_and_lengths, ends, strict=True)]
        return [replace(one, criterion=criterion) for one in plain]

    def paid(*spans: Span, **weights: float) -> np.ndarray:
        return token_rewards(OFFSETS, spans, text=TEXT, rule=rule, weights=weights)

    assert not paid(*spans(1, "a"), *spans(-1, "b"), a=weight, b=weight).any()
    alone = paid(*spans(1, None))
    assert paid(*spans(1, "a"), a=1.0).tobytes() == alone.tobytes()
    np.testing.assert_array_equal(paid(*spans(1, "a"), *spans(1, "b"), a=2.0, b=0.5), 2.5 * alone)


def test_how_many_tokens_a_span_has_does_not_matter() -> None:
    """Eight tokens of one letter each, and one token: the same word is worth the same."""
    word = "Zuerich,"
    letters = np.array([[i, i + 1] for i in range(8)], np.int32)
    one = np.array([[0, 8]], np.int32)
    rule = RewardRuleConfig()
    for offsets in (letters, one):
        assert token_rewards(offsets, [span(0, 8, 1)], text=word, rule=rule).sum() == 1
    assert token_rewards(letters, [span(0, 8, 1)], text=word).sum() == 8  # the paper's


def test_spans_of_one_label_that_share_characters_are_one() -> None:
    assert rewards(span(0, 7, 1), span(3, 7, 1), span(0, 7, 1), unit="span") == [0, 1, 0, 0, 0, 0, 0]
    assert rewards(span(0, 5, -1, 1), span(3, 11, -1, 3), unit="span", poor=(0, 0, -2)) == [0, 0, 0, -2, 0, 0, 0]
    assert rewards(span(0, 3, 1), span(3, 5, 1), unit="span") == [1, 1, 0, 0, 0, 0, 0]  # side by side
    assert rewards(span(3, 5, 1), span(5, 7, 1), unit="span") == [0, 2, 0, 0, 0, 0, 0]  # two in one token


def test_where_labels_share_characters_the_rule_decides() -> None:
    both = span(3, 7, 1), span(5, 15, -1)
    assert rewards(*both, unit="span") == [0, 0, 0, 0, -1, 0, 0]
    assert rewards(*both, unit="span", overlap="good") == [0, 1, 0, 0, 0, 0, 0]
    assert rewards(*both, unit="span", overlap="sum") == [0, 1, 0, 0, -1, 0, 0]
    assert rewards(span(3, 5, 1), span(5, 7, -1), unit="span") == [0] * 7  # in one token, sharing none: 1 - 1
    assert rewards(span(0, 3, 1), span(2, 7, -1), unit="span") == [1, -1, 0, 0, 0, 0, 0]  # they share a blank


@marked_texts
def test_a_span_once_agrees_with_sets_of_characters(
    text: str, cuts: list[int], spans: list[tuple[int, int, int, int, float]], overlap: str
) -> None:
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    offsets = np.array([*itertools.pairwise(bounds), (len(text), len(text))], np.int32)
    nonempty = [span(*fields) for fields in spans if fields[0] < fields[1]]
    units: list[tuple[set[int], Span]] = []  # non-blank characters, the strongest span
    for s in nonempty:
        characters = {i for i, character in enumerate(text) if s.start <= i < s.end and not character.isspace()}
        if s.confidence == 0 or not characters:
            continue
        strongest = s
        for unit in [u for u in units if u[1].label == s.label and u[0] & characters]:
            units.remove(unit)
            characters = characters | unit[0]
            strongest = max(strongest, unit[1], key=strength)
        units.append((characters, strongest))
    expected = np.zeros(len(offsets))
    for characters, strongest in units:
        rival = any(other.label != strongest.label and taken & characters for taken, other in units)
        if rival and overlap == ("poor" if strongest.label == 1 else "good"):
            continue
        for t in reversed(range(len(offsets))):
            ink = {i for i in range(*offsets[t]) if not text[i].isspace()}
            if ink & characters:
                expected[t] += worth(strongest, VALUES)
                break
    rule = RewardRuleConfig(overlap=overlap, poor=VALUES)  # type: ignore[arg-type]
    assert token_rewards(offsets, nonempty, text=text, rule=rule).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("task", "text", "steps"),
    [
        ("summarization", "Is it? Yes... it is 3.5 m.", ["Is it?", " Yes...", " it is 3.5 m."]),
        ("prompts", "- one\n- two! \n", ["- one\n", "- two!", " \n"]),
        ("code", "x = 1. \ny = 2", ["x = 1. \n", "y = 2"]),
        ("tiny", "by Ann, it hums.", ["by Ann,", " it hums."]),
    ],
)
def test_a_task_says_where_its_steps_end(task: str, text: str, steps: list[str]) -> None:
    offsets = np.array([[i, i + 1] for i in range(len(text))] + [[len(text)] * 2], np.int32)
    ids = compute_sentence_ids(offsets, text, get_task(task).step_pattern)
    assert ids.tolist() == [i for i, step in enumerate(steps) for _ in step] + [len(steps) - 1]  # EOS to the last
    assert ids.dtype == np.int32


def test_a_token_belongs_to_the_step_of_its_first_character() -> None:
    text = "ab.cd."
    # "b.c" reaches over the border; one without characters stands before "d"; EOS after the last full stop
    offsets = np.array([[0, 1], [1, 4], [4, 4], [4, 5], [5, 6], [6, 6]], np.int32)
    assert compute_sentence_ids(offsets, text, "[.]").tolist() == [0, 0, 1, 1, 1, 1]
    assert compute_sentence_ids(np.zeros((0, 2), np.int32), "", "[.]").shape == (0,)
    assert compute_sentence_ids(np.array([[0, 0]], np.int32), "", "[.]").tolist() == [0]


DELTAS = np.array([0, 1, 1, -1, 0, 1], np.float32)
STEPS = np.array([0, 0, 0, 1, 1, 2], np.int32)


def placed(deltas: np.ndarray, placement: Placement, **keys: object) -> np.ndarray:
    steps = STEPS if deltas is DELTAS else np.zeros(len(deltas), np.int32)
    return apply_placement(deltas, placement, sentence_ids=steps, **keys)  # type: ignore[arg-type]


def test_scalar_pays_the_sum_at_the_last_token() -> None:
    assert placed(DELTAS, "scalar").tolist() == [0, 0, 0, 0, 0, 2]


def test_step_pays_each_sum_at_the_last_token_of_its_step() -> None:
    assert placed(DELTAS, "step").tolist() == [0, 0, 2, 0, -1, 1]


@given(st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=1, max_size=20))
def test_step_agrees_with_a_loop(tokens: list[tuple[int, bool]]) -> None:
    deltas = np.array([quarter / 4 for quarter, _ in tokens], np.float32)
    steps = np.cumsum([2 * starts for _, starts in tokens])  # ids may skip: a step may have no token
    expected = []
    total = 0.0
    for t, delta in enumerate(deltas):
        total += delta
        last = t + 1 == len(deltas) or steps[t + 1] != steps[t]
        expected.append(total if last else 0)
        total = 0.0 if last else total
    assert apply_placement(deltas, "step", sentence_ids=steps).tolist() == expected


def test_span_leaves_them_and_copies() -> None:
    copy = placed(DELTAS, "span")
    copy[0] = 5
    assert DELTAS[0] == 0


def test_shuffled_keeps_the_deltas_and_depends_on_its_keys_only() -> None:
    deltas = np.arange(20, dtype=np.float32)
    first = placed(deltas, "shuffled", seed=1, prompt_id="p", sample_index=0)
    assert Counter(first.tolist()) == Counter(deltas.tolist())
    assert first.tolist() != deltas.tolist()
    assert first.tolist() == placed(deltas, "shuffled", seed=1, prompt_id="p", sample_index=0).tolist()
    others = [("p", 0, 2), ("p", 1, 1), ("q", 0, 1)]
    for prompt_id, index, seed in others:
        other = placed(deltas, "shuffled", seed=seed, prompt_id=prompt_id, sample_index=index)
        assert other.tolist() != first.tolist()


def test_shuffled_reaches_every_place_equally() -> None:
    one = np.array([1, 0, 0, 0], np.float32)
    hits = sum(placed(one, "shuffled", seed=0, prompt_id=str(i), sample_index=0) for i in range(2000))
    assert (abs(hits - 500) < 100).all()  # five standard deviations


@pytest.mark.parametrize("placement", ["span", "step", "scalar", "shuffled"])
def test_placements_of_an_empty_response(placement: Placement) -> None:
    assert placed(np.zeros(0, np.float32), placement).shape == (0,)


def test_label_shares() -> None:
    assert compute_label_shares(np.array([1, 2, -1, 0], np.float32)) == {"good": 0.5, "poor": 0.25, "neutral": 0.25}
    assert compute_label_shares(np.zeros(0)) == {"good": 0, "poor": 0, "neutral": 0}
