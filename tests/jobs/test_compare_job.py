"""jobs.compare without engines: the runs that a comparison is made of, what is refused, and the files at the end."""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import differing
from jobs import compare as job_module
from jobs.common.cli import StopFlag
from jobs.common.policy_runs import PolicyData
from jobs.common.reference_runs import make_reference, measure_targeting, reference_sampling, sample_and_judge
from jobs.common.run_folder import begin_folder
from jobs.compare import (
    Session,
    check_methods,
    engine_groups,
    finish,
    study_models,
    study_of,
)
from t2g.config import CompareJob, PolicyJob, StyleConfig, loading
from t2g.config.describe import describe_compare
from t2g.errors import UserError
from t2g.study.arms import arm_job, choose_lr, noise_job, search_job, search_scores
from t2g.study.targeting import Reference
from t2g.types import Rollout, TokenStats
from tests.fakes import LENGTH, FakeFeedback, FakeRollouts, LetterTask, letter_prompts, letter_tokenizer

CONFIGS = Path(__file__).parents[2] / "configs" / "tiny"


def the_job(root: Path, *overrides: str, config: str = "compare.yaml") -> CompareJob:
    return loading.load(CompareJob, CONFIGS / config, [f"run.root={root}", *overrides], environ={})


def plain(job: CompareJob) -> PolicyJob:
    return PolicyJob(**{name: getattr(job, name) for name in PolicyJob.model_fields})


# ---------------------------------------------------------------------------------------------------------------- arms
def test_each_method_changes_what_makes_it_and_nothing_else(tmp_path: Path) -> None:
    job = the_job(tmp_path, config="compare_more.yaml")
    always = {"run.root", "run.name", "run.seed", "stages", "learner.policy.lr"}
    placement = "objective.rewards.placement"
    more: dict[str, set[str]] = {
        "span": set(),
        "dpo": set(),
        "ilf": set(),
        "scalar": {placement},
        "step": {placement},
        "shuffled": {placement},
        "grpo": {placement, *(f"objective.{key}" for key in ("advantages", "whiten", "kl_estimator", "loss_mean"))},
        "group": {"objective.advantages"},
        "no_critique": {"feedback.style.critique", "feedback.reward_model"},
        "dense": {"feedback.style.labels", "feedback.reward_model"},
    }
    for method, keys in more.items():
        assert differing(plain(job), arm_job(job, method, 2, 7e-4)) == always | keys, method
    grpo = arm_job(job, "grpo", 2, 7e-4)
    assert (grpo.objective.advantages, grpo.objective.whiten) == ("group_normalised", "none")
    assert grpo.objective.rewards.placement == "scalar" and not grpo.objective.uses_critic
    assert (grpo.run.folder, grpo.run.seed) == (tmp_path / "compare-more" / "arms" / "grpo-2", 2)
    assert grpo.learner.policy.lr == 7e-4


def test_the_runs_of_search_and_noise_have_their_own_folders(tmp_path: Path) -> None:
    job = the_job(tmp_path, config="compare_more.yaml")
    arm = arm_job(job, "scalar", 1, 3e-4)
    search, noisy = search_job(job, "scalar", 101, 3e-4), noise_job(job, "flipped", "scalar", 1, 3e-4)
    assert search.run.folder == tmp_path / "compare-more" / "search" / "scalar-0.0003-101"
    assert noisy.run.folder == tmp_path / "compare-more" / "noise" / "flipped-scalar-1"
    assert differing(arm, search) == {"run.root", "run.name", "run.seed"}
    assert noisy.feedback.noise is not None and noisy.feedback.noise.flip == 0.3
    assert arm.feedback.noise is None


def test_a_learning_rate_is_chosen_by_the_mean_of_its_seeds() -> None:
    assert choose_lr({1e-4: {1: 0.9, 2: 0.1}, 3e-4: {1: 0.6, 2: 0.6}}) == 3e-4
    assert choose_lr({1e-3: {1: 0.5}, 1e-4: {1: 0.5}}) == 1e-4  # the smaller of equals, whatever the order
    assert choose_lr({1e-3: {1: 0.9, 2: None}, 1e-4: {1: 0.5, 2: 0.5}}) == 1e-4  # a run that stopped is no choice
    with pytest.raises(UserError, match=r"no learning rate of compare\.lr_grid=\[0\.1\]"):
        choose_lr({0.1: {1: None}})


def test_the_search_runs_every_rate_on_every_search_seed(tmp_path: Path) -> None:
    job = the_job(tmp_path, "compare.lr_grid=[0.1, 0.2]", "compare.search_seeds=[8, 9]")
    scores = search_scores(job, "span", lambda arm: arm.learner.policy.lr * arm.run.seed)
    assert scores == {0.1: {8: 0.8, 9: 0.9}, 0.2: {8: 1.6, 9: 1.8}}

    def never(arm: PolicyJob) -> float:
        raise AssertionError(arm.run.name)

    assert search_scores(job, "reflection", never) == {}
    assert search_scores(the_job(tmp_path, "compare.lr_grid=[0.1]"), "span", never) == {}


def test_methods_are_grouped_by_the_engines_that_they_need(tmp_path: Path) -> None:
    job = the_job(tmp_path, config="compare_more.yaml")
    groups = engine_groups(job)
    assert [methods for _, methods in groups] == [
        ["reflection", "scalar", "dpo", "ilf", "group", "span"], ["no_critique"], ["dense"],
    ]  # fmt: skip
    assert groups[0][0] == job.feedback
    assert groups[1][0].style == StyleConfig(critique=False)


def test_the_reward_models_of_the_study_are_known_by_their_folders(tmp_path: Path) -> None:
    job = the_job(tmp_path, config="compare_more.yaml")
    assert study_models(job) == [("plain", 1), ("no_critique", 1), ("dense", 1)]
    fewer = the_job(tmp_path, "compare.methods=[span]", "compare.noise={}", config="compare_more.yaml")
    assert study_models(fewer) == [("plain", 1)]
    study = study_of(job)
    assert study is not None and study.run.folder == tmp_path / "reward-study"
    with pytest.raises(UserError, match=r"needs the form \$\{study\}/<variant>-<seed>/model"):
        study_models(the_job(tmp_path, "feedback.reward_model=${study}/plain"))


# ------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("compare.methods=[span, span]", "methods has an entry twice"),
        ("compare.seeds=[1, 101]", "search_seeds has 101, and so has compare.seeds"),
        ("compare.methods=[sft, reflection]", "none that is trained"),
        ("compare.methods=[span, dense]", "dense, which needs compare.reward_models.dense"),
        ("compare.noise={Some: {flip: 0.1}}", "compare.noise.Some"),
        ("eval_data=null", "eval_data is missing"),
        ("feedback.noise={flip: 0.1}", "feedback.noise would be in every run"),
        ("compare.reference_prompts=300", "reference_prompts=300 are held-out prompts, and eval.num_prompts=256"),
        ("run.smoke=true", "run.smoke"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, override: str, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        the_job(tmp_path, override)


def test_an_ablation_needs_a_source_that_reads_the_style(tmp_path: Path) -> None:
    own = ["feedback.source=program", "compare.noise={}", "compare.study=null"]
    the_job(tmp_path, "compare.methods=[span, dense]", *own, config="compare_more.yaml")
    with pytest.raises(UserError, match=r"has no_critique, and feedback\.source=program does not read the style"):
        the_job(tmp_path, "compare.methods=[span, no_critique]", *own, config="compare_more.yaml")


def test_an_arm_that_cannot_be_is_refused_before_any_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"compare\.methods has grpo: .*samples_per_prompt needs to be 2"):
        check_methods(the_job(tmp_path, "compare.methods=[span, grpo]", "rollout.samples_per_prompt=1"), "fact_f1")


def test_noise_needs_span_and_scalar(tmp_path: Path) -> None:
    assert the_job(tmp_path, "compare.noise={some: {flip: 0.1}}").compare.noise["some"].flip == 0.1
    with pytest.raises(UserError, match=r"needs span and scalar among compare\.methods"):
        the_job(tmp_path, "compare.methods=[span, step]", "compare.noise={some: {flip: 0.1}}")


def test_a_source_that_is_changed_does_not_give_the_marks(tmp_path: Path) -> None:
    job = the_job(tmp_path, config="compare_more.yaml")
    check_methods(job, "fact_f1")
    with pytest.raises(UserError, match="no_critique, dense cannot be compared: task tiny has no measure"):
        check_methods(job, "")
    check_methods(the_job(tmp_path), "")


def test_a_baseline_that_makes_no_sense_is_refused_before_any_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dpo needs two responses to compare: rollout\.samples_per_prompt is 1"):
        check_methods(the_job(tmp_path, "compare.methods=[span, dpo]", "rollout.samples_per_prompt=1"), "fact_f1")


def test_the_dry_run_counts_the_runs(tmp_path: Path) -> None:
    assert "55 runs: 30 to choose learning rates, 25 that are compared, 0 under noise" in describe_compare(
        the_job(tmp_path)
    )
    more = describe_compare(the_job(tmp_path, config="compare_more.yaml"))
    assert "70 runs: 28 to choose learning rates, 24 that are compared, 18 under noise" in more


# ----------------------------------------------------------------------------------------------- finished, and resumed
def pretend(arm: PolicyJob, *scores: float) -> None:
    """A finished run with these held-out scores, the first before training."""
    begin_folder(arm)
    lines = [
        {"step": i, "samples": 128.0 * i, "eval/score": score} | ({"time/step_s": 2.0} if i else {})
        for i, score in enumerate(scores)
    ]
    (arm.run.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (arm.run.folder / "summary.json").write_text(json.dumps({"steps": arm.num_steps}))
    measured = {"criticised": -1.0, "praised": 0.5, "unmentioned": -0.1, "difference": -0.9, "returns": 0.2}
    (arm.run.folder / "targeting.json").write_text(json.dumps(measured))


def finished_job(root: Path) -> CompareJob:
    """All runs of a small comparison, with noise, are there; the search prefers .2 for span and .1 for scalar."""
    job = the_job(
        root, "compare.methods=[sft, scalar, span]", "compare.seeds=[1, 2]", "compare.lr_grid=[0.1, 0.2]",
        "compare.noise={some: {flip: 0.1}}", "num_steps=3", "compare.search_seeds=[101]",
    )  # fmt: skip
    lrs = {"scalar": 0.1, "span": 0.2}
    for method, best in lrs.items():
        for lr in (0.1, 0.2):
            pretend(search_job(job, method, 101, lr), 0.1, *[0.8 if lr == best else 0.3] * 3)
        for seed in (1, 2):
            pretend(arm_job(job, method, seed, best), 0.1, 0.2, 0.3 * seed, 0.4)
            pretend(noise_job(job, "some", method, seed, best), 0.1, 0.1, 0.1, 0.1)
    return job


class NoEngines:
    """Stands for t2g's fleets where every run is there already."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked of the engines")


def test_a_finished_comparison_is_read_again_without_a_run(tmp_path: Path) -> None:
    job = finished_job(tmp_path)
    session = Session(job=job, data=NoEngines(), stop=StopFlag())
    found = {method: job_module.find_lr(session, method, NoEngines()) for method in ("scalar", "span")}
    assert {method: lr for method, (_, lr) in found.items()} == {"scalar": 0.1, "span": 0.2}
    chosen = {"scalar": 0.1, "span": 0.2}
    job_module.run_arms(session, ["scalar", "span"], chosen, NoEngines(), [])
    job_module.run_noise(session, chosen, NoEngines())


def test_an_arm_of_another_learning_rate_is_not_taken_for_this_one(tmp_path: Path) -> None:
    session = Session(job=finished_job(tmp_path), data=NoEngines(), stop=StopFlag())
    with pytest.raises(UserError, match=r"span-1 was made otherwise: learner\.policy\.lr"):
        job_module.run_arms(session, ["span"], {"span": 0.1}, NoEngines(), [])


def test_methods_and_seeds_may_be_added_to_a_comparison(tmp_path: Path) -> None:
    begin_folder(the_job(tmp_path, "compare.seeds=[1]", "compare.methods=[span]"))
    begin_folder(the_job(tmp_path))
    with pytest.raises(UserError, match=r"otherwise: objective\.lam"):
        begin_folder(the_job(tmp_path, "objective.lam=0.5"))


def test_a_stop_begins_no_run(tmp_path: Path) -> None:
    job = the_job(tmp_path)
    stop = StopFlag()
    stop.signal_name = "SIGTERM"
    session = Session(job=job, data=NoEngines(), stop=stop)
    with pytest.raises(job_module.Stopped):
        session.run(arm_job(job, "span", 1, 1e-3), NoEngines(), method="span")


def test_the_files_of_a_finished_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = finished_job(tmp_path)
    chosen = {"scalar": 0.1, "span": 0.2}
    search = {"grid": [0.1, 0.2], "seeds": [101], "scores": {"span": {0.1: {101: 0.3}}}, "chosen": chosen}
    finish(job, search)
    folder = job.run.folder
    summary = json.loads((folder / "compare.json").read_text())
    assert list(summary["methods"]) == ["sft", "scalar", "span"]
    span = summary["methods"]["span"]
    assert span["score"]["mean"] == pytest.approx(((0.2 + 0.3 + 0.4) / 3 + (0.2 + 0.6 + 0.4) / 3) / 2)
    assert span["minus_scalar"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert (span["step_seconds"], span["overhead"]) == (2.0, 0.0)
    assert span["targeting"]["difference"]["mean"] == -0.9
    assert summary["methods"]["sft"]["score"]["mean"] == pytest.approx(0.1)
    assert summary["noise"]["some"]["scalar"]["mean"] == pytest.approx(0.1)
    assert summary["search"]["chosen"] == chosen
    assert summary["config"]["compare"]["seeds"] == [1, 2]
    words = (folder / "compare.md").read_text()
    assert words.strip() in capsys.readouterr().out
    assert "| span | 0.2* | 0.350" in words and "| some | 0.100 ± 0.000 |" in words
    page = (folder / "report.html").read_text()
    assert 'class="band s1"' in page and "Noise in the feedback" in page
    assert (folder / "curves.svg").read_text().startswith('<svg xmlns="http://www.w3.org/2000/svg"')


def test_runs_of_two_lengths_are_told_apart(tmp_path: Path) -> None:
    job = finished_job(tmp_path)
    pretend(arm_job(job, "span", 2, 0.2), 0.1, 0.2, 0.3, 0.4, 0.5)
    with pytest.raises(UserError, match=r"span-2 was evaluated after 0, 128, \.\.\. 512 samples"):
        finish(job, {"grid": [], "seeds": [], "scores": {}, "chosen": {"scalar": 0.1, "span": 0.2}})


# ----------------------------------------------------------------------------------------------------------- targeting
class ShiftedLearner:
    """Every token is less likely by its place: 0, .1, .2, ..."""

    def forward(self, rollouts: Sequence[Rollout]) -> list[TokenStats]:
        zero = np.zeros(LENGTH, np.float32)
        change = -0.1 * np.arange(LENGTH, dtype=np.float32)
        return [TokenStats(old_logprobs=change - 1, ref_logprobs=zero - 1, values=zero, entropy=zero) for _ in rollouts]


class FakeFleets:
    """Hands out one pair of engines, and counts how often."""

    def __init__(self, rollouts: FakeRollouts) -> None:
        self.rollouts, self.asked = rollouts, 0

    def for_policy(self, job: PolicyJob, task: Any) -> tuple[FakeRollouts, FakeFeedback]:
        self.asked += 1
        return self.rollouts, FakeFeedback()


def test_the_reference_is_made_once_and_kept(tmp_path: Path) -> None:
    tokenizer, prompts = letter_tokenizer(tmp_path), letter_prompts(8)
    data = PolicyData(task=LetterTask(), tokenizer=tokenizer, prompts=[], eval_prompts=prompts)
    fleets = FakeFleets(FakeRollouts(tokenizer))
    job = the_job(tmp_path / "runs", "compare.reference_prompts=5")
    made = make_reference(job, data, fleets)
    fleets.rollouts.logits[:, 0] = 9.0  # another policy by now: what is kept must not change with it
    again = make_reference(job, data, fleets)
    assert fleets.asked == 1 and len(made) == 5
    assert [r.rollout.response_text for r in again] == [r.rollout.response_text for r in made]
    assert [r.feedback for r in again] == [r.feedback for r in made]
    with pytest.raises(UserError, match=r"reference was made otherwise: eval\.num_prompts"):
        make_reference(the_job(tmp_path / "runs", "compare.reference_prompts=6"), data, fleets)


def test_targeting_is_measured_on_the_responses_of_the_base(tmp_path: Path) -> None:
    tokenizer, prompts, feedback = letter_tokenizer(tmp_path), letter_prompts(6), FakeFeedback()
    data = PolicyData(task=LetterTask(), tokenizer=tokenizer, prompts=prompts, eval_prompts=prompts)
    job = the_job(tmp_path / "runs")
    sampling = reference_sampling(job)
    rollouts = FakeRollouts(tokenizer)
    judged = asyncio.run(sample_and_judge(prompts, rollouts, feedback, sampling))
    reference = [Reference(prompt=p, rollout=r, feedback=f) for p, (r, f) in zip(prompts, judged, strict=True)]
    arm = arm_job(job, "span", 1, 1e-3)
    begin_folder(arm)

    def measured() -> dict[str, Any]:
        measure_targeting(arm, data, reference, sampling, rollouts, feedback, ShiftedLearner())
        return json.loads((arm.run.folder / "targeting.json").read_text())

    still = measured()
    texts = [r.response_text for r, _ in judged]
    places = {letter: [i for text in texts for i, one in enumerate(text) if one == letter] for letter in "abc"}
    assert all(places.values())
    assert still["criticised"] == pytest.approx(-0.1 * np.mean(places["b"]))
    assert still["praised"] == pytest.approx(-0.1 * np.mean(places["a"]))
    assert still["difference"] == pytest.approx(-0.1 * (np.mean(places["b"]) - np.mean(places["c"])))
    assert still["tokens"]["criticised"] == len(places["b"])
    assert still["returns"] == 1.0 and still["prompts"] == 6  # the same weights and seeds say the same again

    rollouts.logits[:, 1] = -99.0  # b is never written again
    assert measured()["returns"] == 0.0
