"""A run that ends anywhere and is started again: the same numbers, nothing twice, nothing left running."""

import asyncio
import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from fakes import letter_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_bench import NUM_STEPS, Bench, chosen, job, task_reward

from jobs.common.cli import StopFlag
from jobs.train_policy.policy_training import RestartBudget
from t2g.concurrency import run_with_background
from t2g.config import LearnerConfig, PolicyJob, with_overrides
from t2g.errors import LearnerLost, RankFailed, RunStopped, SamplingFailed, Stopped, UserError
from t2g.loop.trainer import TrainerState
from t2g.runs.checkpoint import CheckpointStore
from t2g.runs.identity import ContentChange

Result = TypeVar("Result")

PHASES = ("sample", "judge", "measure", "forward", "update", "push", "save", "export")
CONFIG = with_overrides(job(outcome_rewards=task_reward(0.5)), {"checkpoint.export": True})


def with_restarts(attempt: Callable[[float | None], Result], learner: LearnerConfig, stop: StopFlag) -> Result:
    """Attempt as `PolicyTraining.run` does."""
    restarts = RestartBudget(learner, stop)
    while True:
        try:
            return attempt(restarts.lost_at)
        except LearnerLost as lost:
            restarts.spend(lost)


class Killed(BaseException):
    """Ends a run without a last word."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def whole(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("whole"), tokenizer, CONFIG)
    bench.calls = listen(bench, lambda phase, count: None)
    bench.run()
    return bench


def listen(bench: Bench, on_call: Any) -> dict[str, int]:
    """on_call(phase, how often it was entered) before each call of every phase; returns the counts as they grow."""
    counts = dict.fromkeys(PHASES, 0)

    def enter(phase: str, *_: object) -> None:
        counts[phase] += 1
        on_call(phase, counts[phase])

    bench.learner.before_call = enter
    bench.rollouts.before_sample = functools.partial(enter, "sample")
    bench.feedback.before_judge = functools.partial(enter, "judge")
    bench.task.on_measure = functools.partial(enter, "measure")
    return counts


def same(bench: Bench, whole: Bench) -> None:
    assert bench.metrics() == whole.metrics()
    np.testing.assert_array_equal(bench.learner.logits.detach(), whole.learner.logits.detach())
    assert bench.dropped() == whole.dropped()


@settings(max_examples=12)
@given(data=st.data())
def test_a_run_that_is_killed_anywhere_goes_on_to_the_same_numbers(
    tokenizer: Any, tmp_path_factory: pytest.TempPathFactory, whole: Bench, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("killed")
    phase = data.draw(st.sampled_from(PHASES))
    place = data.draw(st.integers(1, whole.calls[phase]))

    def kill(entered: str, count: int) -> None:
        if (entered, count) == (phase, place):
            raise Killed

    first = Bench(folder, tokenizer, CONFIG)
    listen(first, kill)
    with pytest.raises(Killed):
        first.run()
    second = Bench(folder, tokenizer, CONFIG)
    assert second.run().step == NUM_STEPS
    same(second, whole)


@pytest.mark.parametrize("phase", PHASES)
def test_a_stop_in_any_phase_leaves_a_checkpoint_of_the_last_finished_step(
    tokenizer: Any, tmp_path: Path, whole: Bench, phase: str
) -> None:
    stop = StopFlag()
    first = Bench(tmp_path, tokenizer, CONFIG, stop=lambda: bool(stop))

    def signal(entered: str, count: int) -> None:
        if first.trainer.state.step == 2 and entered == phase:
            stop.signal_name = "SIGTERM"

    listen(first, signal)
    state = first.run()
    assert state.step == {"forward": 3, "update": 3, "push": 3}.get(phase, 2)
    assert first.checkpoint_step() == state.step == first.metrics()[-1]["step"]
    second = Bench(tmp_path, tokenizer, CONFIG)
    second.run()
    same(second, whole)


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "update", "push", "save", "export"])
def test_a_lost_learner_is_followed_by_another_on_the_same_engines(
    tokenizer: Any, tmp_path: Path, whole: Bench, phase: str, max_staleness: int
) -> None:
    rollouts = whole.rollouts
    config = with_overrides(CONFIG, {"rollout.max_staleness": max_staleness})
    benches: list[Bench] = []

    def lose(entered: str, count: int) -> None:
        bench = benches[-1]
        if len(benches) < 3 and bench.trainer.state.step == 2 + 2 * (len(benches) - 1) and entered == phase:
            raise LearnerLost("learner rank 1 died")

    def attempt(lost_at: float | None) -> TrainerState:
        bench = Bench(tmp_path, tokenizer, config, rollouts=rollouts, lost_at=lost_at)
        benches.append(bench)
        listen(bench, lose)
        return bench.run()

    assert with_restarts(attempt, LearnerConfig(max_restarts=2), StopFlag()).step == NUM_STEPS
    assert len(benches) == 3
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    recoveries = [line["step"] for line in lines if line.get("recovery/learner_s", -1) >= 0]
    assert len(recoveries) == 2 or phase in ("save", "export")  # in a step that is repeated, the second counts
    if max_staleness == 0:
        same(benches[-1], whole)


def test_a_learner_that_is_lost_too_often_ends_the_run() -> None:
    attempts: list[float | None] = []

    def attempt(lost_at: float | None) -> None:
        attempts.append(lost_at)
        raise LearnerLost("learner rank 0 timed out")

    twice = LearnerConfig(max_restarts=2)
    sentence = r"learner\.max_restarts=2 in 21600 s \(learner\.restart_window_s\) allows no other start"
    with pytest.raises(RunStopped, match=rf"^learner rank 0 timed out; {sentence}$"):
        with_restarts(attempt, twice, StopFlag())
    assert attempts[0] is None
    assert len(attempts) == 3
    assert None not in attempts[1:]

    stop = StopFlag()
    stop.signal_name = "SIGTERM"
    with pytest.raises(Stopped):
        with_restarts(attempt, twice, stop)
    assert len(attempts) == 4


def test_a_learner_that_is_lost_seldom_is_always_started_again() -> None:
    """Four losses of a run, two at most within any 0.2 s."""
    attempts: list[float | None] = []

    def attempt(lost_at: float | None) -> int:
        attempts.append(lost_at)
        if len(attempts) == 5:
            return 7
        time.sleep(0.15)
        raise LearnerLost("learner rank 0 died")

    assert with_restarts(attempt, LearnerConfig(max_restarts=2, restart_window_s=0.2), StopFlag()) == 7
    attempts.clear()
    with pytest.raises(RunStopped, match=r"max_restarts=2 in 60 s"):
        with_restarts(attempt, LearnerConfig(max_restarts=2, restart_window_s=60), StopFlag())


def test_what_ends_beside_the_run_ends_it_and_keeps_the_finished_steps(
    tokenizer: Any, tmp_path: Path, whole: Bench
) -> None:
    bench = Bench(tmp_path, tokenizer, job(outcome_rewards=task_reward(0.5), max_staleness=1))

    async def floor() -> None:
        while bench.trainer.state.step < 3:
            await asyncio.sleep(0)
        raise RunStopped("no rollout worker is left")

    with pytest.raises(RunStopped, match="no rollout worker is left"):
        asyncio.run(run_with_background(bench.tidy(), floor()))
    assert bench.checkpoint_step() == bench.metrics()[-1]["step"] >= 3


def test_a_rank_that_failed_alone_ends_the_run_without_a_save_that_would_hang(tokenizer: Any, tmp_path: Path) -> None:
    """The last checkpoint is of step 2, and the failure comes in step 4."""
    sentence = "learner rank 1 failed in forward, and others wait for it: OutOfMemoryError: CUDA out of memory"
    bench = Bench(tmp_path, tokenizer, CONFIG)

    def fail(phase: str, count: int) -> None:
        if phase == "forward" and bench.trainer.state.step == 3:
            raise RankFailed(sentence)

    counts = listen(bench, fail)
    with pytest.raises(RankFailed) as caught:
        with_restarts(lambda lost_at: bench.run(), LearnerConfig(max_restarts=2), StopFlag())
    assert str(caught.value) == sentence
    assert counts["save"] == 1
    assert bench.checkpoint_step() == 2


def test_unanswered_prompts_are_dropped_and_reported(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, CONFIG)
    failing = {"p3", "p4"}

    def fail(prompt: Any) -> None:
        if prompt.prompt_id in failing:
            raise SamplingFailed(f"prompt {prompt.prompt_id}: three workers died")

    bench.rollouts.before_sample = fail
    bench.feedback.failing = lambda prompt: prompt.prompt_id == "p5"
    assert bench.run().step == NUM_STEPS
    expected = [(s, p, None) for s in range(1, NUM_STEPS + 1) for p in chosen(s) if p in failing]
    expected += [(s, "p5", i) for s in range(1, NUM_STEPS + 1) if "p5" in chosen(s) for i in range(4)]
    dropped = [(d["step"], d["prompt_id"], d["sample_index"]) for d in bench.dropped()]
    assert sorted(dropped, key=str) == sorted(expected, key=str)
    assert {d["reason"] for d in bench.dropped()} == {
        "prompt p3: three workers died", "prompt p4: three workers died", "feedback failed"
    }  # fmt: skip
    for metrics in bench.metrics()[1:]:
        lost = [d for d in bench.dropped() if d["step"] == metrics["step"]]
        assert metrics["dropped/prompts"] == sum(d["sample_index"] is None for d in lost)
        assert metrics["dropped/samples"] == sum(4 if d["sample_index"] is None else 1 for d in lost)
    logged = {(s, p) for s, p, _ in dropped}
    for step, rollouts in enumerate(bench.learner.seen, start=1):
        trained = {r.prompt_id for r in rollouts}
        assert trained.isdisjoint(p for s, p in logged if s == step)
        assert trained | {p for s, p in logged if s == step} == set(chosen(step))


def test_dropped_lines_of_steps_that_are_repeated_stand_once(tokenizer: Any, tmp_path: Path) -> None:
    def failing(bench: Bench) -> Bench:
        bench.feedback.failing = lambda prompt: prompt.prompt_id in ("p1", "p2")
        return bench

    first = failing(Bench(tmp_path / "cut", tokenizer, CONFIG))
    counts = listen(first, lambda phase, count: die(count) if phase == "update" else None)

    def die(count: int) -> None:
        if count == 4:
            raise Killed

    with pytest.raises(Killed):
        first.run()
    assert counts["update"] == 4
    second = failing(Bench(tmp_path / "cut", tokenizer, CONFIG))
    whole = failing(Bench(tmp_path / "w", tokenizer, CONFIG))
    second.run()
    whole.run()
    assert len(whole.dropped()) > 8
    same(second, whole)


def test_too_many_unanswered_prompts_stop_the_run(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, CONFIG)

    def fail(prompt: Any) -> None:
        if prompt.prompt_id in chosen(1)[:5]:
            raise SamplingFailed("three workers died")

    bench.rollouts.before_sample = fail
    with pytest.raises(
        RunStopped,
        match=r"step 1: 20 of 32 samples have no usable feedback \(20 not sampled, 0 failed, 0 unparsable\)",
    ):
        bench.run()


def test_an_unanswered_held_out_prompt_stops_the_run(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, CONFIG)

    def fail(prompt: Any) -> None:
        if prompt.prompt_id == "held-out-7":
            raise SamplingFailed("prompt held-out-7: three workers died")

    bench.rollouts.before_sample = fail
    with pytest.raises(RunStopped, match="prompt held-out-7: three workers died"):
        bench.run()


@contextmanager
def refused(*changed: str) -> Iterator[None]:
    with pytest.raises(UserError, match=r"step-00000002 was made .* take another run.name") as error:
        yield
    assert all(text in str(error.value) for text in changed)


def test_another_origin_is_refused_at_resume(tokenizer: Any, tmp_path: Path) -> None:
    first = Bench(tmp_path, tokenizer, CONFIG, stop=lambda: first.trainer.state.step == 2)
    first.run()

    def again(config: PolicyJob = CONFIG, **changed: Any) -> Bench:
        bench = Bench(tmp_path, tokenizer, config)
        bench.trainer.identity = bench.trainer.identity.model_copy(update=changed)
        return bench

    with refused(
        'objective.outcome_rewards ([{"source": "task", "weight": 0.5}] -> [{"source": "task", "weight": 0.25}])'
    ):
        again(job(outcome_rewards=task_reward(0.25))).trainer.resume()
    with refused("learner.schedule_steps (6 -> 9)", "learner.schedule_steps=6 keeps the learning-rate schedule"):
        again(with_overrides(CONFIG, {"num_steps": 9})).trainer.resume()
    longer = {"num_steps": 9, "learner.schedule_steps": 6, "checkpoint.keep": 7}
    assert again(with_overrides(CONFIG, longer)).trainer.resume().step == 2


def test_a_checkpoint_from_before_an_accepted_change_is_taken(tokenizer: Any, tmp_path: Path) -> None:
    first = Bench(tmp_path, tokenizer, CONFIG, stop=lambda: first.trainer.state.step == 2)
    first.trainer.identity = first.trainer.identity.model_copy(update={"contents": {"feedback.source": "a" * 16}})
    first.run()

    def again(after: str, *accepted: tuple[str, str]) -> TrainerState:
        bench = Bench(tmp_path, tokenizer, CONFIG)
        changes = tuple(ContentChange(key="feedback.source", before=b * 16, after=a * 16) for b, a in accepted)
        update = {"contents": {"feedback.source": after * 16}, "accepted": changes}
        bench.trainer.identity = bench.trainer.identity.model_copy(update=update)
        return bench.trainer.resume()

    with refused(f"the content of feedback.source (hash {'a' * 16} -> {'b' * 16})"):
        again("b")
    for chain in ([("a", "b")], [("a", "c"), ("c", "b")]):
        assert again("b", *chain).step == 2
    assert CheckpointStore(tmp_path / "checkpoints", keep=2).latest() is not None, "nothing was written into it"


def test_damaged_checkpoints_erase_no_log(tokenizer: Any, tmp_path: Path) -> None:
    """A flipped bit in each checkpoint ends the start; the logs stay, and the start that skips them begins again."""
    first = Bench(tmp_path, tokenizer, CONFIG, stop=lambda: first.trainer.state.step == 4)
    first.run()
    logs = {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    for state in tmp_path.glob("checkpoints/step-*/state.json"):
        state.write_text(state.read_text().replace("step", "stop"))
    with pytest.raises(UserError, match=r"step-00000004 \(state.json differs.*\), step-00000002 \(state.json differs"):
        Bench(tmp_path, tokenizer, CONFIG).trainer.resume()
    assert {path: path.read_bytes() for path in logs} == logs
    again = Bench(tmp_path, tokenizer, CONFIG)
    again.trainer.checkpoints.skip_unreadable = True
    assert again.trainer.resume().step == 0


def test_a_checkpoint_of_the_layout_before_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    origin = {"config": "c", "policy": "w", "prompts": "p", "feedback": "f"}
    store.write(2, lambda folder: None, {"step": 2, "kl_coef": 0.5, "origin": origin})
    with refused("by another version of this program"):
        Bench(tmp_path, tokenizer, CONFIG).trainer.resume()
