"""The loop on fakes: it learns, it resumes to the same numbers, it stops with a reason."""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeFeedback, FakeLearner, FakeRollouts, FakeSync, LetterTask, letter_prompts, letter_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from t2g.checkpoint import CheckpointStore
from t2g.config import PolicyJob
from t2g.errors import RunStopped, UserError
from t2g.feedback.parse import make_feedback
from t2g.metrics import RunLog
from t2g.steps import advantage_samples, prompt_indices, sampling_seed, step_metrics
from t2g.trainer import Trainer, TrainerState
from t2g.types import Prompt, Rollout, ScoredRollout, TokenStats

NUM_STEPS = 6


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def job(**objective: Any) -> PolicyJob:
    return PolicyJob.model_validate(
        {
            "model": {"policy": "unused"},
            "data": {"path": "unused"},
            "num_steps": NUM_STEPS,
            "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4},
            "feedback": {"source": "pkg:critic"},
            "objective": {"kl_coef": 0.01, **objective},
            "learner": {"minibatches_per_epoch": 2},
            "eval": {"every": 3},
            "checkpoint": {"every": 2},
            "log": {"tensorboard": False},
        }
    )


class Bench:
    """A trainer on fakes in one run folder; making a second one there is what a restart is."""

    def __init__(
        self, folder: Path, tokenizer: Any, config: PolicyJob, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.folder = folder
        self.rollouts, self.feedback = FakeRollouts(tokenizer), FakeFeedback()
        self.learner = FakeLearner(self.rollouts)
        self.trainer = Trainer(
            config=config,
            task=LetterTask(),
            tokenizer=tokenizer,
            prompts=letter_prompts(20),
            eval_prompts=letter_prompts(40, "held-out-"),
            rollouts=self.rollouts,
            feedback=self.feedback,
            learner=self.learner,
            sync=FakeSync(self.learner, self.rollouts),
            log=RunLog(folder, config.log),
            checkpoints=CheckpointStore(folder / "checkpoints", keep=2),
            stop=stop,
        )

    def run(self) -> TrainerState:
        self.trainer.resume()
        return asyncio.run(self.trainer.run())

    def metrics(self) -> list[dict[str, float]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        timed = ("time/", "speed/")
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(timed)} for line in lines]


def test_good_letters_become_likely_and_poor_ones_rare(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job())
    state = bench.run()
    probabilities = bench.learner.logits.softmax(-1).mean(0)
    assert probabilities[0] > 0.6 and probabilities[1] < 0.15  # from a third each
    metrics = bench.metrics()
    assert [m["step"] for m in metrics] == list(range(NUM_STEPS + 1))
    assert metrics[-1]["eval/score"] > metrics[0]["eval/score"] + 0.2
    assert state.num_samples == NUM_STEPS * 8 * 4 == metrics[-1]["samples"]
    folder, score = CheckpointStore(tmp_path / "checkpoints", keep=2).best()
    assert score == max(m["eval/score"] for m in metrics if "eval/score" in m) and (folder / "policy.json").exists()


def test_a_run_stopped_between_steps_resumes_to_the_same_numbers(tokenizer: Any, tmp_path: Path) -> None:
    whole = Bench(tmp_path / "whole", tokenizer, job())
    whole.run()

    first = Bench(tmp_path / "cut", tokenizer, job(), stop=lambda: first.trainer.state.step >= 3)
    assert first.run().step == 3
    second = Bench(tmp_path / "cut", tokenizer, job())
    assert second.run().step == NUM_STEPS
    assert second.metrics() == whole.metrics()
    np.testing.assert_array_equal(second.learner.logits.detach(), whole.learner.logits.detach())


def test_a_run_that_dies_after_its_checkpoint_repeats_only_the_steps_since(tokenizer: Any, tmp_path: Path) -> None:
    whole = Bench(tmp_path / "whole", tokenizer, job())
    whole.run()

    first = Bench(tmp_path / "died", tokenizer, job())
    calls = []

    def die_in_step_4() -> None:  # 40 held-out prompts, then 8 a step, 40 more at step 3
        calls.append(1)
        if len(calls) > 40 + 8 * 3 + 40 + 2:
            raise RuntimeError("killed")

    first.rollouts.before_sample = die_in_step_4
    with pytest.raises(RuntimeError, match="killed"):
        first.run()
    assert [m["step"] for m in first.metrics()] == [0, 1, 2, 3]  # the checkpoint is of step 2
    second = Bench(tmp_path / "died", tokenizer, job())
    second.run()
    assert second.metrics() == whole.metrics()


def test_a_stop_during_sampling_leaves_the_step_undone(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job(), stop=lambda: bench.rollouts.version >= 1)
    assert bench.run().step == 1
    assert [m["step"] for m in bench.metrics()] == [0, 1]
    assert CheckpointStore(tmp_path / "checkpoints", keep=2).latest()[1]["step"] == 1


def test_too_much_failed_feedback_stops_the_run_and_says_so(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job())
    bench.feedback.failing = lambda prompt: int(prompt.prompt_id[-1]) < 8
    with pytest.raises(RunStopped, match=r"step 1: .*of 32 samples have no usable feedback .*from program"):
        bench.run()


def test_a_run_that_stops_itself_keeps_the_steps_that_were_done(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job())
    bench.feedback.failing = lambda prompt: bench.rollouts.version == 3 and prompt.prompt_id.startswith("p")
    with pytest.raises(RunStopped, match="step 4: 100% of 32 samples"):
        bench.run()
    assert CheckpointStore(tmp_path / "checkpoints", keep=2).latest()[1]["step"] == 3  # checkpoints are every 2 steps

    whole = Bench(tmp_path / "whole", tokenizer, job())
    whole.run()
    again = Bench(tmp_path, tokenizer, job())
    assert again.run().step == NUM_STEPS
    assert again.metrics() == whole.metrics()


def test_a_sample_of_other_weights_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job())
    bench.rollouts.before_sample = lambda: setattr(bench.rollouts, "version", 7)
    with pytest.raises(RunStopped, match=r"weights of version \[7\], and the learner is at 0"):
        bench.run()


def test_some_failed_feedback_is_dropped_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job())
    bench.feedback.failing = lambda prompt: prompt.prompt_id in {"p3", "p4", "p5"}
    bench.run()
    shares = [m["feedback/failed_share"] for m in bench.metrics()[1:]]
    assert sum(shares) * 8 == pytest.approx(len([i for s in range(1, 7) for i in chosen(s) if i in (3, 4, 5)]))


def chosen(step: int) -> list[int]:
    return prompt_indices(num_prompts=20, per_step=8, step=step, seed=1)


def test_a_number_that_is_not_finite_names_step_sample_and_token(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job())
    bench.learner.critic.data[2] = float("nan")
    with pytest.raises(RunStopped, match=r"step 1: prompt p\d+, sample \d: the values of token 2 is nan"):
        bench.run()


@given(num_prompts=st.integers(1, 30), per_step=st.integers(1, 30), seed=st.integers(0, 5))
def test_an_epoch_holds_each_prompt_at_most_once_and_leaves_out_less_than_a_step(
    num_prompts: int, per_step: int, seed: int
) -> None:
    if per_step > num_prompts:
        with pytest.raises(UserError, match=rf"prompts_per_step={per_step}.*only {num_prompts} prompts"):
            prompt_indices(num_prompts=num_prompts, per_step=per_step, step=1, seed=seed)
        return
    steps = num_prompts // per_step
    for epoch in range(2):
        seen = [
            i
            for step in range(epoch * steps + 1, (epoch + 1) * steps + 1)
            for i in prompt_indices(num_prompts=num_prompts, per_step=per_step, step=step, seed=seed)
        ]
        assert len(set(seen)) == len(seen) == steps * per_step > num_prompts - per_step
        assert set(seen) <= set(range(num_prompts))


def test_sampling_seeds_of_steps_and_splits_never_meet() -> None:
    places = itertools.product(range(3), ("train", "eval"), range(200))
    seeds = {sampling_seed(seed, split, step) for seed, split, step in places}
    assert len(seeds) == 3 * 2 * 200 and all(0 <= seed < 2**63 for seed in seeds)


def scored_pair(deltas: list[float]) -> tuple[Prompt, ScoredRollout]:
    text = "x" * len(deltas)
    rollout = Rollout(
        prompt_id="p",
        sample_index=0,
        prompt_ids=np.array([1], np.int32),
        response_ids=np.arange(len(deltas), dtype=np.int32),
        rollout_logprobs=np.full(len(deltas), -1.0, np.float32),
        response_text=text,
        finish_reason="stop",
        policy_versions=((0, len(deltas), 0),),
    )
    feedback = make_feedback("", [], [], text, source="reward_model", version="v")
    return letter_prompts(1)[0], ScoredRollout(
        rollout=rollout, feedback=feedback, token_rewards=np.array(deltas, np.float32)
    )


def stats(length: int, *, old: float = -1.0, ref: float = -1.0, value: float = 0.0) -> TokenStats:
    row = np.ones(length, np.float32)
    return TokenStats(old_logprobs=old * row, ref_logprobs=ref * row, values=value * row, entropy=0.5 * row)


def test_one_labelled_token_gives_the_identity_of_the_method() -> None:
    objective = job(lam=0.5, whiten="none").objective
    _, scored = scored_pair([0.0, 0.0, -1.0, 0.0])
    samples, kl = advantage_samples([scored], [stats(4)], objective, kl_coef=0.3, seed=1)
    np.testing.assert_allclose(samples[0].advantages, [-0.25, -0.5, -1.0, 0.0])
    assert kl == 0.0


def test_scalar_placement_pays_the_sum_at_the_end_and_the_kl_where_it_arises() -> None:
    objective = job(lam=1.0, whiten="none", rewards={"placement": "scalar"}).objective
    _, scored = scored_pair([1.0, -1.0, 1.0])
    samples, kl = advantage_samples([scored], [stats(3, old=-1.0, ref=-1.5)], objective, kl_coef=0.2, seed=1)
    # rewards -.1, -.1, 1 - .1; lambda 1 and no values: the sum from here to the end
    np.testing.assert_allclose(samples[0].advantages, [0.7, 0.8, 0.9], rtol=1e-6)
    assert kl == pytest.approx(1.5)


def test_padding_of_a_short_response_takes_no_part_in_whitening() -> None:
    objective = job(lam=0.0, whiten="full").objective
    pairs = [scored_pair([1.0, 1.0, 0.0, 0.0])[1], scored_pair([1.0, 0.0])[1]]
    samples, _ = advantage_samples(pairs, [stats(4), stats(2)], objective, kl_coef=0.0, seed=1)
    # six tokens 1 1 0 0 1 0: mean .5, deviation .5
    np.testing.assert_allclose(samples[0].advantages, [1, 1, -1, -1], rtol=1e-6)
    np.testing.assert_allclose(samples[1].advantages, [1, -1], rtol=1e-6)


def test_step_metrics_by_hand() -> None:
    prompt, one = scored_pair([1.0, -1.0, 0.0, 0.0])
    _, two = scored_pair([1.0, 1.0])
    pairs = [(prompt, s.rollout, s.feedback) for s in (one, two, two)]  # the last one's feedback was dropped
    metrics = step_metrics(pairs, [one, two], [stats(4), stats(2, old=-1.2)], kl=0.4, kl_coef=0.1)
    assert metrics["reward/token_mean"] == pytest.approx(2 / 6)
    assert metrics["reward/response_mean"] == pytest.approx((0 + 2) / 2)
    assert metrics["tokens/good_share"] == pytest.approx(3 / 6)
    assert metrics["tokens/poor_share"] == pytest.approx(1 / 6)
    assert metrics["feedback/failed_share"] == pytest.approx(1 / 3)
    assert metrics["feedback/source/reward_model"] == 1.0
    assert metrics["gap/logprob_mean"] == pytest.approx(2 * 0.2 / 6, rel=1e-5)
    assert metrics["response/length_mean"] == pytest.approx(8 / 3)
