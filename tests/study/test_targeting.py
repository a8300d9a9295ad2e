from pathlib import Path

import numpy as np
import pytest

from t2g.feedback.parse import make_failed_feedback, make_feedback
from t2g.study.targeting import (
    changes_by_mention,
    find_criticised_quotes,
    label_tokens,
    measure_recurrence,
)
from t2g.tasks.tiny.assets import build_tokenizer
from t2g.types import Prompt, Rollout, SpanFeedback

TEXT = "Ann, Lima"
PROMPT = Prompt(prompt_id="p", prompt_ids=np.array([1, 2], np.int32), prompt_text="who", task="tiny")


def feedback(good: list[str], poor: list[str]) -> SpanFeedback:
    good_quotes = [(text, 1) for text in good]
    poor_quotes = [(text, 1) for text in poor]
    return make_feedback("c", good_quotes, poor_quotes, TEXT, source="program", version="1")


def rollout(tokenizer: object) -> Rollout:
    ids = np.array([*tokenizer(TEXT, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], np.int32)
    return Rollout(
        prompt_id="p",
        sample_index=0,
        prompt_ids=PROMPT.prompt_ids,
        response_ids=ids,
        rollout_logprobs=np.linspace(-1, 0, len(ids), dtype=np.float32),
        response_text=TEXT,
        finish_reason="stop",
        policy_versions=((0, len(ids), 0),),
    )


def test_a_token_is_criticised_praised_or_not_mentioned(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path, ["x"], vocab_size=261)  # a token a byte
    labels = label_tokens(tokenizer, rollout(tokenizer), feedback(["Ann"], ["Lima"]))
    assert labels.tolist() == [1, 1, 1, 0, 0, -1, -1, -1, -1, 0]
    both = label_tokens(tokenizer, rollout(tokenizer), feedback(["Ann, Lima"], ["Lima"]))
    assert both.tolist() == [1, 1, 1, 1, 0, -1, -1, -1, -1, 0]


def test_changes_are_means_over_tokens_not_over_responses() -> None:
    labels = [np.array([-1, 0, 0]), np.array([-1, -1, 1])]
    changes = [np.array([-2.0, 0.5, -1.5]), np.array([-4.0, 0.0, 3.0])]
    assert changes_by_mention(labels, changes, [np.zeros(3), np.zeros(3)]) == {
        "criticised": -2.0,
        "praised": 3.0,
        "unmentioned": -0.5,
        "difference": -1.5,
        "matched": -1.5,
        "tokens": {"criticised": 3, "praised": 1, "unmentioned": 2},
    }


def test_a_kind_without_tokens_has_no_mean() -> None:
    changes = changes_by_mention([np.array([1, 0])], [np.array([0.0, 0.0])], [np.zeros(2)])
    assert (changes["criticised"], changes["difference"], changes["matched"]) == (None, None, None)
    assert changes["tokens"]["criticised"] == 0


def test_criticised_tokens_are_held_against_others_that_the_base_thought_as_likely() -> None:
    """Unlikely tokens lose 2 and likely ones nothing, whether mentioned or not; a criticised one half a nat more."""
    rng = np.random.default_rng(0)
    label = rng.choice([-1, 0], p=[0.2, 0.8], size=4000)
    unlikely = rng.random(4000) < np.where(label == -1, 0.8, 0.1)
    base = np.where(unlikely, -3.0, -0.1) + 0.01 * rng.standard_normal(4000)
    change = np.where(unlikely, -2.0, 0.0) - 0.5 * (label == -1)
    changes = changes_by_mention([label], [change], [base])
    assert changes["difference"] == pytest.approx(-0.5 - 2 * 0.7, abs=0.1)
    assert changes["matched"] == pytest.approx(-0.5, abs=0.02)
    apart = changes_by_mention([np.array([-1, 0])], [np.array([-1.0, 0.0])], [np.array([-3.0, -9.0])])
    assert apart["matched"] == -1.0  # the nearest that there is


def test_criticism_that_comes_again() -> None:
    first = find_criticised_quotes(TEXT, feedback(["Ann"], ["Lima"]))
    assert first == {"Lima"}
    failed = find_criticised_quotes(TEXT, make_failed_feedback("failed", source="program", version="1"))
    assert failed is None
    none = frozenset[str]()
    before = [first, frozenset({"laptop", "Oslo"}), frozenset({"x"}), none]
    after = [first, frozenset({"Oslo", "new"}), failed, frozenset({"y"})]
    assert measure_recurrence(before, after) == {"returns": pytest.approx(2 / 3), "criticisms": 3, "prompts": 3}
    assert measure_recurrence([none], [first])["returns"] is None
