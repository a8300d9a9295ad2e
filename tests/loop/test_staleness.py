"""rollout.max_staleness 1 and 2: what is sampled while what is learnt, from which weights, and what a restart keeps."""

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import TwoTurns
from fakes import FakeRollouts, letter_tokenizer
from trainer_bench import NUM_STEPS, PER_STEP, Bench, chosen, job

from t2g.errors import RunStopped
from t2g.loop.steps import make_sampling_seed
from t2g.types import Rollout

PATIENCE_S = 20  # of a wait that ends at once unless the code is wrong


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def trained(bench: Bench) -> list[list[str]]:
    """Of each step, the prompts it was trained on, in order."""
    prompts = []
    for rollouts in bench.learner.seen:
        prompt_ids = [rollout.prompt_id for rollout in rollouts]
        prompts.append([*dict.fromkeys(prompt_ids)])
    return prompts


def step_seed(step: int) -> int:
    return make_sampling_seed(1, "train", step)


STEPS = {step_seed(step): step for step in range(1, NUM_STEPS + 1)}


def num_answered(bench: Bench, step: int) -> int:
    return sum(seed == step_seed(step) for _, seed in list(bench.rollouts.answered))


def versions(rollout: Rollout) -> list[int]:
    return [version for _, _, version in rollout.policy_versions]


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


def block_until(condition: Any) -> None:
    """In the learner's thread."""
    for _ in range(PATIENCE_S * 1000):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("nothing was sampled meanwhile")


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_each_step_trains_its_own_prompts_whatever_the_order_of_arrival(
    tokenizer: Any, tmp_path: Path, max_staleness: int
) -> None:
    bench = Bench(tmp_path, tokenizer, job(max_staleness=max_staleness))
    rng = random.Random(max_staleness)

    async def some_time(prompt_id: str, seed: int) -> None:
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)

    bench.rollouts.midway = some_time
    bench.run()
    assert trained(bench) == [chosen(step) for step in range(1, NUM_STEPS + 1)]  # three epochs, each prompt once
    assert all(len(rollouts) == PER_STEP * 4 for rollouts in bench.learner.seen)
    oldest = [m["staleness/max"] for m in bench.metrics()[1:]]
    assert all(0 <= age <= min(step, max_staleness) for step, age in enumerate(oldest))


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_the_learner_learns_while_the_next_steps_are_sampled(
    tokenizer: Any, tmp_path: Path, max_staleness: int
) -> None:
    """Step k's responses are begun while the learner is in step k - s, and wait for its end until it has begun; the
    learner's step in turn waits for them: neither gets on unless both are under way.
    """
    bench = Bench(tmp_path, tokenizer, job(max_staleness=max_staleness))
    learning = 0

    def in_step(call: str) -> None:
        nonlocal learning
        if call == "forward":
            learning += 1
            ahead = min(learning + max_staleness, NUM_STEPS)
            block_until(lambda: num_answered(bench, ahead) == PER_STEP)

    async def once_the_learner_is_there(prompt_id: str, seed: int) -> None:
        if seed in STEPS:
            await until(lambda: learning >= STEPS[seed] - max_staleness)

    bench.learner.before_call = in_step
    bench.rollouts.midway = once_the_learner_is_there
    bench.run()
    metrics = bench.metrics()[1:]
    staleness = [min(k, max_staleness) for k in range(NUM_STEPS)]  # all responses are made as early as allowed
    assert [m["staleness/mean"] for m in metrics] == [m["staleness/max"] for m in metrics] == staleness
    waiting = [min(max_staleness, NUM_STEPS - k) for k in range(1, NUM_STEPS + 1)]  # steps ahead that are all there
    assert [m["buffer/samples"] for m in metrics] == [PER_STEP * 4 * steps for steps in waiting]
    for k, rollouts in enumerate(bench.learner.seen):
        assert {v for r in rollouts for v in versions(r)} == {max(0, k - max_staleness)}


def test_without_staleness_nothing_is_sampled_while_the_learner_works(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job())
    running: list[int] = []
    bench.learner.before_call = lambda call: running.append(bench.rollouts.num_running)
    bench.run()
    assert len(running) > NUM_STEPS * 3
    assert set(running) == {0}
    assert all(m["staleness/max"] == m["buffer/samples"] == 0 for m in bench.metrics()[1:])


def test_weights_change_in_the_middle_of_a_response_and_each_token_knows_its_own(
    tokenizer: Any, tmp_path: Path
) -> None:
    bench = Bench(tmp_path, tokenizer, job(max_staleness=1))

    async def until_the_next_weights(prompt_id: str, seed: int) -> None:
        if STEPS.get(seed) == 2:
            assert bench.rollouts.version == 0
            await until(lambda: bench.rollouts.version == 1)

    bench.rollouts.midway = until_the_next_weights
    bench.run()
    second = bench.metrics()[2]
    assert (second["staleness/mean"], second["staleness/max"]) == (0.5, 1.0)
    assert all(versions(r) == [0, 0, 1, 1] for r in bench.learner.seen[1])


def test_tokens_that_are_older_than_allowed_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job(max_staleness=1))
    bench.rollouts.before_sample = lambda prompt: setattr(bench.rollouts, "version", 0)
    with pytest.raises(RunStopped, match=r"version \[0\], and the learner is at 2: rollout.max_staleness=1 forbids"):
        bench.run()
    assert bench.checkpoint_step() == 2


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_a_restart_trains_on_finished_groups_and_samples_only_the_others(
    tokenizer: Any, tmp_path: Path, max_staleness: int
) -> None:
    last = chosen(4)[-1]
    first = Bench(tmp_path, tokenizer, job(max_staleness=max_staleness), stop=lambda: first.trainer.state.step == 3)

    async def never_the_last(prompt_id: str, seed: int) -> None:
        if (prompt_id, seed) == (last, step_seed(4)):
            await asyncio.Event().wait()

    def in_step(call: str) -> None:
        if call == "forward" and first.trainer.state.step == 2:
            block_until(lambda: num_answered(first, 4) == PER_STEP - 1)

    first.rollouts.midway = never_the_last
    first.learner.before_call = in_step
    assert first.run().step == 3

    second = Bench(tmp_path, tokenizer, job(max_staleness=max_staleness))
    assert second.run().step == NUM_STEPS
    assert [prompt for prompt, seed in second.rollouts.requests if seed == step_seed(4)] == [last]
    fourth = second.learner.seen[0]
    assert trained(second)[0] == chosen(4)
    assert len(fourth) == PER_STEP * 4
    fresh = {v for r in fourth if r.prompt_id == last for v in versions(r)}
    finished_versions = {v for r in fourth if r.prompt_id != last for v in versions(r)}
    assert fresh == {3} and max(finished_versions) <= 2
    assert [m["step"] for m in second.metrics()] == list(range(NUM_STEPS + 1))
    assert second.trainer.state.num_samples == NUM_STEPS * PER_STEP * 4


@pytest.mark.parametrize("source", [FakeRollouts, TwoTurns])
def test_what_a_restart_reads_is_what_was_sampled(tokenizer: Any, tmp_path: Path, source: type[FakeRollouts]) -> None:
    def one_step_ahead(folder: str, last_step: int) -> Bench:
        bench = Bench(
            tmp_path / folder, tokenizer, job(max_staleness=1), stop=lambda: bench.trainer.state.step == last_step,
            rollouts=source(tokenizer),
        )  # fmt: skip

        def in_step(call: str) -> None:
            ahead = min(bench.trainer.state.step + 2, NUM_STEPS)
            if call == "forward":
                block_until(lambda: num_answered(bench, ahead) == PER_STEP)

        bench.learner.before_call = in_step
        bench.run()
        return bench

    whole = one_step_ahead("whole", NUM_STEPS)
    one_step_ahead("cut", 2)
    second = one_step_ahead("cut", 3)
    for was, now in zip(whole.learner.seen[2], second.learner.seen[0], strict=True):
        assert (was.prompt_id, was.sample_index, was.response_text) == (
            now.prompt_id,
            now.sample_index,
            now.response_text,
        )
        assert was.policy_versions == now.policy_versions
        assert was.environment_turns == now.environment_turns
        np.testing.assert_array_equal(was.rollout_logprobs.view(np.uint32), now.rollout_logprobs.view(np.uint32))
    assert second.metrics()[3] == whole.metrics()[3]
    assert second.metrics()[3].get("turns/mean") == (2 if source is TwoTurns else None)
