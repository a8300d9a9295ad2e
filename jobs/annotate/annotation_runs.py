"""An annotation run: its samples, the journal of its folder, and its output files.

`jobs.annotate` makes one run, and `jobs.demo` makes one as an artifact.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.common.cli import StopFlag
from jobs.common.journals import judging_limits, make_missing_rows
from jobs.common.run_folder import SMOKE_INPUTS, begin_folder, check_folder, sole_process
from t2g.config import AnnotateJob, ModelConfig, SourceConfig
from t2g.config.jobs import JOURNAL_FILE
from t2g.data.load import load_records
from t2g.data.prompts import make_prompts
from t2g.errors import RunStopped, UserError
from t2g.feedback.conversations import NEXT_MESSAGE
from t2g.feedback.records import AnnotatedRecord, write_annotated
from t2g.feedback.sources.chat_client import BYTES_PER_TOKEN
from t2g.feedback.sources.combined import make_source
from t2g.feedback.sources.human import HumanFeedback, human_paths
from t2g.feedback.sources.llm import estimate_cost
from t2g.feedback.sources.make import make_local_source
from t2g.files import write_json
from t2g.interfaces import FeedbackSource, Sampling
from t2g.loop import annotation
from t2g.loop.annotation import Annotator, Sample, SampleResponses
from t2g.runs.journal import read_journal
from t2g.runs.progress import format_duration
from t2g.tasks.base import Task, get_task
from t2g.tasks.references import check_references, remove_tests_mode
from t2g.text.policy_chat import load_policy_tokenizer
from t2g.text.segments import printable
from t2g.types import Prompt

if TYPE_CHECKING:
    from jobs.common.fleets import Fleets

ANNOTATED_FILE = "annotated.jsonl"
DONE_FILE = "annotated.json"
TRAIN_FILE = "train.jsonl"
HELDOUT_FILE = "heldout.jsonl"
Records = dict[str, AnnotatedRecord]  # by Sample.key


class GroupedRecord(NamedTuple):
    """A record, and the group that is on one side of the held-out split."""

    group: str
    record: AnnotatedRecord


def annotate_data(config: AnnotateJob, fleets: "Fleets") -> dict[str, Any]:
    """Write all records into the run folder; return the content of annotated.json. See `annotate_samples`."""
    return annotate_samples(config, read_samples(config), fleets, StopFlag())


def read_samples(config: AnnotateJob) -> list[Sample]:
    """Return the responses to annotate, from the data or still to be sampled, then the planted ones.

    Raises:
        UserError: The data cannot be used, or the task plants no faults.
    """
    task = get_task(config.task)
    rows = load_records(config.data)
    if config.model is None or config.annotate.responses == "data":
        samples = _samples_from_data(rows, task, config)
    else:
        samples = _samples_to_write(rows, task, config, config.model)
    planted = annotation.plant_samples(samples, task, config.annotate.planted, seed=config.run.seed)
    return samples + planted


def _samples_from_data(rows: Sequence[Any], task: Task, config: AnnotateJob) -> list[Sample]:
    """Return the responses of the data, and print why some cannot be judged."""
    make = annotation.make_turn_samples if config.annotate.reads_conversations else annotation.make_samples
    samples = make(rows, task)
    if _judges_data(config):
        samples = annotation.merge_judgements(samples)
    samples = _with_modes(samples, task, config)
    problems = [sample.problem for sample in samples if sample.problem]
    if len(problems) == len(samples):
        raise UserError(f"data.path={config.data.name}: no record can be judged; {samples[0].problem}")
    for count, problem in annotation.group_reasons(problems):
        print(printable(f"not judged: {count} of {len(samples)} responses, as {problem}"))
    return samples


def _samples_to_write(rows: Sequence[Any], task: Task, config: AnnotateJob, model: ModelConfig) -> list[Sample]:
    """Return samples whose responses the policy still has to write."""
    tokenizer = load_policy_tokenizer(model)
    room = config.rollout.max_prompt_tokens
    prompts = make_prompts(rows, task, tokenizer, room, too_long=config.data.too_long)
    prompts = _check(prompts, task, config, leave_out=True)
    indices = range(config.rollout.samples_per_prompt)
    return [Sample(prompt, index) for prompt, index in product(prompts, indices)]


def _judges_data(config: AnnotateJob) -> bool:
    """Return whether the data are judgements of people: a response then has a record for each of its judges."""
    data_paths = [*map(Path, config.data.paths)]
    for source in config.annotate.named_sources.values():
        if source.source == "human" and human_paths(source) == data_paths:
            return True
    return False


def _with_modes(samples: list[Sample], task: Task, config: AnnotateJob) -> list[Sample]:
    """Return the samples with the mode of their tests; the solution of a record without a response is judged."""
    has_response = [sample for sample in samples if {"response", NEXT_MESSAGE} & sample.prompt.payload.keys()]
    prompts = [sample.prompt for sample in has_response]
    checked = _check(prompts, task, config, leave_out=False)

    checked_by_id: dict[int, Prompt] = {}
    for sample, prompt in zip(has_response, checked, strict=True):
        checked_by_id[id(sample)] = prompt
    result = []
    for sample in samples:
        prompt = checked_by_id.get(id(sample)) or remove_tests_mode(sample.prompt)
        result.append(replace(sample, prompt=prompt))
    return result


def _check(prompts: Sequence[Prompt], task: Task, config: AnnotateJob, *, leave_out: bool) -> list[Prompt]:
    for source in config.annotate.named_sources.values():
        if "program" in (source.source, source.aligner):
            return check_references(prompts, task, source.sandbox, config.run.folder, leave_out=leave_out)
    return list(prompts)


def annotate_samples(
    config: AnnotateJob, samples: Sequence[Sample], fleets: "Fleets | None", stop: StopFlag
) -> dict[str, Any]:
    """Request the judgements that the journal lacks, write the files, and return the content of annotated.json.

    Args:
        fleets: Needed if the job has `roles`.

    Raises:
        UserError: The source cannot be used.
        Stopped: `stop` was set.
        RunStopped: More than `annotate.max_failed_share` has no usable feedback; annotated.jsonl is written.
    """
    options = config.annotate
    smoke = config.run.smoke
    samples_policy = options.responses == "policy"
    with sole_process(config.run.folder):
        check_folder(config)
        requested = _first_samples(config, samples) if smoke else samples
        records = {} if smoke else known_records(config, requested)
        missing = missing_samples(requested, records)
        if not missing:
            folder = begin_folder(config)
            return write_files(config, folder, requested, records)

        source = _feedback_source(config, fleets)
        print_token_estimate(config, missing)
        annotator = Annotator(source, _writer(config, fleets) if samples_policy else None)
        folder = begin_folder(config)
        started = time.monotonic()
        records = make_missing_rows(
            folder / JOURNAL_FILE,
            "annotate",
            _samples_by_key(requested),
            annotator.judge,
            read=lambda: known_records(config, requested),
            limits=judging_limits(options),
            stop=stop,
            prepare=annotator.respond,
            is_recorded=lambda record: record.status != "failed",  # the next start requests a failed one again
        )
        pace = len(missing) / (time.monotonic() - started)
        summary = write_files(config, folder, requested, records)
        if smoke:
            left = format_duration(len(samples) / pace)
            print(f"smoke run done: {pace:.1f} samples/s; {len(samples)} samples will take about {left}")
        return summary


def _first_samples(config: AnnotateJob, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of a smoke run."""
    samples_per_prompt = config.rollout.samples_per_prompt if config.annotate.responses == "policy" else 1
    judged = [sample for sample in samples if not sample.is_left_out]
    return judged[: SMOKE_INPUTS * samples_per_prompt]


def _feedback_source(config: AnnotateJob, fleets: "Fleets | None") -> FeedbackSource:
    """Return the source of feedback, with engines if the job has `roles`."""
    task = get_task(config.task)
    if fleets:
        return fleets.feedback(config.annotate, task, config)
    folder = config.run.folder
    return make_source(
        config.annotate, lambda source, section: make_local_source(source, task, folder=folder, section=section)
    )


def known_records(config: AnnotateJob, samples: Sequence[Sample]) -> Records:
    """Return the journal's records of these samples; human feedback only if the human file still contains it."""
    sources = config.annotate.named_sources
    records = read_journal(config.run.folder / JOURNAL_FILE, AnnotatedRecord)
    for name, source in sources.items():
        if records and source.source == "human":
            human = _human(source, config.task)
            criterion = name if len(sources) > 1 else ""
            records = [record for record in records if human.is_current(record, criterion)]
    by_key: Records = {}
    for record in records:
        by_key |= dict.fromkeys(annotation.record_keys(record), record)
    return {sample.key: by_key[sample.key] for sample in samples if sample.key in by_key}


def missing_samples(samples: Sequence[Sample], records: Records) -> list[Sample]:
    """Return one sample for each missing judgement."""
    by_key = _samples_by_key(samples)
    return [sample for key, sample in by_key.items() if key not in records]


def _samples_by_key(samples: Sequence[Sample]) -> dict[str, Sample]:
    """Return one sample for each judgement; equal responses to a prompt share one."""
    return {sample.key: sample for sample in samples if not sample.problem}


def write_files(config: AnnotateJob, folder: Path, samples: Sequence[Sample], records: Records) -> dict[str, Any]:
    """Write annotated.jsonl, then unless too much failed the training and held-out files; return the summary."""
    (folder / DONE_FILE).unlink(missing_ok=True)
    left_out: list[str] = []
    annotated: list[AnnotatedRecord] = []
    usable: list[GroupedRecord] = []
    for sample in samples:
        if sample.is_left_out:
            left_out.append(sample.problem)
            continue
        record = _make_record(config, sample, records)
        annotated.append(record)
        if record.usable:
            usable.append(GroupedRecord(sample.group or record.prompt, record))
    write_annotated(folder / ANNOTATED_FILE, annotated)

    summary = annotation.summarize(annotated, left_out)
    text = annotation.format_summary(summary)
    limit = config.annotate.max_failed_share
    if not usable or summary["failed_share"] > limit:
        raise RunStopped(
            f"{summary['failed_share']:.0%} of {len(annotated)} responses got no usable feedback from annotate.source="
            f"{config.annotate.describe()}; annotate.max_failed_share allows {limit:.0%}. All judgements are kept in "
            f"{JOURNAL_FILE}: the same command requests the failed ones again\n{text}"
        )

    summary |= _write_split(config, folder, usable)
    styles = {name: source.style.model_dump() for name, source in config.annotate.named_sources.items()}
    summary["style"] = styles.get("", styles)  # jobs.train_reward refuses another style
    write_json(folder / DONE_FILE, summary)

    if summary["heldout_records"] == 0:
        text += f"\n  of one prompt or conversation: nothing is held out, and {HELDOUT_FILE} is empty"
    print(printable(text))
    return summary


def _write_split(config: AnnotateJob, folder: Path, usable: Sequence[GroupedRecord]) -> dict[str, int]:
    """Write the training and held-out files, and return their numbers of records."""
    groups = [grouped.group for grouped in usable]
    heldout_groups = annotation.select_heldout_prompts(groups, config.annotate.heldout_share)
    train: list[AnnotatedRecord] = []
    heldout: list[AnnotatedRecord] = []
    for grouped in usable:
        part = heldout if grouped.group in heldout_groups else train
        part.append(grouped.record)
    write_annotated(folder / TRAIN_FILE, train)
    write_annotated(folder / HELDOUT_FILE, heldout)
    return {"train_records": len(train), "heldout_records": len(heldout)}


def _make_record(config: AnnotateJob, sample: Sample, records: Records) -> AnnotatedRecord:
    """Return the record of a sample; that of a response that cannot be judged says why."""
    if sample.problem:
        return annotation.make_refused_record(sample, config.annotate.describe())
    return records[sample.key].model_copy(update={"sample_index": sample.sample_index})


def _writer(config: AnnotateJob, fleets: "Fleets | None") -> SampleResponses:
    """Return a function that samples responses from the policy's engines."""
    assert fleets is not None and config.model is not None, "see roles and AnnotateJob"
    options = config.rollout
    rollouts = fleets.rollouts(config.model, options, config)
    sampling = Sampling(
        num_samples=options.samples_per_prompt,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        seed=config.run.seed,
    )

    async def write(prompt: Prompt) -> list[str | None]:
        sampled = await rollouts.sample(prompt, sampling)
        return [None if rollout.answer_start is None else rollout.answer for rollout in sampled]

    return write


def _human(source: SourceConfig, task: str) -> HumanFeedback:
    """Return the human feedback of a source, without an aligner."""
    return HumanFeedback(
        human_paths(source), get_task(task),
        columns=source.human_columns, offsets=source.offsets, labels=source.human_labels,
        needs_critique=source.style.critique,
    )  # fmt: skip


def print_token_estimate(config: AnnotateJob, samples: Sequence[Sample]) -> None:
    """Print the estimated requests and tokens; raise UserError if they exceed llm.max_total_tokens."""
    longest = "x" * (BYTES_PER_TOKEN * config.rollout.max_new_tokens)  # upper bound for a response not sampled yet
    task = get_task(config.task)
    for source in config.annotate.named_sources.values():
        if "llm" not in source.models:
            continue
        items = [(sample.prompt, sample.response or longest) for sample in samples]
        if source.source == "human":
            human = _human(source, config.task)
            items = [item for item in items if human.needs_aligner(*item)]
        requests_per_item = [source.source, source.aligner].count("llm")
        items *= requests_per_item
        estimate = estimate_cost(items, source, task)
        print(estimate)
