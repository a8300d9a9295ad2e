"""What a critique, sparse labels and a span-weighted loss are worth: reward models of the tiny world, over seeds.

    python -m jobs.reward_study --config configs/tiny/reward_study.yaml

All variants learn from the same responses, judged by the tiny world's critic, and are measured on the same held-out
ones; a seed decides the initial weights and the order of the records. Leaves `<run folder>/<variant>-<seed>` for each
training, and study.json; prints a table of means with 95 % intervals. The same command again keeps what is there.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from jobs.common.cli import main
from t2g.config import DataConfig, DemoJob, ModelConfig, RewardJob, RunConfig, StudyJob, StyleConfig, with_overrides
from t2g.config.describe import describe_study
from t2g.files import write_atomic
from t2g.sandbox import SandboxConfig
from t2g.study.intervals import half_interval

if TYPE_CHECKING:
    from t2g.feedback.records import AnnotatedRecord
    from t2g.study.reward_eval import JudgedRecord
    from t2g.tasks.base import Critic

STUDY_FILE = "study.json"
# Variant -> style, whether the loss is span-weighted. Each differs in one thing from the first, which is the demo's.
VARIANTS: dict[str, tuple[StyleConfig, bool]] = {
    "plain": (StyleConfig(), False),
    "weighted": (StyleConfig(), True),
    "no_critique": (StyleConfig(critique=False), False),
    "dense": (StyleConfig(labels="dense"), False),
}
TOKENS = tuple(f"{label}_{metric}" for label in ("good", "poor") for metric in ("precision", "recall", "f1"))
LABELLED = "labelled_share"
COLUMNS = {
    LABELLED: "labelled",
    **{name: name.replace("_", " ") for name in TOKENS},
    "decisive_good_f1": "decisive good f1",
    "decisive_poor_f1": "decisive poor f1",
    "located_rate": "located",
    "parse_rate": "parsed",
}
LEGEND = """\
Means over {seeds} seeds ± half the width of the 95 % interval (Student's t). Labelled: share of the held-out tokens
with a gold label. Good and poor: on all tokens, against gold labels of the variant's own kind, sparse or dense.
Decisive: on the tokens that the *sparse* gold calls good or poor (stated values, inventions), where all variants can be
compared. Located: quotes that stand in the response. Parsed: answers without guided decoding that are JSON."""


# ------------------------------------------------------------------------------------------------------------- figures
def study_metrics(
    judged: "Sequence[JudgedRecord]", sparse: "Sequence[AnnotatedRecord]", tokenizer: Any
) -> dict[str, float]:
    """`reward_metrics` of the judged records, their labelled_share, and the metrics of TOKENS as decisive_*, counted on
    the tokens that `sparse` (gold records of the same responses) labels.
    """
    import numpy as np

    from t2g.study.reward_eval import judged_record, reward_metrics

    decisive = []
    for record, gold in zip(judged, sparse, strict=True):
        assert record.response == gold.response
        both = judged_record(record.response, gold.to_feedback(), record.feedback, record.feedback, tokenizer)
        decides = both.gold_labels != 0
        decisive.append(replace(both, gold_labels=both.gold_labels[decides], labels=both.labels[decides]))
    on_decisive = reward_metrics(decisive)
    labelled = np.concatenate([record.gold_labels for record in judged]) != 0
    return (
        reward_metrics(judged)
        | {LABELLED: float(labelled.mean())}
        | {f"decisive_{name}": on_decisive[name] for name in TOKENS}
    )


def table(results: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
    """Markdown: a row for each variant, from its metrics by seed; then what the columns mean."""
    lines = [f"| variant | {' | '.join(COLUMNS.values())} |", "|---|" + "---|" * len(COLUMNS)]
    for variant, runs in results.items():
        cells = []
        for name in COLUMNS:
            values = [metrics[name] for metrics in runs.values()]
            measured = "" if name == LABELLED else f" ± {half_interval(values):.3f}"
            cells.append(f"{mean(values):.3f}{measured}")
        lines.append(f"| {describe_variant(variant)} | {' | '.join(cells)} |")
    num_seeds = len(next(iter(results.values())))
    return "\n".join([*lines, "", LEGEND.format(seeds=num_seeds)])


def describe_variant(variant: str) -> str:
    style, weighted = VARIANTS[variant]
    return f"{'' if style.critique else 'no '}critique, {style.labels}, {'span-weighted' if weighted else 'plain'} loss"


# ------------------------------------------------------------------------------------------------------------ records
def relabelled(record: "AnnotatedRecord", critic: "Critic") -> "AnnotatedRecord":
    """The same response with another critic's critique and quotes."""
    from t2g.feedback.parse import read_judgement
    from t2g.feedback.records import QuoteRecord

    said = read_judgement(critic(record.prompt, record.response, payload=record.payload))
    good, poor = (
        tuple(QuoteRecord(quote=quote.text, occurrence=quote.occurrence) for quote in side)
        for side in (said.good, said.poor)
    )
    return record.model_copy(update={"critique": said.critique, "good": good, "poor": poor, "spans": None})


def tiny_critic(style: StyleConfig) -> "Critic":
    from t2g.tasks.tiny.task import TinyTask

    return TinyTask().critic(style=style, sandbox=SandboxConfig())


def write_dense(study: StudyJob, sparse: RewardJob) -> None:
    """The records of `sparse` with dense labels, in the files that `variant_job` names."""
    from t2g.feedback.records import load_annotated, write_annotated

    critic = tiny_critic(StyleConfig(labels="dense"))
    for source in (sparse.data, sparse.eval_data):
        path = dense_path(study, source)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_annotated(path, [relabelled(record, critic) for record in load_annotated(source)])


def dense_path(study: StudyJob, sparse: DataConfig) -> Path:
    return study.run.folder / "dense" / Path(sparse.path).name


# ----------------------------------------------------------------------------------------------------------- trainings
def variant_job(study: StudyJob, demo: DemoJob, variant: str, seed: int) -> RewardJob:
    """The demo's reward job with the study's epochs, weights of the seed, and the variant's style, records and loss."""
    from jobs.common.stages import reward_job

    job, folder = reward_job(demo), study.run.folder
    style, weighted = VARIANTS[variant]
    changes: dict[str, Any] = {
        "run": RunConfig(root=folder, name=f"{variant}-{seed}", seed=seed),
        "model": ModelConfig(policy=str(folder / "weights" / str(seed))),
        "sft.num_epochs": study.num_epochs,
        "sft.span_weight": study.span_weight if weighted else 1.0,
        "style": style,
        "eval_records": study.eval_records,
    }
    if style.labels == "dense":
        changes["data"] = DataConfig(path=str(dense_path(study, job.data)))
        changes["eval_data"] = DataConfig(path=str(dense_path(study, job.eval_data)))
    return with_overrides(job, changes)


def run_variant(demo: DemoJob, job: RewardJob) -> dict[str, float]:
    """Train and measure one model. Its engine ends with it: twelve would not fit into memory."""
    from jobs.common.fleets import Fleets
    from jobs.common.reward_training import read_data, train_and_judge
    from jobs.common.stages import base_model, reward_job
    from t2g.tasks.tiny.assets import build_reward_model
    from t2g.text.tokenizer import load_tokenizer

    build_reward_model(job.model.policy, load_tokenizer(reward_job(demo).model.policy), seed=job.run.seed)
    data = read_data(job)
    tokenizer = load_tokenizer(base_model(demo).policy)  # spans are compared on the tokens where PPO will pay them
    with Fleets() as fleets:
        judged = train_and_judge(job, data, fleets, tokenizer=tokenizer)
    critic = tiny_critic(StyleConfig())
    return study_metrics(judged, [relabelled(record, critic) for record in data.heldout], tokenizer)


def make_variants(
    study: StudyJob, demo: DemoJob, wanted: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], dict[str, Any]]:
    """The trainings of these variants and seeds that are not there yet; the metrics of all. Ray must be connected."""
    from jobs.common.fleets import Fleets
    from jobs.common.stages import make_records, once, reward_job

    jobs = {(variant, seed): variant_job(study, demo, variant, seed) for variant, seed in wanted}
    with Fleets() as fleets:
        make_records(demo, fleets)
    write_dense(study, reward_job(demo))
    return {key: once(job.run.folder, job, partial(run_variant, demo, job)) for key, job in jobs.items()}


def run(study: StudyJob) -> None:
    from jobs.common.fleets import on_cluster
    from jobs.common.stages import load_beside
    from t2g.runs.versions import versions

    demo = load_beside(DemoJob, study.stages, study)
    with on_cluster(study.cluster, {"sft": demo.reward_sft}):  # each engine starts when the ranks before it have gone
        made = make_variants(study, demo, list(product(study.variants, study.seeds)))
    results = {variant: {seed: made[variant, seed] for seed in study.seeds} for variant in study.variants}
    summary = {"config": study.model_dump(mode="json"), "metrics": results, "versions": versions()}
    write_atomic(study.run.folder / STUDY_FILE, json.dumps(summary, indent=1).encode())
    print(table(results))


if __name__ == "__main__":
    sys.exit(main(StudyJob, run, describe_study))
