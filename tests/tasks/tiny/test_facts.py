"""Worlds of other numbers of facts: their texts, their windows, and what stays of the five."""

from pathlib import Path

import numpy as np
import pytest

from jobs.artifacts.demo_artifacts import demo_of
from t2g.config import CompareJob, DemoJob, WorldConfig, loading
from t2g.feedback.parse import format_answer, make_quote
from t2g.sandbox import SandboxConfig
from t2g.tasks.tiny import assets, world
from t2g.tasks.tiny.task import TinyTask
from t2g.types import Prompt

TINY = Path(__file__).parents[3] / "configs" / "tiny"


def demo(num_facts: int, **sections: dict[str, int]) -> DemoJob:
    return DemoJob.model_validate({"world": {"num_facts": num_facts}} | sections)


def test_a_record_without_facts_has_no_measure() -> None:
    bare = Prompt(prompt_id="p", prompt_ids=np.zeros(1, np.int32), prompt_text="x", task="tiny", payload={"post": "x"})
    assert TinyTask().measure(bare, "by Mira.", sandbox=SandboxConfig()) is None


@pytest.mark.parametrize("num_facts", [3, 10, 20])
def test_posts_summaries_feedback_and_measure_know_the_facts_of_their_record(num_facts: int) -> None:
    rates = WorldConfig(num_facts=num_facts, wrong=0.3, missing=0.2, invented=0.15, repeated=0.1)
    rows = list(world.make_records(count=300, heldout=False, rates=rates, seed=2))
    clauses = 0.0
    for row in rows:
        facts = row["facts"]
        ideal = row["ideal_human_summary"]
        faulty = row["tldr_human_reference_summary"]
        assert len(facts) == num_facts == row["post"].count(".")
        assert all(fact in row["post"] for fact in facts.values())
        verdict = world.judge_summary(facts, ideal)
        assert [ideal[s.start : s.end] for s in verdict.good] == list(facts.values())
        assert not verdict.poor
        assert (world.measure(facts, ideal)["fact_f1"], world.measure(facts, ideal)["clauses"]) == (1.0, num_facts)
        counts = world.measure(facts, faulty)
        judged = world.judge_summary(facts, faulty)
        clauses += counts["clauses"]
        assert len(judged.good) == pytest.approx(counts["fact_recall"] * num_facts)
        assert len(judged.poor) == counts["wrong"] + counts["invented"] + counts["repeated"]
        spoken = {clause.slot for clause in world.split_clauses(faulty, num_facts)} & set(facts)
        assert judged.critique.count(" is missing.") == num_facts - len(spoken)
    at_least_one = 0.2**num_facts  # a summary without a clause is drawn again
    assert clauses / len(rows) == pytest.approx(0.8 * num_facts / (1 - at_least_one) + 0.25, abs=0.25)


def test_a_slot_that_a_world_does_not_have_is_an_invention() -> None:
    five = dict(zip(world.first_slots(5), ("Mira", "phone", "hums", "Monday", "Oslo"), strict=True))
    assert world.measure(five, "by Mira, painted teal.")["invented"] == 1
    ten = five | dict(zip(world.first_slots(10)[5:], ("teal", "20", "Acme", "May", "aunt"), strict=True))
    measured = world.measure(ten, "by Mira, painted teal, delivered in May.")
    assert (measured["invented"], measured["fact_recall"]) == (0, 0.3)
    with pytest.raises(KeyError, match="thing"):
        world.measure({"name": "Mira", "fault": "hums"}, "by Mira.")


def test_windows_follow_the_facts_where_they_are_not_given() -> None:
    small = DemoJob()
    large = demo(20)
    assert (small.rollout.max_new_tokens, small.reward_engine.max_model_len) == (48, 384)
    assert (large.rollout.max_new_tokens, large.reward_engine.max_model_len) == (192, 1536)
    artifacts = demo(7, rollout={"max_new_tokens": 30})
    assert (artifacts.rollout.max_new_tokens, artifacts.rollout.max_model_len, artifacts.reward_sft.max_length) == (
        30,
        180,
        448,
    )


def test_a_job_on_stages_has_their_windows_where_it_gives_none(tmp_path: Path) -> None:
    job = loading.load(CompareJob, TINY / "compare_facts.yaml", [f"run.root={tmp_path}", "rollout.max_new_tokens=90"])
    demo = demo_of(job)
    assert demo is not None and demo.world.num_facts == 10
    assert (job.rollout.max_new_tokens, job.rollout.max_model_len) == (90, 256)
    assert (job.feedback.engine.max_model_len, job.feedback.engine.max_spans) == (768, 24)
    assert job.model.policy == str(tmp_path / "facts10" / "base" / "model")


@pytest.mark.parametrize("num_facts", [5, 10, 20])
def test_windows_hold_what_a_world_writes(num_facts: int, tmp_path: Path) -> None:
    """The longest of many: a summary, with its post; the answer about it, with the question."""
    job = demo(num_facts)
    task = TinyTask()
    lengths = []
    policy, reward = assets.build_tokenizers(tmp_path, num_facts)
    for row in world.make_records(count=60, heldout=False, rates=job.world, seed=4):
        text = row["ideal_human_summary"]
        facts = row["facts"]
        policy_chat = policy.apply_chat_template(task.policy_messages(row), add_generation_prompt=True, tokenize=False)
        verdict = task.feedback_messages(Prompt(prompt_id="p", prompt_text=row["post"], task="tiny"), text)
        question = reward.apply_chat_template(verdict, add_generation_prompt=True, tokenize=False)
        critique, good, poor = world.judge_summary(facts, text)
        good_quotes = [make_quote(text, span) for span in good]
        poor_quotes = [make_quote(text, span) for span in poor]
        target = format_answer(critique, good_quotes, poor_quotes)
        summary = len(policy(text).input_ids) + 1
        answer = len(reward(target).input_ids) + 1
        lengths.append(
            (summary, len(policy(policy_chat).input_ids) + summary, answer, len(reward(question).input_ids) + answer)
        )
    longest = [max(column) for column in zip(*lengths, strict=True)]
    engine = job.reward_engine
    rollout = job.rollout
    windows = [rollout.max_new_tokens, rollout.max_model_len, engine.max_new_tokens, job.reward_sft.max_length]
    assert all(1.05 * length <= window for length, window in zip(longest, windows, strict=True)), (longest, windows)
    assert engine.max_spans >= num_facts + 2
    assert job.policy_sft.max_length >= rollout.max_model_len
