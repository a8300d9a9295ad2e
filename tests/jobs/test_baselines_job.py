"""The baselines on fakes: who is sampled how often, what is learnt from, what is written down. No engine, no Ray."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeFeedback, FakeRollouts, letter_prompts, letter_tokenizer

from jobs.common.cli import StopFlag
from jobs.common.run_folder import begin_folder
from jobs.train_policy.baseline_runs import run_baseline
from jobs.train_policy.policy_data import PolicyData
from t2g.config import ModelConfig, PolicyJob, RolloutConfig
from t2g.errors import RunStopped, Stopped, UserError
from t2g.interfaces import RolloutSource, Sampling
from t2g.loop.sampling import JudgedStep
from t2g.runs.log import METRICS_FILE, SAMPLES_FILE, RunLog, read_records
from t2g.sandbox import SandboxConfig
from t2g.study.baselines import BaselineRun, dpo, ilf, reflection, revise_steps, sample_base
from t2g.tasks.prompts_only import PromptsTask
from t2g.types import FinishReason, Prompt, Rollout, SpanFeedback

# 2 prompts a step: each is seen once
NUM_PROMPTS = 6
NUM_HELD_OUT = 4
NUM_STEPS = 3


class Letters(PromptsTask):
    """Scored by the share of `a`."""

    score_name = "share_a"

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float]:
        return {"share_a": response_text.count("a") / 4}


class Reviser:
    """Writes `aaaa`, then `aaab`, `aabb`, ...; keeps what it was asked."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.requests: list[tuple[str, Sampling]] = []
        self.texts = ["aaaa", "aaab", "aabb"]
        self.truncated = set[str]()

    async def sample(self, prompt: Prompt, sampling: Sampling, on_rollout: Any = None) -> list[Rollout]:
        self.requests.append((self.tokenizer.decode(prompt.prompt_ids), sampling))
        texts = self.texts[: sampling.num_samples]
        rollouts = []
        for i, text in enumerate(texts):
            response_ids = self.tokenizer(text)["input_ids"]
            finish_reason = "length" if text in self.truncated else "stop"
            rollout = Rollout(
                prompt_id=prompt.prompt_id,
                sample_index=i,
                prompt_ids=prompt.prompt_ids,
                response_ids=np.array(response_ids, np.int32),
                rollout_logprobs=np.zeros(4, np.float32),
                response_text=text,
                finish_reason=finish_reason,
                policy_versions=((0, 4, 0),),
            )
            rollouts.append(rollout)
        return rollouts


class World:
    """A baseline on fakes, the models that it asked for, and what it trained on."""

    def __init__(self, folder: Path, stop: Callable[[], bool] = lambda: False) -> None:
        tokenizer = letter_tokenizer(folder)
        self.feedback = FakeFeedback()
        self.reviser = Reviser(tokenizer)
        self.base = FakeRollouts(tokenizer)
        self.served: list[tuple[str, int]] = []
        self.learnt: list[Any] = []
        self.job = make_job(folder)
        self.log = RunLog(self.job.run.folder, self.job.log)
        self.log.truncate(0)
        prompts = letter_prompts(NUM_PROMPTS)
        eval_prompts = letter_prompts(NUM_HELD_OUT, "e")
        self.baseline = BaselineRun(
            job=self.job,
            task=Letters(),
            tokenizer=tokenizer,
            prompts=prompts,
            eval_prompts=eval_prompts,
            feedback=self.feedback,
            reviser=ModelConfig(policy="reviser"),
            reviser_tokenizer=tokenizer,
            log=self.log,
            stop=stop,
            serve=self.serve,
            train=self.train,
        )

    def train(self, items: Sequence[Any]) -> dict[str, float]:
        self.learnt = list(items)
        return {"loss": 0.5}

    def serve(self, model: ModelConfig, rollout: RolloutConfig, ask: Callable[[RolloutSource], Any]) -> Any:
        self.served.append((Path(model.policy).name, rollout.max_model_len))
        return asyncio.run(ask(self.base if model == self.job.model else self.reviser))

    def from_base(self, num_samples: int) -> tuple[list[tuple[Prompt, Rollout]], list[JudgedStep]]:
        return self.serve(self.job.model, self.job.rollout, partial(sample_base, self.baseline, num_samples))

    def lines(self, name: str) -> list[dict[str, Any]]:
        return list(read_records(self.job.run.folder / name))


def make_job(folder: Path) -> PolicyJob:
    return PolicyJob.model_validate(
        {
            "run": {"root": folder, "name": "method", "seed": 3},
            "model": {"policy": "base"},
            "data": {"path": "d.jsonl"},
            "eval_data": {"path": "e.jsonl"},
            "num_steps": NUM_STEPS,
            "feedback": {"source": "m:f", "engine": {"max_model_len": 2048, "max_new_tokens": 64}},
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 3, "max_model_len": 64, "max_new_tokens": 8},
            "log": {"trackers": []},
        }
    )


def worth(rollout: Rollout) -> int:
    return rollout.response_text.count("a") - rollout.response_text.count("b")


@pytest.fixture
def world(tmp_path: Path) -> Any:
    return World(tmp_path)


def test_the_base_is_scored_at_step_0_and_sampled_as_ppo_samples_it(world: World) -> None:
    held_out, steps = world.from_base(3)
    (line,) = world.lines(METRICS_FILE)
    shares = [rollout.response_text.count("a") / 4 for _, rollout in held_out]
    assert len(shares) == NUM_HELD_OUT
    assert (line["step"], line["eval/score"]) == (0, pytest.approx(np.mean(shares)))
    assert [len(step.responses) for step in steps] == [6, 6, 6]
    seen = [prompt.prompt_id for step in steps for prompt, _, _ in step.responses[::3]]
    assert sorted(seen) == sorted(p.prompt_id for p in world.baseline.prompts)


def test_dpo_learns_from_the_best_and_the_worst_sampled_ids_of_each_prompt(world: World, tmp_path: Path) -> None:
    metrics = dpo(world.baseline)
    again = World(tmp_path / "again")
    _, steps = again.from_base(3)  # a function of the seed: the same samples
    groups = []
    for step in steps:
        sampled = [rollout for _, rollout, _ in step.responses]
        groups += [sampled[0:3], sampled[3:6]]
    expected = [(max(map(worth, group)), min(map(worth, group))) for group in groups]
    a, b, _ = world.base.ids

    def worth_of(ids: np.ndarray) -> int:
        return int((ids == a).sum() - (ids == b).sum())

    learnt = [(worth_of(pair.chosen_ids), worth_of(pair.rejected_ids)) for pair in world.learnt]
    assert learnt == [(best, worst) for best, worst in expected if best > worst]
    assert metrics["dpo/ties_share"] == pytest.approx(1 - len(learnt) / 6)
    assert (metrics["samples"], metrics["dpo/pairs"], metrics["dpo/loss"]) == (18, len(learnt), 0.5)
    assert metrics["eval/score"] == 1.0  # the result writes `aaaa`
    assert [name for name, _ in world.served] == ["base", "policy"]


def test_ilf_imitates_the_best_revision_within_ppos_samples(world: World) -> None:
    metrics = ilf(world.baseline)
    revisions = [sampling for _, sampling in world.reviser.requests[:NUM_PROMPTS]]
    assert [sampling.num_samples for sampling in revisions] == [2] * NUM_PROMPTS  # and one response each
    assert len({sampling.seed for sampling in revisions}) == NUM_STEPS
    assert metrics["samples"] == 18  # as PPO: 3 steps of 2 prompts and 3 samples
    target = [world.base.ids[0]] * 4 + [world.baseline.tokenizer.eos_token_id]
    assert [example.response_ids.tolist() for example in world.learnt] == [target] * NUM_PROMPTS
    assert (metrics["reward/response_mean"], metrics["ilf/loss"], metrics["ilf/revised_share"]) == (4, 0.5, 1)
    assert world.served == [("base", 64), ("reviser", 64 + 2048), ("policy", 64)]


class Fixer(FakeFeedback):
    """Each `b` of a response is poor and should be an `a`."""

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        feedback = await super().judge(prompt, response_text)
        spans = [replace(span, fix="a") if span.label == -1 else span for span in feedback.spans]
        return replace(feedback, spans=tuple(spans))


class Finishing(FakeRollouts):
    """Keeps its responses; they end by themselves, apart from that to p0."""

    async def _sample(self, prompt: Prompt, sampling: Sampling) -> list[Rollout]:
        rollouts = await super()._sample(prompt, sampling)
        self.texts = getattr(self, "texts", {}) | {prompt.prompt_id: rollouts[0].response_text}
        reason: FinishReason = "length" if prompt.prompt_id == "p0" else "stop"
        return [replace(rollout, finish_reason=reason) for rollout in rollouts]


def test_a_response_with_its_fixes_is_a_revision_that_may_be_the_best(world: World) -> None:
    world.base = Finishing(world.baseline.tokenizer)
    world.feedback = Fixer()
    world.baseline = replace(world.baseline, feedback=world.feedback)
    world.reviser.texts = ["cbbb", "cccc"]
    metrics = ilf(world.baseline)
    fixed = {name: text.replace("b", "a") for name, text in world.base.texts.items() if "b" in text and name != "p0"}
    expected = [fixed.get(f"p{i}", "cccc") for i in range(NUM_PROMPTS)]
    learnt = [world.baseline.tokenizer.decode(example.response_ids[:-1]) for example in world.learnt]
    assert sorted(learnt) == sorted(expected)
    assert 0 < expected.count("cccc") < NUM_PROMPTS
    assert metrics["ilf/fixed_share"] == 1 - expected.count("cccc") / NUM_PROMPTS
    assert (metrics["samples"], metrics["ilf/revised_share"]) == (18, 1)


@pytest.mark.parametrize("source", [FakeFeedback, Fixer])
def test_ilf_judges_as_many_responses_as_ppo_with_and_without_fixes(world: World, source: type[FakeFeedback]) -> None:
    world.base = Finishing(world.baseline.tokenizer)
    feedback = source()
    world.baseline = replace(world.baseline, feedback=feedback)
    _, steps = world.from_base(1)
    revised = world.serve(world.baseline.reviser, world.job.rollout, partial(revise_steps, world.baseline, steps))
    assert [len(step.responses) for step in steps] == [2] * NUM_STEPS
    assert [len(step.responses) for step in revised] == [4] * NUM_STEPS  # as PPO: 3 samples of 2 prompts
    last_texts = set()
    for step in revised:  # two revisions of each of two prompts
        texts = [rollout.response_text for _, rollout, _ in step.responses]
        last_texts |= {texts[1], texts[3]}
    assert last_texts == ({"aaab"} if source is FakeFeedback else {"aaab", "aaaa"})


def test_of_revisions_worth_the_same_the_first_is_imitated(world: World) -> None:
    world.reviser.texts = ["abab", "bbaa"]
    ilf(world.baseline)
    targets = {world.baseline.tokenizer.decode(example.response_ids[:-1]) for example in world.learnt}
    assert targets == {"abab"}


def test_a_truncated_revision_is_not_imitated(world: World) -> None:
    """The policy would learn to stop in the middle of a sentence."""
    world.reviser.truncated = {"aaaa"}
    ilf(world.baseline)
    assert {world.baseline.tokenizer.decode(example.response_ids[:-1]) for example in world.learnt} == {"aaab"}


def test_with_truncated_revisions_alone_nothing_is_imitated(world: World) -> None:
    world.reviser.truncated = {"aaaa", "aaab", "aabb"}
    with pytest.raises(RunStopped, match="finished revision"):
        ilf(world.baseline)


def test_the_reviser_sees_the_response_and_its_critique(world: World) -> None:
    _, steps = world.from_base(1)
    revised = world.serve(world.baseline.reviser, world.job.rollout, partial(revise_steps, world.baseline, steps))
    for (_, rollout, _), (text, _) in zip(steps[0].responses, world.reviser.requests, strict=False):
        assert f"given:\n{rollout.response_text}\n" in text
        assert "a yes, b no" in text
    assert [prompt for prompt, _, _ in revised[0].responses[::2]] == [prompt for prompt, _, _ in steps[0].responses]


def test_a_response_without_usable_feedback_is_not_revised(world: World) -> None:
    world.feedback.failing = lambda prompt: prompt.prompt_id == "p0"
    metrics = ilf(world.baseline)
    assert len(world.learnt) == NUM_PROMPTS - 1
    assert metrics["ilf/revised_share"] == 5 / 6


def test_reflection_answers_held_out_prompts_again_and_keeps_what_has_no_critique(world: World) -> None:
    world.feedback.failing = lambda prompt: prompt.prompt_id == "e0"
    metrics = reflection(world.baseline)
    (base,) = world.lines(METRICS_FILE)
    before = {r["prompt_id"]: r["response"] for r in world.lines(SAMPLES_FILE) if r["step"] == 0}
    after = {r["prompt_id"]: r["response"] for r in world.lines(SAMPLES_FILE) if r["step"] == NUM_STEPS}
    assert after == {**dict.fromkeys(before, "aaaa"), "e0": before["e0"]}
    assert metrics["eval/score"] == pytest.approx((3 + before["e0"].count("a") / 4) / 4)
    assert base["eval/score"] < metrics["eval/score"]
    assert (metrics["reflection/revised_share"], metrics["samples"]) == (3 / 4, 0)


def test_nothing_to_learn_from_stops_the_run_in_a_sentence(world: World) -> None:
    world.base.logits[:, 0] = 50.0  # always `aaaa`
    with pytest.raises(RunStopped, match="in all 6 pairs both responses have the same reward"):
        dpo(world.baseline)


def test_a_stop_ends_the_sampling(tmp_path: Path) -> None:
    world = World(tmp_path, stop=lambda: True)
    with pytest.raises(Stopped):
        world.from_base(1)


def test_another_baselines_folder_is_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    data = PolicyData(task=Letters(), tokenizer=None, prompts=[], eval_prompts=[])
    begin_folder(job, procedure="reflection", reviser=None)
    for changed, sentence in (
        ({"procedure": "ilf"}, r'procedure \("reflection" -> "ilf"\)'),
        ({"procedure": "reflection", "reviser": "other"}, r'reviser \(null -> "other"\)'),
    ):
        with pytest.raises(UserError, match=sentence):
            run_baseline(job, data, FakeFeedback(), StopFlag(), **changed)
