"""The report of one run folder of jobs.train_policy, finished or not, from the files that the run writes."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from t2g.config.words import first_problem
from t2g.errors import UserError
from t2g.report.html import MAX_EXAMPLES, Example, write_report
from t2g.runs import metrics as m
from t2g.types import SpanFeedback

REPORT_FILE = "report.html"
SUMMARY_FILE = "summary.json"
Key = tuple[str, str, str, int]  # of a Sample


def report_run(folder: Path) -> Path:
    """Write `folder`/report.html and return its path.

    Without a summary.json (the run goes on) the figures at the top are those of the last step.
    Raises UserError when the folder holds no finished step, or a file that no run wrote.
    """
    steps = [step for _, step in m.read_records(folder / m.METRICS_FILE)]
    if not steps:
        raise UserError(
            f"{folder / m.METRICS_FILE} holds no finished step: --run needs the folder of a run of jobs.train_policy"
        )
    summary = _summary(folder / SUMMARY_FILE)
    base = next((m.held_out(step) for step in steps if step[m.STEP] == 0), {})
    write_report(
        folder / REPORT_FILE,
        title=f"Text2Grad: {folder.resolve().name}",
        summary=summary or {"steps": steps[-1][m.STEP], "samples": int(steps[-1].get(m.SAMPLES, 0))},
        arms={"policy": steps},
        base=base,
        examples=examples(folder / m.SAMPLES_FILE),
        reward_model=summary.get("reward_model"),
        versions=summary.get("versions", {}),
        timing=summary.get("timing", {}),
    )
    return folder / REPORT_FILE


class Sample(BaseModel):
    """What the report needs of a line of samples.jsonl."""

    step: int
    split: Literal["train", "eval"]
    prompt_id: str
    sample_index: int
    prompt: str
    response: str
    feedback: SpanFeedback | None

    @property
    def key(self) -> Key:
        """What is compared with what: ids are unique in one data set only, and the held-out one is another."""
        return self.split, self.prompt_id, self.prompt, self.sample_index


def examples(path: Path) -> list[Example]:
    """One example for each sample of a prompt, at most MAX_EXAMPLES: its first and its last response, or the only one.

    Prompts answered at two steps come first, among them held-out ones, then the latest.
    """
    first: dict[Key, Sample] = {}
    last: dict[Key, Sample] = {}
    for number, record in m.read_records(path):
        try:
            sample = Sample.model_validate(record)
        except ValidationError as error:
            raise UserError(f"{path}:{number} is no sample as a run writes it ({first_problem(error)})") from error
        first.setdefault(sample.key, sample)
        if sample.step > last.setdefault(sample.key, sample).step:
            last[sample.key] = sample

    def rank(key: Key) -> tuple[bool, bool, int]:
        one, other = first[key], last[key]
        return one.step == other.step, other.split != "eval", -other.step

    chosen = sorted(first, key=rank)[:MAX_EXAMPLES]
    return [_example(first[i] if first[i].step < last[i].step else None, last[i]) for i in chosen]


def _example(before: Sample | None, after: Sample) -> Example:
    return Example(
        prompt=after.prompt,
        before=before.response if before else None,
        after=after.response,
        feedback_before=before.feedback if before else None,
        feedback_after=after.feedback,
    )


def _summary(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        summary = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    if not isinstance(summary, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(summary).__name__}")
    return summary
