"""jobs.compare without engines: the runs that a comparison is made of, what is refused, and the files at the end."""

import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import LENGTH, FakeFeedback, FakeRollouts, LetterTask, letter_prompts, letter_tokenizer

from jobs.common.cli import StopFlag
from jobs.common.run_folder import begin_folder
from jobs.compare import comparison_rewards
from jobs.compare.__main__ import check, check_start, describe, run
from jobs.compare.comparison_plan import plan_group
from jobs.compare.comparison_report import finish
from jobs.compare.comparison_runs import SEARCH_PROMPTS, Session, has_all, make_search_data, run_all
from jobs.compare.reference_responses import ReferenceResponses
from jobs.train_policy import prepared
from jobs.train_policy.policy_data import PolicyData
from t2g.config import CompareJob, PolicyJob, loading, with_overrides
from t2g.errors import Diverged, RunStopped, Stopped, UserError
from t2g.study.comparison import REWARD_COLUMNS, RunCurve
from t2g.study.methods import ComparisonPlan
from t2g.study.result_lines import ResultLines
from t2g.tasks.base import get_task
from t2g.types import Prompt, Rollout, TokenStats

CONFIGS = Path(__file__).parents[2] / "configs" / "tiny"


def the_job(root: Path, *overrides: str, config: str = "compare.yaml") -> CompareJob:
    return loading.load(CompareJob, CONFIGS / config, [f"run.root={root}", *overrides], environ={})


def plan_of(root: Path, *overrides: str, config: str = "compare.yaml") -> ComparisonPlan:
    return ComparisonPlan(the_job(root, *overrides, config=config))


# ------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("compare.methods=[span, span]", "methods has an entry twice"),
        ("compare.methods=[span, my/span.yaml]", "methods has an entry twice"),
        ("compare.methods=[Span]", "compare.methods.0"),
        ("compare.seeds=[1, 101]", "search_seeds and compare.seeds both have 101"),
        ("compare.seeds=[]", "compare.seeds is empty and compare.rewards is not set"),
        ("compare.rewards={}", "compare.rewards trains what feedback.reward_model=${rewards} stands for"),
        ("feedback.reward_model=${rewards}", "compare.rewards trains what feedback.reward_model=${rewards} stands for"),
        ("compare.noise={Some: {flip: 0.1}}", "compare.noise.Some"),
        ("eval_data=null", "eval_data is missing"),
        ("feedback.noise={flip: 0.1}", "feedback.noise would apply to every run"),
        ("compare.reference_prompts=300", "reference_prompts=300 are held-out prompts, and eval.num_prompts=256"),
        ("compare.search_steps=1000", "compare.search_steps=1000 is more than num_steps="),
        ("run.smoke=true", "run.smoke"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, override: str, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        the_job(tmp_path, override)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["compare.methods=[sft, reflection]"], "has no trained method"),
        (["compare.methods=[spam]"], "compare.methods has spam; did you mean span?"),
        (["compare.methods=[nothing_like_it]"], "compare.methods has nothing_like_it; there are "),
        (["compare.methods=[late.yaml]"], "compare.methods has late.yaml, and there is no such file"),
        (["compare.methods=[span, dense]"], "has dense, which needs a reward model of its own: set compare.rewards"),
        (["compare.methods=[span, dense]"], "has dense, which needs a reward model of its own"),
        (
            ["compare.methods=[span, no_critique]", "feedback.source=program"],
            "has no_critique, which changes a feedback style that feedback.source=program does not use",
        ),
        (
            ["compare.methods=[paper, grpo]", "rollout.samples_per_prompt=1"],
            "compare.methods has grpo: objective.advantages=group_normalised compares the samples of a prompt",
        ),
        (
            ["compare.methods=[paper, dpo]", "rollout.samples_per_prompt=1"],
            "dpo needs two responses to compare: rollout.samples_per_prompt is 1",
        ),
        (["compare.methods=[span, step]", "compare.noise={some: {flip: 0.1}}"], "needs span and scalar among"),
    ],
)
def test_methods_that_make_no_sense_are_refused_before_any_run(
    tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        check(plan_of(tmp_path, *overrides))


def test_what_the_job_allows_is_not_refused(tmp_path: Path) -> None:
    check(plan_of(tmp_path, "compare.noise={some: {flip: 0.1}}"))
    check(plan_of(tmp_path, "compare.methods=[span, dense]", "feedback.source=program"))
    for config in ("compare_more.yaml", "reward_study.yaml"):
        check(plan_of(tmp_path, config=config))


def test_a_source_that_is_changed_does_not_give_the_marks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no_critique, dense cannot be compared: task tiny has no measure"):
        plan_of(tmp_path, config="compare_more.yaml").check("")
    plan_of(tmp_path).check("")


@pytest.mark.parametrize(
    ("overrides", "needs_reward"),
    [
        ([], True),
        (["feedback.source=program"], False),
        (["feedback.source=program", "compare.methods=[span, {folder}/asks.yaml]"], True),
        (["compare.rewards={{seeds: [1]}}", "feedback.reward_model=${{rewards}}"], False),
    ],
)
def test_the_artifacts_have_a_reward_model_where_a_run_asks_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], needs_reward: bool
) -> None:
    def make_demo_artifacts(demo: Any, fleets: Any, *, reward: bool) -> None:
        raise Stopped(f"reward={reward}")

    (tmp_path / "asks.yaml").write_text("about: A reward model.\noverrides: {feedback.source: reward_model}\n")
    monkeypatch.setattr(comparison_rewards, "make_demo_artifacts", make_demo_artifacts)
    monkeypatch.setattr(prepared, "on_cluster", lambda job: nullcontext())
    with pytest.raises(Stopped, match=f"reward={needs_reward}"):
        run(the_job(tmp_path, *(text.format(folder=tmp_path) for text in overrides)), None)


def test_the_dry_run_counts_the_runs_and_says_what_the_methods_are(tmp_path: Path) -> None:
    description = describe(the_job(tmp_path))
    assert "70 runs: 30 or more to choose learning rates, 40 that are compared, 0 under noise" in description
    assert "span: Text2Grad" in description
    more = describe(the_job(tmp_path, config="compare_more.yaml"))
    assert "63 runs: 24 or more to choose learning rates, 21 that are compared, 18 under noise" in more
    assert "reward models: dense, no_critique, plain, each with seeds 1\n" in more
    study = describe(the_job(tmp_path, config="reward_study.yaml"))
    assert "dense, no_critique, plain, each with seeds 1, 2, 3\n" in study and "\n0 runs: " in study


# ----------------------------------------------------------------------------------------------- finished, and resumed
def pretend(plan: ComparisonPlan, method_job: PolicyJob, *scores: float, held_out: str = "") -> None:
    """A finished run with these held-out scores, the first before training. held_out: Its prompts, if others."""
    extras = {"held_out": held_out} if held_out else {}
    begin_folder(method_job, **plan.identity_extras("span", method_job), **extras)
    lines = [
        {"step": i, "samples": 128.0 * i, "eval/score": score} | ({"time/step_s": 2.0} if i else {})
        for i, score in enumerate(scores)
    ]
    (method_job.run.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (method_job.run.folder / "summary.json").write_text(
        json.dumps({"steps": method_job.num_steps, "timing": {"wall_s": 120.0}})
    )
    if held_out:
        return
    measured = {"criticised": -1.0, "praised": 0.5, "unmentioned": -0.1, "difference": -0.9, "returns": 0.2}
    (method_job.run.folder / "targeting.json").write_text(json.dumps(measured))


def finished_plan(root: Path) -> ComparisonPlan:
    """All runs of a small comparison, with noise, are there; the search prefers .2 for span and .1 for scalar."""
    plan = plan_of(
        root, "compare.methods=[sft, scalar, span]", "compare.seeds=[1, 2]", "compare.lr_grid=[0.1, 0.2]",
        "compare.noise={some: {flip: 0.1}}", "num_steps=3", "compare.search_seeds=[101]",
    )  # fmt: skip
    lrs = {"scalar": 0.1, "span": 0.2}
    for method, best in lrs.items():
        for lr in (0.05, 0.1, 0.2, 0.4):  # a step beyond either end of the grid
            pretend(plan, plan.search(method, 101, lr), 0.1, *[0.8 if lr == best else 0.3] * 3)
        for seed in (1, 2):
            pretend(plan, plan.make_job(method, seed, best), 0.1, 0.2, 0.3 * seed, 0.4)
            pretend(plan, plan.make_job(method, seed, best, "some"), 0.1, 0.1, 0.1, 0.1)
    return plan


class NoEngines:
    """Stands for t2g's fleets where every run is there already."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked of the engines")


def session(plan: ComparisonPlan, stop: StopFlag | None = None, search_data: Any = None) -> Session:
    data: Any = NoEngines()
    return Session(
        plan=plan, data=data, search_data=search_data or data, stop=stop or StopFlag(), fleets=NoEngines(),
        results=ResultLines(plan.job.compare),
    )  # fmt: skip


def run_methods(plan: ComparisonPlan, chosen: dict[str, float]) -> None:
    references: Any = SimpleNamespace(measure=lambda *_: None)
    session(plan).run_group(plan_group(plan, [*chosen]), chosen, references)


def test_a_finished_comparison_is_read_again_without_a_run(tmp_path: Path) -> None:
    plan = finished_plan(tmp_path)
    comparison = session(plan)
    scores, lr = comparison.find_lr("span")
    assert lr == 0.2
    assert scores == {rate: {101: pytest.approx(0.8 if rate == lr else 0.3)} for rate in (0.1, 0.2, 0.4)}
    scores, lr = comparison.find_lr("scalar")
    assert (lr, sorted(scores)) == (0.1, [0.05, 0.1, 0.2])  # no end of what was tried
    run_methods(plan, {"scalar": 0.1, "span": 0.2})


@pytest.mark.parametrize("name", ["span", "dpo", "ilf", "reflection"])
def test_a_finished_run_is_kept_for_every_procedure(tmp_path: Path, name: str) -> None:
    plan = plan_of(tmp_path, f"compare.methods=[{name}]")
    method_job = plan.make_job(name, 1, 0.1)
    begin_folder(method_job, **plan.identity_extras(name, method_job))  # as `train` and `run_baseline` do
    (method_job.run.folder / "summary.json").write_text(json.dumps({"steps": method_job.num_steps}))
    session(plan).run(name, method_job)
    other = plan_of(tmp_path, f"compare.methods=[{name}]", "compare.reviser=other")
    with pytest.raises(UserError, match="reviser") if plan.methods[name].is_baseline else nullcontext():
        session(other).run(name, method_job)


def test_rates_are_chosen_on_other_held_out_prompts(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"post": f"Post {i}."}) + "\n" for i in range(5)))
    tokenizer = letter_tokenizer(tmp_path)
    data = PolicyData(task=get_task("tiny"), tokenizer=tokenizer, prompts=[], eval_prompts=[])

    def others(num_prompts: int) -> PolicyData:
        held_out = f"eval_data={{path: {tmp_path / 'held.jsonl'}}}"
        sizes = f"eval.num_prompts={num_prompts}", f"compare.reference_prompts={num_prompts}"
        return make_search_data(the_job(tmp_path, held_out, *sizes), data)

    assert [p.prompt_text for p in others(2).eval_prompts] == ["Post 2.", "Post 3."]
    assert [p.prompt_text for p in others(3).eval_prompts] == ["Post 3.", "Post 4."]
    assert others(5) is data  # there are no others


def test_the_search_reads_its_prompts_as_the_evaluation_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its long prompts are truncated or left out, and its records run their reference solutions."""
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"prompt": "a" * n}) + "\n" for n in (1, 2, 5000, 3)))
    referenced: list[str] = []

    def check_references(prompts: Sequence[Prompt], *_: Any) -> Sequence[Prompt]:
        referenced.extend(prompt.prompt_text for prompt in prompts)
        return prompts[:1]

    monkeypatch.setattr("jobs.compare.comparison_runs.check_references", check_references)
    held_out = f"eval_data={{path: {tmp_path / 'held.jsonl'}, too_long: skip}}"
    job = the_job(tmp_path, held_out, "eval.num_prompts=2", "compare.reference_prompts=2")
    data = PolicyData(task=get_task("prompts"), tokenizer=letter_tokenizer(tmp_path), prompts=[], eval_prompts=[])
    assert [p.prompt_text for p in make_search_data(job, data).eval_prompts] == referenced == ["aaa"]


def test_only_a_run_that_diverged_counts_as_a_bad_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is down would choose another rate."""
    plan = plan_of(tmp_path)
    ends: list[RunStopped] = [Diverged("the loss is not finite"), RunStopped("no rollout worker is left")]
    monkeypatch.setattr(Session, "run", lambda *_, **__: (_ for _ in ()).throw(ends.pop(0)))
    for seed in (101, 102):
        method_job = plan.search("span", seed, 0.4)
        begin_folder(method_job, **plan.identity_extras("span", method_job))
    assert session(plan).score("span", plan.search("span", 101, 0.4)) is None
    assert session(plan).score("span", plan.search("span", 101, 0.4)) is None, "it is not made again"
    other = plan_of(tmp_path, "objective.gamma=0.9")
    with pytest.raises(UserError, match=r"was made with other inputs: objective\.gamma"):
        session(other).score("span", other.search("span", 101, 0.4))
    with pytest.raises(RunStopped, match="no rollout worker"):
        session(plan).score("span", plan.search("span", 102, 0.4))


def test_runs_of_an_earlier_version_are_not_made_again(tmp_path: Path) -> None:
    folder = the_job(tmp_path).run.folder
    (folder / "arms").mkdir(parents=True)
    with pytest.raises(UserError, match="rename it to"):
        check_start(the_job(tmp_path))
    (folder / "arms").rename(folder / "methods")
    check_start(the_job(tmp_path))


def test_one_rate_is_not_searched(tmp_path: Path) -> None:
    assert session(plan_of(tmp_path, "compare.lr_grid=[0.1]")).find_lr("span") == ({}, 0.1)


def test_a_run_of_another_learning_rate_is_not_taken_for_this_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"span-1 was made with other inputs: learner\.policy\.lr"):
        run_methods(finished_plan(tmp_path), {"span": 0.1})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [("num_steps=4", r"num_steps \(3 -> 4\)"), ("eval.every=2", r"eval\.every \(1 -> 2\)")],
)
def test_runs_that_were_evaluated_elsewhere_are_not_compared(tmp_path: Path, change: str, sentence: str) -> None:
    """A score is a mean over evaluations: after other numbers of samples it is another figure."""
    finished_plan(tmp_path)
    plan = plan_of(tmp_path, "compare.methods=[sft, scalar, span]", "num_steps=3", change)
    with pytest.raises(UserError, match=rf"span-1 was made with other inputs: .*{sentence}"):
        session(plan).run("span", plan.make_job("span", 1, 0.2))


def test_runs_in_the_file_of_results_are_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another clone, whose run folders are gone, reads the same figures."""
    options = (
        "compare.methods=[sft, scalar, span]", "compare.seeds=[1, 2]", "compare.lr_grid=[0.1]", "num_steps=3",
        f"compare.results={tmp_path / 'results.jsonl'}",
    )  # fmt: skip
    first = plan_of(tmp_path / "first", *options)
    scores = {("scalar", 1): 0.2, ("scalar", 2): 0.3, ("span", 1): 0.5, ("span", 2): 0.7}
    for (method, seed), score in scores.items():
        pretend(first, first.make_job(method, seed, 0.1), 0.1, *[score] * 3)
    run_methods(first, {"scalar": 0.1, "span": 0.1})
    run_methods(first, {"scalar": 0.1, "span": 0.1})  # adds no line
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(row["method"], row["seed"], row["minutes"]) for row in rows] == [
        (*key, 2.0) for key in sorted(scores, key=lambda key: key[1])
    ]
    second = plan_of(tmp_path / "second", *options)
    begin_folder(second.job)
    search = run_all(second, NoEngines(), StopFlag())
    finish(second, search, {})
    methods = json.loads((second.job.run.folder / "compare.json").read_text())["methods"]
    assert methods["span"]["minus_scalar"]["mean"] == pytest.approx(0.35)
    assert methods["span"]["targeting"]["criticised"]["mean"] == -1
    other = plan_of(tmp_path / "second", *options, "rollout.temperature=0.5")  # other runs
    assert has_all(second, plan_group(second, ["scalar", "span"]), ResultLines(second.job.compare))
    assert not has_all(other, plan_group(other, ["span"]), ResultLines(other.job.compare))
    capsys.readouterr()


def test_a_run_that_began_from_other_weights_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(tmp_path, "compare.lr_grid=[0.1]", f"compare.results={tmp_path / 'results.jsonl'}")
    model = tmp_path / "start" / "model"
    model.mkdir(parents=True)
    weights = model / "weights.txt"
    weights.write_text("1")
    method_job = with_overrides(plan.make_job("span", 1, 0.1), {"model.policy": str(model)})
    run = RunCurve(samples=(0, 8), scores=(0.1, 0.5), seconds=(0, 1), step_seconds=1.0)
    ResultLines(plan.job.compare).append("span", method_job, run, seconds=60)
    assert ResultLines(plan.job.compare).find(method_job) == run
    assert caplog.messages == []

    weights.write_text("22")
    lines = ResultLines(plan.job.compare)
    assert [lines.find(method_job), lines.find(method_job)] == [run, run]
    (message,) = caplog.messages
    assert "span with seed 1" in message and "model.policy" in message

    content = json.loads((tmp_path / "results.jsonl").read_text())
    del content["start"]
    (tmp_path / "results.jsonl").write_text(f"{json.dumps(content)}\n")
    assert ResultLines(plan.job.compare).find(method_job) == run
    assert "(not recorded)" in caplog.messages[-1] and len(caplog.messages) == 2


def test_a_search_in_the_file_of_results_is_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another clone chooses the same rate without a run; also a rate beyond the grid is read."""
    file = tmp_path / "results.jsonl"
    results = f"compare.results={file}"
    options = ("compare.methods=[span]", "compare.lr_grid=[0.1, 0.2]", "compare.search_seeds=[101]", results)
    first = plan_of(tmp_path / "first", *options)
    for lr, score in {0.1: 0.3, 0.2: 0.8, 0.4: 0.5}.items():
        pretend(first, first.search("span", 101, lr), 0.1, *[score] * first.job.num_steps, held_out=SEARCH_PROMPTS)
    searched = session(first, search_data=NoEngines()).find_lr("span")
    assert searched[1] == 0.2
    second = plan_of(tmp_path / "second", *options)
    assert session(second, search_data=NoEngines()).find_lr("span") == searched
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["lr"], line["held_out"]) for line in lines] == [(lr, SEARCH_PROMPTS) for lr in (0.1, 0.2, 0.4)]
    compared = second.make_job("span", 101, 0.2)
    assert ResultLines(second.job.compare).find(compared, **second.identity_extras("span", compared)) is None
    capsys.readouterr()


def test_methods_and_seeds_may_be_added_to_a_comparison(tmp_path: Path) -> None:
    begin_folder(the_job(tmp_path, "compare.seeds=[1]", "compare.methods=[span]"))
    begin_folder(the_job(tmp_path))
    with pytest.raises(UserError, match=r"other inputs: objective\.lam"):
        begin_folder(the_job(tmp_path, "objective.lam=0.5"))


def test_a_stop_begins_no_run(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    stop = StopFlag()
    stop.signal_name = "SIGTERM"
    with pytest.raises(Stopped):
        session(plan, stop).run("span", plan.make_job("span", 1, 1e-3))


def test_the_files_of_a_finished_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = finished_plan(tmp_path)
    chosen = {"scalar": 0.1, "span": 0.2}
    scores = {"span": {0.1: {101: 0.3}, 0.2: {101: 0.4}}}
    search = {"grid": [0.1, 0.2], "seeds": [101], "scores": scores, "chosen": chosen}
    finish(plan, search, {})
    folder = plan.job.run.folder
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


@pytest.mark.parametrize(
    ("config", "overrides"), [("reward_study.yaml", []), ("compare_more.yaml", ["compare.seeds=[]"])]
)  # the second asks for noise, of which nothing is left without policies
def test_reward_models_alone_leave_a_table_and_no_curves(tmp_path: Path, config: str, overrides: list[str]) -> None:
    plan = plan_of(tmp_path, *overrides, config=config)
    begin_folder(plan.job)
    rewards = {"plain": {seed: dict.fromkeys(REWARD_COLUMNS, seed / 10) for seed in (1, 2, 3)}}
    finish(plan, {"grid": [], "seeds": [], "scores": {}, "chosen": {}}, rewards)
    folder = plan.job.run.folder
    assert json.loads((folder / "compare.json").read_text())["rewards"]["plain"]["2"]["parse_rate"] == 0.2
    assert "| plain | 0.200 ± 0.248 |" in (folder / "compare.md").read_text()
    assert not (folder / "report.html").exists()


# ----------------------------------------------------------------------------------------------------------- targeting
class ShiftedLearner:
    """Every token is less likely than it was to the engine by its place: 0, .1, .2, ..."""

    def forward(self, rollouts: Sequence[Rollout], fields: Sequence[str]) -> list[TokenStats]:
        assert fields == ["old_logprobs"], "a learner may leave out what it is not asked for"
        zero = np.zeros(LENGTH, np.float32)
        change = -0.1 * np.arange(LENGTH, dtype=np.float32)
        return [
            TokenStats(old_logprobs=r.rollout_logprobs + change, ref_logprobs=zero, values=zero, entropy=zero)
            for r in rollouts
        ]


class FakeFleets:
    """Hands out one pair of engines, and counts how often."""

    def __init__(self, rollouts: FakeRollouts) -> None:
        self.rollouts = rollouts
        self.requests = 0

    def for_policy(self, job: PolicyJob, task: Any) -> tuple[FakeRollouts, FakeFeedback]:
        self.requests += 1
        return self.rollouts, FakeFeedback()


def test_the_reference_is_made_once_and_kept(tmp_path: Path) -> None:
    tokenizer = letter_tokenizer(tmp_path)
    prompts = letter_prompts(8)
    data = PolicyData(task=LetterTask(), tokenizer=tokenizer, prompts=[], eval_prompts=prompts)
    fleets = FakeFleets(FakeRollouts(tokenizer))
    plan = plan_of(tmp_path / "runs", "compare.reference_prompts=5")
    responses = ReferenceResponses(plan, data, fleets).responses
    fleets.rollouts.logits[:, 0] = 9.0  # another policy by now: what is kept must not change with it
    again = ReferenceResponses(plan, data, fleets).responses
    assert fleets.requests == 1 and len(responses) == 5
    assert [(p, r.response_text, f) for p, r, f in again] == [(p, r.response_text, f) for p, r, f in responses]
    with pytest.raises(UserError, match=r"reference was made with other inputs: eval\.num_prompts"):
        ReferenceResponses(plan_of(tmp_path / "runs", "compare.reference_prompts=6"), data, fleets)


def test_targeting_is_measured_on_the_responses_of_the_base(tmp_path: Path) -> None:
    tokenizer = letter_tokenizer(tmp_path)
    prompts = letter_prompts(6)
    data = PolicyData(task=LetterTask(), tokenizer=tokenizer, prompts=prompts, eval_prompts=prompts)
    plan = plan_of(tmp_path / "runs", "compare.reference_prompts=6")
    rollouts = FakeRollouts(tokenizer)
    references = ReferenceResponses(plan, data, FakeFleets(rollouts))
    method_job = plan.make_job("span", 1, 1e-3)
    begin_folder(method_job)

    def measured() -> dict[str, Any]:
        references.measure(method_job, rollouts, FakeFeedback(), ShiftedLearner())
        return json.loads((method_job.run.folder / "targeting.json").read_text())

    still = measured()
    texts = [r.response_text for _, r, _ in references.responses]
    places: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for text in texts:
        for i, letter in enumerate(text):
            places[letter].append(i)
    assert all(places.values())
    assert still["criticised"] == pytest.approx(-0.1 * np.mean(places["b"]))
    assert still["praised"] == pytest.approx(-0.1 * np.mean(places["a"]))
    assert still["difference"] == pytest.approx(-0.1 * (np.mean(places["b"]) - np.mean(places["c"])))
    assert still["tokens"]["criticised"] == len(places["b"])
    assert still["returns"] == 1.0 and still["prompts"] == 6  # the same weights and seeds say the same again

    rollouts.logits[:, 1] = -99.0  # b is never written again
    assert measured()["returns"] == 0.0
