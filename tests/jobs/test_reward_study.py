"""The study of reward models: its variants, its dense records and its figures."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from configs import differing
from jobs import reward_study
from jobs.common.stages import demo_of, once, reward_job
from jobs.reward_study import (
    COLUMNS,
    VARIANTS,
    relabelled,
    study_metrics,
    table,
    variant_job,
    write_dense,
)
from t2g.config import DataConfig, StudyJob, StyleConfig, loading
from t2g.errors import UserError
from t2g.feedback.records import load_annotated, read_record, write_annotated
from t2g.study.reward_eval import judged_record
from t2g.tasks.tiny.assets import build_tokenizer

CONFIG = Path(__file__).parents[2] / "configs" / "tiny" / "reward_study.yaml"
FACTS = {"name": "Ann", "thing": "phone", "fault": "hums", "day": "Monday", "place": "Oslo"}
SPARSE = read_record(
    {
        "prompt": "A post.", "response": "by Ann, in Lima.", "critique": "c", "good": ["Ann"], "poor": ["Lima"],
        "payload": {"facts": FACTS},
    }
)  # fmt: skip


def study(root: Path) -> StudyJob:
    return loading.load(StudyJob, CONFIG, [f"run.root={root}"])


def test_each_variant_differs_in_one_thing_from_the_demo(tmp_path: Path) -> None:
    config = study(tmp_path)
    demo = demo_of(config)
    assert demo is not None
    always = {"run.name", "run.root", "run.seed", "model.policy", "sft.num_epochs", "eval_records"}
    more = {
        "plain": set(),
        "weighted": {"sft.span_weight"},
        "no_critique": {"style.critique"},
        "dense": {"style.labels", "data.path", "eval_data.path"},
    }
    assert set(more) == set(VARIANTS) == set(config.variants)
    for variant, keys in more.items():
        assert differing(reward_job(demo), variant_job(config, demo, variant, 2)) == always | keys


def test_another_style_of_labels_is_another_run(tmp_path: Path) -> None:
    config = study(tmp_path)
    demo = demo_of(config)
    assert demo is not None
    job = variant_job(config, demo, "plain", 1)
    once(job.run.folder, job, dict)
    with pytest.raises(UserError, match=r"plain-1 was made otherwise: style\.labels"):
        once(job.run.folder, job.model_copy(update={"style": StyleConfig(labels="dense")}), dict)


def test_a_seed_or_variant_given_twice_is_refused(tmp_path: Path) -> None:
    for change in ({"seeds": (1, 1)}, {"variants": ("plain", "plain")}):
        with pytest.raises(ValidationError, match="twice"):
            StudyJob.model_validate({"stages": "demo.yaml", **change})


def test_dense_records_are_those_of_the_dense_critic(tmp_path: Path) -> None:
    config = study(tmp_path)
    demo = demo_of(config)
    assert demo is not None
    sparse = reward_job(demo)
    for data in (sparse.data, sparse.eval_data):
        Path(data.path).parent.mkdir(parents=True, exist_ok=True)
        write_annotated(Path(data.path), [SPARSE])
    write_dense(config, sparse)
    job = variant_job(config, demo, "dense", 1)
    for data in (job.data, job.eval_data):
        (record,) = load_annotated(data)
        assert (record.good, record.poor, record.response) == (("by Ann",), ("in Lima",), SPARSE.response)
        assert record.critique.startswith("The name is Ann, it says Ann: right.")
    assert load_annotated(DataConfig(path=sparse.data.path))[0].good == ("Ann",)


def test_decisive_metrics_look_at_the_tokens_of_the_sparse_gold(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path, ["x"], vocab_size=261)  # a token a byte
    critic = reward_study.tiny_critic(StyleConfig(labels="dense"))
    gold = relabelled(SPARSE, critic).to_feedback()
    said = read_record({"prompt": "p", "response": SPARSE.response, "critique": "c", "good": ["by Ann, in Li"]})
    judged = judged_record(SPARSE.response, gold, said.to_feedback(), said.to_feedback(), tokenizer)
    metrics = study_metrics([judged], [SPARSE], tokenizer)
    # dense gold: "by Ann" good, "in Lima" poor; a token covers when a non-blank character of it does
    assert metrics["labelled_share"] == pytest.approx((5 + 6) / 16)
    assert (metrics["good_precision"], metrics["good_recall"]) == (pytest.approx(5 / 10), 1.0)
    assert metrics["poor_recall"] == 0.0
    # of the tokens of "Ann" and "Lima", those of "Ann" and of "Li" are called good
    assert (metrics["decisive_good_precision"], metrics["decisive_good_recall"]) == (pytest.approx(3 / 5), 1.0)
    assert metrics["decisive_poor_f1"] == 0.0


def test_the_table_has_a_row_for_each_variant() -> None:
    zero = dict.fromkeys(COLUMNS, 0.0)
    runs = {1: zero | {"good_f1": 0.8}, 2: zero | {"good_f1": 0.9}, 3: zero | {"good_f1": 1.0}}
    lines = table({"plain": runs, "no_critique": runs}).splitlines()
    header, rule, plain, bare = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[:4])
    assert len(header) == len(rule) == len(plain) == len(bare) == 1 + len(COLUMNS)
    assert (plain[0], bare[0]) == ("critique, sparse, plain loss", "no critique, sparse, plain loss")
    assert plain[header.index("good f1")] == bare[header.index("good f1")] == "0.900 ± 0.248"
    assert plain[header.index("parsed")] == "0.000 ± 0.000"
    assert plain[header.index("labelled")] == "0.000"  # of the records, not of a measurement
    assert lines[4] == "" and lines[5].startswith("Means over 3 seeds")
