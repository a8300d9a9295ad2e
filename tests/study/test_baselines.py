"""Pairs, revisions and settings of the baselines, worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import letter_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from t2g.config import PolicyJob
from t2g.errors import UserError
from t2g.feedback.parse import make_failed_feedback, make_feedback
from t2g.loop.sampling import JudgedStep
from t2g.study.baselines import (
    Scored,
    batch_size,
    check,
    imitation_examples,
    preference_pairs,
    revising_rollout,
    revision_prompt,
    run_metrics,
    score,
    sft_options,
)
from t2g.tasks.prompts_only import PromptsTask
from t2g.tasks.tiny.assets import build_tokenizer
from t2g.types import JudgedResponse, Prompt, Rollout, SpanFeedback


def prompt(name: str = "p", text: str = "write") -> Prompt:
    return Prompt(prompt_id=name, prompt_ids=np.array([7, 8], np.int32), prompt_text=text, task="letters")


def rollout(ids: Sequence[int], index: int = 0, text: str = "") -> Rollout:
    response_ids = np.array(ids, np.int32)
    logprobs = np.zeros(len(ids), np.float32)
    return Rollout(
        prompt_id="p",
        sample_index=index,
        prompt_ids=np.array([7, 8], np.int32),
        response_ids=response_ids,
        rollout_logprobs=logprobs,
        response_text=text,
        finish_reason="stop",
        policy_versions=((0, len(ids), 0),),
    )


def feedback(critique: str = "a yes, b no", text: str = "") -> SpanFeedback:
    return make_feedback(critique, [], [], text, source="program", version="v")


def scored(*rewards: float, name: str = "p") -> list[Scored]:
    """One response to the prompt for each reward; the response's only token is its index."""
    return [Scored(prompt=prompt(name), rollout=rollout([i], i), reward=reward) for i, reward in enumerate(rewards)]


def job(**changes: Any) -> PolicyJob:
    fields: dict[str, Any] = {
        "model": {"policy": "m"},
        "data": {"path": "d.jsonl"},
        "eval_data": {"path": "e.jsonl"},
        "feedback": {"source": "my.feedback:judge"},
        "num_steps": 10,
        "rollout": {"prompts_per_step": 64, "samples_per_prompt": 2, "max_model_len": 128, "max_new_tokens": 48},
        "learner": {"num_epochs": 2, "minibatches_per_epoch": 2},
    }
    return PolicyJob.model_validate({**fields, **changes})


# --------------------------------------------------------------------------------------------------------------- deltas
def test_a_response_is_worth_the_sum_of_its_token_rewards(tmp_path: Path) -> None:
    """Spans "aa" good and "b" poor of severity 2 (-0.5) over the tokens a, a, b, c: 1 - 0.5, by token 1 + 1 - 0.5."""
    tokenizer = letter_tokenizer(tmp_path)
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "aabc"]
    judged = make_feedback("x", ["aa"], [{"quote": "b", "severity": 2}], "aabc", source="program", version="v")
    rule = {"poor": (-1.0, -0.5, -1.0)}
    whole = JudgedResponse(prompt(), rollout(ids, text="aabc"), judged)
    cut = JudgedResponse(prompt("q"), rollout(ids[1:], text="abc"), judged)
    pairs = (whole, cut)
    steps = [JudgedStep(responses=pairs, generate_s=0, feedback_s=0)] * 2
    for unit, worth in (("span", 0.5), ("token", 1.5)):
        rule_job = job(objective={"rewards": rule | {"unit": unit}})
        groups = score(SimpleNamespace(job=rule_job, feedback=SimpleNamespace(name="program")), steps, tokenizer)
        assert [(group[0].prompt.prompt_id, len(group)) for group in groups] == [("p", 1), ("q", 1)] * 2  # step by step
        assert groups[0][0].reward == groups[2][0].reward == worth
    rule_job = job(objective={"rewards": rule, "truncation_penalty": -0.25})
    truncated = cut._replace(rollout=replace(cut.rollout, finish_reason="length"))
    steps = [JudgedStep(responses=(whole, truncated), generate_s=0, feedback_s=0)]
    groups = score(SimpleNamespace(job=rule_job, feedback=SimpleNamespace(name="program")), steps, tokenizer)
    assert [group[0].reward for group in groups] == [0.5, 0.5 - 0.25]
    halved = job(objective={"rewards": rule, "truncation_penalty": -0.25, "span_coef": 0.5})
    groups_halved = score(SimpleNamespace(job=halved, feedback=SimpleNamespace(name="program")), steps, tokenizer)
    assert [group[0].reward for group in groups_halved] == [0.25, 0.25 - 0.25]
    learnt = [one for group in groups for one in group]
    metrics = run_metrics(rule_job, steps, learnt, learn_s=0)
    assert (metrics["response/truncated_share"], metrics["reward/response_mean"]) == (0.5, 0.375)


# ---------------------------------------------------------------------------------------------------------------- pairs
def ids_of(pairs: Sequence[Any]) -> list[tuple[int, int]]:
    return [(int(pair.chosen_ids[0]), int(pair.rejected_ids[0])) for pair in pairs]


def test_best_meets_worst_and_ties_are_counted() -> None:
    pairs, ties = preference_pairs([scored(0.0, 2.0, 1.0, 0.0)])
    assert ids_of(pairs) == [(1, 3), (2, 0)]  # 2 against the later 0, 1 against the earlier one
    assert ties == 0
    assert preference_pairs([scored(1.0, 1.0)]) == ([], 1)
    assert preference_pairs([scored(0.66666675, 0.66666669)]) == ([], 1)  # the same spans, summed in another order
    pairs, ties = preference_pairs([scored(1.0, 3.0, 1.0, 1.0)])
    assert (ids_of(pairs), ties) == ([(1, 3)], 1)


def test_prompts_are_never_mixed_and_a_single_response_has_no_partner() -> None:
    pairs, ties = preference_pairs([scored(0.0, 1.0, name="p"), scored(5.0, name="q")])
    assert (ids_of(pairs), ties) == ([(1, 0)], 0)


@given(st.lists(st.integers(-2, 2), max_size=9))
def test_a_response_stands_in_one_pair_at_most_and_the_chosen_one_is_better(deltas: list[int]) -> None:
    pairs, ties = preference_pairs([scored(*map(float, deltas))])
    used = [i for pair in ids_of(pairs) for i in pair]
    assert len(used) == len(set(used))
    assert all(deltas[chosen] > deltas[rejected] for chosen, rejected in ids_of(pairs))
    assert len(pairs) + ties == len(deltas) // 2
    assert bool(pairs) == (len(set(deltas)) > 1)  # whatever differs is learnt from


# ------------------------------------------------------------------------------------------------------------ revisions
@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_tokenizer(tmp_path_factory.mktemp("words"), ["Prompt", "response"], vocab_size=280)


def test_a_revision_prompt_shows_prompt_response_and_critique(words: Any) -> None:
    sampled = rollout([1], index=3, text="It is 5.")
    judged = JudgedResponse(prompt(text="What is 2 + 2?"), sampled, feedback("Wrong: it is 4."))
    revision = revision_prompt(PromptsTask(), judged, words, 1000)
    assert revision is not None
    text = words.decode(revision.prompt_ids)
    assert all(part in text for part in ("What is 2 + 2?", "It is 5.", "Wrong: it is 4."))
    assert text.endswith("<|assistant|>")
    assert revision.prompt_id == "p/3"  # another response to the same prompt is revised with another seed
    assert revision.prompt_text == "What is 2 + 2?"


def test_without_critique_or_room_no_request_is_made(words: Any) -> None:
    sampled = (prompt(), rollout([1], text="x"))
    assert revision_prompt(PromptsTask(), JudgedResponse(*sampled, feedback(" ")), words, 1000) is None
    failed = make_failed_feedback("failed", source="program", version="v")
    assert revision_prompt(PromptsTask(), JudgedResponse(*sampled, failed), words, 1000) is None
    assert revision_prompt(PromptsTask(), JudgedResponse(*sampled, feedback("long " * 50)), words, 100) is None


def test_imitation_learns_the_text_of_the_revision_after_the_policys_own_prompt(tmp_path: Path) -> None:
    """The ids of the revision may be another tokenizer's; the target ends with the policy's own EOS."""
    tokenizer = letter_tokenizer(tmp_path)
    one = Scored(prompt=prompt(), rollout=rollout([999], text="ab"), reward=1.0)
    (example,) = imitation_examples([one], tokenizer)
    a, b = (tokenizer.convert_tokens_to_ids(letter) for letter in "ab")
    assert example.prompt_ids.tolist() == [7, 8]
    assert example.response_ids.tolist() == [a, b, tokenizer.eos_token_id]
    assert example.weights.tolist() == [1, 1, 1]


# ------------------------------------------------------------------------------------------------------------- settings
def test_a_pass_has_as_many_optimizer_steps_as_ppos() -> None:
    """10 steps of 2 minibatches: 20 optimizer steps a pass; 600 pairs -> 30 in each, 601 -> 31."""
    assert batch_size(job(), 600) == 30
    assert batch_size(job(), 601) == 31
    assert batch_size(job(), 3) == 1


def test_imitation_has_the_learners_settings() -> None:
    learner = {"workers": 2, "num_epochs": 2, "minibatches_per_epoch": 2, "policy": {"lr": 3e-4}}
    options = sft_options(job(learner={**learner, "lora": {"r": 8, "alpha": 4}}), 640)
    assert (options.workers, options.num_epochs, options.batch_size, options.optim.lr) == (2, 2, 32, 3e-4)
    assert options.lora is not None
    assert (options.lora.r, options.lora.alpha, options.lora.dropout) == (8, 4, 0)


def test_the_reviser_has_room_for_the_critique() -> None:
    with_engine = {"source": "my.feedback:judge", "engine": {"max_model_len": 384, "max_new_tokens": 256}}
    assert revising_rollout(job(feedback=with_engine)).max_model_len == 512


@pytest.mark.parametrize(
    ("method", "changes", "word"),
    [
        ("dpo", {"rollout": {"samples_per_prompt": 1}}, "samples_per_prompt"),
        ("ilf", {"rollout": {"samples_per_prompt": 1}}, "samples_per_prompt"),
        ("dpo", {"rollout": {"resample_zero_groups": 2}}, "resample_zero_groups=2"),
        ("reflection", {"rollout": {"resample_zero_groups": 2}}, "resample_zero_groups=2"),
        ("ilf", {"feedback": {"source": "m:f", "style": {"critique": False}}}, "style.critique"),
        ("reflection", {"feedback": {"source": "m:f", "style": {"critique": False}}}, "style.critique"),
        ("reflection", {"eval_data": None}, "eval_data"),
        ("ilf", {"objective": {"outcome_rewards": [{"source": "task"}]}}, r"objective\.outcome_rewards"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(method: Any, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        check(method, job(**changes))


def test_dpo_can_do_without_critiques_and_reflection_with_one_sample() -> None:
    check("dpo", job(feedback={"source": "m:f", "style": {"critique": False}}))
    check("reflection", job(rollout={"samples_per_prompt": 1}))
