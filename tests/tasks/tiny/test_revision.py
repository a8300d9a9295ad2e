"""What a writer who believes a critique writes, by hand and against the world's own measure."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.config import WorldConfig
from t2g.tasks.tiny.revision import correct_response, drop_sentences, split_sentences
from t2g.tasks.tiny.world import judge_summary, make_clause, make_summary, measure, sample_facts

FACTS = {"name": "Zoë", "thing": "phone", "fault": "hums", "day": "Monday", "place": "Oslo"}
RESPONSE = "by Zoë, about a laptop, sells honey, by Zoë, since Friday."
SAID = {
    "name": "The name is Zoë, it says Zoë: right.",
    "thing": "The thing is phone, it says laptop: wrong.",
    "invented": "It says sells honey: invented.",
    "repeated": "The name is Zoë, it says Zoë: repeated.",
    "day": "The day is Monday, it says Friday: wrong.",
    "fault": "The fault is missing.",
    "place": "The place is missing.",
}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((), "by Zoë, about a laptop, sells honey, by Zoë, since Friday."),
        (("name",), "by Zoë, about a laptop, sells honey, by Zoë, since Friday."),
        (("thing",), "by Zoë, about a phone, sells honey, by Zoë, since Friday."),
        (("invented",), "by Zoë, about a laptop, by Zoë, since Friday."),
        (("repeated",), "by Zoë, about a laptop, sells honey, since Friday."),
        (("fault",), "by Zoë, about a laptop, sells honey, by Zoë, it hums, since Friday."),
        (("place",), "by Zoë, about a laptop, sells honey, by Zoë, since Friday, in Oslo."),
        (tuple(SAID), "by Zoë, about a phone, it hums, since Monday, in Oslo."),
    ],
)
def test_only_what_the_critique_says_is_changed(keys: tuple[str, ...], expected: str) -> None:
    assert " ".join(SAID.values()) == judge_summary(FACTS, RESPONSE).critique
    assert correct_response(FACTS, RESPONSE, " ".join(SAID[key] for key in keys)) == expected


def test_a_correction_never_says_a_fact_twice() -> None:
    """The wrong name becomes the right one, which stands after it already; both are spoken of."""
    response = "by Otto, by Zoë."
    assert correct_response(FACTS, response, judge_summary(FACTS, response).critique).count("by Zoë") == 1


def test_nothing_left_is_an_empty_sentence() -> None:
    assert correct_response(FACTS, "sells honey.", "It says sells honey: invented.") == "."


def test_a_critique_of_another_response_changes_nothing() -> None:
    assert correct_response(FACTS, "by Zoë.", "The thing is phone, it says laptop: wrong. Nonsense.") == "by Zoë."


@given(st.integers(0, 2**31), st.floats(0, 1))
def test_whole_critiques_lead_to_every_fact_and_thinned_ones_never_further_away(seed: int, dropped: float) -> None:
    rng = np.random.default_rng(seed)
    facts = sample_facts(rng, heldout=False)
    response = make_summary(facts, WorldConfig(invented=0.5, repeated=0.5), rng)
    critique = judge_summary(facts, response).critique
    assert measure(facts, correct_response(facts, response, critique))["fact_f1"] == 1.0
    part = drop_sentences(critique, rng, dropped=dropped)
    assert set(split_sentences(part)) <= set(split_sentences(critique))
    revised = correct_response(facts, response, part)
    assert measure(facts, revised)["fact_f1"] >= measure(facts, response)["fact_f1"]
    for slot in facts:
        if f"The {slot} is" not in part:
            clause = make_clause(slot, facts[slot])
            assert (clause in revised) == (clause in response)


def test_thinning_drops_its_share_of_sentences() -> None:
    rng = np.random.default_rng(0)
    critique = " ".join(SAID.values())
    counts = [len(split_sentences(drop_sentences(critique, rng, dropped=0.3))) for _ in range(2000)]
    assert np.mean(counts) == pytest.approx(0.7 * len(SAID), abs=0.1)
    assert drop_sentences(critique, rng, dropped=0.0) == critique
    assert drop_sentences(critique, rng, dropped=1.0) == ""
