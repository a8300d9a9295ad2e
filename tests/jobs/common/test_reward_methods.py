"""Reward models of a comparison: what each differs in, its records and its figures."""

import re
from pathlib import Path

import pytest

from configs import differing
from jobs.artifacts.demo_artifacts import demo_of, load_or_run, reward_job
from jobs.compare import comparison_rewards
from jobs.compare.comparison_rewards import make_reward_job, relabel, write_dense
from t2g.config import CompareJob, DataConfig, DemoJob, RewardJob, StyleConfig, loading
from t2g.errors import UserError
from t2g.feedback.parse import Quote
from t2g.feedback.records import load_annotated, read_record, write_annotated
from t2g.study.comparison import REWARD_COLUMNS, tables
from t2g.study.methods import ComparisonPlan
from t2g.study.reward_eval import judged_record, measure_method
from t2g.tasks.tiny.assets import build_tokenizer

CONFIG = Path(__file__).parents[3] / "configs" / "tiny" / "reward_study.yaml"
FACTS = {"name": "Ann", "thing": "phone", "fault": "hums", "day": "Monday", "place": "Oslo"}
SPARSE = read_record(
    {
        "prompt": "A post.", "response": "by Ann, in Lima.", "critique": "c", "good": ["Ann"], "poor": ["Lima"],
        "payload": {"facts": FACTS},
    }
)  # fmt: skip


def study(root: Path) -> tuple[ComparisonPlan, DemoJob]:
    job = loading.load(CompareJob, CONFIG, [f"run.root={root}"])
    demo = demo_of(job)
    assert demo is not None
    return ComparisonPlan(job), demo


def test_each_model_differs_in_one_thing_from_the_demos(tmp_path: Path) -> None:
    plan, demo = study(tmp_path)
    always = {"run.name", "run.root", "run.seed", "model.policy", "sft.num_epochs", "eval_records"}
    more = {
        "span": set(),
        "no_critique": {"style.critique"},
        "dense": {"style.labels", "data.path", "eval_data.path"},
    }
    assert list(more) == list(plan.methods)
    for name, keys in more.items():
        assert differing(reward_job(demo), make_reward_job(plan, demo, name, 2)) == always | keys
    trained = make_reward_job(plan, demo, "dense", 1).run.folder / "model"
    assert str(trained) == plan.make_job("dense", 7).feedback.reward_model  # what is trained is what serves


def test_another_style_of_labels_is_another_run(tmp_path: Path) -> None:
    plan, demo = study(tmp_path)
    job = make_reward_job(plan, demo, "span", 1)
    load_or_run(job.run.folder, job, dict)
    with pytest.raises(UserError, match=r"plain-1 was made with other inputs: style\.labels"):
        load_or_run(job.run.folder, job.model_copy(update={"style": StyleConfig(labels="dense")}), dict)


def test_dense_records_are_those_of_the_dense_feedback_function(tmp_path: Path) -> None:
    plan, demo = study(tmp_path)
    sparse = reward_job(demo)
    for data in (sparse.data, sparse.eval_data):
        Path(data.path).parent.mkdir(parents=True, exist_ok=True)
        write_annotated(Path(data.path), [SPARSE])
    job = make_reward_job(plan, demo, "dense", 1)
    write_dense(job, sparse)
    for data in (job.data, job.eval_data):
        (record,) = load_annotated(data)
        assert (record.good, record.poor, record.response) == (
            (Quote(quote="by Ann"),),
            (Quote(quote="in Lima", fix="in Oslo"),),
            SPARSE.response,
        )
        assert record.critique.startswith("The name is Ann, it says Ann: right.")
    assert load_annotated(DataConfig(path=sparse.data.path))[0].good == (Quote(quote="Ann"),)


def test_each_model_is_trained_once_with_each_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, demo = study(tmp_path)
    for data in (reward_job(demo).data, reward_job(demo).eval_data):
        Path(data.path).parent.mkdir(parents=True, exist_ok=True)
        write_annotated(Path(data.path), [SPARSE])
    trained: list[str] = []

    def run_reward_job(demo: DemoJob, job: RewardJob) -> dict[str, float]:
        trained.append(job.run.name)
        job.run.folder.mkdir(parents=True)
        return {"good_f1": job.run.seed / 10}

    monkeypatch.setattr(comparison_rewards, "run_reward_job", run_reward_job)
    models = comparison_rewards.make_reward_models(plan, demo)
    assert list(models) == ["plain", "no_critique", "dense"]
    assert {seed: metrics["good_f1"] for seed, metrics in models["dense"].items()} == {1: 0.1, 2: 0.2, 3: 0.3}
    assert comparison_rewards.make_reward_models(plan, demo) == models
    assert len(trained) == len(set(trained)) == 9


def test_decisive_metrics_look_at_the_tokens_of_the_sparse_gold(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path, ["x"], vocab_size=261)  # a token a byte
    gold = relabel(SPARSE, StyleConfig(labels="dense")).to_feedback()
    record = read_record({"prompt": "p", "response": SPARSE.response, "critique": "c", "good": ["by Ann, in Li"]})
    judged = judged_record(SPARSE.response, gold, record.to_feedback(), record.to_feedback(), tokenizer)
    metrics = measure_method([judged], [SPARSE.to_feedback()], tokenizer)
    # dense gold: "by Ann" good, "in Lima" poor; a token covers when a non-blank character of it does
    assert metrics["labelled_share"] == pytest.approx((5 + 6) / 16)
    assert (metrics["good_precision"], metrics["good_recall"]) == (pytest.approx(5 / 10), 1.0)
    assert metrics["poor_recall"] == 0.0
    # of the tokens of "Ann" and "Lima", those of "Ann" and of "Li" are called good
    assert (metrics["decisive_good_precision"], metrics["decisive_good_recall"]) == (pytest.approx(3 / 5), 1.0)
    assert metrics["decisive_poor_f1"] == 0.0


def test_the_table_has_a_row_for_each_model() -> None:
    zero = dict.fromkeys(REWARD_COLUMNS, 0.0)
    runs = {1: zero | {"good_f1": 0.8}, 2: zero | {"good_f1": 0.9}, 3: zero | {"good_f1": 1.0}}
    lines = tables({"methods": {}, "noise": {}, "rewards": {"plain": runs, "dense": runs}}).splitlines()
    header, rule, plain, dense = (re.split(r" *\| *", line.strip("| ")) for line in lines[:4])
    assert len(header) == len(rule) == len(plain) == len(dense) == 1 + len(REWARD_COLUMNS)
    assert (plain[0], dense[0]) == ("plain", "dense")
    assert plain[header.index("good f1")] == dense[header.index("good f1")] == "0.900 ± 0.248"
    assert plain[header.index("parse rate")] == "0.000 ± 0.000"
    assert lines[4] == "" and lines[5].startswith("Reward models, means over 3 seeds")
