"""Stage 1: sample a policy on a data set, criticise every response, write annotated records for jobs.train_reward.

    python -m jobs.annotate --config configs/tiny/annotate.yaml model.policy=my/model data.path=my.jsonl

Each record goes into records.jsonl as it arrives; the same command again asks only for those that are missing. At the
end they are split by prompt into train.jsonl and heldout.jsonl, and annotated.json, written last, says that all is
there. run.smoke=true does the first prompts, in the folder `smoke`, and says how long the whole will take.
"""

import asyncio
import json
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.cli import main
from jobs.train_sft import begin_folder, check_folder
from t2g.checkpoint import write_atomic
from t2g.config import AnnotateJob
from t2g.describe import describe_annotate
from t2g.errors import RunStopped, UserError

if TYPE_CHECKING:
    from jobs.fleets import Fleets
    from t2g.data.records import AnnotatedRecord
    from t2g.types import Prompt

TRAIN_FILE, HELDOUT_FILE = "train.jsonl", "heldout.jsonl"
RECORDS_FILE, DONE_FILE = "records.jsonl", "annotated.json"
SMOKE_PROMPTS = 8


def annotate_data(config: AnnotateJob, fleets: "Fleets") -> dict[str, float]:
    """Records of every prompt into the run folder, split by prompt. Returns counts and shares.

    Goes on with what an earlier start left, and keeps what is finished. Responses without usable feedback are counted,
    not written; RunStopped when there are more than `feedback.max_failed_share`.
    """
    kept = finished(config)
    if kept is not None:
        return kept
    folder = begin_folder(config, RECORDS_FILE, DONE_FILE)
    prompts = read_prompts(config)
    if config.run.smoke:
        return _smoke(config, prompts, folder / RECORDS_FILE, fleets)
    _split(config, [prompt.prompt_id for prompt in prompts])  # refused before anything is paid for
    records = collect(config, prompts, folder / RECORDS_FILE, fleets)
    usable = [record for record in records if record.status in ("ok", "empty")]
    metrics = _metrics(config, usable, len(prompts) * config.rollout.samples_per_prompt)
    return _finish(config, folder, usable, metrics)


def finished(config: AnnotateJob) -> dict[str, float] | None:
    """The metrics of annotations that are whole. UserError when they were made with another config."""
    check_folder(config, RECORDS_FILE, DONE_FILE)
    path = config.run.folder / DONE_FILE
    return None if config.run.smoke or not path.exists() else json.loads(path.read_text())


def read_prompts(config: AnnotateJob) -> "list[Prompt]":
    """What will be sampled. UserError for data that cannot be used."""
    from t2g.data.chat import load_tokenizer
    from t2g.data.load import load_records
    from t2g.data.prompts import make_prompts
    from t2g.tasks.base import get_task

    room = config.rollout.max_model_len - config.rollout.max_new_tokens
    tokenizer = load_tokenizer(config.model.policy, config.model.revision)
    return make_prompts(load_records(config.data), get_task(config.task), tokenizer, room)


def collect(config: AnnotateJob, prompts: "Sequence[Prompt]", path: Path, fleets: "Fleets") -> "list[AnnotatedRecord]":
    """A record for each sample that was answered, in prompt order; `path` has them too, and those it had are kept."""
    from t2g.annotate import annotate, in_prompt_order
    from t2g.data.records import append_annotated, recover_annotated, write_annotated
    from t2g.interfaces import Sampling
    from t2g.progress import stage
    from t2g.tasks.base import get_task

    sampling = Sampling(
        num_samples=config.rollout.samples_per_prompt,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.run.seed,
    )
    total = len(prompts) * sampling.num_samples
    known = in_prompt_order(recover_annotated(path), prompts)
    write_annotated(path, known)  # without a last line that was cut off: the next one would be added to it
    if len(known) == total:
        return known
    rollouts = fleets.rollouts(config.model, config.rollout, config)
    feedback = fleets.feedback(config.feedback, get_task(config.task), config)
    with stage("annotate", total, done=len(known)) as bar:

        def on_record(record: "AnnotatedRecord") -> None:
            if record.status != "failed":  # nobody answered: the next start asks again
                append_annotated(path, record)
            bar.advance()

        done = {(record.prompt_id, record.sample_index) for record in known}
        asyncio.run(annotate(prompts, sampling, rollouts, feedback, on_record, done=done))
    return in_prompt_order(recover_annotated(path), prompts)


def _metrics(config: AnnotateJob, usable: "Sequence[AnnotatedRecord]", total: int) -> dict[str, float]:
    """Shares over all `total` responses. RunStopped when too few of them have usable feedback."""
    failed_share = 1 - len(usable) / total
    if not usable or failed_share > config.feedback.max_failed_share:
        raise RunStopped(
            f"{failed_share:.0%} of {total} responses got no usable feedback from feedback.source="
            f"{config.feedback.source}; feedback.max_failed_share allows {config.feedback.max_failed_share:.0%}. "
            f"The others are kept in {RECORDS_FILE}: the same command asks again for those that failed"
        )
    spans_per_response = sum(len(record.spans or ()) for record in usable) / len(usable)
    return {"failed_share": failed_share, "spans_per_response": spans_per_response}


def _split(config: AnnotateJob, prompt_ids: Collection[str]) -> dict[str, set[str]]:
    """Which prompts go into which file. UserError when a file would be empty."""
    from t2g.annotate import is_heldout

    held = {prompt_id for prompt_id in prompt_ids if is_heldout(prompt_id, config.heldout_share)}
    parts = {TRAIN_FILE: set(prompt_ids) - held, HELDOUT_FILE: held}
    for name, part in parts.items():
        if not part:
            raise UserError(
                f"no record for {name}: {len(set(prompt_ids))} prompts with usable feedback are too few for "
                f"heldout_share={config.heldout_share}"
            )
    return parts


def _finish(
    config: AnnotateJob, folder: Path, usable: "Sequence[AnnotatedRecord]", metrics: dict[str, float]
) -> dict[str, float]:
    """The two files, then the marker that says so, with `metrics` and the number of records in each."""
    from t2g.data.records import write_annotated

    parts = {
        name: [record for record in usable if record.prompt_id in ids]
        for name, ids in _split(config, [record.prompt_id for record in usable]).items()
    }
    for name, part in parts.items():
        write_annotated(folder / name, part)
    counts = {"train_records": len(parts[TRAIN_FILE]), "heldout_records": len(parts[HELDOUT_FILE])}
    write_atomic(folder / DONE_FILE, json.dumps(counts | metrics, indent=1).encode())
    return counts | metrics


def _smoke(config: AnnotateJob, prompts: "Sequence[Prompt]", path: Path, fleets: "Fleets") -> dict[str, float]:
    """The first prompts only, start of the engines included in no figure; says how long all of them will take."""
    from t2g.progress import duration

    chosen = prompts[:SMOKE_PROMPTS]
    fleets.rollouts(config.model, config.rollout, config)  # started here, so that the clock below does not see it
    started = time.monotonic()
    records = collect(config, chosen, path, fleets)
    seconds = time.monotonic() - started
    samples = config.rollout.samples_per_prompt
    usable = [record for record in records if record.status in ("ok", "empty")]
    metrics = _metrics(config, usable, len(chosen) * samples)
    metrics["samples_per_s"] = len(chosen) * samples / seconds
    left = duration(len(prompts) * samples / metrics["samples_per_s"])
    print(f"smoke run done: {metrics['samples_per_s']:.1f} samples/s; {len(prompts)} prompts will take about {left}")
    return metrics


def run(config: AnnotateJob) -> None:
    import ray

    from actors.placement import connect
    from jobs.fleets import Fleets, feedback_roles

    kept = finished(config)
    if kept is not None:
        print(f"{config.run.folder} is already annotated with this config: kept")
        return
    connect(config.cluster, {"rollout": config.rollout} | feedback_roles(config.feedback))
    try:
        with Fleets() as fleets:
            print(annotate_data(config, fleets))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(AnnotateJob, run, describe_annotate))
