"""Methods as files, and the runs of a comparison as configs."""

import subprocess
import sys
from pathlib import Path

import pytest

from configs import differing, shipped
from t2g.config import CompareJob, PolicyJob, StyleConfig, loading, with_overrides
from t2g.errors import UserError
from t2g.study.methods import ComparisonPlan, choose_lr, next_lr, read_method

ROOT = Path(__file__).parents[2]
DISTILLED = {f"objective.teacher.{key}" for key in ("use", "weight", "bound", "top_k", "critique")}
SCALED = {f"objective.teacher.{key}" for key in ("use", "weight", "bound", "critique")}
TEACHER_RECIPES = {
    "sdpo": ("distill", 1, "own"),
    "sdpo_shuffled": ("distill", 1, "shuffled"),
    "sdpo_span": ("distill", 0.5, "own"),
    "rlsd_span": ("scale", 1, "own"),
    "rlsd_shuffled": ("scale", 1, "shuffled"),
    "opsa": None,
}
SHIPPED = sorted(file.stem for file in shipped() if file.parent.name == "methods")


def plan_of(root: Path, *overrides: str, config: str = "compare.yaml") -> ComparisonPlan:
    file = ROOT / "configs" / "tiny" / config
    return ComparisonPlan(loading.load(CompareJob, file, [f"run.root={root}", *overrides], environ={}))


def plain(job: CompareJob) -> PolicyJob:
    return PolicyJob(**{name: getattr(job, name) for name in PolicyJob.model_fields})


def test_each_method_changes_what_makes_it_and_nothing_else(tmp_path: Path) -> None:
    """Beside the default, which is span; settings that repeat a default change nothing."""
    plan = plan_of(tmp_path, f"compare.methods=[{', '.join(SHIPPED)}]", config="compare_more.yaml")
    always = {"run.root", "run.name", "run.seed", "artifacts", "learner.policy.lr", "feedback.reward_model"}
    placement = "objective.rewards.placement"
    unit = "objective.rewards.unit"
    local = "objective.local_coef"
    grpo = {f"objective.{key}" for key in ("advantages", "whiten", "loss_aggregation", "local_coef")}
    critic = {"objective.advantages", "objective.kl_estimator", "objective.lam", local}
    clip_high = "objective.clip_eps_high"
    teacher = {f"objective.teacher{key}" for key in ("", ".use", ".weight", ".bound", ".top_k", ".critique")}
    more: dict[str, set[str]] = {"sft": set(), "reflection": set(), "dpo": set(), "ilf": set(), "span": set()}
    more |= {
        "span_critic": critic,
        "span_grpo": grpo,
        "span_returns": {local},
        "span_values": {"objective.values", "objective.lam"},
        "span_token": {unit, local},
        "span_token_grpo": {unit} | grpo,
        "scalar": {placement, local},
        "scalar_local": {placement},
    }
    more["dr_grpo"] = {placement, local, "objective.whiten"}
    more["gspo"] = {placement, "objective.surrogate", "objective.clip_eps", clip_high} | grpo
    more["cispo"] = {placement, "objective.surrogate", clip_high} | grpo - {"objective.loss_aggregation"}
    more |= {
        "scalar_critic": {placement} | critic,
        "grpo": {placement} | grpo,
        "scalar_token": {placement, unit, local},
        "scalar_token_critic": {placement, unit} | critic,
        "scalar_token_grpo": {placement, unit} | grpo,
        "paper": {unit, "objective.vf_coef"} | critic,
    }
    more |= {
        "sdpo": teacher,
        "sdpo_shuffled": teacher,
        "sdpo_span": teacher,
        "rlsd_span": teacher,
        "rlsd_shuffled": teacher,
        "opsa": {"objective.advantages", "objective.whiten", local},
        "outcome": {"objective.span_coef", "objective.outcome_rewards", local},
        "span_outcome": {"objective.outcome_rewards"},
        "step": {placement, local},
        "shuffled": {placement},
        "no_critique": {"feedback.style.critique"},
        "dense": {"feedback.style.labels"},
    }
    assert sorted(more) == SHIPPED
    for name, keys in more.items():
        assert differing(plain(plan.job), plan.make_job(name, 2, 7e-4)) == always | keys, name
    method_job = plan.make_job("grpo", 2, 7e-4)
    assert (method_job.objective.advantages, method_job.objective.whiten) == ("group_normalised", "none")
    assert method_job.objective.rewards.placement == "scalar" and not method_job.objective.uses_critic
    assert (method_job.run.folder, method_job.run.seed) == (tmp_path / "compare-more" / "methods" / "grpo-2", 2)
    assert method_job.learner.policy.lr == 7e-4


@pytest.mark.parametrize(
    ("name", "differing_keys"),
    [
        (
            "outcome",
            {
                "objective.span_coef",
                "objective.outcome_rewards",
                "objective.turn_gamma",
                "objective.rewards.unit",
                "objective.rewards.placement",
                "objective.local_coef",
            },
        ),
        ("step", {"objective.rewards.placement", "objective.local_coef"}),
        ("shuffled", {"objective.rewards.placement"}),
        ("dense", {"feedback.style.labels"}),
        ("no_critique", {"feedback.style.critique"}),
        ("sdpo_span", DISTILLED),
        ("rlsd_span", SCALED),
        ("rlsd_shuffled", SCALED),
    ],
)
def test_what_is_held_against_span_differs_from_it_in_its_own_keys_whatever_the_job_says(
    name: str, differing_keys: set[str]
) -> None:
    span = read_method("span").overrides
    other = read_method(name).overrides
    assert {key for key in span.keys() | other.keys() if span.get(key) != other.get(key)} == differing_keys


def test_recipes_with_a_teacher_keep_it_whatever_the_teacher_of_the_job() -> None:
    distilling = {"use": "distill", "weight": 0.3, "critique": "shuffled"}
    for teacher in (None, distilling, {"use": "scale", "bound": 9}):
        job = loading.load(PolicyJob, ROOT / "configs" / "tiny" / "policy.yaml", environ={})
        job = with_overrides(job, {"objective.teacher": teacher})
        objectives = {name: with_overrides(job, read_method(name).overrides).objective for name in TEACHER_RECIPES}
        teachers = {}
        for name, objective in objectives.items():
            rule = objective.teacher
            teachers[name] = None if rule is None else (rule.use, rule.weight, rule.critique)
        assert teachers == TEACHER_RECIPES
        assert objectives["rlsd_span"].teacher.use == "scale" and objectives["rlsd_span"].teacher.bound == 2
        assert objectives["opsa"].advantages == "unlikely" and not objectives["opsa"].trains_rewards


@pytest.mark.parametrize("task", ["slf5k", "kodcode", "ultrafeedback"])
def test_the_configs_of_the_paper_are_its_preset(task: str) -> None:
    job = loading.load(PolicyJob, ROOT / "configs" / task / "policy.yaml", environ={})
    assert with_overrides(job, read_method("paper").overrides) == job


def test_the_procedure_of_a_method_is_in_its_file() -> None:
    methods = {name: read_method(name) for name in SHIPPED}
    assert {name: m.procedure for name, m in methods.items() if m.procedure != "ppo"} == {
        "sft": "base", "reflection": "reflection", "dpo": "dpo", "ilf": "ilf",
    }  # fmt: skip
    assert [name for name, method in methods.items() if not method.is_trained] == ["reflection", "sft"]
    assert [name for name, method in methods.items() if method.is_baseline] == ["dpo", "ilf", "reflection"]


def test_the_runs_of_search_and_noise_have_their_own_folders(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, config="compare_more.yaml")
    method_job = plan.make_job("scalar", 1, 3e-4)
    search = plan.search("scalar", 101, 3e-4)
    noisy = plan.make_job("scalar", 1, 3e-4, "flipped")
    assert search.run.folder == tmp_path / "compare-more" / "search" / "scalar-0.0003-101"
    assert noisy.run.folder == tmp_path / "compare-more" / "noise" / "flipped-scalar-1"
    assert differing(method_job, search) == {"run.root", "run.name", "run.seed"}
    assert noisy.feedback.noise is not None
    assert noisy.feedback.noise.flip == 0.3
    assert method_job.feedback.noise is None


def test_a_shorter_search_has_the_rates_of_the_first_steps(tmp_path: Path) -> None:
    schedule = "learner.policy={schedule: linear, final_lr_ratio: 0.3}"
    plan = plan_of(tmp_path, "num_steps=12", "compare.search_steps=4", schedule, config="compare_more.yaml")
    compared = plan.make_job("span", 1, 3e-4)
    search = plan.search("span", 101, 3e-4)
    assert (search.num_steps, search.schedule_steps) == (4, 12)
    assert search.run.folder.name == "span-0.0003-101-4-steps"
    assert (compared.num_steps, compared.schedule_steps) == (12, 12)
    assert plan.identity_extras("span", search)["num_steps"] == 4


def test_a_learning_rate_is_chosen_by_the_mean_of_its_seeds() -> None:
    assert choose_lr({1e-4: {1: 0.9, 2: 0.1}, 3e-4: {1: 0.6, 2: 0.6}}) == 3e-4
    assert choose_lr({1e-3: {1: 0.5}, 1e-4: {1: 0.5}}) == 1e-4  # the smaller of equals, whatever the order
    assert choose_lr({1e-3: {1: 0.9, 2: None}, 1e-4: {1: 0.5, 2: 0.5}}) == 1e-4  # a run that stopped is no choice
    with pytest.raises(UserError, match=r"no learning rate of compare\.lr_grid=\[0\.1\]"):
        choose_lr({0.1: {1: None}})


def test_a_search_goes_on_until_its_best_is_no_end() -> None:
    assert next_lr({1e-4: {1: 0.2}, 1e-3: {1: 0.5}}) == 1e-2
    assert next_lr({1e-4: {1: 0.5}, 3e-4: {1: 0.2}}) == 3.33e-5
    assert next_lr({1e-4: {1: 0.2}, 3e-4: {1: 0.5}, 9e-4: {1: 0.3}}) is None
    assert next_lr({1e-4: {1: 0.2}, 3e-4: {1: 0.5}, 9e-4: {1: None}}) is None  # it stopped: that was worse
    assert next_lr({3e-4: {1: 0.5}}) is None


def test_a_method_is_served_by_the_reward_model_of_its_style_and_loss(tmp_path: Path) -> None:
    method_file = tmp_path / "dense_scalar.yaml"
    method_file.write_text(
        "about: Dense labels, on the last token.\n"
        "overrides: {objective.rewards.placement: scalar, feedback.style.labels: dense}\n"
    )
    methods = f"compare.methods=[span, scalar, no_critique, dense, {method_file}]"
    plan = plan_of(tmp_path, methods, "compare.rewards.seeds=[4, 5]", config="compare_more.yaml")
    models = [plan.reward_model(name) for name in plan.methods]
    assert models == ["plain", "plain", "no_critique", "dense", "dense"]
    method_job = plan.make_job("dense_scalar", 1, 1e-3)
    assert (method_job.feedback.style, method_job.objective.rewards.placement) == (
        StyleConfig(labels="dense"),
        "scalar",
    )
    assert method_job.feedback.reward_model == str(tmp_path / "compare-more" / "rewards" / "dense-4" / "model")
    assert plan.reference.feedback == plan.make_job("span", 1).feedback


def test_a_method_of_ones_own_may_name_its_reward_model(tmp_path: Path) -> None:
    method_file = tmp_path / "mine.yaml"
    method_file.write_text(
        f"about: Mine.\noverrides: {{feedback.style.labels: dense, feedback.reward_model: {tmp_path}, "
        "feedback.noise: {flip: 0.5}}\n"
    )
    plan = plan_of(tmp_path, f"compare.methods=[span, {method_file}]")
    plan.check("fact_f1")
    feedback = plan.make_job("mine", 1).feedback
    assert feedback.reward_model == str(tmp_path)
    assert feedback.noise is not None
    assert feedback.noise.flip == 0.5


def test_a_path_in_a_method_means_what_it_means_in_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of another machine or folder would look for it elsewhere."""
    (tmp_path / "trained").mkdir()
    method_file = tmp_path / "mine.yaml"
    method_file.write_text("about: Mine.\noverrides: {feedback.reward_model: trained, model.policy: org/model}\n")
    demo = tmp_path / "my_demo.yaml"
    demo.write_text("run: {name: world}\n")
    plan = plan_of(tmp_path, f"compare.methods=[span, {method_file}]", f"artifacts={demo}")
    monkeypatch.chdir(tmp_path)
    method_job = plan.make_job("mine", 1)
    assert (method_job.feedback.reward_model, method_job.model.policy) == (str(tmp_path / "trained"), "org/model")
    method_file.write_text("about: Mine.\noverrides: {feedback.reward_model: '${artifacts}/other', num_steps: 3}\n")
    method_job = ComparisonPlan(plan.job).make_job("mine", 1)
    assert (method_job.feedback.reward_model, method_job.num_steps) == (str(tmp_path / "world" / "other"), 3)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("about: A.\noverride: {}\n", "override is unknown; did you mean overrides?"),
        ("overrides: {}\n", "about is missing"),
        (
            "about: A.\noverrides: {objective.rewards.placment: span}\n",
            "compare.methods has bad: objective.rewards.placment is unknown; did you mean objective.rewards.placement?",
        ),
        ("about: A.\noverrides: {objective.kl_coef: much}\n", 'objective.kl_coef: got "much"'),
        ("about: A.\noverrides: {learner.policy.lr: 0.5}\n", "compare.methods has bad, which sets learner.policy.lr"),
        ("about: A.\noverrides: {num_steps.a: 1}\n", "compare.methods has bad: num_steps.a=1: num_steps is a value"),
    ],
)
def test_a_broken_method_is_refused_by_name(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        plan_of(tmp_path, f"compare.methods=[span, {file}]").check("fact_f1")
    assert sentence in str(caught.value)


def test_a_wheel_finds_its_methods_wherever_a_job_runs(tmp_path: Path) -> None:
    """Installed is only what setuptools picks up by pyproject.toml, and the job runs in a folder of the user's."""
    script = (
        "import setuptools, sys; setuptools.setup(script_args=['-q', 'build', '--build-base', sys.argv[1], "
        "'--build-lib', sys.argv[1] + '/lib', 'egg_info', '--egg-base', sys.argv[1]])"
    )
    lib = tmp_path / "build" / "lib"
    lib.parent.mkdir()
    subprocess.run([sys.executable, "-c", script, str(lib.parent)], cwd=ROOT, check=True, timeout=120)
    look = "from t2g.study.methods import read_method; import t2g; print(t2g.__file__, read_method('span').overrides)"
    (tmp_path / "user" / "configs").mkdir(parents=True)
    (tmp_path / "user" / "configs" / "__init__.py").touch()  # a package of that name hides nothing
    process = subprocess.run(
        [sys.executable, "-c", look], cwd=tmp_path / "user", env={"PYTHONPATH": str(lib), "PATH": ""},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert str(lib) in process.stdout and "placement" in process.stdout
