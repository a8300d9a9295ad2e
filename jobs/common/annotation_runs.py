"""An annotation run: its samples, the journal of its folder, and its output files.

`jobs.annotate` makes one run, and `jobs.demo` makes one as a pipeline stage.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.common.cli import StopFlag
from jobs.common.run_folder import begin_folder, check_folder, sole_process
from t2g.config import AnnotateConfig, AnnotateJob, FeedbackConfig, SourceConfig
from t2g.data.load import load_records
from t2g.data.prompts import make_prompts
from t2g.errors import RunStopped, Stopped, UserError
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
from t2g.loop.annotation import ConcurrencyLimit, Sample, SampleResponses
from t2g.runs.journal import Journal, read_journal
from t2g.runs.progress import format_duration, show_progress
from t2g.tasks.base import Task, get_task
from t2g.tasks.references import check_references
from t2g.text.policy_chat import load_policy_tokenizer
from t2g.types import Prompt

if TYPE_CHECKING:
    from jobs.common.fleets import Fleets

JOURNAL_FILE, ANNOTATED_FILE, DONE_FILE = "journal.jsonl", "annotated.jsonl", "annotated.json"
TRAIN_FILE, HELDOUT_FILE = "train.jsonl", "heldout.jsonl"
SMOKE_PROMPTS = 8
DRAIN_S = 5.0  # a stopped run waits so long for running judgements without requests to a language model
TICK_S = 0.2  # between checks for signals and journal syncs: a power failure may lose the records of one tick
Records = dict[str, AnnotatedRecord]  # by Sample.key


def annotate_data(config: AnnotateJob, fleets: "Fleets") -> dict[str, Any]:
    """Write all records into the run folder; return the content of annotated.json. See `annotate_samples`."""
    return annotate_samples(config, read_samples(config), fleets, StopFlag())


def read_samples(config: AnnotateJob) -> list[Sample]:
    """Return the responses to annotate, from the data or still to be sampled, then the planted ones.

    Raises:
        UserError: The data cannot be used, or the task plants no faults.
    """
    task, rows = get_task(config.task), load_records(config.data)
    if config.model is None or config.annotate.responses == "data":
        make = annotation.make_turn_samples if config.annotate.reads_conversations else annotation.make_samples
        samples = make(rows, task)
        if _judges_data(config):
            samples = annotation.merge_judgements(samples)
        samples = _with_modes(samples, task, config)
        problems = [sample.problem for sample in samples if sample.problem]
        if len(problems) == len(samples):
            raise UserError(f"data.path={config.data.name}: no record can be judged; {samples[0].problem}")
        for count, problem in annotation.group_reasons(problems):
            print(f"not judged: {count} of {len(samples)} responses, as {problem}")
    else:
        tokenizer = load_policy_tokenizer(config.model)
        room, too_long = config.rollout.max_prompt_tokens, config.data.too_long
        prompts = make_prompts(rows, task, tokenizer, room, too_long=too_long)
        prompts = _check(prompts, task, config, leave_out=True)
        samples = [Sample(prompt, index) for prompt in prompts for index in range(config.rollout.samples_per_prompt)]
    return samples + annotation.plant_samples(samples, task, config.annotate.planted, seed=config.run.seed)


def _judges_data(config: AnnotateJob) -> bool:
    """Return whether the data are judgements of people: a response then has a record for each of its judges."""
    sources = config.annotate.named_sources.values()
    return any(
        source.source == "human" and human_paths(source) == [*map(Path, config.data.paths)] for source in sources
    )


def _with_modes(samples: list[Sample], task: Task, config: AnnotateJob) -> list[Sample]:
    """Return the samples with the mode of their tests; the solution of a record without a response is judged."""
    chosen = [sample for sample in samples if {"response", NEXT_MESSAGE} & sample.prompt.payload.keys()]
    checked = _check([sample.prompt for sample in chosen], task, config, leave_out=False)
    prompts = {id(sample): prompt for sample, prompt in zip(chosen, checked, strict=True)}
    return [replace(sample, prompt=prompts.get(id(sample), sample.prompt)) for sample in samples]


def _check(prompts: Sequence[Prompt], task: Task, config: AnnotateJob, *, leave_out: bool) -> list[Prompt]:
    options = config.annotate
    programs = [source for source in options.named_sources.values() if "program" in (source.source, source.aligner)]
    if not programs:
        return list(prompts)
    return check_references(prompts, task, programs[0].sandbox, config.run.folder, leave_out=leave_out)


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
    options, smoke = config.annotate, config.run.smoke
    with sole_process(config.run.folder):
        check_folder(config, JOURNAL_FILE)
        num_smoke = SMOKE_PROMPTS * (config.rollout.samples_per_prompt if options.responses == "policy" else 1)
        requested = [sample for sample in samples if not sample.is_left_out][:num_smoke] if smoke else samples
        records = {} if smoke else known_records(config, requested)
        missing = missing_samples(requested, records)
        if not missing:
            return write_files(config, begin_folder(config, JOURNAL_FILE), requested, records)
        task = get_task(config.task)
        if fleets:
            source = fleets.feedback(options, task, config)
        else:
            folder = config.run.folder
            source = make_source(options, lambda one, key: make_local_source(one, task, folder=folder, section=key))
        print_token_estimate(config, missing)
        write = _writer(config, fleets) if options.responses == "policy" else None
        folder = begin_folder(config, JOURNAL_FILE)
        started = time.monotonic()
        collect(options, missing, source, write, folder / JOURNAL_FILE, records, stop)
        pace = len(missing) / (time.monotonic() - started)
        summary = write_files(config, folder, requested, records)
        if smoke:
            left = format_duration(len(samples) / pace)
            print(f"smoke run done: {pace:.1f} samples/s; {len(samples)} samples will take about {left}")
        return summary


def known_records(config: AnnotateJob, samples: Sequence[Sample]) -> Records:
    """Return the journal's records of these samples; human feedback only if the human file still contains it."""
    options = config.annotate
    records = read_journal(config.run.folder / JOURNAL_FILE, AnnotatedRecord)
    if records and options.source == "human":
        human = _human(options, config.task)
        records = [record for record in records if human.is_current(record)]
    by_key = {key: record for record in records for key in annotation.record_keys(record)}
    return {sample.key: by_key[sample.key] for sample in samples if sample.key in by_key}


def missing_samples(samples: Sequence[Sample], records: Records) -> list[Sample]:
    """Return one sample for each missing judgement; equal responses to a prompt share one."""
    return list({s.key: s for s in samples if s.key not in records and not s.problem}.values())


def collect(
    options: AnnotateConfig,
    samples: Sequence[Sample],
    source: FeedbackSource,
    write: SampleResponses | None,
    journal_path: Path,
    records: Records,
    stop: StopFlag,
) -> None:
    """Add a record of each sample to `records`, and the answered ones to the journal.

    Raises:
        Stopped: `stop` was set. No new request starts then; open requests, which may cost money, have some seconds.
    """
    done = len(records)
    with closing(Journal(journal_path)) as journal, show_progress("annotate", done + len(samples), done=done) as bar:

        def on_record(sample: Sample, record: AnnotatedRecord) -> None:
            if record.status != "failed":  # the next start requests a failed one again
                journal.append(record)
            records[sample.key] = record
            bar.advance()

        limit = ConcurrencyLimit(judging_concurrency(options))
        work = annotation.annotate(samples, source, on_record, limit, sample_responses=write)
        asyncio.run(run_until_stopped(work, limit, journal.sync, stop, drain_seconds(options)))


def drain_seconds(options: FeedbackConfig) -> float:
    """Return how long a stopped run waits for running judgements: requests to language models may cost money."""
    models = [source.llm for source in options.named_sources.values() if "llm" in source.models]
    return max((llm.request_timeout_s for llm in models), default=DRAIN_S)


def judging_concurrency(options: FeedbackConfig) -> int:
    """Return the number of concurrent judgements that keep the sources busy."""
    return max(map(_source_concurrency, options.named_sources.values()))


def _source_concurrency(source: SourceConfig) -> int:
    limits = {
        "llm": source.llm.concurrency,
        "reward_model": 2 * source.engine.workers.initial * source.engine.max_num_seqs,
        "program": source.sandbox.max_concurrent,
        "human": 1,
    }
    return max(limits.get(name, source.concurrency) for name in (source.source, source.aligner or source.source))


async def run_until_stopped(
    work: Coroutine[Any, Any, None],
    limit: ConcurrencyLimit,
    at_tick: Callable[[], None],
    stop: StopFlag,
    drain_s: float,
) -> None:
    """Run `work` until it ends or `stop` is set.

    `stop` closes `limit`. `work` is then cancelled once no request is running, after drain_s, or by a second signal.

    Raises:
        Stopped: `stop` was set.
    """
    task = asyncio.ensure_future(work)

    async def until(over: Callable[[], bool]) -> None:
        while not task.done() and not over():
            await asyncio.wait([task], timeout=TICK_S)
            at_tick()

    await until(lambda: bool(stop))
    if task.done():
        return task.result()
    limit.close()
    name, stop.signal_name = stop.signal_name, None  # a second signal sets it again
    waits = f"waiting up to {drain_s:g} s for {limit.num_in_flight} answers under way"
    print(f"{name}: {waits}; once more to stop at once", file=sys.stderr)
    deadline = time.monotonic() + drain_s
    await until(lambda: bool(stop) or not limit.num_in_flight or time.monotonic() >= deadline)
    stop.signal_name = name
    if not task.cancel():
        task.result()  # an error of the work takes precedence over the signal
    raise Stopped


def write_files(config: AnnotateJob, folder: Path, samples: Sequence[Sample], records: Records) -> dict[str, Any]:
    """Write annotated.jsonl, then unless too much failed the training and held-out files; return the summary."""
    (folder / DONE_FILE).unlink(missing_ok=True)
    left_out, samples = [s.problem for s in samples if s.is_left_out], [s for s in samples if not s.is_left_out]
    made = [
        annotation.make_refused_record(s, config.annotate.describe())
        if s.problem
        else records[s.key].model_copy(update={"sample_index": s.sample_index})
        for s in samples
    ]
    write_annotated(folder / ANNOTATED_FILE, made)
    summary = annotation.summarize(made, left_out)
    text, limit = annotation.format_summary(summary), config.annotate.max_failed_share
    usable = [(s.group or record.prompt, record) for s, record in zip(samples, made, strict=True) if record.usable]
    if not usable or summary["failed_share"] > limit:
        raise RunStopped(
            f"{summary['failed_share']:.0%} of {len(made)} responses got no usable feedback from annotate.source="
            f"{config.annotate.describe()}; annotate.max_failed_share allows {limit:.0%}. All judgements are kept in "
            f"{JOURNAL_FILE}: the same command requests the failed ones again\n{text}"
        )
    heldout = annotation.select_heldout_prompts((group for group, _ in usable), config.annotate.heldout_share)
    for name, is_heldout in ((TRAIN_FILE, False), (HELDOUT_FILE, True)):
        part = [record for group, record in usable if (group in heldout) is is_heldout]
        write_annotated(folder / name, part)
        summary["heldout_records" if is_heldout else "train_records"] = len(part)
    styles = {name: source.style.model_dump() for name, source in config.annotate.named_sources.items()}
    summary["style"] = styles.get("", styles)  # jobs.train_reward refuses another style
    write_json(folder / DONE_FILE, summary)
    if not heldout:
        text += f"\n  of one prompt or conversation: nothing is held out, and {HELDOUT_FILE} is empty"
    print(text)
    return summary


def _writer(config: AnnotateJob, fleets: "Fleets | None") -> SampleResponses:
    """Return a function that samples responses from the policy's engines."""
    assert fleets is not None and config.model is not None, "see roles and AnnotateJob"
    rollouts = fleets.rollouts(config.model, config.rollout, config)
    sampling = Sampling(
        num_samples=config.rollout.samples_per_prompt,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
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
    )  # fmt: skip


def print_token_estimate(config: AnnotateJob, samples: Sequence[Sample]) -> None:
    """Print the estimated requests and tokens; raise UserError if they exceed llm.max_total_tokens."""
    longest = "x" * (BYTES_PER_TOKEN * config.rollout.max_new_tokens)  # upper bound for a response not sampled yet
    for source in config.annotate.named_sources.values():
        items = [(s.prompt, s.response or longest) for s in samples]
        if source.source == "human" and "llm" in source.models:
            human = _human(source, config.task)
            items = [item for item in items if human.needs_aligner(*item)]
        if "llm" in source.models:
            items *= [source.source, source.aligner].count("llm")
            print(estimate_cost(items, source, get_task(config.task)))
