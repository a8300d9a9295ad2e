"""The loop on fakes: it learns, it resumes to the same numbers, it stops with a reason."""

import asyncio
import json
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import LENGTH, letter_prompts, letter_tokenizer
from pydantic import ValidationError
from trainer_bench import NUM_STEPS, Bench, chosen, job, task_reward

from t2g.config import with_overrides
from t2g.errors import Diverged, RunStopped, UserError
from t2g.runs import checkpoint
from t2g.runs.checkpoint import CheckpointStore
from t2g.sandbox import SandboxConfig
from t2g.types import Prompt, Rollout, TokenStats, TrainBatch, UpdateResult


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return letter_tokenizer(tmp_path_factory.mktemp("tokenizer"))


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
    assert score == max(m["eval/score"] for m in metrics if "eval/score" in m)
    assert (folder / "policy.json").exists()


def test_a_run_stopped_between_steps_resumes_to_the_same_numbers(tokenizer: Any, tmp_path: Path) -> None:
    whole = Bench(tmp_path / "whole", tokenizer, job())
    whole.run()

    first = Bench(tmp_path / "cut", tokenizer, job(), stop=lambda: first.trainer.state.step >= 3)
    assert first.run().step == 3
    second = Bench(tmp_path / "cut", tokenizer, job())
    assert second.run().step == NUM_STEPS
    assert second.metrics() == whole.metrics()
    np.testing.assert_array_equal(second.learner.logits.detach(), whole.learner.logits.detach())


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_fewer_prompts_than_a_step_takes_get_more_samples_each(
    tokenizer: Any, tmp_path: Path, max_staleness: int
) -> None:
    def bench(folder: str, **options: Any) -> Bench:
        new_bench = Bench(tmp_path / folder, tokenizer, job(max_staleness=max_staleness), **options)
        new_bench.trainer.prompts = letter_prompts(3)
        return new_bench

    whole = bench("whole")
    assert whole.run().num_samples == NUM_STEPS * 8 * 4
    for rollouts in whole.learner.seen:
        assert len({(r.prompt_id, r.sample_index) for r in rollouts}) == 8 * 4
        counts = Counter(r.prompt_id for r in rollouts)
        assert set(counts) == {"p0", "p1", "p2"}
        assert sorted(counts.values()) == [8, 12, 12], "8 prompts of 4 samples are 3 + 3 + 2"
    assert len(whole.learner.seen) == NUM_STEPS

    cut = bench("cut", stop=lambda: cut.trainer.state.step >= 3)
    cut.run()
    resumed = bench("cut")
    resumed.run()
    if max_staleness == 0:
        assert resumed.metrics() == whole.metrics()
    assert resumed.trainer.state.num_samples == NUM_STEPS * 8 * 4


def test_the_next_step_goes_on_while_a_checkpoint_is_sealed(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, tokenizer, job())
    gone_on = threading.Event()
    seal = checkpoint._seal
    waited: list[bool] = []

    def slow_seal(folder: Path, known: Any) -> None:
        if (folder / "learner").exists():  # no best policy
            waited.append(gone_on.wait(20))
        seal(folder, known)

    def before_call(call: str) -> None:
        if call == "forward" and bench.trainer.state.step == 2:  # whose checkpoint is under way
            assert bench.checkpoint_step() is None
            gone_on.set()

    monkeypatch.setattr(checkpoint, "_seal", slow_seal)
    bench.learner.before_call = before_call
    bench.run()
    assert waited == [True] * 3  # of steps 2, 4 and 6
    assert bench.checkpoint_step() == NUM_STEPS


def test_checkpoints_hold_a_model_folder_where_the_config_asks_for_it(tokenizer: Any, tmp_path: Path) -> None:
    for export in (False, True):
        config = job()
        checkpoint_config = config.checkpoint.model_copy(update={"export": export})
        config = config.model_copy(update={"checkpoint": checkpoint_config})
        bench = Bench(tmp_path / str(export), tokenizer, config)
        bench.run()
        checkpoints = list((tmp_path / str(export) / "checkpoints").glob("step-*"))
        assert [(folder / "policy" / "policy.json").is_file() for folder in checkpoints] == [export, export]


def test_cancellation_during_a_checkpoint_leaves_it_complete(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, tokenizer, job())
    go_on = threading.Event()
    seal = checkpoint._seal

    def slow_seal(folder: Path, known: Any) -> None:
        if folder.name.endswith("step-00000002"):
            assert go_on.wait(20)
        seal(folder, known)

    async def cancelled_in_step_3() -> None:
        running = asyncio.create_task(bench.tidy())
        while bench.trainer.state.step < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # its evaluation waits for the checkpoint before
        running.cancel()
        await asyncio.sleep(0.1)
        assert bench.checkpoint_step() is None
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    monkeypatch.setattr(checkpoint, "_seal", slow_seal)
    asyncio.run(cancelled_in_step_3())
    assert bench.checkpoint_step() == 3
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == ["step-00000002", "step-00000003"]


def test_a_run_that_dies_after_its_checkpoint_repeats_only_the_steps_since(tokenizer: Any, tmp_path: Path) -> None:
    whole = Bench(tmp_path / "whole", tokenizer, job())
    whole.run()

    first = Bench(tmp_path / "died", tokenizer, job())
    calls = []

    def die_in_step_4(prompt: Prompt) -> None:  # 40 held-out prompts, then 8 a step, 40 more at step 3
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


def test_a_run_tells_what_it_does_within_a_step(tokenizer: Any, tmp_path: Path) -> None:
    phases: list[str] = []
    Bench(tmp_path, tokenizer, with_overrides(job(), {"num_steps": 3}), on_phase=phases.append).run()
    step = ["sampling", "feedback", "learning", "weight sync"]
    assert phases == ["evaluation", *step, *step, "checkpoint", *step, "evaluation", "checkpoint"]


def test_a_stop_during_sampling_leaves_the_step_undone(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job(), stop=lambda: bench.rollouts.version >= 1)
    assert bench.run().step == 1
    assert [m["step"] for m in bench.metrics()] == [0, 1]
    assert CheckpointStore(tmp_path / "checkpoints", keep=2).latest()[1]["step"] == 1


def test_too_much_failed_feedback_stops_the_run_and_says_so(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, with_overrides(job(), {"feedback.source": "facts:judge"}))
    bench.feedback.failing = lambda prompt: int(prompt.prompt_id[-1]) < 8
    with pytest.raises(RunStopped, match=r"step 1: .*no usable feedback .*from feedback\.source=facts:judge;"):
        bench.run()
    dropped = bench.dropped()
    assert len(dropped) > 16
    assert {line["step"] for line in dropped} == {1}
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert "failed" in {sample["feedback"]["status"] for sample in samples if sample["split"] == "train"}
    again = Bench(tmp_path, tokenizer, job())
    again.run()
    assert [line for line in again.dropped() if line["step"] == 1] == []


def test_a_run_that_stops_itself_keeps_the_steps_that_were_done(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job())
    bench.feedback.failing = lambda prompt: bench.rollouts.version == 3 and prompt.prompt_id.startswith("p")
    with pytest.raises(RunStopped, match="step 4: 32 of 32 samples"):
        bench.run()
    assert CheckpointStore(tmp_path / "checkpoints", keep=2).latest()[1]["step"] == 3  # checkpoints are every 2 steps

    whole = Bench(tmp_path / "whole", tokenizer, job())
    whole.run()
    again = Bench(tmp_path, tokenizer, job())
    assert again.run().step == NUM_STEPS
    assert again.metrics() == whole.metrics()


def test_numbers_that_are_not_finite_stop_a_run_and_its_last_checkpoint_stays(tokenizer: Any, tmp_path: Path) -> None:
    """The weights of step 3 gave them: a checkpoint of these would repeat the error at each start."""
    bench = Bench(tmp_path, tokenizer, job())
    forward = bench.learner.forward

    def fail_in_step_4(rollouts: Any) -> Any:
        stats = forward(rollouts)
        if bench.trainer.state.step == 3:
            stats[0] = replace(stats[0], old_logprobs=np.full_like(stats[0].old_logprobs, np.nan))
        return stats

    bench.learner.forward = fail_in_step_4
    with pytest.raises(Diverged, match="step 4"):
        bench.run()
    assert bench.checkpoint_step() == 2  # checkpoints are every 2 steps


def test_an_evaluation_whose_policy_cannot_be_exported_is_kept(tokenizer: Any, tmp_path: Path) -> None:
    """A resumed run does not evaluate a finished step again."""
    bench = Bench(tmp_path, tokenizer, job())
    export = bench.learner.export

    def refuse_in_step_3(folder: Path) -> None:
        if bench.trainer.state.step == 3:
            raise RunStopped("not the trained one")
        export(folder)

    bench.learner.export = refuse_in_step_3
    with pytest.raises(RunStopped, match="not the trained one"):
        bench.run()
    whole = Bench(tmp_path / "whole", tokenizer, job())
    whole.run()
    again = Bench(tmp_path, tokenizer, job())
    again.run()
    assert again.metrics() == whole.metrics()
    assert "eval/score" in again.metrics()[3]


def test_a_sample_of_other_weights_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job())
    bench.rollouts.before_sample = lambda prompt: setattr(bench.rollouts, "version", 7)
    with pytest.raises(RunStopped, match=r"weights of version \[7\], and the learner is at 0"):
        bench.run()


def test_some_failed_feedback_is_dropped_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job())
    failing = {"p3", "p4", "p5"}
    bench.feedback.failing = lambda prompt: prompt.prompt_id in failing
    bench.run()
    shares = [m["feedback/failed_share"] for m in bench.metrics()[1:]]
    assert sum(shares) * 8 == pytest.approx(len([i for s in range(1, 7) for i in chosen(s) if i in failing]))
    limit = bench.trainer.config.alarms.max_failed_share
    first = next(step for step, share in enumerate(shares, start=1) if share > limit)
    alarms = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    alarm = next(alarm for alarm in alarms if "truncated" not in alarm["alarm"])
    assert alarm["step"] == first
    assert f"{shares[first - 1]:.0%} of the responses have no usable" in alarm["alarm"]


def test_a_number_that_is_not_finite_names_step_sample_and_token(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job())
    bench.learner.critic.data[2] = float("nan")
    with pytest.raises(RunStopped, match=r"step 1: prompt p\d+, sample \d: the values of token 2 is nan"):
        bench.run()


def test_the_measure_of_the_task_alone_teaches_as_an_outcome_reward(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job(span_coef=0.0, outcome_rewards=task_reward(4.0)))
    bench.run()
    assert bench.learner.logits.softmax(-1).mean(0)[0] > 0.6
    rewards = [m["reward/outcome_mean"] for m in bench.metrics()[1:]]
    assert rewards[-1] > rewards[0] + 0.8
    assert 0 < rewards[0] < 4
    assert rewards == [4 * m["reward/outcome/task"] for m in bench.metrics()[1:]]


def test_a_truncation_penalty_is_in_everything_that_a_step_tells_of_its_rewards(tokenizer: Any, tmp_path: Path) -> None:
    """Every response of the fake is truncated, so the advantages against the others, and all else, are the same."""
    benches = [Bench(tmp_path / str(cut), tokenizer, job(truncation_penalty=cut)) for cut in (0, -0.5)]
    (_, plain), (_, penalized) = ((bench.run(), bench.metrics()[1:]) for bench in benches)
    for without, with_penalty in zip(plain, penalized, strict=True):
        assert without["response/truncated_share"] == with_penalty["response/truncated_share"] == 1
        assert with_penalty["reward/token_mean"] == pytest.approx(without["reward/token_mean"] - 0.5 / LENGTH)
        assert with_penalty["reward/response_mean"] == pytest.approx(without["reward/response_mean"] - 0.5)
        assert with_penalty["tokens/poor_share"] == without["tokens/poor_share"]
    logged = []
    for bench in benches:
        lines = (bench.folder / "samples.jsonl").read_text().splitlines()
        logged.append([json.loads(line).get("token_rewards") for line in lines])
    changed = [(a, b) for a, b in zip(*logged, strict=True) if a]
    assert len(changed) > 10
    assert all(b == [*a[:-1], a[-1] - 0.5] for a, b in changed)
    alarms = [json.loads(line) for line in (tmp_path / "0" / "alarms.jsonl").read_text().splitlines()]
    assert [alarm["step"] for alarm in alarms if "truncated 100% of the responses" in alarm["alarm"]] == [1]


def test_a_measure_that_gives_less_than_the_task_promised_names_the_task(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job(outcome_rewards=task_reward()))
    bench.task.measure = lambda prompt, text, *, sandbox: {"other": 1.0} if prompt.prompt_id == "p5" else {"share_a": 0}
    step = next(step for step in range(1, 7) if "p5" in chosen(step))
    with pytest.raises(UserError, match=r"task letters: measure gives no share_a for prompt p5, and can_measure says"):
        bench.run()
    assert bench.metrics()[-1]["step"] == step - 1


def test_a_stop_while_outcome_rewards_are_measured_leaves_the_step_undone(tokenizer: Any, tmp_path: Path) -> None:
    measured: list[str] = []
    bench = Bench(tmp_path, tokenizer, job(outcome_rewards=task_reward()), stop=lambda: bool(measured))

    def measure_slowly(prompt_id: str) -> None:
        if prompt_id.startswith("p"):  # no held-out prompt
            measured.append(prompt_id)
            time.sleep(0.05)

    bench.task.on_measure = measure_slowly
    assert bench.run().step == 0
    assert 1 <= len(measured) < 32  # the rest was not even begun


def test_an_outcome_reward_that_is_no_number_is_named(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job(outcome_rewards=task_reward()))
    bench.task.unit = float("nan")
    with pytest.raises(RunStopped, match=rf"the outcome reward of token {LENGTH - 1} is nan"):
        bench.run()


def share_of_a(completions: list[str], **columns: Any) -> list[float]:
    return [text.count("a") / LENGTH for text in completions]


async def only_b(prompts: list[str], completions: list[str]) -> list[float | None]:
    return [text.count("b") / LENGTH if "b" in text else None for text in completions]


def sometimes_nan(prompts: list[str], completions: list[str]) -> list[float]:
    return [float("nan") if text.startswith("c") else 1.0 for text in completions]


def test_reward_functions_teach_and_have_curves_of_their_own(tokenizer: Any, tmp_path: Path) -> None:
    sources = [
        {"source": f"{__name__}:{name}", "weight": weight} for name, weight in (("share_of_a", 4), ("only_b", -1))
    ]
    bench = Bench(tmp_path, tokenizer, job(span_coef=0.0, outcome_rewards=sources, max_staleness=1))
    bench.run()
    assert bench.learner.logits.softmax(-1).mean(0)[0] > 0.6
    names = [f"reward/outcome/{entry['source']}" for entry in sources]
    first, *_, last = bench.metrics()[1:]
    assert last[names[0]] > first[names[0]] + 0.2
    assert 0.25 <= first[names[1]] <= 1
    assert first["reward/total_mean"] == first["reward/outcome_mean"] < 4 * first[names[0]]
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    logged = [(line["response"], line["feedback"]["outcomes"]) for line in lines if line["split"] == "train"]
    assert len(logged) > 10
    for text, outcomes in logged:
        shares = {name: text.count(letter) / LENGTH for name, letter in zip(names, "ab", strict=True)}
        assert {f"reward/outcome/{source}": number for source, number in outcomes.items()} == {
            name: share for name, share in shares.items() if name == names[0] or share
        }


def share_of_b(completions: list[str]) -> list[float]:
    return [text.count("b") / LENGTH for text in completions]


def test_rewards_for_what_the_task_does_not_measure_raise_an_alarm(tokenizer: Any, tmp_path: Path) -> None:
    """The task measures the share of a."""
    config = job(span_coef=0.0, outcome_rewards=[{"source": f"{__name__}:share_of_b"}], samples_per_prompt=8)
    bench = Bench(tmp_path, tokenizer, with_overrides(config, {"eval.every": 1, "eval.samples_per_prompt": 8}))
    bench.run()
    scores = [line["eval/score"] for line in bench.metrics()]
    assert scores[-1] < scores[0] - 0.1
    alarms = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert [alarm["step"] for alarm in alarms if "while the held-out score fell" in alarm["alarm"]] == [4]


def test_a_group_without_numbers_is_dropped_and_a_step_without_any_stops_the_run(
    tokenizer: Any, tmp_path: Path
) -> None:
    """What was learned before stays in the checkpoint."""
    source = f"{__name__}:sometimes_nan"
    bench = Bench(tmp_path, tokenizer, job(outcome_rewards=[{"source": source}], samples_per_prompt=2))
    bench.learner.logits.data[0, 2] = -2.0  # few responses begin with c
    bench.run()
    dropped = bench.dropped()
    assert 0 < len(dropped) < NUM_STEPS * 16 / 2, "whole groups"
    assert len(dropped) % 2 == 0, "whole groups"
    reason = f"feedback failed: the reward function {source} returned nan among its numbers; it needs finite numbers, "
    assert {line["reason"] for line in dropped} == {f"{reason}or None"}
    assert sum(line["dropped/samples"] for line in bench.metrics()[1:]) == len(dropped)

    def fails(completions: list[str]) -> list[float]:
        return [] if stopping.trainer.state.step == 3 else [0.0] * len(completions)

    globals()["fails"] = fails
    stopping = Bench(tmp_path / "stopping", tokenizer, job(outcome_rewards=[{"source": f"{__name__}:fails"}]))
    with pytest.raises(
        RunStopped, match=r"step 4: 32 of 32 .*; the first: the reward function \S+:fails returned 0 numbers"
    ):
        stopping.run()
    assert stopping.checkpoint_step() == 3 == stopping.metrics()[-1]["step"]


def test_what_a_measure_runs_has_the_limits_of_the_feedbacks_sandbox(tokenizer: Any, tmp_path: Path) -> None:
    limits = SandboxConfig(timeout_s=3)
    config = job(outcome_rewards=task_reward())
    feedback = config.feedback.model_copy(update={"sandbox": limits})
    bench = Bench(tmp_path, tokenizer, config.model_copy(update={"feedback": feedback}))
    bench.run()
    assert len(bench.task.sandboxes) > NUM_STEPS * 8 * 4
    assert all(sandbox == limits for sandbox in bench.task.sandboxes)


@pytest.mark.parametrize("advantages", ["group", "group_normalised"])
def test_groups_teach_without_a_critic(tokenizer: Any, tmp_path: Path, advantages: str) -> None:
    bench = Bench(tmp_path, tokenizer, job(advantages=advantages))
    bench.learner.critic.data[:] = 3.0  # must not be used
    bench.run()
    probabilities = bench.learner.logits.softmax(-1).mean(0)
    assert probabilities[0] > 0.6 and probabilities[1] < 0.15


def test_what_an_updates_only_pass_saw_is_what_a_pass_before_it_sees(tokenizer: Any, tmp_path: Path) -> None:
    config = with_overrides(
        job(advantages="group", kl_estimator="k3"), {"learner.num_epochs": 1, "learner.minibatches_per_epoch": 1}
    )
    plain, blind = (Bench(tmp_path / name, tokenizer, config) for name in ("plain", "blind"))
    forward = blind.learner.forward
    update = blind.learner.update
    stats_before: list[TokenStats] = []

    def silent_forward(rollouts: list[Rollout]) -> list[TokenStats]:
        stats_before[:] = forward(rollouts)
        return [replace(t, old_logprobs=0 * t.old_logprobs, entropy=0 * t.entropy) for t in stats_before]

    def seeing_update(batch: TrainBatch) -> UpdateResult:
        pairs = zip(batch.minibatches[0], stats_before, strict=True)
        minibatch = tuple(replace(sample, old_logprobs=t.old_logprobs) for sample, t in pairs)
        return replace(update(replace(batch, minibatches=(minibatch,))), stats=tuple(stats_before))

    blind.learner.forward = silent_forward
    blind.learner.update = seeing_update
    plain.run()
    blind.run()
    assert blind.metrics() == plain.metrics()
    assert plain.metrics()[-1]["policy/kl"] > 0


@pytest.mark.parametrize("advantages", ["group", "group_normalised"])
def test_a_group_of_one_is_refused(advantages: str) -> None:
    with pytest.raises(ValidationError, match=rf"objective.advantages={advantages} compares .* needs to be 2 or more"):
        job(advantages=advantages, samples_per_prompt=1)
    with pytest.raises(ValidationError, match=r"objective.values=sentence compares .* needs to be 2 or more"):
        job(values="sentence", samples_per_prompt=1)
    assert job(samples_per_prompt=1).rollout.samples_per_prompt == 1


def test_noise_reaches_the_training_and_not_the_evaluation(tokenizer: Any, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tokenizer, job(noise={"flip": 1.0}))
    bench.run()
    probabilities = bench.learner.logits.softmax(-1).mean(0)
    assert probabilities[1] > 0.6 and probabilities[0] < 0.15
    records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    for record in records:
        good = "b" if record["split"] == "train" else "a"
        for span in record["feedback"]["spans"]:
            assert (span["label"] == 1) == (record["response"][span["start"]] == good)
    assert {record["split"] for record in records} == {"train", "eval"}


def test_the_coefficient_goes_where_the_penalty_is(tokenizer: Any, tmp_path: Path) -> None:
    for estimator in ("k1", "k3"):
        bench = Bench(tmp_path / estimator, tokenizer, job(kl_estimator=estimator, kl_coef=0.3))
        bench.run()
        used = [m["policy/kl_coef"] for m in bench.metrics()[1:]]
        assert used[0] == 0.3
        assert len(set(used)) == NUM_STEPS  # it adapts
        in_loss = [batch.kl_coef for batch in bench.learner.batches]
        assert in_loss == (used if estimator == "k3" else [0.0] * NUM_STEPS)


def test_engines_that_give_their_gpus_to_a_last_checkpoint_finish_no_response(tokenizer: Any, tmp_path: Path) -> None:
    """A stop meets the sampling of step 2: vLLM would finish all responses before it sleeps."""
    sampling = 0
    is_stopped = False

    class CheckedTimeSharing:
        async def switch_to(self, user: str) -> None:
            assert user == "engines" or sampling == 0

    bench = Bench(tmp_path, tokenizer, job(), gpu_time_sharing=CheckedTimeSharing(), stop=lambda: is_stopped)
    sample = bench.rollouts.sample

    async def sample_slowly(prompt: Prompt, *options: Any) -> Any:
        nonlocal sampling, is_stopped
        if bench.trainer.state.step == 0:
            return await sample(prompt, *options)
        sampling += 1
        is_stopped = True
        try:
            await asyncio.sleep(60)
        finally:
            sampling -= 1

    bench.rollouts.sample = sample_slowly
    assert bench.run().step == 1
    assert bench.trainer.checkpoints.latest() is not None


@pytest.mark.parametrize("loss_aggregation", ["token", "sequence"])
def test_minibatches_are_weighted_by_the_config(tokenizer: Any, tmp_path: Path, loss_aggregation: str) -> None:
    bench = Bench(tmp_path, tokenizer, job(loss_aggregation=loss_aggregation))
    bench.run()
    assert all(len(batch.minibatches) == 4 * 2 for batch in bench.learner.batches)  # epochs x minibatches
    for minibatch in (m for batch in bench.learner.batches for m in batch.minibatches):  # 16 responses of LENGTH
        np.testing.assert_allclose([s.weights for s in minibatch], 1 / (16 * LENGTH), rtol=1e-6)


def test_with_time_sharing_learner_and_engines_work_one_after_the_other(tokenizer: Any, tmp_path: Path) -> None:
    class Recorded:
        gpu_user = "learner"
        taken = 0

        async def switch_to(self, user: str) -> None:
            self.taken += user != self.gpu_user
            self.gpu_user = user

    plain = Bench(tmp_path / "plain", tokenizer, job())
    plain.run()
    turns = Recorded()
    bench = Bench(tmp_path / "turns", tokenizer, job(), gpu_time_sharing=turns)
    allowed = {"forward": "learner", "update": "learner", "save": "learner", "push": "engines"}

    def before_call(call: str) -> None:
        assert turns.gpu_user == allowed.get(call, turns.gpu_user), call  # an export needs the weights alone

    def before_sample(prompt: Prompt) -> None:
        assert turns.gpu_user == "engines"

    bench.learner.before_call = before_call
    bench.rollouts.before_sample = before_sample
    assert bench.run().step == NUM_STEPS
    assert bench.metrics() == plain.metrics()
    assert turns.gpu_user == "engines", "the next caller needs engines that serve"
    assert turns.taken == 1 + 2 * (NUM_STEPS + NUM_STEPS // 2), "to and fro for a step, and for a checkpoint"
