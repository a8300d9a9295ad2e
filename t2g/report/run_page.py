"""The report of one run folder of jobs.train_policy, finished or not, from the files that the run writes."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from t2g.config.words import first_problem
from t2g.errors import UserError
from t2g.report.html import MAX_EXAMPLES, Answer, Example, write_report
from t2g.runs import metrics as m
from t2g.runs.log import METRICS_FILE, SAMPLES_FILE, SampleRecord, read_records

REPORT_FILE = "report.html"
SUMMARY_FILE = "summary.json"
Key = tuple[str, str, str, int]  # of a SampleRecord
_SAMPLE = TypeAdapter(SampleRecord)
_OBJECT = TypeAdapter(dict[str, Any])


def report_run(folder: Path) -> Path:
    """Write `folder`/report.html and return its path.

    Without a summary.json (the run goes on) the figures at the top are those of the last step.
    Raises UserError when the folder holds no finished step, or a file that no run wrote.
    """
    steps = [step for _, step in read_records(folder / METRICS_FILE)]
    if not steps:
        raise UserError(
            f"{folder / METRICS_FILE} holds no finished step: --run needs the folder of a run of jobs.train_policy"
        )
    base = next((m.held_out(step) for step in steps if step[m.STEP] == 0), {})
    path = folder / SUMMARY_FILE
    summary = {"steps": steps[-1][m.STEP], "samples": int(steps[-1].get(m.SAMPLES, 0))}
    if path.exists():
        try:
            summary = _OBJECT.validate_json(path.read_bytes())
        except ValidationError as error:
            raise UserError(f"{path} is no JSON object: {first_problem(error)}") from error
    write_report(
        folder / REPORT_FILE,
        title=f"Text2Grad: {folder.resolve().name}",
        summary={"base": base} | summary,
        arms={"policy": steps},
        examples=examples(folder / SAMPLES_FILE),
    )
    return folder / REPORT_FILE


def key(sample: SampleRecord) -> Key:
    """What is compared with what: ids are unique in one data set only, and the held-out one is another."""
    return sample.split, sample.prompt_id, sample.prompt, sample.sample_index


def examples(path: Path) -> list[Example]:
    """One example for each sample of a prompt, at most MAX_EXAMPLES: its first and its last response, or the only one.

    Prompts answered at two steps come first, among them held-out ones, then the latest.
    """
    first: dict[Key, SampleRecord] = {}
    last: dict[Key, SampleRecord] = {}
    for number, record in read_records(path):
        try:
            sample = _SAMPLE.validate_python(record)
        except ValidationError as error:
            raise UserError(f"{path}:{number} is no sample as a run writes it ({first_problem(error)})") from error
        first.setdefault(key(sample), sample)
        if sample.step > last.setdefault(key(sample), sample).step:
            last[key(sample)] = sample

    def rank(which: Key) -> tuple[bool, bool, int]:
        one, other = first[which], last[which]
        return one.step == other.step, other.split != "eval", -other.step

    return [_example(first[which], last[which]) for which in sorted(first, key=rank)[:MAX_EXAMPLES]]


def _example(first: SampleRecord, last: SampleRecord) -> Example:
    answers = [Answer("After", last.response, last.feedback)]
    if first.step < last.step:
        answers.insert(0, Answer("Before", first.response, first.feedback))
    return Example(prompt=last.prompt, answers=answers)
