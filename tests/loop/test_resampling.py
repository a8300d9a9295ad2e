"""rollout.resample_zero_groups: which prompts are drawn and replaced, counted, and the same after a restart."""

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import TwoTurns
from fakes import FakeRollouts, letter_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from trainer_bench import NUM_PROMPTS, PER_STEP, Bench, chosen, job

from t2g.config import PolicyJob, with_overrides
from t2g.errors import RunStopped, SamplingFailed, UserError
from t2g.loop.resampling import (
    RewardVariance,
    check_further_prompts,
    match_replacements,
    needs_further_prompt,
    order_further_prompts,
)
from t2g.loop.steps import make_sampling_seed, select_prompts
from t2g.types import Prompt

NUM_STEPS = 3
NUM_FURTHER = 4
SAMPLES = 4  # responses to a prompt
PATIENCE_S = 20
VARIANCES: list[RewardVariance] = ["nonzero", "zero", "undefined"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def resampling_job(number: int = NUM_FURTHER, **options: Any) -> PolicyJob:
    changes = {"rollout.resample_zero_groups": number, "num_steps": NUM_STEPS, "checkpoint.every": 1}
    return with_overrides(job(**options), changes)


def further(step: int, count: int = NUM_FURTHER) -> list[str]:
    """The ids of the further prompts of a step, in their order."""
    own_ids = select_prompts(num_prompts=NUM_PROMPTS, per_step=PER_STEP, step=step, seed=1)
    indices = order_further_prompts(own_ids, num_prompts=NUM_PROMPTS, step=step, seed=1, count=count)
    return [f"p{index}" for index in indices]


def trained(bench: Bench) -> list[list[str]]:
    """The prompts of each step that the learner saw, in order."""
    prompts = []
    for rollouts in bench.learner.seen:
        ids = [rollout.prompt_id for rollout in rollouts]
        prompts.append([*dict.fromkeys(ids)])
    return prompts


def requested(bench: Bench, step: int) -> list[str]:
    """The prompts that were sampled for a step, in order of the requests."""
    seed = make_sampling_seed(1, "train", step)
    return [prompt_id for prompt_id, own_seed in bench.rollouts.requests if own_seed == seed]


def make_bench(folder: Path, tokenizer: Any, config: PolicyJob, silent: Sequence[str], **options: Any) -> Bench:
    """A run whose feedback says nothing about some prompts."""
    bench = Bench(folder, tokenizer, config, **options)
    bench.feedback.silent = lambda prompt: prompt.prompt_id in silent
    return bench


# ------------------------------------------------------------------------------------------------------- pure functions
@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 8), st.integers(1, 40), st.integers(0, 5))
def test_a_step_draws_no_prompt_twice(per_step: int, count: int, spare: int, step: int, seed: int) -> None:
    num_prompts = per_step + count + spare
    own_ids = select_prompts(num_prompts=num_prompts, per_step=per_step, step=step, seed=seed)
    drawn = order_further_prompts(own_ids, num_prompts=num_prompts, step=step, seed=seed, count=count)
    assert len(drawn) == count
    assert len({*own_ids, *drawn}) == per_step + count
    fewer = order_further_prompts(own_ids, num_prompts=num_prompts, step=step, seed=seed, count=count // 2)
    assert fewer == drawn[: count // 2]


def test_further_prompts_are_spread_over_the_data() -> None:
    """They are not always those of the next step."""
    drawn: set[str] = set()
    for step in range(1, 9):
        drawn |= set(further(step))
    assert len(drawn) > NUM_PROMPTS / 2


@given(st.data())
def test_what_is_drawn_does_not_depend_on_the_order_of_judgement(data: st.DataObject) -> None:
    own_ids = data.draw(st.lists(st.sampled_from(VARIANCES), min_size=1, max_size=6))
    available = data.draw(st.lists(st.sampled_from(VARIANCES), max_size=6))
    rng = random.Random(data.draw(st.integers(0, 9)))

    def count_drawn(*, is_shuffled: bool) -> int:
        waiting = [(variance, True) for variance in own_ids]
        num_drawn = 0
        while waiting:
            index = rng.randrange(len(waiting)) if is_shuffled else 0
            variance, is_own = waiting.pop(index)
            if needs_further_prompt(variance, is_own=is_own) and num_drawn < len(available):
                waiting.append((available[num_drawn], False))
                num_drawn += 1
        return num_drawn

    num_drawn = count_drawn(is_shuffled=True)
    assert num_drawn == count_drawn(is_shuffled=False)
    replacements = match_replacements(own_ids, available[:num_drawn])
    assert len(replacements) == available[:num_drawn].count("nonzero"), "each useful one is trained on"
    assert all(own_ids[index] == "zero" for index in replacements)
    is_complete = len(replacements) == own_ids.count("zero")
    assert is_complete or num_drawn == len(available), "the budget is used up"


# ----------------------------------------------------------------------------------------------------------------- runs
@pytest.mark.parametrize("source", [FakeRollouts, TwoTurns])
def test_a_further_prompt_replaces_one_whose_samples_earn_the_same(
    tokenizer: Any, tmp_path: Path, source: type[FakeRollouts]
) -> None:
    """The second own prompt and the first further prompt of step 1 earn the same; the second one replaces."""
    first_own = chosen(1)
    first_further = further(1)
    silent = [first_own[1], first_further[0]]
    config = with_overrides(resampling_job(), {"num_steps": 1})
    bench = make_bench(tmp_path, tokenizer, config, silent, rollouts=source(tokenizer))
    state = bench.run()

    expected = [first_own[0], first_further[1], *first_own[2:]]
    assert trained(bench) == [expected]
    assert requested(bench, 1) == first_own + first_further[:2]
    metrics = bench.metrics()[1]
    assert metrics["group/further_prompts"] == 2
    assert metrics["group/replaced_prompts"] == 1
    assert metrics["group/zero_variance_share"] == 0
    assert metrics["samples"] == state.num_samples == (PER_STEP + 2) * SAMPLES
    assert metrics["dropped/samples"] == metrics["dropped/prompts"] == 0
    reasons = {line["prompt_id"]: line["reason"] for line in bench.dropped()}
    assert reasons.keys() == set(silent)
    assert first_further[1] in reasons[first_own[1]]


def test_without_a_replacement_a_prompt_stays(tokenizer: Any, tmp_path: Path) -> None:
    everything = [f"p{index}" for index in range(NUM_PROMPTS)]
    bench = make_bench(tmp_path, tokenizer, resampling_job(2), everything)
    bench.run()
    assert trained(bench) == [chosen(step) for step in range(1, NUM_STEPS + 1)]
    for step, metrics in enumerate(bench.metrics()[1:], start=1):
        assert requested(bench, step) == chosen(step) + further(step, 2)
        assert metrics["samples"] == step * (PER_STEP + 2) * SAMPLES
        assert metrics["group/further_prompts"] == 2
        assert metrics["group/replaced_prompts"] == 0
        assert metrics["group/zero_variance_share"] == 1
    assert [line["prompt_id"] for line in bench.dropped() if line["step"] == 2] == further(2, 2)


def test_where_no_prompt_earns_the_same_nothing_changes(tokenizer: Any, tmp_path: Path) -> None:
    plain = make_bench(tmp_path / "plain", tokenizer, resampling_job(0), [])
    plain.run()
    bench = make_bench(tmp_path / "resampling", tokenizer, resampling_job(), [])
    bench.run()
    for before, metrics in zip(plain.metrics()[1:], bench.metrics()[1:], strict=True):
        assert metrics == before | {"group/further_prompts": 0, "group/replaced_prompts": 0}
    np.testing.assert_array_equal(bench.learner.logits.detach(), plain.learner.logits.detach())


SILENT = [f"p{index}" for index in range(0, NUM_PROMPTS, 4)]


@pytest.fixture(scope="module")
def whole(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A run of which prompts are replaced in each step."""
    bench = make_bench(tmp_path_factory.mktemp("whole"), tokenizer, resampling_job(), SILENT)
    bench.run()
    assert all(metrics["group/replaced_prompts"] > 0 for metrics in bench.metrics()[1:])
    return bench


class Killed(BaseException):
    """Ends a run without a last word."""


@pytest.mark.parametrize("place", ["own", "further", "update"])
def test_a_killed_run_goes_on_with_the_same_prompts_and_numbers(
    tokenizer: Any, tmp_path: Path, whole: Bench, place: str
) -> None:
    """It is killed in step 2, in which an own or a further prompt is sampled, or the learner updates."""
    fatal = {"own": chosen(2)[3], "further": further(2)[0]}.get(place)
    config = resampling_job()
    first = make_bench(tmp_path, tokenizer, config, SILENT)

    def die_at_prompt(prompt: Prompt) -> None:
        if first.trainer.state.step == 1 and prompt.prompt_id == fatal:
            raise Killed

    def die_in_update(call: str) -> None:
        if first.trainer.state.step == 1 and call == place:
            raise Killed

    first.rollouts.before_sample = die_at_prompt
    first.learner.before_call = die_in_update
    with pytest.raises(Killed):
        first.run()

    second = make_bench(tmp_path, tokenizer, config, SILENT)
    state = second.run()
    assert second.metrics() == whole.metrics()
    assert second.dropped() == whole.dropped()
    assert state.num_samples == whole.trainer.state.num_samples
    np.testing.assert_array_equal(second.learner.logits.detach(), whole.learner.logits.detach())
    for step in (2, 3):
        assert requested(second, step) == requested(whole, step)


def test_the_order_of_arrival_changes_nothing(tokenizer: Any, tmp_path: Path, whole: Bench) -> None:
    bench = make_bench(tmp_path, tokenizer, resampling_job(), SILENT)
    rng = random.Random(3)

    async def some_time(prompt_id: str, seed: int) -> None:
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)

    bench.rollouts.midway = some_time
    bench.run()
    assert bench.metrics() == whole.metrics()
    assert trained(bench) == trained(whole)


def test_a_step_ahead_draws_as_well_and_a_restart_keeps_what_it_drew(tokenizer: Any, tmp_path: Path) -> None:
    """Each step is sampled whole, further prompts included, while the learner is in the step before it."""
    config = resampling_job(max_staleness=1)

    def run_to(folder: str, last_step: int) -> Bench:
        bench = make_bench(
            tmp_path / folder, tokenizer, config, SILENT, stop=lambda: bench.trainer.state.step == last_step
        )

        def wait_for_next_step(call: str) -> None:
            if call == "forward":
                ahead = min(bench.trainer.state.step + 2, NUM_STEPS)
                block_until_answered(bench, ahead)

        bench.learner.before_call = wait_for_next_step
        bench.run()
        return bench

    whole = run_to("whole", NUM_STEPS)
    run_to("cut", 1)
    second = run_to("cut", 2)
    assert requested(second, 2) == [], "step 2 is in the checkpoint"
    assert second.metrics()[2] == whole.metrics()[2]
    assert trained(second)[0] == trained(whole)[1]
    assert sorted(requested(whole, 2)) == sorted([*chosen(2), *further(2)[: count_draws(2)]])


def block_until_answered(bench: Bench, step: int) -> None:
    """Wait, in the learner's thread, until all prompts of a step are sampled."""
    seed = make_sampling_seed(1, "train", step)
    for _ in range(PATIENCE_S * 1000):
        num_answered = sum(own_seed == seed for _, own_seed in [*bench.rollouts.answered])
        if num_answered == PER_STEP + count_draws(step):
            return
        time.sleep(0.001)
    raise AssertionError(f"step {step} was not sampled meanwhile")


def count_draws(step: int) -> int:
    """Count the further prompts of a step one after the other."""
    num_missing = sum(prompt_id in SILENT for prompt_id in chosen(step))
    num_drawn = 0
    for prompt_id in further(step):
        if num_missing == 0:
            break
        num_drawn += 1
        num_missing -= prompt_id not in SILENT
    return num_drawn


# ------------------------------------------------------------------------------------------------------------- failures
def test_a_further_prompt_without_feedback_or_samples_replaces_none_and_is_counted(
    tokenizer: Any, tmp_path: Path
) -> None:
    """The feedback on the first further prompt fails, the second cannot be sampled; own failures draw no prompt."""
    own_ids = chosen(1)
    drawn = further(1)
    failing = {drawn[0], own_ids[5]}
    config = with_overrides(resampling_job(), {"num_steps": 1})
    bench = make_bench(tmp_path, tokenizer, config, [own_ids[2]])
    bench.feedback.failing = lambda prompt: prompt.prompt_id in failing

    def sample(prompt: Prompt) -> None:
        if prompt.prompt_id == drawn[1]:
            raise SamplingFailed("no worker answers")

    bench.rollouts.before_sample = sample
    bench.run()
    assert requested(bench, 1) == own_ids + drawn[:3]
    without_failure = [own_ids[0], own_ids[1], drawn[2], own_ids[3], own_ids[4], own_ids[6], own_ids[7]]
    assert trained(bench) == [without_failure]
    metrics = bench.metrics()[1]
    assert metrics["samples"] == (PER_STEP + 2) * SAMPLES, "one of three further prompts has no responses"
    assert metrics["dropped/prompts"] == 1
    assert metrics["dropped/samples"] == 3 * SAMPLES
    judged = (PER_STEP + 2) * SAMPLES
    assert metrics["feedback/failed_share"] == pytest.approx(2 * SAMPLES / judged), "a further prompt, an own one"
    reasons = [(line["prompt_id"], line["sample_index"] is None) for line in bench.dropped()]
    assert reasons.count((drawn[0], False)) == SAMPLES
    assert reasons.count((drawn[1], True)) == reasons.count((own_ids[2], True)) == 1


def test_failed_feedback_on_further_prompts_counts_for_the_bound(tokenizer: Any, tmp_path: Path) -> None:
    """4 of 12 prompts have no feedback, which feedback.max_failed_share=0.3 forbids."""
    drawn = further(1)
    config = with_overrides(resampling_job(), {"feedback.max_failed_share": 0.3})
    bench = make_bench(tmp_path, tokenizer, config, chosen(1)[:1])
    bench.feedback.failing = lambda prompt: prompt.prompt_id in drawn
    with pytest.raises(RunStopped, match="step 1: 16 of 48 samples have no usable feedback"):
        bench.run()


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"samples_per_prompt": 1}, ["rollout.resample_zero_groups=4", "rollout.samples_per_prompt is 1"]),
        ({"advantages": "gae"}, ["rollout.resample_zero_groups=4", "objective.advantages=gae"]),
        ({"advantages": "unlikely"}, ["rollout.resample_zero_groups=4", "objective.advantages=unlikely"]),
        ({"teacher": {"weight": 1}}, ["rollout.resample_zero_groups=4", "objective.teacher.weight=1"]),
    ],
)
def test_resampling_without_groups_is_refused(options: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        resampling_job(**options)
    for fragment in fragments:
        assert fragment in str(refused.value)


def test_fewer_prompts_than_a_step_may_take_are_refused() -> None:
    config = resampling_job()
    check_further_prompts(config, 12)
    check_further_prompts(resampling_job(0), 3)
    with pytest.raises(UserError, match=r"data.path has 11 prompts, .*resample_zero_groups=4 may take 12 different"):
        check_further_prompts(config, 11)
